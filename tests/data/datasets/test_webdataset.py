"""Tar files by WebDataset's convention, against what Python's own `tarfile` was given to write."""

import gzip
import io
import json
import os
import tarfile

import numpy as np
import pytest
import tensorflow as tf
from support.covering import first
from support.refusals import refused
from support.source_columns import columns_of

import tfdist
from tfdist import config
from tfdist.config import field_syntax
from tfdist.config.buckets import Bucket
from tfdist.data.datasets import registry
from tfdist.data.sources import Arrays, Records

datasets = pytest.importorskip("datasets")

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 6, 5, 3), dtype=np.uint8)
LABELS = np.arange(20) % 3
VALUES = np.random.default_rng(1).normal(size=(20, 2, 2))
ALL = dict(train_split="train", eval_split="train")


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def write(path, files):
    """Writes files of (name, content) as a tar file."""
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def sample(i, key):
    """The files of an example; what is no part of it is there as well."""
    key = key.format(i)
    yield f"{key}.png", tf.io.encode_png(PIXELS[i]).numpy()
    yield f"{key}.cls", b"%d\n" % LABELS[i]
    yield f"{key}.seg.npy", npy(VALUES[i])
    yield f"{key}.json", json.dumps({"label": int(LABELS[i]), "price": i / 4}).encode()


def samples(rows, key="{:06}"):
    return [file for i in rows for file in sample(i, key)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "tables"))


@pytest.fixture
def tars(tmp_path):
    """Three files of training and one for testing; names of 130 letters need two headers."""
    for number, rows in enumerate((range(6), range(6, 8), range(8, 16))):
        key = f"deep.folder/{'k' * 130}{{:06}}" if number == 1 else "{:06}"
        write(
            tmp_path / f"train-{number:03}.tar", [("README", b"none"), *samples(rows, key=key), (".hidden.cls", b"x")]
        )
    write(tmp_path / "test-000.tar", samples(range(16, 20)))
    return tmp_path


def test_images_and_labels(tars):
    data = tfdist.load_data(f"webdataset:{tars}", cache="stream")
    assert (data.spec.shape, data.spec.dtype, data.spec.classes) == ((6, 5, 3), "uint8", 3)
    for source, rows in ((data.train, slice(16)), (data.eval, slice(16, 20))):
        assert isinstance(source, Records)
        x, y = columns_of(source)
        np.testing.assert_array_equal(x, PIXELS[rows])
        np.testing.assert_array_equal(y, LABELS[rows])
    assert data.train.name(6).endswith(f"k000006 in {tars}/train-001.tar")
    held = tfdist.load_data(
        f"webdataset:{tars}/train-{{000,002}}.tar", image_size="3x2", train_split="train[2:8]", eval_split="train[:2]"
    )
    assert isinstance(held.train, Arrays) and held.spec.shape == (3, 2, 3)
    np.testing.assert_array_equal(held.train.columns[1], LABELS[[2, 3, 4, 5, 8, 9]])
    both = tfdist.load_data(f"webdataset:{tars}", train_split="test[1:]+train[5:9]").train
    np.testing.assert_array_equal(both.columns[0], PIXELS[[17, 18, 19, 5, 6, 7, 8]])


@pytest.mark.parametrize("options, x, y, classes", first(1, [
    ("x='seg.npy', weight='json.price'", VALUES, LABELS, 3), ("y='json.label', classes=5", PIXELS, LABELS, 5),
    ("y='seg.npy', channels=3", PIXELS, VALUES, None),
]))  # fmt: skip
def test_what_other_files_hold(options, x, y, classes, tars):
    data = tfdist.load_data(f"webdataset:{tars}/tr*", cache="stream", options=options, **ALL)
    found = columns_of(data.train)
    np.testing.assert_array_equal(found[0], x[:16].astype(data.spec.dtype))
    np.testing.assert_array_equal(found[1], y[:16].astype(found[1].dtype))
    assert (data.spec.classes, data.spec.shape) == (classes, x.shape[1:])
    if "weight" in options:
        np.testing.assert_array_equal(found[2], np.arange(16) / 4)


def test_braces():
    expanded = lambda text: field_syntax.expanded("data.name", text)
    assert expanded("a-{008..010}.tar") == ["a-008.tar", "a-009.tar", "a-010.tar"]
    assert expanded("{b,a}/{9..10}") == ["b/9", "b/10", "a/9", "a/10"]
    assert expanded("plain*.tar") == ["plain*.tar"]
    for wrong in ("{3..1}", "{a}", "a}", "{a,{b,c}}", "{0..999999999999}"):
        with refused(r"data.name: the braces in .* are not understood: write {000..009} or"):
            expanded(wrong)
    with refused("stands for 100,000,000 files, more than 1,000,000: write"):
        expanded("{0..9999}{0..9999}")


A = [("a.png", tf.io.encode_png(PIXELS[0]).numpy()), ("a.cls", b"1")]
B = [("b.png", A[0][1]), ("b.cls", b"0")]


@pytest.mark.parametrize("files, options, message", [
    ([*A, B[0]], "", "the files in the archive don't share the same prefix or the same types: write them again with"),
    ([*A, ("b.png", b"none"), B[1]], "", r"b in .*t.tar cannot be decoded: .*: remove it"),
    ([A[0], ("a.cls", b"cat")], "", "cannot be opened: invalid literal for int.* b'cat': write them again with"),
    ([*A, A[1]], "", "cannot be opened: Duplicate field 'cls' for sample 'a'"),
    ([("a.json", b"[" * 100_000)], "", "cannot be opened: maximum recursion depth exceeded"),
    (A, "y=txt", r"there is no column 'txt' for y in webdataset:.*: it has .*png \(Image\), cls \(int64\)"),
    (A, "config=a", "unknown 'config' in data.options"),
    (A, "max_pixels=29", "a in .*t.tar cannot be decoded: it has more pixels than max_pixels=29"),
])  # fmt: skip
def test_what_does_not_fit(files, options, message, tmp_path):
    path = write(tmp_path / "t.tar", files)
    with refused(message):
        tfdist.load_data(f"webdataset:{path}", options=options, cache="memory", **ALL)


@pytest.mark.parametrize("last, wrong", [
    (dict(json=b'{"a": 2.5, "b": [0.5, 1]}'), "json.a"), (dict(json=b'{"a": 3.0, "b": [0, 1.5]}'), ""),
    (dict(npy=npy(np.float32([2, -1.09]))), "npy"), (dict(npy=npy(np.int64([300, 2]))), "npy"),
    (dict(json=b'{"a": 1, "b": [1], "c": "false"}'), "json.c"),
])  # fmt: skip
def test_numbers_that_are_not_like_the_first(last, wrong, tmp_path):
    usual = dict(npy=npy(np.uint8([1, 2])), cls=b"1", json=b'{"a": 1, "b": [0.5, 2.0], "c": true}')
    rows = [*[usual] * 7, usual | last]
    path = write(tmp_path / "t.tar", [(f"{i}.{end}", row[end]) for i, row in enumerate(rows) for end in row])
    load = lambda: tfdist.load_data(f"webdataset:{path}", options="x=npy, y='json.a'", cache="memory", **ALL)
    if not wrong:
        return np.testing.assert_array_equal(load().train.columns[1], [1] * 7 + [3])
    for _ in range(2):  # nothing is kept that a second run would take
        with refused(f"cannot be opened: {wrong} of 7 in {path} is of another type than the first: write them"):
            load()


def between_of(path, name):
    with tarfile.open(path) as tar:
        return tar.getmember(name).offset


@pytest.mark.whole
def test_other_content_of_the_same_time_and_size_is_read(tmp_path):
    for shift in (0, 1):
        rows = [((f"{i}.cls", b"%d" % ((i + shift) % 3)), (f"{i}.npy", npy(VALUES[0]))) for i in range(9)]
        path = write(tmp_path / "t.tar", [file for row in rows for file in row])
        os.utime(path, (1, 1))
        loaded = tfdist.load_data(f"webdataset:{path}", cache="memory", **ALL)
        assert loaded.train.columns[1].tolist() == [(i + shift) % 3 for i in range(9)]


def test_files_that_cannot_be_read(tmp_path, tars):
    def no(name, message):
        with refused(message):
            tfdist.load_data(f"webdataset:{tmp_path / name}", **ALL)

    no("none-*", "none-.* has no files: give a tar file, a folder, or a pattern such as train-{000..009}.tar")
    no("train-{000..004}.tar", "there is no file .*train-003.tar: correct the name or its numbers, or bring it here")
    (tmp_path / "none.tar").write_bytes(b"")
    no("none.tar", "none.tar cannot be opened: file could not be opened successfully.*: write them again with")
    whole = (tmp_path / "train-000.tar").read_bytes()
    with tarfile.open(tmp_path / "train-000.tar") as tar:
        between = tar.getmembers()[-3].offset
    (tmp_path / "cut.tar").write_bytes(whole[:between])
    no("cut.tar", "cut.tar is cut off: it does not end with zeros: copy or write it again")
    (tmp_path / "cut.tar.gz").write_bytes(gzip.compress(whole[:between]))
    no("cut.tar.gz", "cut.tar.gz is cut off: it does not end with zeros: copy or write it again")
    zeros = write(tmp_path / "zeros.tar", [*samples(range(2)), ("2.png", bytes(4096)), ("2.cls", b"0")])
    (tmp_path / "zeros.tar").write_bytes(zeros.read_bytes()[: 4096 + between_of(zeros, "2.png") + 512])
    no("zeros.tar", "zeros.tar is cut off: it does not end with zeros")
    (tmp_path / "both.tar").write_bytes(whole + whole)
    no("both.tar", r"both.tar goes on after the end of an archive, at byte \d+: those examples would be lost: leave")
    (tmp_path / "flipped.tar").write_bytes(whole[:between] + b"#" + whole[between + 1 :])
    no("flipped.tar", f"flipped.tar has a damaged header at byte {between}: copy or write it again")


@pytest.mark.whole
def test_a_dry_run_makes_no_table(tars):
    experiment = config.Experiment(data=config.Data(name=f"webdataset:{tars}"))
    with refused("is not in .* yet, and a dry run copies nothing: run without it"):
        registry.load(experiment, prepare=False)
    registry.load(experiment)
    assert registry.load(experiment, prepare=False).examples == 16


@pytest.mark.whole
def test_shards_in_a_bucket(tars, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"memory://bucket/{tmp_path.name}"
    for path in tars.glob("*.tar"):
        Bucket(url).put(path, path.name)
    data = tfdist.load_data(f"webdataset:{url}/train-{{000..001}}.tar", **ALL)
    np.testing.assert_array_equal(data.train.columns[0], PIXELS[:8])
    assert sorted(p.name for p in (tmp_path / "cache").rglob("*.tar")) == ["train-000.tar", "train-001.tar"]
    with refused(r"there is no file .*train-003\.tar"):
        tfdist.load_data(f"webdataset:{url}/train-{{000..003}}.tar", **ALL)
