"""Text for language models: every byte once, in files' order, in memory or from the files."""

import ast
import os

import numpy as np
import pytest
import tensorflow as tf
from support.refusals import refused
from support.source_columns import columns_of

from tfdist import config
from tfdist.config import validation
from tfdist.data import spec as spec_lib
from tfdist.data.datasets import registry, tables, text
from tfdist.data.sources import Arrays, Records

TEXTS = {"b.txt": b"to be, or not to be", "a/x.py": b"print('hi')\n", "a/empty": b"", "a/.hidden": b"no", "c.txt": b"z"}
WHOLE = b"print('hi')\n\0to be, or not to be\0z\0"


@pytest.fixture
def folder(tmp_path):
    for name, content in TEXTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_bytes(b"no")
    return tmp_path


@pytest.mark.parametrize("memory, kind", [(1e9, Arrays), (0, Records)])
@pytest.mark.parametrize("length", [1, 5, 7, 34])
def test_windows_are_the_files_without_gaps(length, memory, kind, folder):
    source = text.load(str(folder), {"f": "train", "e": "train[:1]"}, memory, length).train
    assert isinstance(source, kind)
    x, y = columns_of(source)
    assert x.shape == y.shape == ((len(WHOLE) - 1) // length, length) and x.dtype == y.dtype == "int32"
    count = x.size
    assert bytes(x.reshape(-1).tolist()) == WHOLE[:count]
    assert bytes(y.reshape(-1).tolist()) == WHOLE[1 : count + 1]


@pytest.mark.parametrize("memory", [1e9, 0])
def test_slices_by_windows(memory, folder):
    load = lambda one, other: text.load(str(folder), {"a": one, "b": other}, memory, 3)
    data, parts = load("train", "train[3:]+train[:2]"), load("train[:60%]", "train[60%:]")
    whole, mixed, first, rest = (columns_of(s)[0] for s in (data.train, data.eval, parts.train, parts.eval))
    np.testing.assert_array_equal(np.concatenate([first, rest]), whole)
    np.testing.assert_array_equal(mixed, np.concatenate([whole[3:], whole[:2]]))


def test_splits_by_file_and_patterns(folder, tmp_path):
    assert text.files(str(folder / "**" / "*.txt")) == {"train": [str(folder / "b.txt"), str(folder / "c.txt")]}
    (folder / "train.py").write_bytes(b"no split")
    assert list(text.files(str(folder))) == ["train"] and len(text.files(str(folder))["train"]) == 5
    (folder / "train").mkdir()
    (folder / "train" / "one").write_bytes(b"abc")
    by_split = text.files(str(folder))
    assert by_split["train"] == [str(folder / "train" / "one")] and by_split["c"] == [str(folder / "c.txt")]
    data = text.load(str(folder), {"a": "train", "b": "b[:2]"}, 1e9, 2)
    assert data.examples == data.train.size == 1 and bytes(data.eval.columns[0].reshape(-1).tolist()) == b"to b"


@pytest.mark.parametrize("path, splits, length, message", [
    ("*.md", "train", 4, r"data.name=text:.*md has no files: give a text file, a folder, or a pattern"),
    ("", "test", 4, "text:.* in windows of 4 bytes has no split 'test': known are train"),
    ("", "train", 100, "selects none of the 0 examples of text:.* in windows of 100 bytes"),
    ("", "train", True, "length must be an integer of at least 1, got True"),
    ("", "train", 0, "length must be an integer of at least 1, got 0"),
    ("", "train", "long", "length must be an integer of at least 1, got 'long'"),
])  # fmt: skip
def test_what_cannot_be_used(path, splits, length, message, folder):
    with refused(message):
        text.load(str(folder / path), {"data.train_split": splits}, 1e9, length)


@pytest.mark.parametrize("place", ["gone.txt", "a/gone"])
def test_a_link_to_nothing_is_not_left_out(place, folder):
    (folder / place).symlink_to("nowhere")
    with refused(f"{place} cannot be read: No such file or directory: correct or remove"):
        text.load(str(folder), {"f": "train"}, 1e9, 5)


def test_a_file_that_shrinks_is_no_zeros(folder):
    source = text.load(str(folder), {"f": "train", "e": "train"}, 0, 5).train
    (folder / "b.txt").write_bytes(b"to be")
    with pytest.raises(tf.errors.OpError, match=r"b\.txt has become shorter since the run began"):
        columns_of(source)


def test_a_changed_byte_of_a_file_that_is_streamed_shows(folder):
    contents = lambda: text.load(str(folder), {"f": "train", "e": "train"}, 0, 5).train.contents()
    before = contents()
    (folder / "b.txt").write_bytes((folder / "b.txt").read_bytes()[:-1] + b"?")
    assert before.keys() == contents().keys() and before != contents()


def test_an_experiment_on_text(folder):
    e = config.Experiment()
    e.data = config.Data(name=f"text:{folder}", options="length=5", train_split="train[:5]", eval_split="train[5:]")
    for cache, kind in (("auto", Arrays), ("memory", Arrays), ("stream", Records)):
        e.data.cache = cache
        loaded = registry.load(validation.validate(e))
        assert isinstance(loaded.train, kind) and loaded.examples == 5 and loaded.eval.size == 1
        assert loaded.spec == spec_lib.Spec((5,), "int32", 256, 255.0)
    e.data.options = "lenght=5"
    with refused(r"data.options: tfdist.data.datasets.text:load takes no such arguments"):
        registry.load(e)


@pytest.mark.parametrize("name, options, message", [
    ("stdlib_text", "length=0", "length must be an integer of at least 1, got 0"),
    ("stdlib_text", "examples=few", "examples must be an integer of at least 1, got 'few'"),
    ("synthetic", "examples=-5", "examples must be an integer of at least 1, got -5"),
    ("synthetic", "classes=0", "classes must be an integer of at least 1, got 0"),
    ("synthetic", "shape=5", r"shape must be that of an example, such as \(8, 8, 3\), got 5"),
    ("synthetic", "shape=[0, 3]", "each side of shape must be an integer of at least 1, got 0"),
    ("synthetic", "noise=loud", "noise must be a number, got 'loud'"),
    ("synthetic", "noise=1, noise=2", "is not understood: write name=value, name=value, each name once"),
])  # fmt: skip
def test_options_of_data_that_is_made(name, options, message):
    with refused(f"data.options.*{message}"):
        registry.load(config.Experiment(data=config.Data(name=name, options=options)))


def test_the_standard_library():
    data = text.stdlib_text(length=32, examples=100)
    x, y = data["train"]
    assert x.shape == (100, 32) and data["test"][0].shape == (10, 32)
    np.testing.assert_array_equal(x.reshape(-1)[1:], y.reshape(-1)[:-1])
    first = text.pathlib.Path(ast.__file__).read_bytes()
    assert bytes(x.reshape(-1).tolist()) == first[:3200]


def test_a_folder_that_may_not_be_read_is_not_left_out(tmp_path, monkeypatch):
    """By a user without root's right to read everything."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir(mode=0)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    user = os.getuid()
    for files, path in [(text.files, "."), (text.files, "*/*.txt"), (text.files, "**/*.txt"),
                        (lambda path: tables.files_by_split("csv", path), "*/*.csv")]:  # fmt: skip
        os.setresuid(user or 65534, user or 65534, user)
        try:
            with refused(r"the folder (\./)?b cannot be read: correct its permissions"):
                files(path)
        finally:
            os.setresuid(user, user, user)
