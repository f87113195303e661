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
import math
import os
import re
from typing import Any

from tfdist.errors import UserError

MODELS = (
    "cnn", "mlp", "conv_bn", "alexnet", "resnet_cifar", "vit", "char_transformer", "gpt", "table_mlp",
)  # fmt: skip
APPLICATIONS = (
    "ConvNeXtBase", "ConvNeXtLarge", "ConvNeXtSmall", "ConvNeXtTiny", "ConvNeXtXLarge",
    "DenseNet121", "DenseNet169", "DenseNet201",
    "EfficientNetB0", "EfficientNetB1", "EfficientNetB2", "EfficientNetB3", "EfficientNetB4", "EfficientNetB5",
    "EfficientNetB6", "EfficientNetB7", "EfficientNetV2B0", "EfficientNetV2B1", "EfficientNetV2B2",
    "EfficientNetV2B3", "EfficientNetV2L", "EfficientNetV2M", "EfficientNetV2S",
    "InceptionResNetV2", "InceptionV3", "MobileNet", "MobileNetV2", "MobileNetV3Large", "MobileNetV3Small",
    "NASNetLarge", "NASNetMobile", "ResNet101", "ResNet101V2", "ResNet152", "ResNet152V2", "ResNet50", "ResNet50V2",
    "VGG16", "VGG19", "Xception",
)  # fmt: skip
"""Functions of keras.applications, listed here so that a misspelt name needs no Keras."""
FILE = ".keras"
"""How the name of a file ends that is a model."""
DATASETS = ("digits", "synthetic", "stdlib_text")
OPTIMIZERS = (
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "ftrl", "lamb", "lion",
    "muon", "nadam", "rmsprop", "sgd",
)  # fmt: skip
PRECISIONS = ("float32", "float64", "mixed_bfloat16", "mixed_float16")
SCHEDULES = {
    "constant": (),
    "cosine": ("end",),
    "linear": ("end",),
    "step": ("boundaries", "factor"),
    "exponential": ("end", "factor", "every"),
}
"""And what `optimizer.schedule_options` may say of each."""
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
    """One of `MODELS` or `APPLICATIONS`, a `.keras` file to go on with, with a new optimizer and nothing frozen, or
    `package.module:function`, called as `function(spec, **options)`."""
    options: str = ""
    """Keyword arguments of the model's function, such as `dropout=0.1, units=64`."""
    weights: str = ""
    """A `.keras` or `.h5` file: the model starts with its weights, by layer and variable, where shapes fit."""
    freeze: str = ""
    """Layers that do not train, by patterns of their names: `conv*, block1_*`, or `!head` for all but that one."""
    sync_batch_norm: bool = True
    """BatchNorm looks at the whole batch, so that the number of replicas does not matter; else at a replica's share."""


@dataclasses.dataclass(slots=True)
class Optimizer:
    name: str = "sgd"
    """A Keras optimizer in lower case, or `package.module:function`, called as `function(learning_rate)`."""
    learning_rate: float = 0.05
    schedule: str = "cosine"
    """What follows the warm-up: `constant`, `cosine`, `linear`, `step` or `exponential`."""
    schedule_options: str = ""
    """`end=0.01` of cosine, linear and exponential: share of the peak that is left at the end (0, 0, 0.01).
    `boundaries=30% 60% 80%, factor=0.1` of step. `factor=0.94, every=2 epochs` of exponential instead of `end`."""
    warmup: str = "2 epochs"
    """Linear warm-up from zero: a duration (`5%`, `100 steps`, `1 epoch`, `5000 examples`)."""
    weight_decay: float = 0.02
    decay_exclude: str = ""
    """Patterns for layers and variables without weight decay, such as `bias, gamma, beta, embedding*`."""
    layer_rates: str = ""
    """Factors on rate and weight decay by patterns for layers, such as `head*=10, block1_*=0.1`; the last counts."""
    layer_decay: float = 1.0
    """Factor on both from each layer or block to the one below it; 1 for none (see tfdist.layer_rates.factors)."""
    clip_norm: float = 0.0
    """Bound on the norm of the whole gradient, summed over all replicas; 0 for none."""
    reduce_dtype: str = "float32"
    """Type in which gradients travel between replicas: `float32`, `bfloat16` or `float16` (half the bytes)."""
    scale_learning_rate: str = "none"
    """`linear` or `sqrt`: learning_rate is for base_batch, and grows with train.batch_size as that does."""
    base_batch: int = 0
    """Global batch for which learning_rate was chosen; needed to scale it."""
    ema_momentum: float = 0.0
    """Evaluates, and ends the run with, an exponential moving average of the weights; 0 for none."""
    options: str = "momentum=0.9, nesterov=True"
    """More keyword arguments of the optimizer, such as `momentum=0.9, nesterov=True`."""


@dataclasses.dataclass(slots=True)
class Train:
    epochs: int = 30
    """Passes over the data; 0 to count in `steps`."""
    steps: int = 0
    """Updates; 0 to count in `epochs`."""
    batch_size: int = 48
    """Global batch: examples per update, over all replicas and micro-batches; 0, or `auto` on the command line, looks
    for the largest that fits (see tfdist.batch_finder)."""
    accumulate: int = 1
    """Micro-batches per update and replica: less memory, same result."""
    precision: str = "float32"
    """`float32`, `float64`, `mixed_bfloat16` or `mixed_float16`."""
    label_smoothing: float = 0.1
    """Share of each target spread over all classes."""
    class_weight: str = ""
    """`balanced`, or weights by class number or name, such as `0=3.0, 2=0.2`; other classes weigh 1."""
    patience: int = 0
    """Ends after so many evaluations in a row without a better `monitor`, with the best weights; 0 for never."""
    monitor: str = "val_loss"
    """Metric that patience watches, such as `val_accuracy`; `min` or `max` before it where the name is not plain."""
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
    _model(e.model)
    _among("optimizer.name", e.optimizer.name, OPTIMIZERS)
    _among("optimizer.schedule", e.optimizer.schedule, tuple(SCHEDULES), reference=False)
    schedule_options(e.optimizer)
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
        ("train.patience", e.train.patience),
        ("train.batch_size", e.train.batch_size),
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
    layer_rates(e.optimizer)
    if not 0 < e.optimizer.layer_decay <= 1:
        raise UserError(f"optimizer.layer_decay must be in (0, 1], got {e.optimizer.layer_decay}")
    if e.optimizer.decay_exclude and not e.optimizer.weight_decay:
        raise UserError(
            f"optimizer.decay_exclude={e.optimizer.decay_exclude!r} has nothing to exclude from: set weight_decay"
        )
    if not 0 <= e.optimizer.ema_momentum < 1:
        raise UserError(f"optimizer.ema_momentum must be in [0, 1), got {e.optimizer.ema_momentum}")
    if not 0 <= e.train.label_smoothing < 1:
        raise UserError(f"train.label_smoothing must be in [0, 1), got {e.train.label_smoothing}")
    class_weights(e.train.class_weight)
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


def assignments(field: str, text: str) -> dict[str, str]:
    """`name=value, name=value` with values that are any words: `boundaries=30% 60%, factor=0.1`.

    Raises:
      UserError: naming `field`, when `text` is something else.
    """
    found: dict[str, str] = {}
    for part in text.split(",") if text.strip() else []:
        name, equals, value = (word.strip() for word in part.rpartition("="))
        if not (name and equals and value) or name in found:
            raise UserError(f"{field}={text!r} is not understood: write name=value, name=value, each name once")
        found[name] = value
    return found


def number(field: str, text: str) -> float:
    """A finite number in `text`.

    Raises:
      UserError: naming `field`.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{field} must be a number, got {text!r}")
    return value


def layer_rates(optimizer: Optimizer) -> dict[str, float]:
    """`optimizer.layer_rates` as factors by pattern."""
    field = "optimizer.layer_rates"
    found = {
        name: number(f"{name} in {field}", text) for name, text in assignments(field, optimizer.layer_rates).items()
    }
    for name, value in found.items():
        if value <= 0:
            raise UserError(f"{name} in {field} must be positive, got {value:g}: freeze layers with model.freeze")
    return found


def class_weights(text: str) -> dict[str, float]:
    """`train.class_weight` as weights by class number or name; empty for `balanced`."""
    field = "train.class_weight"
    if text == "balanced":
        return {}
    found = {name: number(f"{name} in {field}", value) for name, value in assignments(field, text).items()}
    for name, value in found.items():
        if value < 0:
            raise UserError(f"{name} in {field} must not be negative, got {value:g}")
    return found


def schedule_options(optimizer: Optimizer) -> dict[str, Any]:
    """`optimizer.schedule_options` as numbers `end` and `factor` and texts `boundaries` and `every`, where given.

    Raises:
      UserError: the schedule has no such option, or needs another one.
    """
    field = "optimizer.schedule_options"
    found: dict[str, Any] = dict(assignments(field, optimizer.schedule_options))
    known = SCHEDULES[optimizer.schedule]
    for name in found:
        if name not in known:
            raise UserError(
                f"unknown {name!r} in {field}={optimizer.schedule_options!r}: "
                f"{optimizer.schedule} knows {', '.join(known) or 'none'}"
            )
    for name in ("end", "factor"):
        if name in found:
            found[name] = number(f"{name} in {field}", found[name])
            if not 0 <= found[name] < 1 or (found[name] == 0 and optimizer.schedule not in ("cosine", "linear")):
                raise UserError(f"{name} in {field} must be a share of the rate below 1, got {found[name]:g}")
    if optimizer.schedule == "step" and "boundaries" not in found:
        raise UserError(f"optimizer.schedule=step needs {field}, such as 'boundaries=30% 60% 80%, factor=0.1'")
    if ("factor" in found) != ("every" in found) and optimizer.schedule == "exponential":
        raise UserError(f"{field}={optimizer.schedule_options!r} is half of it: write factor=0.94, every=2 epochs")
    if "end" in found and "factor" in found:
        raise UserError(f"{field}={optimizer.schedule_options!r} says it twice: give end, or factor and every")
    return found


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


def _model(model: Model) -> None:
    name = model.name
    if name.endswith(FILE):
        _file("model.name", name)
        for field, value in (("model.options", model.options), ("model.weights", model.weights)):
            if value:
                raise UserError(f"{field}={value!r} does not go with a model from a file ({name}): leave it out")
    elif not (name in MODELS or name in APPLICATIONS or is_reference(name)):
        lower = {known.lower(): known for known in (*APPLICATIONS, *MODELS)}
        near = difflib.get_close_matches(name.lower(), lower, n=1)
        hint = f": did you mean {lower[near[0]]!r}? Known" if near else ": known"
        raise UserError(
            f"unknown model.name {name!r}{hint} are {', '.join(MODELS)}, those of keras.applications such as ResNet50, "
            "a .keras file, or package.module:function"
        )
    if model.weights:
        if not model.weights.endswith((FILE, ".h5")):
            raise UserError(
                f"model.weights={model.weights!r} is no file of Keras: give a .keras, .weights.h5 or .h5 file"
            )
        _file("model.weights", model.weights)
    if model.freeze and not all(pattern.strip().strip("!") for pattern in model.freeze.split(",")):
        raise UserError(
            f"model.freeze={model.freeze!r} is not understood: write patterns of layer names, such as conv*, !head"
        )


def _file(field: str, path: str) -> None:
    if not os.path.isfile(path):
        raise UserError(f"{field}={path!r} does not exist: give the path of a file on this machine")


def suggest(value: str, known: tuple[str, ...]) -> str:
    """`: did you mean 'x'? Known: ...`, the way every unknown name ends."""
    near = difflib.get_close_matches(value, known, n=1)
    return (f": did you mean {near[0]!r}? Known" if near else ": known") + f" are {', '.join(known)}"
