"""Data in buckets: downloaded once, and read as any other."""

import keras
import numpy as np
import pytest
from support.refusals import refused

import tfdist
from tfdist import config
from tfdist.config import buckets

ROWS = "".join(f"{i},{i * i % 7},{i % 2}\n" for i in range(40))


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"memory://bucket/{tmp_path.name}"


def same(one, other):
    pairs = zip(keras.tree.flatten(one.train.columns), keras.tree.flatten(other.train.columns), strict=True)
    return all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def downloads(said):
    return [line for line in said if line.startswith("downloading")]


@pytest.mark.parametrize("path", ["train.csv", "", "*.csv", "t*.csv"])
def test_a_file_a_folder_and_a_pattern_are_downloaded_once(path, url, said, tmp_path):
    bucket = buckets.Bucket(f"{url}/data")
    bucket.put_bytes(b"a,b,kind\n" + ROWS.encode(), "train.csv")
    if not path:
        bucket.put_bytes(b"a,b,kind\n" + ROWS.encode(), "test.csv")
    name = f"csv:{url}/data/{path}"
    split = {"eval_split": "test"} if not path else {"train_split": "train[:75%]", "eval_split": "train[75%:]"}
    for file in ("train.csv", "test.csv") if not path else ("train.csv",):
        (tmp_path / "here").mkdir(exist_ok=True)
        (tmp_path / "here" / file).write_text("a,b,kind\n" + ROWS)
    expected = tfdist.load_data(f"csv:{tmp_path}/here/{path}", options="target=kind", **split)
    for _ in range(2):
        data = tfdist.load_data(name, options="target=kind", **split)
        assert same(data, expected)
    assert len(downloads(said)) == 1
    bucket.put_bytes(b"a,b,kind\n" + ROWS.replace("0,0", "9,9").encode(), "train.csv")
    changed = tfdist.load_data(name, options="target=kind", **split)
    assert len(downloads(said)) == 2
    assert not same(changed, expected)


def test_prepared_data_of_tfds_are_taken_from_a_bucket(url, said, tmp_path):
    tfdist.load_data("digits", data_dir=str(tmp_path / "here"))
    for file in (tmp_path / "here").rglob("*"):
        if file.is_file() and not file.name.startswith("."):
            buckets.Bucket(f"{url}/tfds").put(file, file.relative_to(tmp_path / "here").as_posix())
    data = tfdist.load_data("digits", data_dir=f"{url}/tfds/")
    assert data.train.size == 1437 and len(downloads(said)) == 1
    with refused(f"data.data_dir={url}/tfds has no files"):
        tfdist.load_data("mnist", data_dir=f"{url}/tfds")


def test_what_is_not_there_or_leads_elsewhere_is_refused(url, tmp_path):
    for name in (f"csv:{url}/nothing.csv", f"image_folder:{url}/nothing", f"tfrecord:{url}/*.tfrecord"):
        with refused("has no files: give the URL of a file"):
            buckets.data_here(config.Data(name=name))
    buckets.Bucket(f"{url}/data").put_bytes(b"x", "train.csv")
    with refused("a dry run downloads nothing"):
        buckets.data_here(config.Data(name=f"csv:{url}/data/train.csv"), download=False)
    system = buckets.Bucket(url)._system()
    system.pipe_file(f"{url}/data/../escaped", b"x")
    buckets.local_copy(f"{url}/data", "data.name")
    assert not list(tmp_path.rglob("escaped"))


def test_paths_and_names_stay_as_they_are():
    for data in (config.Data(), config.Data(name="csv:a.csv"), config.Data(name="hf:mnist"), config.Data(name="a.b:c")):
        assert buckets.data_here(data) == data
    public = config.Data(name="mnist", data_dir="gs://tfds-data/datasets")
    assert buckets.data_here(public) is public
