"""Image classifiers: AlexNet, the residual network for CIFAR, a small transformer, and those of keras.applications."""

import inspect

import keras
import numpy as np

from tfdist.config import user_functions
from tfdist.data.spec import Spec
from tfdist.errors import UserError, one_line
from tfdist.models.zoo import layers

ALEXNET_SMALLEST = 63  # pixels from which AlexNet's three poolings leave something


def alexnet(spec: Spec, width: int = 64, units: int = 4096, dropout: float = 0.5) -> keras.Model:
    """AlexNet in one tower: "One weird trick for parallelizing convolutional neural networks" (Krizhevsky, 2014).

    Without response normalization, and with He's initial weights (2015), which it then needs to start. Images below 63
    pixels, such as CIFAR's, get a first convolution of 3x3 without stride, and poolings that keep the edge.

    Args:
      width: channels of the first convolution, 64 as published; the others grow with it.
      units: width of the two hidden layers.
      dropout: rate of what they read.
    """
    layers.needs_image("alexnet", spec)
    small = min(spec.shape[:2]) < ALEXNET_SMALLEST
    image = keras.Input(spec.shape, dtype=spec.dtype, name="image")
    x = layers.scaled(spec, centred=True)(image)
    convolution = lambda channels, size, name, strides=1, padding="same": keras.layers.Conv2D(
        channels, size, strides, padding, activation="relu", kernel_initializer="he_normal", name=name
    )
    pool = lambda name: keras.layers.MaxPooling2D(3, 2, padding="same" if small else "valid", name=name)
    if small:
        x = convolution(width, 3, "conv1")(x)
    else:
        x = keras.layers.ZeroPadding2D(2, name="conv1_pad")(x)
        x = convolution(width, 11, "conv1", 4, "valid")(x)
    x = pool("conv1_pool")(x)
    x = pool("conv2_pool")(convolution(3 * width, 5, "conv2")(x))
    x = convolution(6 * width, 3, "conv3")(x)
    x = convolution(4 * width, 3, "conv4")(x)
    x = pool("conv5_pool")(convolution(4 * width, 3, "conv5")(x))
    x = keras.layers.Flatten(name="flatten")(x)
    for number in (6, 7):
        x = layers.dropped(x, dropout, f"dense{number}_dropout")
        x = keras.layers.Dense(units, "relu", kernel_initializer="he_normal", name=f"dense{number}")(x)
    return keras.Model(image, layers.logits(spec)(x))


def resnet_cifar(spec: Spec, depth: int = 20, width: int = 16, stochastic_depth: float = 0.0) -> keras.Model:
    """The network for CIFAR-10 of "Deep Residual Learning for Image Recognition" (He et al., 2016, section 4.2).

    Three stages of (depth - 2) / 6 blocks, of width, 2 and 4 times as many channels. Shortcuts have no weights: where
    the size halves they are subsampled and filled up with zeros (the paper's option A).

    Args:
      depth: layers with weights: 20, 32, 44, 56, 110, ...
      width: channels of the first stage.
      stochastic_depth: probability of leaving out the last block; those before it less (Huang et al., 2016).
    """
    layers.needs_image("resnet_cifar", spec)
    if depth < 8 or (depth - 2) % 6:
        raise UserError(f"model.options: depth={depth} of resnet_cifar is not 6n + 2", "choose 20, 32, 44, 56 or 110")
    blocks = (depth - 2) // 6
    rates = iter(layers.depth_rates(stochastic_depth, 3 * blocks))
    image = keras.Input(spec.shape, dtype=spec.dtype, name="image")
    x = _convolution(layers.scaled(spec, centred=True)(image), width, 1, "stem")
    x = keras.layers.ReLU(name="stem_relu")(x)
    for stage in range(3):
        for number in range(blocks):
            stride = 2 if stage and not number else 1
            x = _residual(x, width << stage, stride, next(rates), f"block{stage + 1}_{number + 1}")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(image, layers.logits(spec)(x))


def vit(
    spec: Spec,
    patch: int = 4,
    width: int = 96,
    heads: int = 3,
    depth: int = 6,
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
) -> keras.Model:
    """A small vision transformer: "An Image is Worth 16x16 Words" (Dosovitskiy et al., 2021).

    Normalized before each branch; the mean of all patches in place of a class token ("Better plain ViT baselines for
    ImageNet-1k", Beyer et al., 2022).

    Args:
      patch: pixels per side of a patch; divides both sides of the image.
      width: length of a patch's vector; a multiple of `heads`.
      dropout: rate after the patches, in the attention and after each branch.
      stochastic_depth: probability of leaving out the last block's branches; those before it less.
    """
    layers.needs_image("vit", spec)
    high, wide, channels = spec.shape
    if high % patch or wide % patch:
        raise UserError(f"model.options: patch={patch} does not divide images of {high}x{wide}", "choose another")
    layers.divides(width, heads)
    image = keras.Input(spec.shape, dtype=spec.dtype, name="image")
    x = layers.scaled(spec, centred=True)(image)
    rows, columns = high // patch, wide // patch
    x = keras.layers.Reshape((rows, patch, columns, patch, channels), name="stem_split")(x)
    x = keras.layers.Permute((1, 3, 2, 4, 5), name="stem_order")(x)
    x = keras.layers.Reshape((rows * columns, patch * patch * channels), name="stem_patches")(x)
    # A bias per patch: the learned positions, without a layer of our own in the saved model.
    x = keras.layers.EinsumDense("npi,iw->npw", (rows * columns, width), bias_axes="pw", name="stem")(x)
    x = layers.dropped(x, dropout, "stem_dropout")
    for block, rate in enumerate(layers.depth_rates(stochastic_depth, depth), 1):
        name = f"block{block}"
        y = keras.layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm1")(x)
        y = layers.attention(heads, width, dropout, "glorot_uniform", f"{name}_attention")(y, y)
        x = _added(x, y, dropout, rate, name, 1)
        y = keras.layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm2")(x)
        y = keras.layers.Dense(4 * width, "gelu", name=f"{name}_dense1")(y)
        y = keras.layers.Dense(width, name=f"{name}_dense2")(y)
        x = _added(x, y, dropout, rate, name, 2)
    x = keras.layers.LayerNormalization(epsilon=1e-6, name="norm")(x)
    x = keras.layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(image, layers.logits(spec)(x))


def _convolution(x: keras.KerasTensor, channels: int, stride: int, name: str) -> keras.KerasTensor:
    x = keras.layers.Conv2D(
        channels, 3, stride, "same", use_bias=False, kernel_initializer="he_normal", name=f"{name}_conv"
    )(x)
    # Keras' momentum of 0.99 lags a hundred updates behind.
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"{name}_bn")(x)


def _residual(x: keras.KerasTensor, channels: int, stride: int, rate: float, name: str) -> keras.KerasTensor:
    y = _convolution(x, channels, stride, f"{name}_1")
    y = keras.layers.ReLU(name=f"{name}_1_relu")(y)
    y = layers.stochastic_depth(_convolution(y, channels, 1, f"{name}_2"), rate, f"{name}_drop")
    missing = channels - x.shape[-1]
    if stride > 1:
        x = keras.layers.AveragePooling2D(1, stride, "same", name=f"{name}_shortcut")(x)
    if missing:
        x = keras.ops.pad(x, ((0, 0), (0, 0), (0, 0), (missing // 2, missing - missing // 2)))
    return keras.layers.ReLU(name=f"{name}_relu")(keras.layers.Add(name=f"{name}_add")([x, y]))


def _added(
    x: keras.KerasTensor, y: keras.KerasTensor, dropout: float, rate: float, name: str, number: int
) -> keras.KerasTensor:
    y = layers.dropped(y, dropout, f"{name}_dropout{number}")
    y = layers.stochastic_depth(y, rate, f"{name}_drop{number}")
    return keras.layers.Add(name=f"{name}_add{number}")([x, y])


OWN = ("weights", "input_tensor", "input_shape", "classes", "classifier_activation", "include_top", "pooling")
"""Arguments that are given here."""

# What their preprocess_input does to pixels from 0 to 255; the families that are not here do it in the model itself.
TO_ONE = ("inception_resnet_v2", "inception_v3", "mobilenet", "mobilenet_v2", "nasnet", "resnet_v2", "xception")
BLUE_FIRST = ("resnet", "vgg16", "vgg19")
STANDARDISED = ("densenet",)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, red first, of 1
BLUE_MEAN = (103.939, 116.779, 123.68)  # of ImageNet, blue first, of 255


def application(name: str, options: dict[str, object], spec: Spec) -> keras.Model:
    """Builds that model of keras.applications for this data, with more arguments; its outputs are logits [n, classes].

    Images of one channel become grey ones of three. Values are brought to what the family expects inside the model, so
    that the weights that Keras offers fit, and the saved model takes images as they are stored.
    """
    layers.needs_image(name, spec)
    if spec.classes is None:
        layers.logits(spec)  # which refuses that
    function, given = getattr(keras.applications, name), sorted(options.keys() & set(OWN))
    if given:
        raise UserError(f"model.options: {given[0]} of {name} is set from the data", "leave it out")
    high, wide, channels = spec.shape
    if channels not in (1, 3):
        raise UserError(f"model.name={name!r} needs images of 1 or 3 channels, the data has {channels}")
    image = keras.Input(spec.shape, dtype=spec.dtype, name="image")
    arguments = {
        "weights": None,
        "input_tensor": pixels(image, spec, inspect.unwrap(function).__module__.rpartition(".")[2]),
        "input_shape": (high, wide, 3),
        "classes": spec.classes,
        "classifier_activation": None,
        **options,
    }
    try:
        model = user_functions.call("model.options", function, arguments)
    except (TypeError, ValueError) as error:
        what = f"model.name={name!r} does not fit the data or model.options: {one_line(error, 200)}"
        raise UserError(what) from error
    # The layers from the last one with weights on work in full precision. Their type is changed after they have been
    # made, since the families end in different layers (Dense; Conv2D, Reshape and Activation) and none takes a type.
    precision = layers.full_precision()
    for layer in reversed(model.layers) if precision else ():
        layer.dtype_policy = precision
        if layer.weights:
            break
    return keras.Model(image, model.outputs[0], name=model.name)  # of one input, and not of a list of one


def correct(model: keras.Model) -> None:
    """Lets EfficientNet standardise as the ImageNet weights that it was given expect.

    Keras' file has standard deviations where its layer wants variances, which Keras makes up for by a second scaling
    of its own `weights="imagenet"` (tensorflow issue 49930). Here the variances are made what they should be.
    """
    for layer in model.layers:
        if isinstance(layer, keras.layers.Normalization) and layer.input_mean is None:
            given = np.array(layer.adapt_variance)
            if given.shape == (3,) and np.allclose(given, STD, atol=1e-5):
                layer.adapt_variance.assign(given**2)
                layer.finalize_state()


def pixels(image: keras.KerasTensor, spec: Spec, family: str) -> keras.KerasTensor:
    """Returns `image` as `keras.applications.<family>.preprocess_input` would give it to the model, [n, h, w, 3]."""
    if spec.shape[-1] == 1:
        image = keras.layers.Concatenate(name="grey")([image] * 3)
    factor = layers.PIXEL * layers.unit(spec)
    scale: float | list[float] = factor
    offset: float | list[float] = 0.0
    if family in BLUE_FIRST:
        image = keras.ops.flip(image, axis=-1)
        scale, offset = [factor] * 3, [-m for m in BLUE_MEAN]
    elif family in TO_ONE:
        scale, offset = factor / 127.5, -1.0
    elif family in STANDARDISED:
        scale, offset = [factor / layers.PIXEL / s for s in STD], [-m / s for m, s in zip(MEAN, STD)]
    return keras.layers.Rescaling(scale, offset, name="pixels")(image)
