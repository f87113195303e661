"""Finds what can be known to be wrong in an experiment without TensorFlow."""

import dataclasses
import math
import operator
import os
import re
from collections.abc import Callable
from typing import Any

from tfdist import config
from tfdist.config import Experiment, Model, buckets, field_syntax, training_objects
from tfdist.errors import UserError

OF_FIELDS = {
    "learning_rate": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "global_clipnorm": "optimizer.clip_norm",
    "use_ema": "optimizer.ema_momentum",
    "ema_momentum": "optimizer.ema_momentum",
    "gradient_accumulation_steps": "train.accumulate",
}
"""Arguments of an optimizer that are fields of their own; in its options one of both would be ignored."""

LONGEST_NAME = 200  # bytes; file systems take 255 in the name of a folder, with what comes before and after
_FROM_ONE = ("train.batch_size", "eval.batch_size", "train.accumulate", "train.max_rollbacks", "checkpoint.keep")
_FROM_ZERO = (
    "train.epochs", "train.steps", "train.steps_per_call", "train.virtual_replicas", "train.audit", "train.patience",
    "optimizer.learning_rate", "optimizer.weight_decay", "optimizer.clip_norm",
    "optimizer.base_batch",
)  # fmt: skip
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    *((field, lambda value: value >= 1, "be at least 1") for field in _FROM_ONE),
    *((field, lambda value: value >= 0, "not be negative") for field in _FROM_ZERO),
    *((field, lambda value: value < 2**31, "be below 2**31") for field in _FROM_ONE),
    ("optimizer.learning_rate", lambda value: value < 1e38, "be below 1e38"),
    ("optimizer.layer_decay", lambda value: 0 < value <= 1, "be in (0, 1]"),
    ("optimizer.ema_momentum", lambda value: 0 <= value < 1, "be in [0, 1)"),
    ("train.zero_stage", lambda value: value in (0, 1), "be 0 or 1"),
    ("train.label_smoothing", lambda value: 0 <= value < 1, "be in [0, 1)"),
    ("seed", lambda value: 0 <= value < 2**31, f"be between 0 and {2**31 - 1}"),
)


def validate(experiment: object) -> Experiment:
    if not isinstance(experiment, Experiment):
        what = f"get_config() of --config must return a tfdist.config.Experiment, got {type(experiment).__name__}"
        raise UserError(what, "see configs/digits.py")
    _types(experiment)
    _model(experiment.model)
    for field, choices in config.CHOICES.items():
        value, function = operator.attrgetter(field)(experiment), field == "optimizer.name"
        if value not in choices and not (function and field_syntax.is_reference(value)):
            text = f"unknown {field} {value!r}{field_syntax.suggest(value, choices)}"
            raise UserError(text + (", or package.module:function" if function else ""))
    _parse_texts(experiment)
    if not re.fullmatch(r"[\w.-]+", experiment.name) or experiment.name in (".", ".."):
        raise UserError(f"name={experiment.name!r} becomes a folder", "use letters, digits, '_', '-' and '.'")
    if len(experiment.name.encode()) > LONGEST_NAME:
        length = f"has {len(experiment.name)} characters"
        raise UserError(f"name={experiment.name[:20]!r}... becomes a folder and {length}", "use fewer")
    for field, within, words in _RANGES:
        number = operator.attrgetter(field)(experiment)
        if not within(number):
            raise UserError(f"{field} must {words}, got {number}")
    _combinations(experiment)
    return experiment


def _parse_texts(experiment: Experiment) -> None:
    """Parses every text that has a syntax, so that a mistake in it shows before anything is started."""
    data, train, optimizer = experiment.data, experiment.train, experiment.optimizer
    field_syntax.schedule_options(optimizer)
    field_syntax.layer_rates(optimizer)
    training_objects.loss(train)
    training_objects.metrics(train)
    training_objects.callbacks(train)
    field_syntax.class_weights(train.class_weight)
    if kind_and_path := field_syntax.files(data.name):
        buckets.check("data.name", kind_and_path[1])
    if not data.data_dir.startswith("gs://"):  # TFDS reads it, through TensorFlow
        buckets.check("data.data_dir", data.data_dir)
    field_syntax.image_size(data.image_size)
    field_syntax.augment_steps(data.augment, "data.augment")
    field_syntax.options("data.options", data.options)
    field_syntax.options("model.options", experiment.model.options)
    for name in field_syntax.options("optimizer.options", optimizer.options):
        if name in OF_FIELDS:
            raise UserError(f"optimizer.options: {name} is set by {OF_FIELDS[name]}", "give it there")


def _combinations(experiment: Experiment) -> None:
    """Refuses fields that contradict each other."""
    train, optimizer = experiment.train, experiment.optimizer
    if bool(train.epochs) == bool(train.steps):
        given = f"got {train.epochs} and {train.steps}"
        raise UserError(f"give either train.epochs or train.steps and 0 for the other, {given}")
    if (optimizer.scale_learning_rate == "none") != (optimizer.base_batch == 0):
        scaling, batch = optimizer.scale_learning_rate, optimizer.base_batch
        what = f"optimizer.scale_learning_rate={scaling} and optimizer.base_batch={batch} do not go together"
        raise UserError(what, "give the batch that the learning rate is for, or neither")
    if optimizer.base_batch and not optimizer.learning_rate:
        what = f"optimizer.base_batch={optimizer.base_batch} is the batch that optimizer.learning_rate is for"
        raise UserError(what, "set both")
    if train.on_nonfinite == "rollback" and experiment.checkpoint.every == "off":
        what = "train.on_nonfinite=rollback goes back to a checkpoint: it cannot be used with checkpoint.every=off"
        raise UserError(what)
    if experiment.checkpoint.best and experiment.checkpoint.every == "off":
        what = f"checkpoint.best={experiment.checkpoint.best} is not kept with checkpoint.every=off"
        raise UserError(what, "leave out one of them")
    if train.virtual_replicas and optimizer.reduce_dtype != "float32":
        raise UserError(
            f"optimizer.reduce_dtype={optimizer.reduce_dtype} cannot be used with train.virtual_replicas, "
            "whose sums are exact",
            "leave out one of them",
        )
    if train.audit and not train.virtual_replicas:
        raise UserError("train.audit compares the bits of virtual replicas", "set train.virtual_replicas, too")
    if optimizer.decay_exclude and not optimizer.weight_decay and optimizer.name not in ("adamw", "muon"):
        what = f"optimizer.decay_exclude={optimizer.decay_exclude!r} has nothing to exclude from"
        raise UserError(what, "set weight_decay")


def without_effect(experiment: Experiment) -> list[str]:
    """Returns a warning for each field that is set and changes nothing, since another one is not."""
    data, train, saves = experiment.data, experiment.train, experiment.checkpoint.every != "off"
    other = field_syntax.files(data.name) or field_syntax.is_reference(data.name) or data.name == "synthetic"
    needs = {
        "config.train.monitor": train.patience == 0 and "train.patience",
        "config.train.max_rollbacks": train.on_nonfinite == "stop" and "train.on_nonfinite=rollback",
        "config.data.resize": not data.image_size and "data.image_size",
        "config.data.on_error": not re.match("(csv|parquet|image_folder|tfrecord):", data.name) and "files to skip",
        "config.data.data_dir": other and "a TFDS name in data.name",
        "config.checkpoint.keep": not saves and "checkpoint.every",
    }
    changed = dict(config.flat(experiment).items() - config.flat(Experiment()).items())
    return [f"WARNING: {f}={value} changes nothing without {needs[f]}" for f, value in changed.items() if needs.get(f)]


def _types(group: object, above: str = "") -> None:
    """Checks that each field of a dataclass has its type, as from the command line; a config file may give any."""
    for field in dataclasses.fields(group):  # type: ignore[arg-type]
        kind: Any = field.type
        name, value = above + field.name, getattr(group, field.name)
        fits = isinstance(value, (int, float) if kind is float else kind)
        if dataclasses.is_dataclass(value) and fits:
            _types(value, f"{name}.")
        elif not fits or (isinstance(value, bool) and kind is not bool):
            known = {str: "text in quotes", int: "an integer", float: "a number", bool: "True or False"}
            words = known.get(kind) or f"a tfdist.config.{kind.__name__}"
            raise UserError(f"{name} must be {words}, got {value!r}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name} must be a finite number, got {value}")
        elif isinstance(value, int) and abs(value) > field_syntax.LARGEST:
            digits = str(value) if abs(value) < 10**40 else "one with more than 40 digits"
            raise UserError(f"{name} must be at most {field_syntax.LARGEST:,}, got {digits}")


def _model(model: Model) -> None:
    name = model.name
    for field, path in (("model.name", name), ("model.weights", model.weights)):
        field_syntax.check_local(field, path)
    if name.endswith(config.FILE):
        _file("model.name", name)
        for field, value in (("model.options", model.options), ("model.weights", model.weights)):
            if value:
                raise UserError(f"{field}={value!r} does not go with a model from a file ({name})", "leave it out")
    elif not (name in config.MODELS or name in config.APPLICATIONS or field_syntax.is_reference(name)):
        known = field_syntax.suggest(name, (*config.MODELS, *config.APPLICATIONS))
        raise UserError(f"unknown model.name {name!r}{known}, a .keras file, or package.module:function")
    if model.weights:
        if not model.weights.endswith((config.FILE, ".h5")):
            what = f"model.weights={model.weights!r} is not a Keras file"
            raise UserError(what, "give a .keras, .weights.h5 or .h5 file")
        _file("model.weights", model.weights)
    if model.freeze and not all(pattern.strip().strip("!") for pattern in model.freeze.split(",")):
        what = f"model.freeze={model.freeze!r} is not understood"
        raise UserError(what, "write patterns of layer names, such as conv*, !head")


def _file(field: str, path: str) -> None:
    if not os.path.isfile(path):
        what = f"{field}={path!r} does not exist"
        raise UserError(what, "give the path of a file on this machine, or train first what makes it")
