"""The models that ship with tfdist, tiny, and made data for each: what every world must train alike."""

import dataclasses

import keras
import numpy as np

import tfdist
from support import training_cases
from tfdist import config
from tfdist.data.spec import Column, Spec
from tfdist.models import build as models

COLUMNS = (
    Column("age", "number", 40.0, 10.0),
    Column("town", "category", vocabulary=("", "a", "b")),
    Column("income", "number", 3.0, 1.0),
    Column("kind", "category", vocabulary=("x", "y")),
)


def images(side, channels):
    return Spec((side, side, channels), "uint8", 5, 255.0)


def tokens(length):
    return Spec((length,), "int32", 40, 39.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model and its data; nothing in it is random while training."""

    name: str
    options: str
    spec: Spec
    examples: int = 60
    """With BatchNorm, batches that divide evenly; else a tail that does not."""
    batch: int = 24
    rate: float = 1e-3
    adam: bool = True
    accumulate: int = 1


OWN = {
    "cnn": Case("cnn", "channels=(4, 8), units=8", images(8, 1), 48),
    "conv_bn": Case("conv_bn", "channels=(4, 8)", images(8, 3), 48, accumulate=2),
    "mlp": Case("mlp", "units=8", images(8, 1)),
    "alexnet": Case("alexnet", "width=4, units=16, dropout=0", images(63, 3)),
    "alexnet, small images": Case("alexnet", "width=4, units=16, dropout=0", images(16, 3)),
    "resnet_cifar": Case("resnet_cifar", "depth=8, width=4", images(16, 3), 48),
    "vit": Case("vit", "patch=4, width=16, heads=2, depth=2", images(8, 3)),
    "gpt": Case("gpt", "width=16, heads=2, depth=2", tokens(10)),
    "gpt, untied": Case("gpt", "width=16, heads=2, depth=1, tied=False, vocabulary=40", tokens(10)),
    "table_mlp": Case("table_mlp", "units=16", Spec((2,), "float32", 3, 1.0, (), COLUMNS)),
    "table_mlp, numbers to predict": Case("table_mlp", "units=16", Spec((2,), "float32", None, 1.0, (), COLUMNS)),
}


def application(name, side=32, options=""):
    """Two updates by SGD: Adam would move the biases before BatchNorm, which have no effect, by rounding alone."""
    return Case(name, options, images(side, 3), 32, 16, rate=1e-2, adam=False)


APPLICATIONS = {
    name: application(name, *more)
    for name, *more in (
        ("ConvNeXtTiny",), ("DenseNet121",), ("EfficientNetB0",), ("EfficientNetV2B0",), ("InceptionResNetV2", 75),
        ("InceptionV3", 75), ("MobileNet", 32, "alpha=0.25"), ("MobileNetV2", 32, "alpha=0.35"), ("MobileNetV3Small",),
        ("NASNetMobile",), ("ResNet50",), ("ResNet50V2",), ("VGG16",), ("Xception", 71),
    )
}  # fmt: skip
"""One of each family, for the smallest images that it takes."""


def data(case):
    """Made examples of what the spec says, (x, y)."""
    r, spec, n = np.random.default_rng(5), case.spec, case.examples
    if spec.columns:
        x = {"numbers": r.normal(size=(n, 2)).astype("float32"), "categories": r.integers(0, 3, (n, 2), "int32")}
    elif spec.dtype == "int32":
        x = r.integers(1, int(spec.maximum) + 1, (n, *spec.shape), "int32")
        return x, np.roll(x, -1, axis=1)
    else:
        x = r.integers(0, 256, (n, *spec.shape)).astype("uint8")
    y = r.normal(size=n).astype("float32") if spec.classes is None else r.integers(0, spec.classes, n)
    return x, y


def build(case, precision="float32", **model):
    """The model, compiled; in the scope of a distribution."""
    experiment = config.Experiment(seed=3)
    experiment.model = config.Model(name=case.name, options=case.options, **model)
    models.set_precision(precision)
    made = models.build(experiment, case.spec)
    for layer in made._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0  # the applications' own, of which every replica draws its own
    optimizer = keras.optimizers.Adam(case.rate) if case.adam else keras.optimizers.SGD(case.rate, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(optimizer, "mse" if case.spec.classes is None else loss)
    return made


def outcome(case, distribution, precision="float32"):
    """(weights after one epoch, loss, how far the weights have moved)."""
    with distribution.scope():
        made = build(case, precision)
    start = training_cases.weights(made)
    history = tfdist.fit(
        made, *data(case), distribution=distribution, batch_size=case.batch, accumulate=case.accumulate, verbose=0
    )
    end = training_cases.weights(made)
    return end, history.history["loss"], np.linalg.norm(end - start)
