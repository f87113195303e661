"""What is trained: the experiment, as typed dataclasses.

A config file is a Python file with a `get_config()` that returns an
`Experiment`. Slots make a misspelt field an error while flags are parsed,
before any device is touched.
"""

# No `from __future__ import annotations` here: config_flags parses overrides by
# the types of the fields and cannot do so from strings.

import ast
import dataclasses
import difflib
import re
from typing import Any

from tfdist.errors import UserError

MODELS = ("cnn", "mlp", "conv_bn", "char_transformer")
DATASETS = ("digits", "synthetic", "stdlib_text")
OPTIMIZERS = (
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "ftrl", "lamb", "lion",
    "muon", "nadam", "rmsprop", "sgd",
)  # fmt: skip
PRECISIONS = ("float32", "float64", "mixed_bfloat16", "mixed_float16")
SCHEDULES = ("constant", "cosine")
REDUCE_DTYPES = ("float32", "bfloat16", "float16")
LR_SCALINGS = ("none", "linear", "sqrt")
ON_NONFINITE = ("stop", "rollback")
CACHES = ("auto", "memory", "stream")
FILES = ("csv", "image_folder", "text", "tfrecord")
"""What `data.name` may begin with to read files, as in `image_folder:/path`."""
RESIZES = ("crop", "stretch", "pad")
ON_BROKEN = ("refuse", "skip")

_REFERENCE = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


# The defaults are those of the digits experiment, which runs without a config.


@dataclasses.dataclass(slots=True)
class Data:
    name: str = "digits"
    """A TFDS name, `image_folder:/path`, `csv:/path`, `text:/pattern`, `tfrecord:/pattern`, `synthetic`, `stdlib_text`,
    or `package.module:function` (see tfdist.datasets.catalog.load)."""
    train_split: str = "train"
    eval_split: str = "test"
    data_dir: str = ""
    """Where TFDS keeps prepared data; empty for TFDS' own default (TFDS_DATA_DIR or ~/tensorflow_datasets)."""
    shuffle: bool = True
    """A new order each epoch, a function of the seed and the epoch alone."""
    cache: str = "auto"
    """`memory` holds the decoded split in memory; `stream` reads it anew each epoch; `auto` decides by size."""
    options: str = ""
    """Keyword arguments of the data set's function, such as `examples=1000, classes=5`."""
    image_size: str = ""
    """Height and width that images are made: `224` or `192x256`; empty to leave them as they are."""
    resize: str = "crop"
    """How: `crop` cuts the longer side, `stretch` changes the proportions, `pad` adds black borders."""
    augment: str = ""
    """Random changes of training images, in order, such as `flip, crop(4), color(0.4), mixup(0.2)` (augment.py)."""
    broken: str = "refuse"
    """Files that are no images, rows that are no rows: `refuse` to train, or `skip` them; they are named either way."""


@dataclasses.dataclass(slots=True)
class Model:
    name: str = "cnn"
    """One of `MODELS` or `package.module:function`, called as `function(spec, **options)`."""
    options: str = ""
    """Keyword arguments of the model's function, such as `dropout=0.1, units=64`."""


@dataclasses.dataclass(slots=True)
class Optimizer:
    name: str = "sgd"
    """A Keras optimizer in lower case, or `package.module:function`, called as `function(learning_rate)`."""
    learning_rate: float = 0.05
    schedule: str = "cosine"
    """`constant`, or `cosine` down to zero at the last update."""
    warmup: str = "2 epochs"
    """Linear warm-up from zero: a duration (`5%`, `100 steps`, `1 epoch`, `5000 examples`)."""
    weight_decay: float = 0.02
    clip_norm: float = 0.0
    """Bound on the norm of the whole gradient, summed over all replicas; 0 for none."""
    reduce_dtype: str = "float32"
    """Type in which gradients travel between replicas: `float32`, `bfloat16` or `float16` (half the bytes)."""
    scale_learning_rate: str = "none"
    """`linear` or `sqrt`: learning_rate is for base_batch, and grows with train.batch_size as that does."""
    base_batch: int = 0
    """Global batch for which learning_rate was chosen; needed to scale it."""
    ema_momentum: float = 0.0
    """Ends the run with an exponential moving average of the weights; 0 for none."""
    options: str = "momentum=0.9, nesterov=True"
    """More keyword arguments of the optimizer, such as `momentum=0.9, nesterov=True`."""


@dataclasses.dataclass(slots=True)
class Train:
    epochs: int = 30
    """Passes over the data; 0 to count in `steps`."""
    steps: int = 0
    """Updates; 0 to count in `epochs`."""
    batch_size: int = 48
    """Global batch: examples per update, over all replicas and micro-batches."""
    accumulate: int = 1
    """Micro-batches per update and replica: less memory, same result."""
    precision: str = "float32"
    """`float32`, `float64`, `mixed_bfloat16` or `mixed_float16`."""
    label_smoothing: float = 0.1
    """Share of each target spread over all classes."""
    steps_per_call: int = 0
    """Updates per call of the compiled function; 0 measures and chooses."""
    on_nonfinite: str = "stop"
    """`rollback`: when the loss is NaN or infinite, go back to the last checkpoint and leave out those updates."""
    max_rollbacks: int = 3


@dataclasses.dataclass(slots=True)
class Eval:
    every: str = "1 epoch"
    """How often to evaluate: a duration in whole epochs; the end is always evaluated."""
    batch_size: int = 256


@dataclasses.dataclass(slots=True)
class Checkpoint:
    every: str = "60 seconds"
    """How often, and at the end: a time (`5 minutes`) or a duration (`100 steps`, `1 epoch`); `off` for never."""
    keep: int = 3
    """How many of the newest are kept."""
    best: str = ""
    """Metric whose best epoch is kept besides, such as `val_accuracy`, or `min`/`max` and a metric."""
    asynchronous: bool = True
    """Write beside the training."""


@dataclasses.dataclass(slots=True)
class Experiment:
    name: str = "digits"
    seed: int = 0
    data: Data = dataclasses.field(default_factory=Data)
    model: Model = dataclasses.field(default_factory=Model)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    train: Train = dataclasses.field(default_factory=Train)
    eval: Eval = dataclasses.field(default_factory=Eval)
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)


def validate(experiment: Any) -> Experiment:
    """Checks all that can be known without TensorFlow.

    Raises:
      UserError: naming the field, the value received and what to change.
    """
    if not isinstance(experiment, Experiment):
        raise UserError(
            f"get_config() of --config must return a tfdist.config.Experiment, got {type(experiment).__name__}: "
            "see configs/digits.py"
        )
    e = experiment
    _among("model.name", e.model.name, MODELS)
    _among("optimizer.name", e.optimizer.name, OPTIMIZERS)
    _among("optimizer.schedule", e.optimizer.schedule, SCHEDULES, reference=False)
    _among("optimizer.reduce_dtype", e.optimizer.reduce_dtype, REDUCE_DTYPES, reference=False)
    _among("optimizer.scale_learning_rate", e.optimizer.scale_learning_rate, LR_SCALINGS, reference=False)
    if (e.optimizer.scale_learning_rate == "none") != (e.optimizer.base_batch == 0):
        raise UserError(
            f"optimizer.scale_learning_rate={e.optimizer.scale_learning_rate} and "
            f"optimizer.base_batch={e.optimizer.base_batch} do not go together: "
            "give the batch that the learning rate is for, or neither"
        )
    _among("train.precision", e.train.precision, PRECISIONS, reference=False)
    _among("train.on_nonfinite", e.train.on_nonfinite, ON_NONFINITE, reference=False)
    if e.train.on_nonfinite == "rollback" and e.checkpoint.every == "off":
        raise UserError(
            "train.on_nonfinite=rollback goes back to a checkpoint: it cannot be used with checkpoint.every=off"
        )
    _among("data.cache", e.data.cache, CACHES, reference=False)
    _among("data.resize", e.data.resize, RESIZES, reference=False)
    _among("data.broken", e.data.broken, ON_BROKEN, reference=False)
    image_size(e.data.image_size)
    options("data.options", e.data.options)
    options("model.options", e.model.options)
    options("optimizer.options", e.optimizer.options)
    if not re.fullmatch(r"[\w.-]+", e.name):
        raise UserError(f"name={e.name!r} becomes a folder: use letters, digits, '_', '-' and '.'")
    for field, value in (
        ("train.batch_size", e.train.batch_size),
        ("eval.batch_size", e.eval.batch_size),
        ("train.accumulate", e.train.accumulate),
        ("train.max_rollbacks", e.train.max_rollbacks),
        ("checkpoint.keep", e.checkpoint.keep),
    ):
        if value < 1:
            raise UserError(f"{field} must be at least 1, got {value}")
    for field, number in (
        ("train.epochs", e.train.epochs),
        ("train.steps", e.train.steps),
        ("train.steps_per_call", e.train.steps_per_call),
        ("optimizer.weight_decay", e.optimizer.weight_decay),
        ("optimizer.clip_norm", e.optimizer.clip_norm),
        ("optimizer.base_batch", e.optimizer.base_batch),
    ):
        if number < 0:
            raise UserError(f"{field} must not be negative, got {number}")
    if bool(e.train.epochs) == bool(e.train.steps):
        raise UserError(
            f"give either train.epochs or train.steps and 0 for the other, got {e.train.epochs} and {e.train.steps}"
        )
    if e.optimizer.learning_rate <= 0:
        raise UserError(f"optimizer.learning_rate must be positive, got {e.optimizer.learning_rate}")
    if not 0 <= e.optimizer.ema_momentum < 1:
        raise UserError(f"optimizer.ema_momentum must be in [0, 1), got {e.optimizer.ema_momentum}")
    if not 0 <= e.train.label_smoothing < 1:
        raise UserError(f"train.label_smoothing must be in [0, 1), got {e.train.label_smoothing}")
    if not 0 <= e.seed < 2**31:
        raise UserError(f"seed must be between 0 and {2**31 - 1}, got {e.seed}")
    return e


def flat(experiment: Experiment | dict[str, Any]) -> dict[str, str]:
    """Every field by its name on the command line, for comparing experiments.

    Args:
      experiment: or its fields as they stand in `experiment.json`.
    """

    def fields(prefix: str, value: Any) -> dict[str, str]:
        if not isinstance(value, dict):
            return {prefix: str(value)}
        return {name: text for key, inner in value.items() for name, text in fields(f"{prefix}.{key}", inner).items()}

    return fields("config", experiment if isinstance(experiment, dict) else dataclasses.asdict(experiment))


def options(field: str, text: str) -> dict[str, Any]:
    """Keyword arguments in `text`, Python literals or bare words: `units=64, activation=relu`.

    Raises:
      UserError: naming `field`, when `text` is something else.
    """
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        return {
            str(k.arg): k.value.id if isinstance(k.value, ast.Name) else ast.literal_eval(k.value)
            for k in call.keywords
        }
    except (SyntaxError, ValueError):
        raise UserError(f"{field}={text!r} is not understood: write name=value, name=value") from None


def image_size(text: str) -> tuple[int, int] | None:
    """Height and width in `data.image_size`; None if it is empty.

    Raises:
      UserError: when it is something else.
    """
    if not text:
        return None
    found = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text)
    if not found:
        raise UserError(f"data.image_size={text!r} is not understood: write 224, or height x width such as 192x256")
    return int(found[1]), int(found[2] or found[1])


def files(name: str) -> tuple[str, str] | None:
    """One of `FILES` and the path or pattern behind it, or None where `data.name` is something else."""
    kind, colon, path = name.partition(":")
    return (kind, path) if colon and kind in FILES else None


def is_reference(name: str) -> bool:
    """Whether `name` is written as `package.module:function`."""
    return bool(_REFERENCE.match(name))


def _among(field: str, value: str, known: tuple[str, ...], reference: bool = True) -> None:
    if value in known or (reference and is_reference(value)):
        return
    raise UserError(
        f"unknown {field} {value!r}{suggest(value, known)}" + (", or package.module:function" if reference else "")
    )


def suggest(value: str, known: tuple[str, ...]) -> str:
    """`: did you mean 'x'? Known: ...`, the way every unknown name ends."""
    near = difflib.get_close_matches(value, known, n=1)
    return (f": did you mean {near[0]!r}? Known" if near else ": known") + f" are {', '.join(known)}"
