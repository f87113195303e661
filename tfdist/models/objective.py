"""What a model is trained for and measured by: loss, metrics, class weights."""

import inspect
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import config
from tfdist.config import field_syntax, training_objects, user_functions
from tfdist.config.messages import logger
from tfdist.config.training_objects import KerasObjectSpec
from tfdist.data.loaded import Loaded
from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals


def of(experiment: config.Experiment, model: keras.Model, data: Loaded) -> tuple[dict[str, Any], bool, bool]:
    """Returns what `train.loss` and `train.metrics` ask for, and for what they leave open, what fits the data.

    These are arguments of `compile`; whether they compare outputs with rows of 0 and 1 instead of class numbers; and
    whether the loss is the user's own, of which nothing is known.
    """
    spec, metrics = training_objects.loss(experiment.train), training_objects.metrics(experiment.train)
    measured = "weighted_metrics" if data.train.weighted else "metrics"
    if data.spec.classes is None:
        loss = _loss(spec, model, {}) if spec else "mse"
        several = len(keras.tree.flatten(getattr(model, "outputs", None) or [])) > 1  # of which one list tells nothing
        usual = [] if several else ["mae"]
        return {"loss": loss, measured: _metrics(metrics, model) or usual}, False, bool(spec and not spec.kind)
    smoothing = experiment.train.label_smoothing
    mixes = data.train.mixes
    # What is skipped weighs nothing, and does not count.
    fitting: dict[str, object] = {"reduction": "mean_with_sample_weight"} if experiment.data.on_error == "skip" else {}
    if spec is None:
        rows = bool(smoothing) or mixes or any(_takes_rows(metric, model) for metric in metrics)
        name = "CategoricalCrossentropy" if rows else "SparseCategoricalCrossentropy"
        spec = KerasObjectSpec("train.loss", name, name, {}, False)
    else:
        rows = bool(_takes_rows(spec, model))
    if mixes and not rows:
        what = f"data.augment={experiment.data.augment!r} mixes classes, and train.loss={spec.name} takes class numbers"
        raise UserError(what, "leave out mixup and cutmix, or use categorical_crossentropy")
    if smoothing:
        takes = spec.kind and "label_smoothing" in inspect.signature(getattr(keras.losses, spec.kind)).parameters
        own = "label_smoothing" in spec.options
        if not takes or own or spec.kind.startswith("Sparse"):
            what = f"train.label_smoothing={smoothing} does not go with train.loss={spec.name}{' and its own' * own}"
            raise UserError(what, "set it to 0")
        fitting["label_smoothing"] = smoothing
    for metric in metrics:
        _check_targets(metric, _takes_rows(metric, model), rows)
    loss, made = _loss(spec, model, fitting), _metrics(metrics, model) or ["accuracy"]
    return {"loss": loss, measured: made}, rows, not spec.kind


def callbacks(experiment: config.Experiment, optimizer: keras.optimizers.Optimizer) -> list[keras.callbacks.Callback]:
    """Returns what `train.callbacks` asks for, made anew. Raises UserError: something there makes no callbacks."""
    made = []
    rate = keras_internals.rate_setting(keras_internals.inner_optimizer(optimizer))
    scheduled = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    setters = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)
    for spec in training_objects.callbacks(experiment.train):
        if spec.kind:
            found = _of_keras(keras.callbacks, spec, {})
        else:
            function = user_functions.resolve(spec.field, spec.name, called=False)
            single = isinstance(function, keras.callbacks.Callback)
            found = function if single else user_functions.call(spec.field, function, spec.options)
        for callback in found if isinstance(found, (list, tuple)) else [found]:
            if not isinstance(callback, keras.callbacks.Callback):
                raise UserError(f"{spec.field}: {spec.name} must return Keras callbacks, got {callback!r}")
            if scheduled and isinstance(callback, setters):
                what = f"{spec.field}: {spec.name} sets the learning rate, which has a schedule or a warm-up"
                raise UserError(what, "leave it out, or set optimizer.schedule=constant and optimizer.warmup='0 steps'")
            made.append(callback)
    return made


def ends_with_probabilities(model: keras.Model) -> str:
    """Returns the name of the softmax or sigmoid that a model's only output comes out of, else ""."""
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    if len(outputs) != 1:  # none: a class of one's own, which has not been called yet
        return ""
    last: Any = model
    while isinstance(last, keras.Model) and getattr(last, "outputs", None):  # a class of one's own does not tell
        last = keras_internals.producing_layer(last.outputs[0])
    activation = getattr(last, "activation", None)
    if type(last).__name__ == "Softmax" or activation in (keras.activations.softmax, keras.activations.sigmoid):
        return getattr(activation, "__name__", "softmax")
    return ""


def _takes_rows(spec: KerasObjectSpec, model: keras.Model) -> bool | None:
    """Tells whether a loss or metric of Keras compares rows instead of class numbers; None for one that does either."""
    if not spec.kind or spec.kind in training_objects.ACCURACY:
        return None
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    single = len(outputs) == 1 and outputs[0].shape[-1] == 1
    return not (spec.kind.startswith("Sparse") or single)


def _check_targets(metric: KerasObjectSpec, takes_rows: bool | None, rows: bool) -> None:
    """Refuses a metric that would compare outputs with targets of another form, and mean nothing."""
    if takes_rows is None or takes_rows == rows:
        return
    if rows:
        other = "set train.label_smoothing=0 and leave out mixup, cutmix and a categorical train.loss"
        what = f"train.metrics: {metric.name} takes class numbers, and the loss rows of 0 and 1"
        raise UserError(what, f"use one without sparse in its name, or {other}")
    what = f"train.metrics: {metric.name} takes rows of 0 and 1, and the loss class numbers"
    raise UserError(what, "use one with sparse in its name, or a train.loss with categorical in its name")


def _loss(spec: KerasObjectSpec, model: keras.Model, fitting: dict[str, object]) -> object:
    """Returns a loss; `fitting` are arguments that Keras' own take besides."""
    return _of_keras(keras.losses, spec, _logits(spec, model, keras.losses) | fitting) if spec.kind else _own(spec)


def _metrics(specs: list[KerasObjectSpec], model: keras.Model) -> list[object]:
    made: list[Any] = []
    for metric in specs:
        if metric.kind in training_objects.ACCURACY:
            made.append(metric.kind)
        elif metric.kind:
            named = {} if metric.name == metric.kind else {"name": metric.name}  # as Keras calls them in its logs
            made.append(_of_keras(keras.metrics, metric, _logits(metric, model, keras.metrics) | named))
        else:
            made.append(_own(metric))
    return made


def _logits(spec: KerasObjectSpec, model: keras.Model, module: object) -> dict[str, object]:
    """Returns what outputs are: Keras takes them for probabilities, and would train logits as such without a word."""
    if "from_logits" not in inspect.signature(getattr(module, spec.kind)).parameters:
        return {}
    return {"from_logits": not ends_with_probabilities(model)}


def _of_keras(module: object, spec: KerasObjectSpec, fitting: dict[str, object]) -> object:
    """Returns an object of Keras; `fitting` are arguments that stand back behind those that were written."""
    try:
        named = f"{spec.name} in {spec.field}"
        return user_functions.call(named, getattr(module, spec.kind), {**fitting, **spec.options})
    except (TypeError, ValueError) as error:
        raise UserError(f"{spec.field}: {spec.name} cannot be made: {error}") from error


def _own(spec: KerasObjectSpec) -> object:
    """Returns a loss or metric of one's own: an object or a function as it is, a class or what has arguments called."""
    found = user_functions.resolve(spec.field, spec.name)
    if spec.called or inspect.isclass(found):
        found = user_functions.call(spec.field, found, spec.options)
    if not callable(found):
        raise UserError(f"{spec.field}: {spec.name} must be what compile takes, got {found!r}")
    return found


def class_weights(text: str, data: Loaded) -> dict[int, float] | None:
    """Returns the weight of each class, for `fit`, and logs them; None for no weights.

    The text is `balanced`, or weights by class number or name: `0=3.0, 2=0.2`. Targets are class numbers [n] or [n, 1].
    """
    if not text:
        return None
    classes, names = data.spec.classes, data.spec.names
    y = (*data.train.specs, None)[1]
    one_each = y is not None and not tf.nest.is_nested(y) and tf.as_dtype(y.dtype).is_integer
    if classes is None or not one_each or tuple(y.shape[1:]) not in ((), (1,)):
        raise UserError(f"train.class_weight={text!r} is for data with one class per example", "leave it out")
    if text == "balanced":  # as scikit-learn's: n / (classes x examples of the class), so that all weigh the same
        counts = data.train.class_counts(classes)
        present = np.flatnonzero(counts)
        weights = {int(c): float(counts.sum() / (len(present) * counts[c])) for c in present}
    else:
        weights = _parsed(text, classes, names)
    words = [f"{names[c] if c < len(names) else c} {weight:.3g}" for c, weight in weights.items()]
    logger.info(f"class weights: {', '.join([*words[:10], *['...'] * (len(words) > 10)])}")
    return weights


def _parsed(text: str, classes: int, names: tuple[str, ...]) -> dict[int, float]:
    weights: dict[int, float] = {}
    by_number = not any(map(str.isdecimal, names))  # else `1` may be the second class, or the one of this name
    for name, value in field_syntax.class_weights(text).items():
        number = names.index(name) if name in names else int(name) if by_number and name.isdecimal() else -1
        if number in weights:
            raise UserError(f"train.class_weight={text!r} has two weights for the class {name!r}", "write one")
        if not 0 <= number < classes:
            known = names or tuple(map(str, range(classes)))
            raise UserError(f"unknown class {name!r} in train.class_weight{field_syntax.suggest(name, known)}")
        weights[number] = value
    if all(weights.get(number) == 0 for number in range(classes)):
        raise UserError(f"train.class_weight={text!r} gives every class the weight 0", "leave some to be learned")
    return weights
