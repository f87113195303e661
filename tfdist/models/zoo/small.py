"""Small networks for small images: what the examples and many tests train."""

from __future__ import annotations

import keras

from tfdist.data.spec import Spec
from tfdist.errors import UserError
from tfdist.models.zoo import layers as layers_lib


def cnn(spec: Spec, channels: tuple[int, ...] = (64, 128), units: int = 128) -> keras.Model:
    """Convolutions with BatchNorm, one pooling, a hidden layer: for small images. Returns logits.

    Everything in it is smooth. With ReLU and max pooling, two runs that differ
    in the last bit of a sum are 5 % apart after 900 updates; with GELU and mean
    pooling they stay within 1e-6, so that strategies can be compared to the end.
    """
    layers_lib.needs_image("cnn", spec, smallest=2)
    layers: list[keras.Layer] = [layers_lib.scaled(spec)]
    for width in channels:
        layers += [*_convolution(width), keras.layers.Activation("gelu")]
    layers += [keras.layers.AveragePooling2D(2), keras.layers.Flatten(), keras.layers.Dense(units, activation="gelu")]
    return keras.Sequential([_input(spec), *layers, layers_lib.logits(spec)])


def mlp(spec: Spec, units: int = 32, depth: int = 1, dropout: float = 0.0) -> keras.Model:
    """Flatten and `depth` hidden layers of `units`. Returns logits."""
    if spec.columns:
        raise UserError("model.name='mlp' takes one kind of input, and a table has columns: use model.name=table_mlp")
    layers: list[keras.Layer] = [layers_lib.scaled(spec), keras.layers.Flatten()]
    for _ in range(depth):
        layers += [keras.layers.Dense(units, activation="relu")]
        layers += [keras.layers.Dropout(dropout)] if dropout else []
    return keras.Sequential([_input(spec), *layers, layers_lib.logits(spec)])


def conv_bn(spec: Spec, channels: tuple[int, ...] = (32, 64, 128)) -> keras.Model:
    """Blocks of two convolutions with BatchNorm and ReLU, then pooling. Returns logits."""
    layers_lib.needs_image("conv_bn", spec, smallest=2 ** len(channels))
    layers: list[keras.Layer] = [layers_lib.scaled(spec)]
    for width in channels:
        for _ in range(2):
            layers += [*_convolution(width), keras.layers.ReLU()]
        layers += [keras.layers.MaxPooling2D()]
    return keras.Sequential([_input(spec), *layers, keras.layers.GlobalAveragePooling2D(), layers_lib.logits(spec)])


def _convolution(width: int) -> list[keras.Layer]:
    return [
        keras.layers.Conv2D(width, 3, padding="same", use_bias=False),
        # Keras' momentum of 0.99 lags a hundred updates behind, a tenth of a short run.
        keras.layers.BatchNormalization(momentum=0.9),
    ]


def _input(spec: Spec) -> keras.KerasTensor:
    return keras.Input(spec.shape, dtype=spec.dtype)
