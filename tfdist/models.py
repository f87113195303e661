"""The models that ship with tfdist, by name, and the user's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from tfdist import config, imports
from tfdist.data import Records, one_hot
from tfdist.datasets.catalog import Loaded, Spec
from tfdist.errors import UserError
from tfdist.records_feed import is_weighted


def set_precision(precision: str) -> None:
    """`train.precision` for the models that are made from now on."""
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)


def build(experiment: config.Experiment, spec: Spec) -> keras.Model:
    """Builds `model.name` for this data; call it inside the strategy's scope.

    The model's initial weights depend on the experiment's seed alone.

    Raises:
      UserError: options that the model does not take, or data it cannot use.
    """
    keras.utils.set_random_seed(experiment.seed)
    name = experiment.model.name
    options = config.options("model.options", experiment.model.options)
    model = imports.call("model.options", _function(name), options, spec)
    if not isinstance(model, keras.Model):
        raise UserError(f"model.name={name!r} must return a keras.Model, got {type(model).__name__}")
    return model


def compiled(model: keras.Model, optimizer: Any, experiment: config.Experiment, data: Loaded) -> Loaded:
    """Gives the model its optimizer, and a loss that fits the data unless it brought one.

    Returns:
      The data, its targets in the form that the loss wants.

    Raises:
      UserError: label smoothing where it has no place.
    """
    smoothing = experiment.train.label_smoothing
    mixes = isinstance(data.train, Records) and data.train.mix is not None
    if model.compiled or data.spec.classes is None:
        if mixes:
            raise UserError(
                f"data.augment={experiment.data.augment!r} mixes classes, which is for classification "
                "with tfdist's own loss: leave out mixup and cutmix"
            )
        if smoothing:
            raise UserError(
                f"train.label_smoothing={smoothing} is for classification with tfdist's own loss: set it to 0"
            )
        if not model.compiled:
            model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
        elif model.dtype_policy.name == "mixed_float16":
            model.optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        else:
            model.optimizer = optimizer
        return data
    weighted = is_weighted(data.train)
    reduction = "mean_with_sample_weight" if weighted else "sum_over_batch_size"
    loss: Any
    if smoothing or mixes:
        loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=smoothing, reduction=reduction)
        train, evaluation = one_hot(data.train, data.spec.classes), one_hot(data.eval, data.spec.classes)
        data = dataclasses.replace(data, train=train, eval=evaluation)
    else:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    metrics = {"weighted_metrics" if weighted else "metrics": ["accuracy"]}
    model.compile(optimizer=optimizer, loss=loss, **metrics)
    return data


def _function(name: str) -> Callable[..., keras.Model]:
    match name:
        case "cnn":
            return cnn
        case "mlp":
            return mlp
        case "conv_bn":
            return conv_bn
        case "char_transformer":
            return char_transformer
    return imports.resolve("model.name", name)


def cnn(spec: Spec, channels: tuple[int, ...] = (64, 128), units: int = 128) -> keras.Model:
    """Convolutions with synchronized BatchNorm, one pooling, a hidden layer: for small images. Returns logits.

    Everything in it is smooth. With ReLU and max pooling, two runs that differ
    in the last bit of a sum are 5 % apart after 900 updates; with GELU and mean
    pooling they stay within 1e-6, so that strategies can be compared to the end.
    """
    _needs_image("cnn", spec)
    layers: list[Any] = [_scaled(spec)]
    for width in channels:
        layers += [*_convolution(width, True), keras.layers.Activation("gelu")]
    layers += [keras.layers.AveragePooling2D(2), keras.layers.Flatten(), keras.layers.Dense(units, activation="gelu")]
    return keras.Sequential([*_input(spec), *layers, _logits(spec)])


def mlp(spec: Spec, units: int = 32, depth: int = 1, dropout: float = 0.0) -> keras.Model:
    """Flatten and `depth` hidden layers of `units`. Returns logits."""
    layers: list[Any] = [_scaled(spec), keras.layers.Flatten()]
    for _ in range(depth):
        layers += [keras.layers.Dense(units, activation="relu")]
        layers += [keras.layers.Dropout(dropout)] if dropout else []
    return keras.Sequential([*_input(spec), *layers, _logits(spec)])


def conv_bn(spec: Spec, channels: tuple[int, ...] = (32, 64, 128), synchronized: bool = True) -> keras.Model:
    """Blocks of two convolutions with BatchNorm and ReLU, then pooling. Returns logits.

    BatchNorm is synchronized, so that the statistics are those of the global
    batch and the result does not depend on the number of replicas.
    """
    _needs_image("conv_bn", spec)
    layers: list[Any] = [_scaled(spec)]
    for width in channels:
        for _ in range(2):
            layers += [*_convolution(width, synchronized), keras.layers.ReLU()]
        layers += [keras.layers.MaxPooling2D()]
    return keras.Sequential([*_input(spec), *layers, keras.layers.GlobalAveragePooling2D(), _logits(spec)])


def char_transformer(spec: Spec, width: int = 64, heads: int = 4, depth: int = 2) -> keras.Model:
    """A small causal transformer over sequences of bytes, 0 being padding. Returns logits [n, length, 256]."""
    if len(spec.shape) != 1:
        raise UserError(f"model.name='char_transformer' needs sequences, the data has shape {list(spec.shape)}")
    length = spec.shape[0]
    tokens = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(256, width, mask_zero=True)(tokens)
    # Positions 1, 2, ... and 0 for padding, as Keras operations, so that the saved model needs nothing of tfdist.
    present = keras.ops.cast(keras.ops.not_equal(tokens, 0), "int32")
    positions = keras.ops.cumsum(present, axis=1) * present
    x = keras.layers.Add()([x, keras.layers.Embedding(length + 1, width, mask_zero=True, name="positions")(positions)])
    for _ in range(depth):
        y = keras.layers.LayerNormalization()(x)
        # Add layers and not `+`, which would drop the mask.
        x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)])
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(4 * width, activation="gelu")(y)
        x = keras.layers.Add()([x, keras.layers.Dense(width)(y)])
    return keras.Model(tokens, keras.layers.Dense(256)(keras.layers.LayerNormalization()(x)))


def _convolution(width: int, synchronized: bool) -> list[Any]:
    return [
        keras.layers.Conv2D(width, 3, padding="same", use_bias=False),
        # Keras' momentum of 0.99 lags a hundred updates behind, a tenth of a short run.
        keras.layers.BatchNormalization(momentum=0.9, synchronized=synchronized),
    ]


def _input(spec: Spec) -> list[Any]:
    return [keras.Input(spec.shape, dtype=spec.dtype)]


def _scaled(spec: Spec) -> Any:
    """Inputs to [0, 1] where they are whole numbers, unchanged otherwise."""
    whole = spec.dtype.startswith(("int", "uint"))
    return keras.layers.Rescaling(1.0 / spec.maximum if whole else 1.0)


def _logits(spec: Spec) -> Any:
    if spec.classes is None:
        raise UserError(
            "this model classifies, and the targets are not whole numbers: use model.name=package.module:function"
        )
    # float32 logits: in half precision the loss would lose most of its digits.
    return keras.layers.Dense(spec.classes, dtype=None if keras.config.floatx() == "float64" else "float32")


def _needs_image(name: str, spec: Spec) -> None:
    if len(spec.shape) != 3:
        raise UserError(
            f"model.name={name!r} needs images [height, width, channels], the data has shape {list(spec.shape)}"
        )
