"""Models from a file, weights from a file, and layers that do not train."""

import dataclasses

import keras
import numpy as np
import pytest
from support import training_cases, zoo_cases
from support.covering import first
from support.refusals import refused

import tfdist
from tfdist import config
from tfdist.checkpoints import training_state
from tfdist.config import validation
from tfdist.data import spec_file
from tfdist.data.datasets import registry, tables
from tfdist.data.loaded import Loaded
from tfdist.data.sources import Arrays
from tfdist.data.spec import Spec
from tfdist.keras_bridge import keras_internals
from tfdist.models import build as models
from tfdist.models import pretrained

L = keras.layers
IMAGES = zoo_cases.images(16, 3)


def built(name="resnet_cifar", options="depth=8, width=4", spec=IMAGES, **model):
    wanted = config.Model(name=str(name), options=options, **{k: str(v) for k, v in model.items()})
    experiment = config.Experiment(seed=0, model=wanted)
    return models.build(validation.validate(experiment), spec)


def shaken(model, seed=1):
    """With other weights than it was made with, statistics included."""
    r = np.random.default_rng(seed)
    model.set_weights([(w + r.uniform(0.1, 1.0, w.shape)).astype(w.dtype) for w in model.get_weights()])
    return model


def by_path(model):
    return {v.path: v.numpy() for v in model.weights}


FORMATS = {
    ".keras": lambda model, path: model.save(path),
    ".weights.h5": lambda model, path: model.save_weights(path),
    ".h5": lambda model, path: model.save(path),
}
ENDINGS = [".keras", *(pytest.param(ending, marks=pytest.mark.whole) for ending in list(FORMATS)[1:])]


@pytest.mark.parametrize("ending", ENDINGS)
def test_weights_by_name_but_for_the_head(ending, tmp_path, said):
    """From 5 classes to 3: everything but the head, in each format that Keras writes or has written."""
    path = str(tmp_path / f"there{ending}")
    there = shaken(built())
    FORMATS[ending](there, path)
    here = built(spec=Spec(IMAGES.shape, "uint8", 3, 255.0), weights=path)
    assert said == [f"weights: 35 of 37 tensors are those of {path}; not those of head"]
    fresh = by_path(built(spec=Spec(IMAGES.shape, "uint8", 3, 255.0)))
    for name, value in by_path(here).items():
        np.testing.assert_array_equal(value, fresh[name] if "head" in name else by_path(there)[name], err_msg=name)


def numbered(classes, more=False, recurrent=True):
    """Layers without names of their own, some inside of others, and a layer that holds layers."""
    inner = keras.Sequential([keras.Input((4,)), L.Dense(4), L.BatchNormalization(), L.Dense(4)], name="inner")
    x = image = keras.Input((6,))
    for _ in range(12):
        x = L.Dense(4)(x)
    x = inner(x)
    x = L.Reshape((2, 2))(x)
    x = L.MultiHeadAttention(2, 2)(x, x)
    x = L.Bidirectional(L.LSTM(3))(x) if recurrent else L.Flatten()(x)
    x = L.Dense(7, name="more")(x) if more else x
    return keras.Model(image, L.Dense(classes, name="head")(x))


@pytest.mark.parametrize("ending", ENDINGS)
def test_layers_that_keras_has_numbered_go_by_their_order(ending, tmp_path):
    path = str(tmp_path / f"there{ending}")
    recurrent = ending != ".h5"  # the older format does not tell where the cells are
    there = shaken(numbered(3, recurrent=recurrent))
    FORMATS[ending](there, path)
    here = numbered(3, recurrent=recurrent)  # Keras has counted on
    assert here.layers[1].name != there.layers[1].name
    line = pretrained.take(here, path)
    assert line.startswith(f"weights: {len(here.weights)} of {len(here.weights)} ")
    training_cases.all_same(here.get_weights(), there.get_weights())
    line = pretrained.take(numbered(3, True, recurrent), path)
    assert line.endswith("; not those of more, head")


def test_nothing_fits(tmp_path):
    keras.Sequential([keras.Input((3,)), L.Dense(2, name="other")]).save_weights(tmp_path / "a.weights.h5")
    with refused(r"has nothing that fits: it has other, the model has stem_bn, "):
        built(weights=tmp_path / "a.weights.h5")
    for name, content in (("a.keras", b"no zip"), ("a.h5", b"no hdf5"), ("b.weights.h5", b"")):
        (tmp_path / name).write_bytes(content)
        with refused(r"model.weights='.*' cannot be read \(.*\): give a file that Keras has"):
            built(weights=tmp_path / name)


def test_a_layer_of_other_variables_takes_none(tmp_path):
    """BatchNorm without `scale` has its offset where the other has its scale."""
    path = str(tmp_path / "a.weights.h5")
    model = lambda scale: keras.Sequential([keras.Input((3,)), L.Dense(3), L.BatchNormalization(scale=scale)])
    shaken(model(True)).save_weights(path)
    here = model(False)
    assert pretrained.take(here, path).endswith("not those of batch_normalization 1")
    np.testing.assert_array_equal(here.layers[-1].beta, 0)


class MetricsHead(L.Dense):
    """Its place in a file holds that of a part which is no weight."""


def test_a_place_may_hold_the_name_of_a_part_of_training(tmp_path):
    path = str(tmp_path / "a.weights.h5")
    model = lambda: keras.Sequential([keras.Input((3,)), MetricsHead(2, name="head")])
    model().save_weights(path)
    assert pretrained.take(model(), path).startswith("weights: 2 of 2 ")


def test_a_normalization_computes_with_what_it_was_given(connect):
    """Keras' layer has constants made of its variables, which an assignment alone does not change."""
    model = lambda: keras.Sequential([keras.Input((3,)), L.Normalization(), L.Dense(2)])
    x = np.random.default_rng(0).normal(3, 2, (20, 3)).astype("float32")
    there = model()
    there.layers[0].adapt(x)
    for replicas in (1, 2):
        distribution = connect(replicas)
        with distribution.scope():
            here = model()
        training_state.assign(here, distribution, there.get_weights())
        np.testing.assert_allclose(tfdist.predict(here, x, distribution=distribution), there(x), rtol=1e-5, atol=1e-6)


def test_a_run_goes_on_from_a_file(tmp_path, connect):
    """Also with several replicas, and with a model that was frozen when it was saved."""
    there = built(freeze="!head")
    path = tmp_path / "model.keras"
    shaken(there).save(path)
    with connect(2).scope():
        here = built(path, "")
    assert len(here.trainable_variables) == len(built().trainable_variables)
    x = zoo_cases.data(zoo_cases.OWN["alexnet, small images"])[0][:8]
    np.testing.assert_allclose(tfdist.predict(here, x, distribution=connect(2)), there(x), rtol=1e-5, atol=1e-5)


class Mine(L.Layer):
    def call(self, x):
        return x


REFUSED = [
    (Spec((16, 16, 3), "uint8", 3, 255.0),
     r"has 5 outputs, the data 3 classes: choose a model by name and .* model.weights="),
    (Spec((8, 8, 3), "uint8", 5, 255.0), r"takes \[16, 16, 3\] uint8, and the data \[8, 8, 3\] uint8: choose"),
    (Spec((16, 16, 3), "float32", 5, 1.0), r"takes \[16, 16, 3\] uint8, and the data \[16, 16, 3\] float32: choose"),
]  # fmt: skip


@pytest.mark.parametrize("spec, message", REFUSED, ids=["classes", "shape", "type"])
def test_a_file_for_other_data(spec, message, tmp_path):
    built().save(tmp_path / "a.keras")
    with refused(message):
        built(tmp_path / "a.keras", "", spec)


def flats(path, towns, rows, low, seed=0, **fields):
    """Writes a table of flats, and returns the experiment that trains on it."""
    r = np.random.default_rng(seed)
    lines = [
        f"{size:.1f},{town},{size * 7:.1f}\n" for size, town in zip(r.uniform(low, 150, rows), r.choice(towns, rows))
    ]
    path.write_text("size,town,price\n" + "".join(lines))
    splits = {"train_split": "train", "eval_split": "train", "options": fields.pop("options", "target=price")}
    return config.Experiment(data=config.Data(name=f"csv:{path}", **splits), model=config.Model(**fields))


@pytest.mark.parametrize("target", ["price", "town"])
def test_another_table_is_encoded_as_the_file_was_trained(target, tmp_path):
    options = f"target={target}"
    first = flats(tmp_path / "a.csv", ["Bern", "Lyon", "Oslo"], 60, 20, name="table_mlp", options=options)
    before = registry.load(first)
    model = models.build(first, before.spec)
    (tmp_path / "run").mkdir()
    model.save(tmp_path / "run/model.keras")
    spec_file.write(lambda name, text: (tmp_path / "run" / name).write_text(text), before.spec)
    again = flats(tmp_path / "b.csv", ["Lyon", "Oslo"], 30, 100, 1, name=f"{tmp_path}/run/model.keras", options=options)
    loaded = registry.load(again)
    expected = tables.read_rows(f"{tmp_path}/b.csv", before.spec.columns, before.spec.target, {"target": target})
    by_price = lambda inputs, targets: np.lexsort((*inputs["numbers"].T, targets))
    for rows in loaded.train.columns, loaded.eval.columns:
        for got, wanted in zip(keras.tree.flatten(rows), keras.tree.flatten(expected)):
            np.testing.assert_array_equal(got[by_price(*rows)], wanted[by_price(*expected)])
    assert loaded.spec == before.spec
    x = loaded.eval.columns[0]
    np.testing.assert_array_equal(models.build(again, loaded.spec).predict(x), model.predict(x))


def test_a_file_that_does_not_tell_how_its_table_was_encoded(tmp_path, said):
    experiment = flats(tmp_path / "a.csv", ["Bern", "Lyon"], 60, 20, name="table_mlp")
    spec = registry.load(experiment).spec
    models.build(experiment, spec).save(tmp_path / "a.keras")
    experiment.model.weights = str(tmp_path / "a.keras")
    models.build(experiment, spec)
    assert not any("WARNING" in line for line in said)
    spec_file.write(lambda name, text: (tmp_path / name).write_text(text), spec)
    other = registry.load(flats(tmp_path / "b.csv", ["Bern", "Oslo"], 60, 20)).spec
    models.build(experiment, other)
    assert "was trained on another table's encoding, which it keeps as model.name" in said[-1]
    experiment.model = config.Model(name=str(tmp_path / "a.keras"))
    with refused("has the inputs size, and the model was trained on size, town"):
        registry.load(
            dataclasses.replace(
                experiment, data=dataclasses.replace(experiment.data, options="target=price, leave_out=town")
            )
        )
    (tmp_path / "data.json").unlink()
    with refused("does not tell how the columns of its training's table were encoded: keep the data.json of its run"):
        models.build(experiment, registry.load(experiment).spec)


def test_a_file_keeps_its_precision(tmp_path):
    for precision, other in (("float32", "mixed_bfloat16"), ("mixed_bfloat16", "float32"), ("float64", "float32")):
        models.set_precision(precision)
        path = tmp_path / f"{precision}.keras"
        built().save(path)
        experiment = config.Experiment(model=config.Model(name=str(path)))
        experiment.train.precision = precision
        assert models.build(experiment, IMAGES)
        experiment.train.precision = other
        with refused(f"computes in {precision}, which .*={other}: set that to {precision}, or"):
            models.build(experiment, IMAGES)


class Opaque(keras.Model):
    """Does not tell what it ends with."""

    def call(self, x):
        return x


def ends(spec, activation=None, units=5, inner=False):
    image = keras.Input(spec.shape, dtype=spec.dtype)
    x = L.Dense(units, activation=activation if activation in ("softmax", "sigmoid") else None)(L.Flatten()(image))
    if activation == "opaque":
        x = Opaque()(x)
    model = keras.Model(image, L.Softmax()(x) if activation == "layer" else x)
    return keras.Sequential([keras.Input(spec.shape, dtype=spec.dtype), model]) if inner else model


@pytest.mark.parametrize("options, message", [
    ("activation=softmax", "ends with softmax, and tfdist's own loss takes logits: leave that activation out"),
    ("activation=softmax, inner=True", "ends with softmax"),
    ("activation=layer", "ends with softmax"),
    ("activation=sigmoid", "ends with sigmoid"),
    ("units=4", "has 4 outputs, the data 5 classes: give it as many"),
    ("units=6", ""),
    ("activation=opaque", ""),
])  # fmt: skip
def test_what_is_no_logits(options, message):
    """tfdist's own loss would train probabilities worse, without a word."""
    model = built("test_pretrained:ends", options)
    x, y = zoo_cases.data(zoo_cases.OWN["alexnet, small images"])
    data = Loaded(Arrays((x, y)), Arrays((x, y)), len(x), IMAGES)
    experiment = config.Experiment(model=config.Model(name="test_pretrained:ends"))
    experiment.train.label_smoothing = 0.0
    if not message:
        models.compiled(model, keras.optimizers.SGD(), experiment, data)
        return
    with refused(message):
        models.compiled(model, keras.optimizers.SGD(), experiment, data)


def test_data_of_another_form():
    """Seven outputs and a batch of seven numbers would be compared each with each."""
    model, experiment = built("test_pretrained:ends", "units=7"), config.Experiment(model=config.Model(name="mine"))
    experiment.train.label_smoothing = 0.0
    x, numbers = np.zeros((14, *IMAGES.shape), "uint8"), np.zeros(14, "float32")
    loaded = lambda x, y, classes: Loaded(
        Arrays((x, y)), Arrays((x, y)), 14, dataclasses.replace(IMAGES, classes=classes)
    )
    for x_, y, classes, message in (
        (x, numbers, None, r"model.name='mine' has outputs of shape \[7\], and the targets \[\]: make them alike"),
        (
            {"a": x, "b": x},
            numbers,
            5,
            r"takes the inputs .*, and the data has {'a': \[n, .*\], 'b': \[n, .*\]}: give it",
        ),
    ):
        with refused(message):
            models.compiled(model, keras.optimizers.SGD(), experiment, loaded(x_, y, classes))
    for y, units in ((numbers, 1), (np.zeros((14, 7)), 7)):
        models.compiled(ends(IMAGES, units=units), keras.optimizers.SGD(), experiment, loaded(x, y, None))


def test_files_that_cannot_be_loaded(tmp_path):
    image = keras.Input((16, 16, 3))
    keras.Model(image, Mine()(image)).save(tmp_path / "mine.keras")
    keras.Model(image, L.Lambda(lambda x: x + 1)(image)).save(tmp_path / "code.keras")
    (tmp_path / "text.keras").write_text("no zip")
    for name in ("mine", "code", "text"):
        with refused(r"cannot be loaded \(.*\): give a file that Keras has saved") as caught:
            built(tmp_path / f"{name}.keras", "")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text, trained", [
    ("!head", {"head"}),
    ("stem*, block1_*, block2_*", {"block3_1_1_conv", "block3_1_1_bn", "block3_1_2_conv", "block3_1_2_bn", "head"}),
    ("block*, !block3_1_2*", {"stem_conv", "stem_bn", "block3_1_2_conv", "block3_1_2_bn", "head"}),
    ("!head, !stem_conv", {"head", "stem_conv"}),
])  # fmt: skip
def test_freeze(text, trained, said):
    model = built(freeze=text)
    assert {v.path.split("/")[0] for v in model.trainable_variables} == trained
    assert said[0].startswith(f"frozen: {15 - len(trained)} of 15 layers with weights; ")


def test_freeze_what_is_inside_of_other_layers():
    model = numbered(3)
    models.freeze(model, "inner, forward_*, query")
    frozen = {v.path for v in keras_internals.fixed_variables(model)}
    assert len([p for p in frozen if "inner" in p or "batch_norm" in p]) >= 4
    assert any("forward" in p for p in frozen) and any("query" in p for p in frozen)
    assert not any("backward" in p or "key" in p or p.startswith("head") for p in frozen)
    assert len(model.trainable_variables) + len(frozen) == len(model.weights)


@pytest.mark.parametrize("text, message", [
    ("hed", r"model.freeze: 'hed' matches no layer with weights: did you mean 'head'\? Known are stem_conv, "),
    ("stem*, zzz", r"model.freeze: 'zzz' matches no layer with weights: known are stem_conv"),
    ("*", r"model.freeze='\*' leaves nothing to train: leave layers out, such as !head"),
    ("stem*, !stem*", r"model.freeze='stem\*, !stem\*' freezes nothing"),
])  # fmt: skip
def test_freeze_refused(text, message):
    with refused(message):
        built(freeze=text)


def trained(distribution, epochs=1, **fit):
    """A frozen start and a trained end, with BatchNorm on both sides."""
    with distribution.scope():
        model = built(freeze="stem*, block1_*")
        shaken(model)
        model.compile(keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = by_path(model)
    x, y = zoo_cases.data(zoo_cases.OWN["resnet_cifar"])
    tfdist.fit(model, x, y, distribution=distribution, batch_size=24, epochs=epochs, verbose=0, **fit)
    return model, before


@pytest.fixture(scope="module")
def reference(connect):
    """The end on one device."""
    return training_cases.weights(trained(connect(1))[0])


@pytest.mark.parametrize("replicas", first(0, [2, 1, 3]))
def test_what_is_frozen_keeps_every_bit(replicas, connect, reference):
    """Its BatchNorm as well; what is not frozen agrees with one device."""
    model, before = trained(connect(replicas))
    for path, value in by_path(model).items():
        same = value.tobytes() == before[path].tobytes()
        assert same == path.startswith(("stem", "block1_")), path
    assert training_cases.distance(training_cases.weights(model), reference) < 1e-6


def test_a_frozen_batch_norm_predicts():
    model = shaken(built(freeze="stem*, block1_*"))
    x = zoo_cases.data(zoo_cases.OWN["resnet_cifar"])[0][:8]
    start = keras.Model(model.inputs, model.get_layer("block1_1_relu").output)
    np.testing.assert_array_equal(start(x, training=True), start(x, training=False))


@pytest.mark.whole
def test_a_frozen_run_resumes(connect, tmp_path):
    """Frozen weights are in a checkpoint once, whatever the number of replicas."""
    whole = training_cases.weights(trained(connect(2), epochs=2)[0])
    checkpoints = lambda: tfdist.Checkpoints(tmp_path, every="1 epoch")
    trained(connect(3), epochs=1, checkpoints=checkpoints())
    assert (
        training_cases.distance(
            training_cases.weights(trained(connect(2), epochs=2, checkpoints=checkpoints())[0]), whole
        )
        < 1e-6
    )


def test_layers_that_are_not_there_yet():
    with refused("need a model whose layers are there already: build test_pretrained:lazy in its"):
        built("test_pretrained:lazy", "", freeze="dense")


def lazy(spec):
    return keras.Sequential([L.Flatten(), L.Dense(spec.classes)])


@pytest.mark.whole
def test_the_command(run, tmp_path):
    """A run that goes on from a file, and one that trains a new head on two replicas."""
    short = ["--config.model.name=mlp", "--config.train.epochs=1", "--config.optimizer.warmup=0%", "--notensorboard"]
    digits = shaken(built("mlp", "", Spec((8, 8, 1), "uint8", 10, 16.0)))
    digits.save(tmp_path / "one.keras")
    first = digits.get_weights()

    still = ["--config.optimizer.learning_rate=1e-12", "--config.optimizer.weight_decay=0"]
    done = run("tfdist.train", *short, *still, "--config.model.name=one.keras", "--workdir=two")
    assert done.returncode == 0, done.stderr
    training_cases.all_same(keras.saving.load_model(tmp_path / "two" / "model.keras").get_weights(), first, atol=1e-6)

    tuned = ["--config.model.weights=one.keras", "--config.model.freeze=!head", "--virtual_devices=2"]
    done = run("tfdist.train", *short, *tuned, "--workdir=three")
    assert done.returncode == 0, done.stderr
    assert "tfdist: weights: 4 of 4 tensors are those of one.keras\n" in done.stdout
    assert "tfdist: frozen: 1 of 2 layers with weights; 330 of 2,410 numbers train\n" in done.stdout
    third = keras.saving.load_model(tmp_path / "three" / "model.keras").get_weights()
    np.testing.assert_array_equal(third[0], first[0])
    assert not np.allclose(third[2], first[2])
