"""The models that ship with tfdist: the same under every strategy, whole in a file, and clear about what they need."""

import functools
import inspect
import os
import sys

import keras
import numpy as np
import pytest
from support import processes, training_cases, worlds, zoo_cases
from support.covering import first

from tfdist import config
from tfdist.config import validation
from tfdist.data.spec import Spec
from tfdist.errors import UserError
from tfdist.models import build as models
from tfdist.models.zoo import layers as layers_lib
from tfdist.models.zoo import small, vision

TOLERANCE = 1e-6
IN_WORLDS = ["cnn", "alexnet", "resnet_cifar", "vit", "gpt", "table_mlp"]
IMAGES = zoo_cases.images(16, 3)
TOKENS = zoo_cases.tokens(10)


@pytest.fixture(scope="module")
def reference(connect):
    """Each model on one device, trained once."""
    return functools.cache(lambda case: zoo_cases.outcome(case, connect(1)))


def assert_agrees(got, expected, tolerance=TOLERANCE):
    """The weights, the loss, and what was learned."""
    assert training_cases.distance(got[0], expected[0]) < tolerance
    np.testing.assert_allclose(got[1], expected[1], rtol=tolerance)
    assert expected[2] > 1e-3 * np.linalg.norm(expected[0])
    assert np.linalg.norm(got[0] - expected[0]) < 100 * tolerance * expected[2]


@pytest.mark.parametrize("name", first(0, zoo_cases.OWN))
def test_mirrored_agrees_with_one_device(name, reference, connect):
    case = zoo_cases.OWN[name]
    assert_agrees(zoo_cases.outcome(case, connect(2)), reference(case))


@pytest.fixture(scope="module")
def workers_of(request, tmp_path_factory):
    """What two workers end with, for all models that are asked of them: each strategy is started once."""

    @functools.cache
    def of(world):
        names = worlds.asked(request, IN_WORLDS, world=world)
        return worlds.outcomes(tmp_path_factory.mktemp("world"), world, 2, "zoo", names)

    return of


@pytest.mark.whole
@pytest.mark.parametrize("world", ["multi_worker", "horovod"])
@pytest.mark.parametrize("name", IN_WORLDS)
def test_two_workers_agree_with_one_device(name, world, workers_of, reference):
    chief, other = workers_of(world)
    assert chief[name][0].tobytes() == other[name][0].tobytes()
    assert_agrees(chief[name], reference(zoo_cases.OWN[name]))


PLAIN = """
import sys, keras, numpy as np
assert not any(name.split(".")[0] == "tfdist" for name in sys.modules)
for path in sys.argv[1:]:
    kept = np.load(path + ".npz")
    x = {k: kept[k] for k in kept.files if k != "outputs"}
    outputs = keras.saving.load_model(path)(x["x"] if "x" in x else x)
    np.testing.assert_allclose(np.asarray(outputs), kept["outputs"], rtol=1e-5, atol=1e-6)
    print("same", path)
"""


def in_plain_keras(paths, folder):
    """Loads models in a process that cannot import tfdist and compares their outputs with those that are kept."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"TF_CPP_MIN_LOG_LEVEL": "2"}
    (folder / "tfdist.py").write_text("raise ImportError('not here')")
    (folder / "plain.py").write_text(PLAIN)
    words = [sys.executable, "plain.py", *map(str, paths)]
    done = processes.run(words, cwd=folder, env=env, text=True, capture_output=True, timeout=500)
    assert done.returncode == 0 and done.stdout.count("same") == len(paths), done.stderr[-3000:]


def kept(model, x, path):
    model.save(path)
    np.savez(f"{path}.npz", outputs=np.asarray(model(x)), **(x if isinstance(x, dict) else {"x": x}))
    return path


@pytest.mark.whole
def test_saved_models_need_no_tfdist(tmp_path):
    """With what is left out of the tests above: dropout and stochastic depth."""
    paths = []
    more = {"alexnet": "dropout=0.5", "vit": "dropout=0.1, stochastic_depth=0.1", "gpt": "dropout=0.1"}
    more |= {"resnet_cifar": "depth=14, stochastic_depth=0.5", "table_mlp": "dropout=0.5", "mlp": "dropout=0.5"}
    for number, (name, case) in enumerate(zoo_cases.OWN.items()):
        model = zoo_cases.build(case)
        paths.append(kept(model, one(case), tmp_path / f"{number}.keras"))
        if name in more:
            paths.append(kept(built(name, case.spec, more[name]), one(case), tmp_path / f"{number}-more.keras"))
    in_plain_keras(paths, tmp_path)


@pytest.mark.parametrize("name", first(4, zoo_cases.OWN))
def test_logits_have_full_precision(name):
    case = zoo_cases.OWN[name]
    for train, wanted in (("mixed_bfloat16", "float32"), ("float64", "float64")):
        assert built(case.name, case.spec, case.options, train)(one(case)).dtype == wanted


def one(case):
    """Inputs of two examples."""
    return keras.tree.map_structure(lambda a: a[:2], zoo_cases.data(case)[0])


def built(name, spec, options="", train="float32", **model):
    models.set_precision(train)
    experiment = config.Experiment(model=config.Model(name=name, options=options, **model))
    return models.build(validation.validate(experiment), spec)


def test_stochastic_depth_leaves_out_whole_branches_of_single_examples():
    model = built("resnet_cifar", IMAGES, "depth=8, stochastic_depth=0.6")
    rates = [layer.rate for layer in model.layers if isinstance(layer, keras.layers.Dropout)]
    np.testing.assert_allclose(rates, [0.2, 0.4, 0.6])
    drop = model.get_layer("block3_1_drop")
    x = np.ones((4000, 2, 2, 3), "float32")
    y = np.asarray(drop(x, training=True)).reshape(4000, -1)
    assert (y == y[:, :1]).all(), "part of a branch is left out"
    assert set(np.unique(y.round(4))) == {0.0, 2.5}  # 1 / (1 - 0.6)
    assert np.mean(y[:, 0] == 0) == pytest.approx(0.6, abs=0.04)
    np.testing.assert_array_equal(drop(x), x)


@pytest.mark.whole
def test_sizes_are_those_of_the_papers():
    """Weights as published: He et al. 2016, table 6; Krizhevsky's one tower of 2014 has 61.1 million."""
    weights = lambda model: sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    cifar = Spec((32, 32, 3), "uint8", 10, 255.0)
    for depth, millions in ((20, 0.27), (56, 0.85)):
        assert weights(built("resnet_cifar", cifar, f"depth={depth}")) / 1e6 == pytest.approx(millions, abs=0.05)
    assert weights(built("alexnet", Spec((224, 224, 3), "uint8", 1000, 255.0))) / 1e6 == pytest.approx(61.1, abs=0.05)


def test_the_future_does_not_change_what_gpt_says():
    model = built("gpt", TOKENS, "width=16, heads=2, depth=2")
    x = zoo_cases.data(zoo_cases.OWN["gpt"])[0][:4]
    other = x.copy()
    other[:, 6:] = 1
    before, after = np.asarray(model(x)), np.asarray(model(other))
    np.testing.assert_allclose(before[:, :6], after[:, :6], atol=1e-6)
    assert np.abs(before[:, 6:] - after[:, 6:]).max() > 1e-3
    assert model.output_shape == (None, 10, 256)
    assert built("gpt", Spec((10,), "int32", 900, 850.0), "width=16, heads=2, depth=1").output_shape[-1] == 900


REFUSED = [
    ("resnet_cifar", "depth=21", IMAGES, "depth=21 of resnet_cifar is not 6n + 2: choose 20"),
    ("cnn", "channels=(4, 0)", IMAGES, "channels of cnn must be integers such as (16, 32), got (4, 0)"),
    ("mlp", "spec=1", IMAGES, "model.options: tfdist.models.zoo.small:mlp takes no such arguments: multiple values"),
    ("cnn", "", zoo_cases.images(1, 1), "needs images of at least 2x2 with these options, the data has 1x1"),
    ("table_mlp", "outputs=3", zoo_cases.OWN["table_mlp"].spec, "outputs=3 is for numbers to predict, and the"),
    ("mlp", "", zoo_cases.OWN["table_mlp"].spec, "takes one kind of input, and a table has columns"),
    ("gpt", "width=10", TOKENS, "width=10 is not a multiple of heads=4"),
    ("gpt", "vocabulary=30", TOKENS, "vocabulary=30 is too small for the data, which needs 40"),
    ("gpt", "", Spec((10,), "float32", 5, 1.0), "needs sequences of integers, the data has float32"),
    ("vit", "patch=5", IMAGES, "patch=5 does not divide images of 16x16"),
    ("alexnet", "", TOKENS, "needs images [height, width, channels], the data has shape [10]"),
    ("table_mlp", "", IMAGES, "needs the columns of a table"),
    ("mlp", "", Spec((), "object", 3, 1.0), "this model takes numbers, and the data has inputs of object: use a model"),
    ("cnn", "", Spec((8, 8, 1), "uint8", None, 255.0), "this model classifies, and the targets are not integers"),
]  # fmt: skip


@pytest.mark.parametrize("name, options, spec, message", REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_refused(name, options, spec, message):
    with pytest.raises(UserError) as caught:
        built(name, spec, options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_every_option_is_checked():
    """A new argument of another kind would go unchecked."""
    for name in config.MODELS:
        module = next(m for m in (small, vision) if hasattr(m, name))
        for argument in list(inspect.signature(getattr(module, name)).parameters.values())[1:]:
            kind = inspect.formatannotation(argument.annotation)
            assert kind in ("bool", "float", "int", "tuple[int, ...]"), argument
            with pytest.raises(UserError, match=f"{argument.name} of {name} must be"):
                layers_lib.check_options(getattr(module, name), {argument.name: "x"})


def test_batch_norm_is_synchronized_or_not():
    for wanted in (True, False):
        for name in ("cnn", "conv_bn", "resnet_cifar"):
            layers = built(name, IMAGES, sync_batch_norm=wanted)._flatten_layers()
            norms = [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]
            assert norms and {layer.get_config()["synchronized"] for layer in norms} == {wanted}
