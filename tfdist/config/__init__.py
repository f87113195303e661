"""The experiment to train, as typed dataclasses; below it the runtime options, their checks, and the schedule.

Nothing in this package touches a device, a file of a run, or TensorFlow. A config file has a `get_config()` that
returns an `Experiment`. Slots make a misspelt field an error while flags are parsed, before any device is touched.
"""

# No `from __future__ import annotations` here: config_flags parses overrides by the fields' types, and not by strings.

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

MODELS = ("cnn", "mlp", "conv_bn", "alexnet", "resnet_cifar", "vit", "gpt", "table_mlp")
KERAS_NAMES: dict[str, list[str]] = json.loads(pathlib.Path(__file__).with_name("keras_names.json").read_text())
"""Functions and classes of Keras that experiments may name, listed so that a misspelt name needs no Keras."""
APPLICATIONS = tuple(KERAS_NAMES["applications"])
FILE = ".keras"  # suffix of model files
DATASETS = ("digits", "synthetic", "stdlib_text")
OPTIMIZERS = (
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "ftrl", "lamb", "lion",
    "muon", "nadam", "rmsprop", "sgd",
)  # fmt: skip
SCHEDULES = {
    "constant": (),
    "cosine": ("end",),
    "linear": ("end",),
    "step": ("boundaries", "factor"),
    "exponential": ("end", "factor", "every"),
}
"""Schedules, and what `optimizer.schedule_options` may say of each."""
CHOICES = {
    "model.remat": ("none", "blocks"),
    "optimizer.name": OPTIMIZERS,
    "optimizer.schedule": tuple(SCHEDULES),
    "optimizer.reduce_dtype": ("float32", "bfloat16", "float16"),
    "optimizer.scale_learning_rate": ("none", "linear", "sqrt"),
    "train.precision": ("float32", "float64", "mixed_bfloat16", "mixed_float16"),
    "train.on_nonfinite": ("stop", "rollback"),
    "data.cache": ("auto", "memory", "stream"),
    "data.resize": ("crop", "stretch", "pad"),
    "data.on_error": ("refuse", "skip"),
}
"""Values of the fields that take one of a few."""
FILES = ("csv", "hf", "image_folder", "numpy", "parquet", "text", "tfrecord", "webdataset")
"""Prefixes of `data.name` for files, as in `image_folder:/path`."""

# A field that is not written changes nothing of what Keras' compile and fit do.


@dataclasses.dataclass(slots=True)
class Data:
    """Which examples are trained and evaluated on, and how they are read."""

    name: str = "digits"
    """A TFDS name, `image_folder:/path`, `csv:/path`, `parquet:/path`, `numpy:/path`, `hf:/path` or `hf:name`,
    `text:/pattern`, `tfrecord:/pattern`, `webdataset:/pattern`, `synthetic`, `stdlib_text`, or
    `package.module:function` (see tfdist.data.datasets.registry.load)."""
    train_split: str = "train"
    """Which examples are trained on; of TFDS also a part, such as `train[:90%]`."""
    eval_split: str = "test"
    """Which examples the model is evaluated on."""
    data_dir: str = ""
    """Where TFDS keeps prepared data; empty for TFDS' own default (TFDS_DATA_DIR or ~/tensorflow_datasets)."""
    shuffle: bool = True
    """A new order each epoch, a function of the seed and the epoch alone."""
    cache: str = "auto"
    """`memory` holds the decoded split in memory; `stream` reads it anew each epoch; `auto` decides by size."""
    options: str = ""
    """Keyword arguments of the data set's function, such as `examples=1000, classes=5`."""
    image_size: str = ""
    """Target height and width of images: `224` or `192x256`; empty to leave them as they are."""
    resize: str = "crop"
    """Way to resize: `crop` cuts the longer side, `stretch` changes the proportions, `pad` adds black borders."""
    augment: str = ""
    """Random changes of training images, in order, such as `flip, crop(4), color(0.4), mixup(0.2)`."""
    on_error: str = "refuse"
    """What to do with unreadable files or rows: `refuse` to train, or `skip` them; they are named either way."""


@dataclasses.dataclass(slots=True)
class Model:
    """Which model is trained, and what it starts with."""

    name: str = "cnn"
    """One of `MODELS` or `APPLICATIONS`, a `.keras` file to go on with, in its precision, with a new optimizer and
    nothing frozen, or `package.module:function`, called as `function(spec, **options)`."""
    options: str = ""
    """Keyword arguments of the model's function, such as `dropout=0.1, units=64`."""
    weights: str = ""
    """A `.keras` or `.h5` file: the model starts with its weights, by layer and variable, where shapes fit."""
    freeze: str = ""
    """Layers that do not train, by patterns of their names: `conv*, block1_*`, or `!head` for all but that one."""
    sync_batch_norm: bool = True
    """BatchNorm looks at the whole batch, so that the number of replicas does not matter; else at a replica's share."""
    remat: str = "none"
    """`blocks`: the activations within each block are computed again in the backward pass: less memory, same result."""


@dataclasses.dataclass(slots=True)
class Optimizer:
    """How the weights change: the optimizer, its learning rate, and what goes with them."""

    name: str = "sgd"
    """A Keras optimizer in lower case, or `package.module:function`, called as `function(learning_rate)`."""
    learning_rate: float = 0.0
    """The peak of the learning rate, after the warm-up; 0 for the optimizer's own default."""
    schedule: str = "constant"
    """What follows the warm-up: `constant`, `cosine`, `linear`, `step` or `exponential`."""
    schedule_options: str = ""
    """`end=0.01` of cosine, linear and exponential: share of the peak that is left at the end (0, 0, 0.01).
    `boundaries=30% 60% 80%, factor=0.1` of step. `factor=0.94, every=2 epochs` of exponential instead of `end`."""
    warmup: str = "0 steps"
    """Linear warm-up from zero: a duration (`5%`, `100 steps`, `1 epoch`, `5000 examples`)."""
    weight_decay: float = 0.0
    """Decoupled weight decay, times the rate; 0 for the optimizer's own: 0.004 of adamw and muon, else none."""
    decay_exclude: str = ""
    """Patterns for layers and variables without weight decay, such as `bias, gamma, beta, embedding*`."""
    layer_rates: str = ""
    """Factors on rate and weight decay by patterns for layers, such as `head*=10, block1_*=0.1`; the last counts."""
    layer_decay: float = 1.0
    """Factor on both from each layer or block to the one below it; 1 for none (see models/optimizers.py)."""
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
    options: str = ""
    """More keyword arguments of the optimizer, such as `momentum=0.9, nesterov=True`."""


@dataclasses.dataclass(slots=True)
class Train:
    """How long and in which portions to train."""

    epochs: int = 1
    """Passes over the data; 0 to count in `steps`."""
    steps: int = 0
    """Updates; 0 to count in `epochs`."""
    batch_size: int = 32
    """Global batch: examples per update, over all replicas and micro-batches."""
    accumulate: int = 1
    """Micro-batches per update and replica: less memory, same result."""
    virtual_replicas: int = 0
    """Slices into which every batch is cut, also on one device: the same bits on any number of replicas up to this one
    (see docs/sameness.md); 0 for off."""
    zero_stage: int = 0
    """1 keeps a slice of the optimizer's state on each replica: less memory, same result (see docs/methods.md)."""
    audit: int = 0
    """Updates between two recomputations of a batch on every device, which must have the same bits, and needs
    virtual_replicas (see docs/reliability.md); 0 for never."""
    precision: str = "float32"
    """`float32`, `float64`, `mixed_bfloat16` or `mixed_float16`."""
    loss: str = ""
    """Empty for what fits the data; a loss of Keras such as `categorical_focal_crossentropy(gamma=3.0)`, or
    `package.module:function`, as compile takes it (see docs/recipes.md)."""
    metrics: str = ""
    """Empty for what fits the data; metrics of Keras such as `accuracy, TopKCategoricalAccuracy(k=3)`, or
    `package.module:function`."""
    callbacks: str = ""
    """More callbacks: of Keras, such as `EarlyStopping(patience=3)`, or `package.module:function`, called as
    `function()` for one or a list."""
    label_smoothing: float = 0.0
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
    """How often `on_nonfinite=rollback` may go back before the run fails."""


@dataclasses.dataclass(slots=True)
class Eval:
    """How often and in which portions to evaluate."""

    every: str = "1 epoch"
    """How often to evaluate: a duration in whole epochs; the end is always evaluated."""
    batch_size: int = 256
    """Examples that are evaluated at a time, over all replicas. A loss with sample weights or masks depends on it as in
    Keras: it is the mean over batches by their examples. So may losses and metrics that look across a batch."""


@dataclasses.dataclass(slots=True)
class Checkpoint:
    """How often checkpoints are written, and which are kept."""

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
    """All that decides about the numbers of a run; where it runs is in `runtime_options`."""

    name: str = "experiment"
    """What the run is called, and its folder in `runs/`."""
    seed: int = 0
    """Decides the first weights, the order of the examples, and what is random in layers and augmentation."""
    data: Data = dataclasses.field(default_factory=Data)
    model: Model = dataclasses.field(default_factory=Model)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    train: Train = dataclasses.field(default_factory=Train)
    eval: Eval = dataclasses.field(default_factory=Eval)
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)


FORMER_NAMES = {"shards": "virtual_replicas", "broken": "on_error"}
"""Names by which run folders of 0.1 know fields; their groups do not matter."""


def current_name(name: str) -> str:
    """Returns the present name of a field such as `config.train.shards`, which 0.1 has recorded."""
    group, dot, field = name.rpartition(".")
    return f"{group}{dot}{FORMER_NAMES.get(field, field)}"


def set_fields(experiment: Experiment, values: Mapping[str, Any]) -> None:
    """Sets fields by names such as `train.batch_size`."""
    for name, value in values.items():
        *groups, last = name.split(".")
        setattr(functools.reduce(getattr, groups, experiment), last, value)


def flat(experiment: Experiment | dict[str, object]) -> dict[str, str]:
    """Returns every field of an experiment, or its `experiment.json`, by its name on the command line."""

    def fields(prefix: str, value: object) -> dict[str, str]:
        if not isinstance(value, dict):
            return {current_name(prefix): str(value)}
        return {name: text for key, inner in value.items() for name, text in fields(f"{prefix}.{key}", inner).items()}

    return fields("config", experiment if isinstance(experiment, dict) else dataclasses.asdict(experiment))
