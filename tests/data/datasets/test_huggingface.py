"""`hf:path`: data sets that Hugging Face `datasets` has saved, against what was put into them."""

import json
import sys

import keras
import numpy as np
import pytest
from PIL import Image
from support.refusals import refused
from support.source_columns import columns_of

import tfdist
from tfdist import config
from tfdist.data.batch_layout import Layout
from tfdist.data.datasets import registry
from tfdist.data.records import RecordFeed
from tfdist.data.sources import Arrays, Records

datasets = pytest.importorskip("datasets")

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (30, 8, 6), dtype=np.uint8)
LABELS = RNG.integers(0, 3, 30)
VALUES = RNG.normal(size=(30, 2, 2))
CUT = dict(train_split="train[:20]", eval_split="train[20:]")


@pytest.fixture(scope="module", autouse=True)
def quiet():
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with all kinds of columns."""
    features = datasets.Features(
        image=datasets.Image(),
        label=datasets.ClassLabel(names=["a", "b", "c"]),
        values=datasets.Array2D((2, 2), "float64"),
        lists=datasets.List(datasets.Value("float64")),
        ragged=datasets.List(datasets.Value("int64")),
        text=datasets.Value("string"),
        price=datasets.Value("float32"),
        gaps=datasets.Value("float32"),
        share=datasets.Value("float32"),
    )
    columns = dict(
        image=[Image.fromarray(p) for p in PIXELS],
        label=LABELS.tolist(),
        values=VALUES.tolist(),
        lists=VALUES[:, 0].tolist(),
        ragged=[[1] * (1 + i % 2) for i in range(30)],
        text=["x"] * 30,
        price=VALUES[:, 0, 0].tolist(),
        gaps=[None if i == 25 else 1.0 for i in range(30)],
        share=np.abs(VALUES[:, 0, 0]).tolist(),
    )
    path = tmp_path_factory.mktemp("hf") / "saved"
    datasets.Dataset.from_dict(columns, features).save_to_disk(path)
    return path


@pytest.mark.parametrize("cache", ["stream", pytest.param("memory", marks=pytest.mark.whole)])
def test_images(saved, cache):
    data = tfdist.load_data(f"hf:{saved}", cache=cache, options="channels=1", **CUT)
    assert isinstance(data.train, Records if cache == "stream" else Arrays)
    assert (data.spec.shape, data.spec.dtype, data.spec.classes) == ((8, 6, 1), "uint8", 3)
    assert data.spec.names == ("a", "b", "c")
    x, y = columns_of(data.eval)
    np.testing.assert_array_equal(x[..., 0], PIXELS[20:])
    np.testing.assert_array_equal(y, LABELS[20:])
    colour = tfdist.load_data(f"hf:{saved}", image_size="4", **CUT)
    assert colour.spec.shape == (4, 4, 3)


@pytest.mark.covering(0)
@pytest.mark.parametrize("floats", ["float32", "float64"])
@pytest.mark.parametrize("x, want", [("values", VALUES), ("lists", VALUES[:, 0]), ("price", VALUES[:, 0, :1])])
def test_numbers_to_the_bit(saved, floats, x, want, monkeypatch):
    """`datasets` itself would hand over float64 as float32."""
    monkeypatch.setattr(keras.config, "floatx", lambda: floats)
    data = tfdist.load_data(f"hf:{saved}", options=f"x={x}", **CUT)
    want = want.astype("float32" if x == "price" else floats).astype(floats)
    np.testing.assert_array_equal(columns_of(data.train)[0], want[:20])
    assert (data.spec.dtype, data.spec.shape) == (floats, want.shape[1:])


def test_splits_that_were_shuffled_and_are_taken_together(saved, tmp_path):
    whole = datasets.load_from_disk(saved).select_columns(["lists", "price", "share"])
    mixed = whole.shuffle(seed=1)  # a view, of which the rows are elsewhere
    datasets.DatasetDict(train=mixed, test=whole.select(range(5))).save_to_disk(tmp_path / "two")
    data = tfdist.load_data(
        f"hf:{tmp_path / 'two'}",
        cache="stream",
        options="x=lists, y=price, weight=share",
        train_split="test+train[10:]",
        eval_split="train[:10]",
    )
    order = [VALUES[:, 0, 0].astype("float32").tolist().index(v) for v in mixed["price"]]
    x, y, weight = columns_of(data.train)
    rows = [*range(5), *order[10:]]
    np.testing.assert_array_equal(x, VALUES[rows, 0].astype("float32"))
    np.testing.assert_array_equal(y, VALUES[rows, 0, 0].astype("float32"))
    np.testing.assert_array_equal(weight, np.abs(y))
    assert data.spec.classes is None and data.train.name(5).startswith("example 10 of hf:")


def test_what_has_no_image_is_named(saved, tmp_path):
    some = datasets.load_from_disk(saved).select_columns(["image", "label"]).to_list()
    some[3]["image"] = None
    features = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
    datasets.Dataset.from_list(some, features).save_to_disk(tmp_path / "gaps")
    data = tfdist.load_data(f"hf:{tmp_path / 'gaps'}", cache="stream", **CUT)
    feed = RecordFeed(data.train, Layout(20, 1, 1))
    feed.next(0, 1)
    assert feed.first_unreadable().startswith(f"example 3 of hf:{tmp_path / 'gaps'} cannot be decoded")


def offline(name, config):
    raise ConnectionError(f"Couldn't reach '{name}' on the Hub\n(offline)")


@pytest.mark.parametrize("name, options, message", [
    ("/no/such/folder", "", "there is no such folder: give one that save_to_disk has written, or a name"),
    ("{tmp}", "", "cannot be opened: Directory .* is neither a `Dataset` directory .*: give a folder that save_to"),
    ("nobody/nothing", "", r"cannot be opened: Couldn't reach 'nobody/nothing' on the Hub \(offline\): give a f"),
    ("{saved}", "x=text", r"the input text is string: only images and numbers can be trained on: image \(Image\), "),
    ("{saved}", "x=pixels", "there is no column 'pixels' for x"),
    ("{saved}", "colour=1", "unknown 'colour' in data.options"),
    ("{saved}", "x=ragged", "ragged has lists of different lengths, such as 1 and 2: make them alike"),
    ("{saved}", "x=gaps", "gaps has examples without a value"),
    ("{saved}", "y=text", "text has values of type string: give numbers"),
    ("{saved}", "channels=0", "channels must be"),
    ("{saved}", "max_pixels=3", "example 0 of hf:.* cannot be decoded: it has more pixels than max_pixels=3"),
])  # fmt: skip
def test_what_is_refused(name, options, message, saved, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", offline)
    with refused(message):
        tfdist.load_data(f"hf:{name.format(saved=saved, tmp=tmp_path)}", cache="memory", options=options, **CUT)


def test_labels_that_are_not_told(tmp_path):
    """Test splits on the Hub often have -1."""
    features = datasets.Features(x=datasets.Value("float32"), y=datasets.ClassLabel(names=["a", "b"]))
    hidden = datasets.Dataset.from_dict({"x": [1.0, 2.0], "y": [-1, 1]}, features)
    hidden.save_to_disk(tmp_path / "d")
    with refused("label -1 of example 0"):
        tfdist.load_data(f"hf:{tmp_path / 'd'}", train_split="train", eval_split="train")


@pytest.mark.parametrize("types, names, values, message", [
    (("int64", "float64"), ("ab", "ab"), [0.25], "x is int64 in train, and float64 in another split: make them alike"),
    (("int64", "uint8"), ("ab", "ab"), [3], "x is int64 in train, and uint8 in another split: make them alike"),
    (("int8", "int8"), ("ab", "ba"), [3], "class 'a' of y in train has the number of 'b' in another split: make the C"),
    (("float32", "float64"), ("ab", None), [0.25], ""),
])  # fmt: skip
def test_splits_that_are_stored_in_other_ways(types, names, values, message, tmp_path):
    """Inputs would be cast to those of the first split, and its classes be other ones."""
    made = {}
    for split, kind, labels in zip(("test", "train"), types[::-1], names[::-1]):
        label = datasets.ClassLabel(names=list(labels)) if labels else datasets.Value("int8")
        features = datasets.Features(x=datasets.List(datasets.Value(kind)), y=label)
        made[split] = datasets.Dataset.from_dict({"x": [values], "y": [1]}, features)
    datasets.DatasetDict(made).save_to_disk(tmp_path / "d")
    load = lambda: tfdist.load_data(f"hf:{tmp_path / 'd'}", options="x=x, y=y", train_split="test", eval_split="train")
    if not message:
        return np.testing.assert_array_equal(columns_of(load().eval)[0], [values])
    with refused(message):
        load()


def test_a_dry_run_downloads_nothing(monkeypatch):
    asked = []
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a: asked.append(dict(registry.os.environ)) or offline(*a))
    with refused("cannot be opened"):
        registry.load(config.Experiment(data=config.Data(name="hf:nobody/nothing")), prepare=False)
    assert asked[0]["HF_HUB_OFFLINE"] == "1"


def test_without_the_package(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(f"data.name=hf:{saved} is read with a package that is not installed: pip insta"):
        tfdist.load_data(f"hf:{saved}")


@pytest.mark.whole
def test_a_name_of_the_hub_is_trained_on_from_its_cache(run, tmp_path):
    """As on a machine without a network, where it was loaded before; `datasets` itself has written the cache."""
    from datasets.packaged_modules.parquet.parquet import Parquet

    columns = {"values": VALUES[:, 0].tolist(), "label": LABELS.tolist()}
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "train.parquet")
    cache = tmp_path / "home" / "datasets"
    files = {"train": [str(tmp_path / "train.parquet")]}
    Parquet(cache_dir=str(cache), dataset_name="some_name", hash="0" * 40, data_files=files).download_and_prepare()
    (found,) = (cache / "some_name").iterdir()
    (cache / "org___some_name").mkdir()
    found.rename(cache / "org___some_name" / "default")  # as of one whose card has no configurations
    offline = dict(HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", real=True)
    flags = ["--config=digits_mlp", "--config.train.epochs=1", "--config.optimizer.warmup=0%", "--progress=none"]
    split = ["--config.data.train_split=train[:20]", "--config.data.eval_split=train[20:]"]
    options = "--config.data.options=x=values, y=label"
    program = run(
        "tfdist.train", *flags, *split, options, "--config.data.name=hf:org/some_name", "--workdir=a", **offline
    )
    assert program.returncode == 0, program.stderr
    np.savez(tmp_path / "same.npz", x=VALUES[:, 0], y=LABELS)
    program = run("tfdist.train", *flags, *split, f"--config.data.name=numpy:{tmp_path}/same.npz", "--workdir=b")
    assert program.returncode == 0, program.stderr
    hub, arrays = (json.loads((tmp_path / name / "result.json").read_text()) for name in "ab")
    assert hub["weights_sha256"] == arrays["weights_sha256"]
    program = run("tfdist.train", *flags, "--config.data.name=hf:org/other", **offline)
    assert program.returncode == 2
    assert program.stderr.startswith("tfdist: error: data.name=hf:org/other cannot be opened: ")
