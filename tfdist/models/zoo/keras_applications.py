"""The image classifiers of keras.applications, without weights, for images as they are stored."""

import inspect
import re

import keras
import numpy as np

from tfdist.config import user_functions
from tfdist.data.spec import Spec
from tfdist.errors import UserError, one_line
from tfdist.models.zoo import layers

OWN = ("weights", "input_tensor", "input_shape", "classes", "classifier_activation", "include_top", "pooling")
"""Arguments that are given here."""

# What their preprocess_input does to pixels from 0 to 255; the families that are not here do it in the model itself.
TO_ONE = ("inception_resnet_v2", "inception_v3", "mobilenet", "mobilenet_v2", "nasnet", "resnet_v2", "xception")
BLUE_FIRST = ("resnet", "vgg16", "vgg19")
STANDARDISED = ("densenet",)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, red first, of 1
BLUE_MEAN = (103.939, 116.779, 123.68)  # of ImageNet, blue first, of 255


def build(name: str, options: dict[str, object], spec: Spec) -> keras.Model:
    """Builds the model of that name for this data, with more of its arguments; its outputs are logits [n, classes].

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
        smallest = re.search(r"at least (\d+)x\1", str(error))
        if smallest:
            raise UserError(
                f"model.name={name!r} needs images of at least {smallest[1]}x{smallest[1]}, the data has {high}x{wide}",
                f"set data.image_size={smallest[1]} or more",
            ) from None
        raise UserError(f"model.options do not fit {name}: {one_line(error, 200)}") from error
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
