"""The model of an experiment: by name, from a file or the user's own, with the weights that it starts from."""

import dataclasses
import fnmatch
import json
import math
from collections.abc import Callable

import keras

from tfdist import config
from tfdist.config import field_syntax, user_functions
from tfdist.config.messages import logger
from tfdist.data import spec_file
from tfdist.data.loaded import Loaded
from tfdist.data.sources import Source, one_hot
from tfdist.data.spec import Spec
from tfdist.errors import UserError, one_line
from tfdist.keras_bridge import keras_internals
from tfdist.keras_bridge.rematerialization import remat
from tfdist.models import objective, optimizers, pretrained
from tfdist.models.zoo import layers, small, vision

_ZOO: dict[str, Callable[..., keras.Model]] = {
    name: getattr(small, name, None) or getattr(vision, name) for name in config.MODELS
}


def set_precision(precision: str) -> None:
    """Sets `train.precision` for the models that are made from now on."""
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)


def build(experiment: config.Experiment, spec: Spec, quiet: bool = False) -> keras.Model:
    """Builds `model.name` for this data; call it inside the strategy's scope, on all workers. `quiet` logs nothing.

    The initial weights depend on the experiment's seed alone, and the file of `model.weights`, which all workers read.
    """
    wanted = experiment.model
    keras.utils.set_random_seed(experiment.seed)
    # Layers are named alike whatever this process has built before: patterns, files and checkpoints go by names.
    keras_internals.reset_layer_names()
    if wanted.name.endswith(config.FILE):
        model = _loaded(wanted.name, experiment.train.precision, spec)
    else:
        options = field_syntax.options("model.options", wanted.options)
        if wanted.name in config.APPLICATIONS:
            model = vision.application(wanted.name, options, spec)
        else:
            function = _ZOO.get(wanted.name) or user_functions.resolve("model.name", wanted.name)
            if wanted.name in _ZOO:
                layers.check_options(function, options)
            model = user_functions.call("model.options", function, options, spec)
    if not isinstance(model, keras.Model):
        raise UserError(f"model.name={wanted.name!r} must return a keras.Model, got {type(model).__name__}")
    for layer in keras_internals.batch_norms(model):
        layer.synchronized = wanted.sync_batch_norm  # read when the layer is called
    if wanted.remat == "blocks":
        remat(model)
    if (wanted.weights or wanted.freeze) and not model.built:
        what = "model.weights and model.freeze need a model whose layers are there already"
        raise UserError(what, f"build {wanted.name} in its function")
    lines = []
    if wanted.weights:
        lines.append(pretrained.take(model, wanted.weights))
        if spec.columns and getattr(spec_file.of_model(wanted.weights), "columns", spec.columns) != spec.columns:
            lines.append(
                f"WARNING: {wanted.weights} was trained on another table's encoding, which it keeps as model.name"
            )
        if wanted.name in config.APPLICATIONS:
            vision.correct(model)
    if wanted.freeze:
        lines.append(freeze(model, wanted.freeze))
    for line in [] if quiet else lines:
        logger.info(line)
    return model


def compiled(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, experiment: config.Experiment, data: Loaded
) -> Loaded:
    """Compiles the model, unless it brought its own loss, and returns the data with targets in the form for that."""
    train, name, columns = experiment.train, experiment.model.name, data.train.columns
    inputs = {tensor.name: tensor for tensor in keras.tree.flatten(getattr(model, "inputs", None) or [])}
    given = inputs if columns is None else columns[0]
    if inputs and len(inputs) != len(keras.tree.flatten(given)):
        said = [str(keras.tree.map_structure(lambda a: ["n", *a.shape[1:]], each)) for each in (inputs, given)]
        what = f"model.name={name!r} takes the inputs {said[0]}, and the data has {said[1]}".replace("'n'", "n")
        raise UserError(what, "give it as many")
    if model.compiled:
        for field, value in (("train.loss", train.loss), ("train.metrics", train.metrics)):
            if value:
                what = f"{field}={value!r}, and model.name={name!r} compiles the model itself"
                raise UserError(what, "leave out one of them")
    if model.compiled or data.spec.classes is None:
        if data.train.mixes:
            what = f"data.augment={experiment.data.augment!r} mixes classes, which is for classification"
            raise UserError(f"{what} with tfdist's own loss", "leave out mixup and cutmix")
        if train.label_smoothing:
            what = f"train.label_smoothing={train.label_smoothing} is for classification with tfdist's own loss"
            raise UserError(what, "set it to 0")
    if model.compiled:
        scales = model.dtype_policy.name == "mixed_float16"
        model.optimizer = keras.optimizers.LossScaleOptimizer(optimizer) if scales else optimizer
        return data
    arguments, rows, own = objective.of(experiment, model, data)
    if data.spec.classes is not None:
        _check_outputs(name, model, data.spec.classes, train.loss)
    elif not own:
        _check_targets(name, model, data.train)
    model.compile(optimizer=optimizer, **arguments)
    if rows:
        classes = data.spec.classes or 0
        data = dataclasses.replace(data, train=one_hot(data.train, classes), eval=one_hot(data.eval, classes))
    return data


def check_can_be_saved(model: keras.Model, name: str) -> None:
    """Refuses a compiled model of which Keras could not write `model.keras`, and warns where it writes another one."""
    try:
        with optimizers.portable(model):
            json.dumps(keras.saving.serialize_keras_object(model))
    except (TypeError, ValueError, NotImplementedError) as error:
        why = one_line(error, 200).partition(". ")[0]
        raise UserError(f"model.name={name!r} cannot be saved ({why})", "give its parts a get_config()") from error
    layers = [layer for layer in keras_internals.flat_layers(model) if getattr(layer, "lora_enabled", False)]
    if any(getattr(layer, "quantization_mode", None) for layer in layers):
        what = "Keras rounds the weights of LoRA into quantized kernels when it writes model.keras"
        logger.info(f"WARNING: {what}, another model than the trained one: evaluate with --checkpoint=latest")


def _check_targets(name: str, model: keras.Model, train: Source) -> None:
    """Refuses outputs that the squared error would compare with each of the targets, in a batch of as many."""
    outputs, targets = keras.tree.flatten(getattr(model, "outputs", None) or []), train.targets
    if len(outputs) != 1 or targets is None or keras.tree.is_nested(targets):
        return
    made, wanted = tuple(outputs[0].shape[1:]), tuple(targets.shape[1:])
    if None not in made and made not in (wanted, (*wanted, 1)) and (*made, 1) != wanted:
        what = f"model.name={name!r} has outputs of shape {list(made)}, and the targets {list(wanted)}"
        raise UserError(what, "make them alike")


def _check_outputs(name: str, model: keras.Model, classes: int, loss: str) -> None:
    """Refuses what the loss cannot train: tfdist's own takes logits, and would train probabilities without a word."""
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    if len(outputs) != 1:  # none: a class of one's own, which has not been called yet
        return
    activation = objective.ends_with_probabilities(model)
    if activation and not loss:
        what = f"model.name={name!r} ends with {activation}, and tfdist's own loss takes logits"
        raise UserError(what, "leave that activation out, or set train.loss")
    units = outputs[0].shape[-1]
    alone = bool(loss) and (units, classes) == (1, 2)  # one score, for the second class
    if units is not None and units < classes and not alone:
        raise UserError(f"model.name={name!r} has {units} outputs, the data {classes} classes", "give it as many")


def _loaded(path: str, precision: str, spec: Spec) -> keras.Model:
    """A model that is saved in a file, all of which trains, for data of the same kind."""
    try:
        model = keras.saving.load_model(path, compile=False, safe_mode=True)
    except Exception as error:  # whatever the layers in it raise
        why = one_line(error, 200)
        what = f"model.name={path!r} cannot be loaded ({why})"
        raise UserError(what, "give a file that Keras has saved, without code of its own") from error
    if not isinstance(model, keras.Model):
        raise UserError(f"model.name={path!r} holds no keras.Model", "give the model.keras of a run")
    for layer in keras_internals.flat_layers(model):  # `model.trainable = True` leaves out the inside of a frozen one
        layer.trainable = True
    advice = f"choose a model by name and start with these weights: model.weights={path}"
    if spec.columns and getattr(spec_file.of_model(path), "columns", None) != spec.columns:
        what = f"model.name={path!r} does not tell how the columns of its training's table were encoded"
        raise UserError(what, "keep the data.json of its run beside it")
    inputs = keras.tree.flatten(model.inputs)
    # Half precision leaves its last layer in float32.
    inner = keras_internals.flat_layers(model)
    policies = {layer.dtype_policy.name for layer in inner if keras_internals.own_trainable_variables(layer)}
    own_precision = ", ".join(sorted(policies - {"float32"})) or "float32"
    if policies and own_precision != precision:
        raise UserError(
            f"model.name={path!r} computes in {own_precision}, which its layers keep, and train.precision={precision}",
            f"set that to {own_precision}, or {advice}",
        )
    if len(inputs) == 1:
        shape, dtype = tuple(inputs[0].shape[1:]), keras.backend.standardize_dtype(inputs[0].dtype)
        fits = len(shape) == len(spec.shape) and all(a in (None, b) for a, b in zip(shape, spec.shape))
        # Integers are scaled inside; fractions of 1 would all become 0.
        if not fits or ("int" in dtype and "int" not in spec.dtype):
            what = f"model.name={path!r} takes {list(shape)} {dtype}, and the data {list(spec.shape)} {spec.dtype}"
            raise UserError(what, advice)
    outputs = keras.tree.flatten(model.outputs)
    if len(outputs) == 1 and spec.classes is not None:
        units = outputs[0].shape[-1]
        # Of a language model's tokens, the data need not have all.
        if units is not None and (units < spec.classes or (units > spec.classes and len(outputs[0].shape) == 2)):
            raise UserError(f"model.name={path!r} has {units} outputs, the data {spec.classes} classes", advice)
    return model


def freeze(model: keras.Model, text: str) -> str:
    """Freezes layers of a built model, as `layer.trainable = False` does: BatchNorm then predicts.

    Returns a line on it. `text` has patterns of layer names such as `conv*, block1_*`, which also stand for what is
    inside of a layer. One with `!` before it takes out what it matches; if all have one, everything else is frozen.
    """
    patterns = [pattern.strip() for pattern in text.split(",")]
    layers = list(optimizers.with_weights(model))
    for pattern in patterns:
        if not any(_matches(names, pattern.removeprefix("!")) for _, names in layers):
            known = field_syntax.suggest(pattern.strip("!*?"), tuple(dict.fromkeys(n for _, ns in layers for n in ns)))
            raise UserError(f"model.freeze: {pattern!r} matches no layer with weights{known}")
    wanted = [p for p in patterns if not p.startswith("!")] or ["*"]
    excepted, frozen = [p[1:] for p in patterns if p.startswith("!")], 0
    for layer, names in layers:
        if any(_matches(names, p) for p in wanted) and not any(_matches(names, p) for p in excepted):
            layer.trainable = False
            frozen += 1
    if not model.trainable_variables:
        what = f"model.freeze={text!r} leaves nothing to train"
        raise UserError(what, f"leave layers out, such as !{layers[-1][1][0]}")
    if not frozen:
        raise UserError(f"model.freeze={text!r} freezes nothing", "take out fewer layers")
    trained, total = (sum(math.prod(v.shape) for v in part) for part in (model.trainable_variables, model.weights))
    return f"frozen: {frozen} of {len(layers)} layers with weights; {trained:,} of {total:,} numbers train"


def _matches(names: tuple[str, ...], pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)
