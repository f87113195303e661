"""URLs of buckets, and all others: these are refused by their scheme, since they would become folders such as `gs:`."""

import importlib.util
import pathlib

import pytest

import tfdist
from tfdist import config
from tfdist.config import runtime_options, validation
from tfdist.errors import UserError
from tfdist.inference import trained_model
from tfdist.launch import plan as launch

URLS = ["file:///tmp/run", "hdfs://host:9000/x", "HTTPS://x/y", "az://x/y"]
BUCKETS = ["gs://bucket/run1", "s3://bucket/a b", "memory://bucket/x"]


def on_this_machine_alone(url):
    """What is never in a bucket."""
    return [
        lambda: validation.validate(config.Experiment(model=config.Model(name=url + ".keras"))),
        lambda: validation.validate(config.Experiment(model=config.Model(weights=url + ".h5"))),
        lambda: trained_model.request("", url, "", config.Experiment(), {}, False),
        lambda: launch.make_plan(*launch.parse([f"--log_dir={url}", "--", "script.py"]), {}),
    ]


def anywhere(url):
    """What may be in a bucket."""
    data = [config.Data(name=f"{kind}:{url}") for kind in config.FILES]
    data += [] if url.startswith("gs:") else [config.Data(data_dir=url)]  # which TFDS reads
    return [
        *(lambda d=d: validation.validate(config.Experiment(data=d)) for d in data),
        lambda: runtime_options.ResumeOptions(workdir=url),
        lambda: trained_model.request(url, "", "", config.Experiment(), {}, False),
        lambda: tfdist.Checkpoints(url),
    ]


@pytest.mark.parametrize("url", [*URLS, *BUCKETS])
def test_a_url_is_no_path(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for ask in [*on_this_machine_alone(url), *(anywhere(url) if url in URLS else [])]:
        with pytest.raises(UserError) as error:
            ask()
        assert f"={url}" in str(error.value) and f" is a URL ({url.partition(':')[0]}:), and only" in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", BUCKETS)
def test_a_bucket_is_a_place_if_its_package_is_there(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for ask in anywhere(url):
        ask()
    assert not list(tmp_path.iterdir())
    scheme = url.partition(":")[0]
    for bad in (
        f"{scheme}://bucket",
        f"{scheme}://bucket/",
        f"{scheme}:///run",
        f"{scheme}://b//x",
        f"{scheme}://b/../x",
    ):
        for ask in anywhere(bad):
            with pytest.raises(UserError, match=f"={bad} names no folder in a bucket: write {scheme}://bucket/folder"):
                ask()
    for bad in (f"{scheme}://key:secret@bucket/x", f"{scheme}://bucket/x?versionId=1", f"{scheme}://bucket/x#1"):
        for ask in anywhere(bad):
            with pytest.raises(UserError, match="has more than a bucket and a folder: leave out '@'"):
                ask()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    package = {"gs": "gcsfs", "s3": "s3fs", "memory": "fsspec"}[scheme]
    extra = {"gs": r"tfdist\[gcs\]", "s3": r"tfdist\[s3\]", "memory": "fsspec"}[scheme]
    for ask in anywhere(url):
        with pytest.raises(UserError, match=f"needs the package {package}, .*: pip install '{extra}'"):
            ask()


def test_what_is_no_url():
    for path in ("runs/a:b", "C:/x", "a//b", "~/x", "://x", ""):
        runtime_options.ResumeOptions(workdir=path)
    tfdist.Checkpoints(pathlib.Path("runs") / "a")
    experiment = config.Experiment(data=config.Data(data_dir="gs://tfds-data/datasets"))
    validation.validate(experiment)  # TFDS reads it, through TensorFlow
