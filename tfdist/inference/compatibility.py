"""Checks that data match a trained model, and reads properties of its outputs from its loss."""

import dataclasses

import keras

from tfdist import config
from tfdist.config import training_objects
from tfdist.data.loaded import Loaded
from tfdist.data.sources import one_hot
from tfdist.data.spec import Spec
from tfdist.errors import UserError
from tfdist.models import objective


def check_data(experiment: config.Experiment, spec: Spec, trained: Spec, targets: object = None) -> None:
    """Raises UserError if data have other inputs, targets or columns than those that the model was trained on."""
    what = f"data.name={experiment.data.name!r}"
    for name, mine, its in (("shape", list(spec.shape), list(trained.shape)), ("type", spec.dtype, trained.dtype)):
        if mine != its:
            raise UserError(f"{what} has inputs of {name} {mine}, the model was trained on {its}", "choose such data")
    if spec.names and trained.names and spec.names != trained.names:
        odd = sorted(set(spec.names) ^ set(trained.names))
        why = f"{odd[0]!r} is a class of only one of them" if odd else "they are in another order"
        what = f"{what} has other classes than the model was trained on ({why})"
        raise UserError(what, "choose data of those classes")
    if trained.classes is not None and (spec.classes or 0) > trained.classes:
        why = f"{what} has {spec.classes} classes, the model was trained on {trained.classes}"
        raise UserError(why, "choose other data")
    if trained.classes is not None and spec.classes is None and "float" in str(getattr(targets, "dtype", "")):
        raise UserError(f"{what}: the model classifies, and the targets are not integers", "choose other data")
    if spec.columns != trained.columns:
        pairs = zip(spec.columns, trained.columns)
        odd_one = next((mine.name for mine, its in pairs if mine != its), f"there are {len(spec.columns)}")
        what = f"{what} has other columns than the model was trained on, or other statistics of them ({odd_one})"
        raise UserError(what, "choose data of the same table")


def check_inputs(model: keras.Model, experiment: config.Experiment, spec: Spec) -> None:
    """Raises UserError if a model without a description does not take inputs of the data's shape."""
    shape = getattr(model, "input_shape", None)
    if not isinstance(shape, tuple) or any(isinstance(side, (tuple, list)) for side in shape):
        return
    if len(shape[1:]) != len(spec.shape) or any(a not in (None, b) for a, b in zip(shape[1:], spec.shape)):
        mine, its = list(spec.shape), list(shape[1:])
        what = f"data.name={experiment.data.name!r} has inputs of shape {mine}, the model takes {its}"
        raise UserError(what, "choose its data with --config, or --config.data.name")


def for_own_loss(model: keras.Model, data: Loaded, source: str) -> Loaded:
    """Returns the data with the targets that the loss of a model from the file `source` expects."""
    if not model.compiled or model.loss is None:
        what = f"--model={source} was saved without a loss and metrics"
        raise UserError(what, "compile the model before it is saved, or give the --workdir of its run")
    name = loss_name(model)
    shape: object = getattr(model, "output_shape", None)
    # All of Keras' losses but the sparse ones compare rows with rows; some would do so with numbers, and mean nothing.
    if not name or "sparse" in name or not isinstance(shape, tuple) or len(shape) != 2 or shape[1] == 1:
        return data
    if data.spec.classes is not None and getattr(data.eval.targets, "ndim", 1) == 1:
        classes = shape[1]
        if data.spec.classes > classes:
            why = f"the data has {data.spec.classes} classes, --model={source} knows {classes}"
            raise UserError(why, "choose others")
        data = dataclasses.replace(data, eval=one_hot(data.eval, classes))
    return data


def from_logits(model: keras.Model, train: config.Train | None) -> bool | None:
    """Tells whether scores are logits, by the loss of the model, or of the run that made it; None if unknown."""
    if not model.compiled:
        spec = training_objects.loss(train) if train else None
        if train is None or (spec and not spec.kind):
            return None
        return (spec.options if spec else {}).get("from_logits", not objective.ends_with_probabilities(model))
    return getattr(model.loss, "from_logits", None)


def loss_name(model: keras.Model) -> str:
    """Returns the name of a model's Keras loss, such as `categoricalcrossentropy`; empty if it is not one of Keras."""
    if not model.compiled or model.loss is None or isinstance(model.loss, (dict, list, tuple)):
        return ""
    loss = keras.losses.get(model.loss)
    loss = type(loss) if isinstance(loss, keras.losses.Loss) else loss
    return loss.__name__.replace("_", "").lower() if loss.__module__.startswith("keras.") else ""
