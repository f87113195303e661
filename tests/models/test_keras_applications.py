"""The classifiers of keras.applications: all are built, see what their family expects, and train alike everywhere."""

import functools
import inspect

import keras
import numpy as np
import pytest
import test_zoo
from keras.src.applications import convnext, efficientnet
from support import training_cases, worlds, zoo_cases
from support.covering import first

from tfdist import config
from tfdist.config import validation
from tfdist.data.spec import Spec
from tfdist.errors import UserError
from tfdist.models import build as models
from tfdist.models.zoo import vision

REPRESENTATIVES = list(zoo_cases.APPLICATIONS)
PRECISION = {"ConvNeXtTiny": "float32", "MobileNetV3Small": "float32", "VGG16": "float32"}
"""In float64 unless rounding is small in float32 as well. At random weights and a few pixels the deep networks with
BatchNorm multiply it: two replicas of MobileNet end 2.4e-2 from one in float32 and 4e-14 in float64."""


def images(spec, count=2):
    r = np.random.default_rng(0)
    if spec.dtype.startswith("float"):
        return r.uniform(0, spec.maximum, (count, *spec.shape)).astype(spec.dtype)
    return r.integers(0, int(spec.maximum) + 1, (count, *spec.shape)).astype(spec.dtype)


def test_the_names_are_those_of_keras():
    """Keras has functions in capitals here and nothing else; a newer one may have more, and no fewer."""
    there = {name for name, value in vars(keras.applications).items() if inspect.isfunction(value)}
    assert set(config.APPLICATIONS) <= there
    assert len(set(config.APPLICATIONS)) == 40


def families():
    """(family, one of its models)"""
    found = {
        inspect.unwrap(getattr(keras.applications, n)).__module__.rpartition(".")[2]: n for n in config.APPLICATIONS
    }
    return sorted(found.items())


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", [family for family, _ in families()])
@pytest.mark.parametrize("spec, to_pixels", [
    (Spec((6, 5, 3), "uint8", 2, 255.0), 1.0),
    (Spec((6, 5, 3), "uint8", 2, 16.0), 255 / 16),
    (Spec((6, 5, 3), "float32", 2, 255.0), 1.0),
    (Spec((6, 5, 3), "float32", 2, 1.0), 255.0),
    (Spec((6, 5, 1), "uint8", 2, 255.0), 1.0),
], ids=["bytes", "up to 16", "float pixels", "fractions", "grey"])  # fmt: skip
def test_pixels_are_what_preprocess_input_gives(family, spec, to_pixels):
    """Keras' own function is the independent answer."""
    image = keras.Input(spec.shape, dtype=spec.dtype)
    x = images(spec)
    ours = keras.Model(image, vision.pixels(image, spec, family))(x)
    colour = np.broadcast_to(x.astype("float64") * to_pixels, (*x.shape[:3], 3)).copy()
    theirs = getattr(keras.applications, family).preprocess_input(colour)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


def built(name, spec=None, options="", **model):
    spec = spec or zoo_cases.APPLICATIONS[name].spec
    experiment = config.Experiment(model=config.Model(name=name, options=options, **model))
    return models.build(validation.validate(experiment), spec)


def test_a_model_sees_its_pixels():
    """That of a grey image with values up to 16, with the options of its function."""
    model = built("MobileNet", Spec((32, 32, 1), "uint8", 3, 16.0), "alpha=0.25")
    first = keras.Model(model.inputs, model.get_layer("pixels").output)
    np.testing.assert_allclose(first(np.full((1, 32, 32, 1), 16, "uint8")), np.ones((1, 32, 32, 3)))
    np.testing.assert_allclose(first(np.zeros((1, 32, 32, 1), "uint8")), -np.ones((1, 32, 32, 3)))
    assert model.get_layer("conv1").filters == 8
    assert model.output_shape == (None, 3)


def test_efficientnet_sees_what_its_imagenet_weights_expect(tmp_path, monkeypatch):
    """Keras' own is the independent answer, which makes up for the file only with `weights="imagenet"`."""
    spec, mean, std = zoo_cases.APPLICATIONS["EfficientNetB0"].spec, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    monkeypatch.setattr(efficientnet, "DEFAULT_BLOCKS_ARGS", [{**efficientnet.DEFAULT_BLOCKS_ARGS[0], "repeats": 1}])
    with monkeypatch.context() as without_the_file:
        without_the_file.setattr(keras.src.utils.file_utils, "get_file", lambda *a, **k: "")
        without_the_file.setattr(keras.Model, "load_weights", lambda *a, **k: None)
        there = keras.applications.EfficientNetB0(weights="imagenet", input_shape=spec.shape, include_top=False)
    norm = next(layer for layer in there.layers if isinstance(layer, keras.layers.Normalization))
    norm.set_weights([np.array(mean), np.array(std), np.array(0)])  # what is in the file
    norm.finalize_state()
    stem = lambda model: np.asarray(keras.Model(model.inputs, model.get_layer("stem_conv").output)(images(spec)))
    expected, paths = stem(there), [str(tmp_path / f"{i}.weights.h5") for i in range(2)]
    there.save_weights(paths[0])
    ours = built("EfficientNetB0", weights=paths[0])
    np.testing.assert_allclose(stem(ours), expected, rtol=1e-4, atol=1e-5)
    ours.save_weights(paths[1])
    ours.load_weights(paths[1])
    vision.correct(ours)  # once only
    np.testing.assert_allclose(stem(ours), expected, rtol=1e-4, atol=1e-5)


REFUSED = [
    ("Xception", Spec((32, 70, 3), "uint8", 3, 255.0), "",
     r"'Xception' does not fit the data or model.options: Input size must be at least 71x71; Received: .*70"),
    ("ResNet50", Spec((32, 32, 4), "uint8", 3, 255.0), "", "needs images of 1 or 3 channels, the data has 4"),
    ("ResNet50", Spec((10,), "uint8", 3, 255.0), "",
     r"needs images \[height, width, channels\], the data has shape \[10\]"),
    ("ResNet50", Spec((32, 32, 3), "uint8", None, 255.0), "",
     "this model classifies, and the targets are not integers"),
    ("ResNet50", Spec((32, 32, 3), "uint8", 3, 255.0), "alpha=1",
     r"model.options: keras.*ResNet50 takes no such arguments"),
    ("ResNet50", Spec((32, 32, 3), "uint8", 3, 255.0), "classes=5",
     "model.options: classes of ResNet50 is set from the data"),
    ("MobileNetV3Small", Spec((32, 32, 3), "uint8", 3, 255.0), "name=7",
     r"'MobileNetV3Small' does not fit the data or model.options: "),
    ("MobileNet", Spec((32, 32, 3), "uint8", 3, 255.0), "alpha=None",
     "'MobileNet' does not fit the data or model.options: "),
]  # fmt: skip


@pytest.mark.parametrize("name, spec, options, message", REFUSED)
def test_refused(name, spec, options, message):
    with pytest.raises(UserError, match=message) as caught:
        built(name, spec, options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", first(1, ["MobileNet", "MobileNetV3Small", "ResNet50"]))
def test_logits_have_full_precision(name):
    """Their last layers are of different kinds: Conv2D and Flatten, Conv2D and Reshape, Dense."""
    for precision, wanted in (("mixed_bfloat16", "float32"), ("float64", "float64")):
        models.set_precision(precision)
        model = built(name)
        assert model(images(zoo_cases.APPLICATIONS[name].spec)).dtype == wanted
        inner = next(layer.compute_dtype for layer in model.layers if isinstance(layer, keras.layers.Conv2D))
        assert inner == {"mixed_bfloat16": "bfloat16", "float64": "float64"}[precision]


@pytest.mark.whole
def test_saved_models_need_no_tfdist(tmp_path, monkeypatch):
    """The second has layers of its family's own; one of each will do."""
    small = {"depths": [1, 1, 1, 1], "projection_dims": [4, 8, 12, 16], "default_size": 224}
    monkeypatch.setitem(convnext.MODEL_CONFIGS, "tiny", small)
    saved(["MobileNetV3Small", "ConvNeXtTiny"], tmp_path)


@pytest.mark.faults
def test_saved_models_of_every_family_need_no_tfdist(tmp_path):
    saved(REPRESENTATIVES, tmp_path)


def saved(names, folder):
    paths = []
    for name in names:
        x = images(zoo_cases.APPLICATIONS[name].spec)
        paths.append(test_zoo.kept(built(name), x, folder / f"{name}.keras"))
    test_zoo.in_plain_keras(paths, folder)


SMALLEST = {"InceptionResNetV2": 75, "InceptionV3": 75, "Xception": 71}


@pytest.mark.faults
@pytest.mark.parametrize("name", config.APPLICATIONS)
def test_every_one_is_built_and_predicts(name):
    """For the smallest image that its message names."""
    side = SMALLEST.get(name, 32)
    with pytest.raises(UserError, match=f"Input size must be at least {side}x{side}"):
        built(name, Spec((side - 1, side, 3), "uint8", 5, 255.0))
    spec = Spec((side, side, 3), "uint8", 5, 255.0)
    outputs = np.asarray(built(name, spec)(images(spec)))
    assert outputs.shape == (2, 5) and np.isfinite(outputs).all() and np.ptp(outputs) > 0
    keras.backend.clear_session()


@pytest.fixture(scope="module")
def reference(connect):
    return functools.cache(lambda name: outcome(name, connect(1)))


def outcome(name, distribution):
    return zoo_cases.outcome(zoo_cases.APPLICATIONS[name], distribution, PRECISION.get(name, "float64"))


def assert_agrees(name, got, expected):
    """What was learned, not only the weights, most of which stay what they were."""
    float64 = PRECISION.get(name, "float64") == "float64"
    assert training_cases.distance(got[0], expected[0]) < (1e-9 if float64 else 1e-5)
    assert np.linalg.norm(got[0] - expected[0]) < (1e-9 if float64 else 1e-3) * expected[2]


@pytest.mark.faults
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_mirrored_agrees_with_one_device(name, reference, connect):
    assert_agrees(name, outcome(name, connect(2)), reference(name))


@pytest.mark.faults
@pytest.mark.parametrize("name", REPRESENTATIVES)
@pytest.mark.parametrize("strategy", ["multi_worker", "horovod"])
def test_two_workers_agree_with_one_device(strategy, name, reference, tmp_path):
    in_precision = f"{name}/{PRECISION.get(name, 'float64')}"
    found = [worker[in_precision] for worker in worlds.outcomes(tmp_path, strategy, 2, "zoo", [in_precision])]
    assert found[0][0].tobytes() == found[1][0].tobytes()
    assert_agrees(name, found[0], reference(name))
