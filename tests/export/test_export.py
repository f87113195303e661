"""`python -m tfdist.export`: what is written gives what the model gives, without tfdist; what does not is not kept."""

import json
import resource
import shutil
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import many_commands, processes
from support.covering import first
from support.finished_runs import made_run

from tfdist import config
from tfdist.data.spec import Column, Spec
from tfdist.errors import TrainingError, UserError
from tfdist.export import __main__ as export
from tfdist.export import formats, saved_model
from tfdist.export import formats as formats_lib
from tfdist.inference import trained_model
from tfdist.models import build as models

pytest_plugins = ("support.finished_runs",)  # its fixtures

PICTURES = Spec((8, 8, 1), "uint8", 3, 255.0, ("ant", "bee", "cat"))

CLIENT = """
import sys
sys.modules["tfdist"] = None
import numpy as np
images = np.load("x.npy")
found = {}
import onnxruntime
session = onnxruntime.InferenceSession("out/model.onnx")
found["onnx"] = session.run(None, {"inputs": images})[0]
from ai_edge_litert.interpreter import Interpreter
runner = Interpreter("out/model.tflite").get_signature_runner()
found["litert"] = runner(inputs=images)["output_0"]
import tensorflow as tf
loaded = tf.saved_model.load("out/saved_model")
for name, answer in loaded.signatures["serving_default"](inputs=tf.constant(images)).items():
    found[name] = answer.numpy().astype("S") if answer.dtype == tf.string else answer.numpy()
png = lambda i: tf.io.encode_png(tf.cast(tf.round(tf.cast(i, tf.float32) * 255 / 16), tf.uint8))
pictures = tf.map_fn(png, images, fn_output_signature=tf.string)
found["encoded"] = loaded.signatures["encoded"](images=pictures)["logits"].numpy()
np.savez("found.npz", **found)
"""


@pytest.mark.whole
def test_every_format_gives_what_the_model_gives(after, trained):
    """A CNN with GELU and BatchNorm on real digits; Keras' own predictions are the independent answer."""
    from tfdist.data.datasets import registry

    done = after("tfdist.export", "--workdir=run", "--output=out", "--formats=saved_model,onnx,litert")
    assert done.returncode == 0, done.stderr
    assert [line.partition(": ")[2].partition(":")[0] for line in done.stdout.splitlines()[-3:]] == [
        "out/saved_model",
        "out/model.onnx",
        "out/model.tflite",
    ]
    told = json.loads((trained / "out" / "export.json").read_text())
    assert told["examples"] == "digits, test" and told["classes"] == [str(k) for k in range(10)]
    assert all(kind["difference"] <= kind["tolerance"] for kind in told["formats"].values())

    x = registry.load(config.Experiment()).eval.columns[0][:50]
    np.save(trained / "x.npy", x)
    client = processes.run([sys.executable, "-c", CLIENT], cwd=trained, capture_output=True, text=True, timeout=300)
    assert client.returncode == 0, client.stderr
    found = np.load(trained / "found.npz")
    logits = keras.saving.load_model(trained / "run" / "model.keras").predict(x, verbose=0)
    for name in ("onnx", "litert", "logits", "encoded"):
        np.testing.assert_allclose(found[name], logits, rtol=1e-4, atol=1e-5, err_msg=name)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(found["probabilities"], shares, rtol=1e-4)
    assert found["class_ids"].tolist() == logits.argmax(1).tolist() == [int(name) for name in found["classes"]]

    again = after("tfdist.export", "--workdir=run", "--output=out")
    assert again.returncode == 2
    assert again.stderr == "tfdist: error: --output=out is there already: give --overwrite, or choose another name\n"


# -- signatures -------------------------------------------------------------


def saved(servable, tmp_path):
    saved_model.save(servable, str(tmp_path / "m"))
    return tf.saved_model.load(tmp_path / "m").signatures


def picture_model(spec=PICTURES):
    keras.utils.set_random_seed(0)
    layers = [keras.Input(spec.shape, dtype=spec.dtype), keras.layers.Rescaling(1 / 255), keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(3)])


@pytest.mark.whole
def test_pictures_of_another_size_are_resized_as_the_pipeline_does(tmp_path):
    from tfdist.data.augmentation import ops

    big = np.random.default_rng(0).integers(0, 256, (2, 24, 40, 1)).astype("uint8")
    texts = [tf.io.encode_png(image) for image in big]
    texts[1] = tf.io.encode_jpeg(tf.repeat(big[1], 3, -1), quality=100)  # colour where the model takes grey
    for policy in ("crop", "pad", "stretch"):
        found = saved(saved_model.Servable(picture_model(), PICTURES, True, policy), tmp_path / policy)
        answer = found["encoded"](images=tf.stack(texts))
        small = ops.resize(tf.constant(big[0]), (8, 8), policy).numpy()
        expected = picture_model()(small[None]).numpy()
        np.testing.assert_allclose(answer["logits"][:1], expected, rtol=1e-5, atol=1e-6)
        assert answer["logits"].shape == (2, 3)
        assert answer["classes"].numpy()[0].decode() == PICTURES.names[int(expected.argmax())]


@pytest.mark.parametrize("policy", first(1, ["crop", "pad", "stretch"]))
def test_pictures_are_decoded_as_those_of_an_image_folder(policy):
    """JPEGs at the ratio that the pipeline chooses by their sizes, others whole."""
    from tfdist.data import image_decoding
    from tfdist.data.augmentation import ops

    draw, decode = np.random.default_rng(0), image_decoding.decoder((8, 8), policy)
    sizes = np.array([(8, 8), (16, 40), (31, 200), (32, 32), (70, 64), (5, 90), (15, 15)])
    for size in sizes:
        picture = draw.integers(0, 256, (*size, 3)).astype("uint8")
        text = tf.io.encode_jpeg(picture)
        factor = (max if policy == "pad" else min)(size / 8)
        expected = tf.io.decode_jpeg(text, 3, ratio=max(ratio for ratio in (1, 2, 4, 8) if ratio <= max(1, factor)))
        assert decode(text).shape == expected.shape
        np.testing.assert_array_equal(decode(text), expected)
        np.testing.assert_array_equal(decode(tf.io.encode_png(picture)), picture)
    spec = Spec((8, 8, 3), "uint8", 3, 255.0)
    small = saved_model.Servable(picture_model(spec), spec, True, policy, shrink=True).decoded(tf.stack([text]))
    np.testing.assert_array_equal(small[0], ops.resize(expected, (8, 8), policy))


def test_columns_of_a_table_as_they_stand_in_it(tmp_path):
    """Against NumPy: standardised, a missing number the mean, text that training has not seen 0."""
    columns = (
        Column("hours per week", "number", 40.0, 10.0),
        Column("sex", "category", vocabulary=("f", "m", "1", "2.0")),
        Column("time", "number", 1.6e9, 100.0),  # which float32 knows to two minutes
    )
    spec = Spec((3,), "float32", 2, 1.0, ("no", "yes"), columns)
    keras.utils.set_random_seed(0)
    numbers, categories = keras.Input((2,), name="numbers"), keras.Input((1,), dtype="int32", name="categories")
    x = keras.layers.Concatenate()([numbers, keras.layers.Flatten()(keras.layers.Embedding(5, 4)(categories))])
    model = keras.Model({"numbers": numbers, "categories": categories}, keras.layers.Dense(2)(x))
    servable = saved_model.Servable(model, spec, True)
    signatures = saved(servable, tmp_path)
    answer = signatures["serving_default"](
        hours_per_week=tf.constant([30.0, 60.0, np.nan, 40.0, 40.0]),
        sex=tf.constant([" m\xa0", "\u3000f\x1f", "x", "1.0", "2"]),
        time=tf.constant([1.6e9 + 100, np.nan, 1.6e9 - 200, 1.6e9, 1.6e9], tf.float64),
    )
    numbers = np.float32([[-1, 1], [2, 0], [0, -2], [0, 0], [0, 0]])
    inputs = {"numbers": numbers, "categories": np.int32([[2], [1], [0], [3], [4]])}
    expected = model(inputs).numpy()
    np.testing.assert_allclose(answer["logits"], expected, rtol=1e-5, atol=1e-6)
    tensors = signatures["tensors"](**{k: tf.constant(v) for k, v in inputs.items()})
    np.testing.assert_allclose(tensors["logits"], expected, rtol=1e-5, atol=1e-6)
    assert set(saved_model.trials(servable, inputs)) == {"serving_default", "tensors"}

    twice = Spec((2,), "float32", 2, 1.0, (), (Column("a b", "number"), Column("a_b", "number")))
    odd = ["class", "self", "None", "_x", "größe", "2nd", "日本", "Size"]
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    spec = Spec((8,), "float32", 2, 1.0, (), tuple(Column(name, "number") for name in odd))
    answer = saved(saved_model.Servable(model, spec, True), tmp_path / "odd")["serving_default"]
    assert set(answer.structured_input_signature[1]) == {
        "named_class", "named_self", "named_None", "named__x", "gr__e", "named_2nd", "named___", "Size"
    }  # fmt: skip
    with pytest.raises(UserError, match=r"two columns have one name in a signature \(a_b, a_b\): rename one of them"):
        saved_model.save(saved_model.Servable(model, twice, True), str(tmp_path / "twice"))


def test_outputs_that_are_no_classes(tmp_path):
    image, extra = keras.Input((4,), name="image"), keras.Input((3,), name="extra")
    model = keras.Model(
        {"image": image, "extra": extra},
        {"kind": keras.layers.Dense(2, name="kind")(image), "size": keras.layers.Dense(3, name="size")(extra)},
    )
    answer = saved(saved_model.Servable(model, Spec((4,), "float32", None, 1.0), True), tmp_path)["serving_default"](
        image=tf.ones((2, 4)), extra=tf.ones((2, 3))
    )
    assert {name: value.shape for name, value in answer.items()} == {"kind": (2, 2), "size": (2, 3)}
    nested = keras.Model(image, {"x": {"y": image, "z": [image]}})
    answer = saved(saved_model.Servable(nested, Spec((4,), "float32", None, 1.0), True), tmp_path / "nested")
    assert set(answer["serving_default"](inputs=tf.ones((2, 4)))) == {"x_y", "x_z_0"}
    alike = keras.Model(image, {"a-b": keras.layers.Dense(2)(image), "a_b": keras.layers.Dense(3)(image)})
    with pytest.raises(UserError, match="two outputs of 'a-b', 'a_b' have one name in a signature: rename one"):
        saved(saved_model.Servable(alike, Spec((4,), "float32", None, 1.0), True), tmp_path / "alike")


def test_classes_that_rounding_decides_between():
    """Scores of half precision are often equal; another class counts as much as its probability is less."""
    from tfdist.export.verify import of_classes

    expected = {
        "class_ids": np.array([0, 1]),
        "classes": np.array([b"ant", b"bee"]),
        "probabilities": np.float32([[0.5, 0.5], [0.25, 0.75]]),
    }
    got = expected | {"class_ids": np.array([1, 1]), "classes": np.array([b"bee", b"bee"], object)}
    assert of_classes(expected, expected) == of_classes(got, expected) == 0
    assert of_classes(expected | {"class_ids": np.array([0, 0])}, expected) == np.inf  # its name is another one
    got = expected | {"class_ids": np.array([0, 0]), "classes": np.array([b"ant", b"ant"])}
    assert of_classes(got, expected) == 0.5
    # The last bit of a logit is so much of a probability.
    expected |= {"logits": np.float32([[40, 40], [30, 40]])}
    got = expected | {"probabilities": expected["probabilities"] + np.float32(0.1)}
    assert of_classes(got, expected) == pytest.approx(0.1 / 40)
    assert of_classes(expected | {"logits": expected["logits"] + 4}, expected) == pytest.approx(0.1)


# -- the command, in this process -------------------------------------------


def run_of(folder, precision="float32", **options):
    e = config.Experiment()
    e.train.precision, e.model.name, e.model.options = precision, "mlp", "units=8"
    e.data.data_dir = "/dev/null/data"  # nothing can be there, so examples are made
    models.set_precision(precision)
    model = models.build(e, PICTURES)
    made_run(folder, e, model, PICTURES)
    return trained_model.ModelRequest(str(folder), "", "", config.Experiment(), {}), model


def exported(asked, tmp_path, *formats):
    export.export(asked, list(formats), tmp_path / "out", False)
    return json.loads((tmp_path / "out" / "export.json").read_text())


@pytest.mark.whole
@pytest.mark.parametrize("precision", ["mixed_bfloat16", pytest.param("float64", marks=pytest.mark.whole)])
def test_other_precisions(precision, tmp_path, capsys):
    """SavedModel as it was trained; ONNX in float32, built anew with the same weights."""
    asked, model = run_of(tmp_path, precision)
    told = exported(asked, tmp_path, "saved_model", "onnx")
    assert told["examples"] == "made" and "checked on made examples" in capsys.readouterr().out
    assert told["formats"]["onnx"]["note"] == f"float32, and trained in {precision}"
    assert told["formats"]["onnx"]["difference"] < 1e-5
    import onnxruntime

    x = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1)).astype("uint8")
    got = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx").run(None, {"inputs": x})[0]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, model(x).numpy(), atol=1e-5 if precision == "float64" else 2e-2)


@pytest.mark.whole
def test_a_file_of_keras(tmp_path, monkeypatch):
    model = picture_model()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.save(tmp_path / "m.keras")
    asked = trained_model.ModelRequest("", str(tmp_path / "m.keras"), "", config.Experiment(), {})
    told = exported(asked, tmp_path, "saved_model")
    assert set(told["formats"]["saved_model"]["signatures"]["serving_default"]["outputs"]) == {
        "class_ids",
        "probabilities",
        "logits",
    }

    inputs = keras.Input((6, 4))
    for i, outputs in enumerate((keras.layers.Dense(3)(inputs), inputs[:, 0, 0])):  # [n, 6, 3] and [n]
        keras.Model(inputs, outputs).save(tmp_path / "m.keras")
        export.export(asked, ["saved_model"], tmp_path / f"shape{i}", False)
        shutil.rmtree(tmp_path / f"shape{i}")

    keras.config.set_dtype_policy("mixed_bfloat16")
    picture_model().save(tmp_path / "m.keras")
    keras.config.set_dtype_policy("float32")
    monkeypatch.setattr(formats_lib, "_difference", lambda *_: 0.0)
    export.export(asked, ["saved_model"], tmp_path / "half", False)
    kind = json.loads((tmp_path / "half" / "export.json").read_text())["formats"]["saved_model"]
    assert kind["tolerance"] == formats_lib.HALF
    with pytest.raises(UserError, match=r"m.keras does not compute in float32, as onnx does: give the --workdir of"):
        export.export(asked, ["onnx"], tmp_path / "other", False)
    assert {p.name for p in tmp_path.iterdir()} == {"m.keras", "out", "half"}


@pytest.mark.whole
def test_a_table(tmp_path):
    """As the command writes it, with texts to look up; and from the file alone, on numbers that its embedding knows."""
    columns = (Column("age", "number", 40.0, 10.0), Column("sex", "category", vocabulary=("f", "m")))
    spec = Spec((2,), "float32", 2, 1.0, ("no", "yes"), columns, Column("pays", "category", vocabulary=("no", "yes")))
    e = config.Experiment()
    e.name, e.data.name, e.data.options, e.model.name = "table", "csv:gone.csv", "target=pays", "table_mlp"
    keras.utils.set_random_seed(0)
    model = models.build(e, spec)
    made_run(tmp_path, e, model, spec)
    told = exported(trained_model.ModelRequest(str(tmp_path), "", "", config.Experiment(), {}), tmp_path, "saved_model")
    assert told["formats"]["saved_model"]["signatures"]["serving_default"]["inputs"] == {
        "age": ["float32", [None]],
        "sex": ["string", [None]],
    }
    asked = trained_model.ModelRequest("", str(tmp_path / "model.keras"), "", config.Experiment(), {})
    assert formats.from_file(asked, config.Experiment()).examples["categories"].max() == 2


class Own(keras.Model):
    """A class of one's own, which has neither inputs nor outputs to look at."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(3)])

    def call(self, x):
        return self.inner(x)


def test_a_class_of_ones_own(tmp_path):
    model, x = Own(), tf.zeros((2, 8, 8, 1), tf.uint8)
    model(x)
    answer = saved(saved_model.Servable(model, PICTURES, True), tmp_path)["serving_default"](inputs=x)
    assert set(answer) == {"class_ids", "classes", "probabilities", "logits"}


def only_the_run(folder):
    return {p.name for p in folder.iterdir()} == {"model.keras", "experiment.json", "data.json", "result.json"}


def test_what_differs_is_not_kept(tmp_path, monkeypatch):
    """The real check, of a model that answers otherwise once it is written."""
    asked, _ = run_of(tmp_path)
    real = formats_lib._in_float32

    def other(made, name):
        model, note = real(made, name)
        twin = keras.models.clone_model(model)
        twin.set_weights([w + 1e-2 for w in model.get_weights()])
        write = formats_lib._onnx
        monkeypatch.setattr(formats_lib, "_onnx", lambda model, inputs, path: write(twin, inputs, path))
        return model, note

    monkeypatch.setattr(formats_lib, "_in_float32", other)
    with pytest.raises(
        TrainingError,
        match=r"onnx gives other results than the model: they differ by .*more than 0.0001: nothing was kept",
    ):
        exported(asked, tmp_path, "onnx")
    assert only_the_run(tmp_path)


@pytest.mark.whole
def test_a_row_of_zeros_is_checked(tmp_path):
    """LiteRT's norm of it has no epsilon, so that 0 / 0 is NaN where Keras gives 0."""
    inputs = keras.Input((4,))
    keras.Model(inputs, keras.layers.UnitNormalization()(inputs)).save(tmp_path / "m.keras")
    asked = trained_model.ModelRequest("", str(tmp_path / "m.keras"), "", config.Experiment(), {})
    with pytest.raises(TrainingError, match="litert gives other results than the model: they differ by inf"):
        export.export(asked, ["litert"], tmp_path / "out", False)


@pytest.mark.whole
def test_an_operation_that_a_format_does_not_know(tmp_path):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 1), dtype="uint8")
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.ops.erfinv(x / 2)))
    model.save(tmp_path / "m.keras")
    asked = trained_model.ModelRequest("", str(tmp_path / "m.keras"), "", config.Experiment(), {})
    with pytest.raises(TrainingError, match=r"onnx was written and cannot be used \(.*\): leave onnx out of --formats"):
        export.export(asked, ["onnx"], tmp_path / "out", False)
    with pytest.raises(TrainingError, match=r"the model cannot be written as litert \(.*\): leave litert out of"):
        export.export(asked, ["litert"], tmp_path / "out", False)
    assert [p.name for p in tmp_path.iterdir()] == ["m.keras"]


@pytest.mark.parametrize("name", first(1, ["saved_model", "onnx"]))
def test_a_full_disk_is_told_in_one_line(name, tmp_path):
    """TensorFlow's own error ended in a traceback, and that of the system was taken for the format's."""
    asked, _ = run_of(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(TrainingError, match=r"^--output=.*/out cannot be written \(File too large.*\)$"):
            export.export(asked, [name], tmp_path / "out", False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert only_the_run(tmp_path)


def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    asked, _ = run_of(tmp_path)
    seen = []

    def interrupt(name, path, trials):
        seen.append(path.exists())
        raise KeyboardInterrupt

    monkeypatch.setattr(formats_lib, "_difference", interrupt)
    with pytest.raises(KeyboardInterrupt):
        exported(asked, tmp_path, "onnx")
    assert seen == [True] and only_the_run(tmp_path)


@pytest.mark.whole
def test_an_earlier_export_is_replaced_as_a_whole(tmp_path, monkeypatch):
    asked, _ = run_of(tmp_path)
    monkeypatch.setattr(formats_lib, "_difference", lambda *_: 0.0)
    exported(asked, tmp_path, "onnx")
    (tmp_path / "out" / "old").write_text("")
    export.export(asked, ["onnx"], tmp_path / "out", True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["export.json", "model.onnx"]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".out")]


def test_a_library_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(export.NEEDED, "onnx", ("tf2onnx", "no_such_library"))
    with pytest.raises(UserError, match=r"--formats=onnx needs no_such_library: pip install 'tfdist\[export\]'"):
        export.export(
            trained_model.ModelRequest("x", "", "", config.Experiment(), {}), ["onnx"], tmp_path / "out", False
        )


BAD = [
    (["--formats=onx"], "unknown format 'onx' in --formats: did you mean 'onnx'? Known are saved_model, onnx, litert"),
    (["--formats="], "--formats names none: give some of saved_model,onnx,litert"),
    ([], "--output is missing: give the folder to write, such as --output=exported"),
    (["--output=."], "--output=. is there already: give --overwrite, or choose another name"),
    (["--output=.", "--overwrite"], "--output=. is there already and no export: choose another name"),
    (["--output=none/out"], "--output=none/out: none cannot be written in: choose another one, or make it"),
    (["--output=out"], "--workdir=missing holds no run (no experiment.json that can be read): check the path"),
    (["--output=out", "--model=m.keras"], "--workdir and --model name two models"),
    (["--outptu=out"], "unknown flag --outptu: did you mean --output=out?"),
]


def test_bad_flags(tmp_path):
    table = [(["--workdir=missing", *flags], message) for flags, message in BAD]
    many_commands.refuses("tfdist.export", table, tmp_path)


def test_another_backend_of_keras(run, tmp_path):
    """It is refused before Keras is imported, which would end in a traceback."""
    (tmp_path / "m.keras").touch()
    done = run("tfdist.export", "--model=m.keras", "--output=out", real=True, KERAS_BACKEND="banana")
    message = "KERAS_BACKEND makes Keras run on banana, tfdist needs TensorFlow: unset KERAS_BACKEND"
    assert (done.returncode, done.stderr) == (2, f"tfdist: error: {message}\n")
