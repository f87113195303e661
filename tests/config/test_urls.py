"""URLs where a path is needed are refused by their scheme; they would become folders such as `gs:`."""

import pathlib

import pytest

import tfdist
from tfdist import config
from tfdist.config import runtime_options, validation
from tfdist.errors import UserError
from tfdist.inference import trained_model
from tfdist.launch import __main__ as launch

URLS = ["gs://bucket/run1", "s3://bucket/a b", "file:///tmp/run", "hdfs://host:9000/x", "HTTPS://x"]


@pytest.mark.parametrize("url", URLS)
def test_a_url_is_no_path(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fields = {
        f"data.name={kind}:{url}": config.Experiment(data=config.Data(name=f"{kind}:{url}")) for kind in config.FILES
    }
    fields |= {
        "model.name": config.Experiment(model=config.Model(name=url + ".keras")),
        "model.weights": config.Experiment(model=config.Model(weights=url + ".h5")),
    }
    asks = [lambda e=e: validation.validate(e) for e in fields.values()]
    asks += [
        lambda: runtime_options.Environment(workdir=url),
        lambda: trained_model.request(url, "", "", config.Experiment(), {}, False),
        lambda: trained_model.request("", url, "", config.Experiment(), {}, False),
        lambda: tfdist.Checkpoints(url),
        lambda: launch.make_plan(*launch.parse([f"--log_dir={url}", "--", "script.py"]), {}),
    ]
    for ask in asks:
        with pytest.raises(UserError) as error:
            ask()
        assert f"={url}" in str(error.value) and f" is a URL ({url.partition(':')[0]}:), and only" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_what_is_no_url():
    for path in ("runs/a:b", "C:/x", "a//b", "~/x", "://x", ""):
        runtime_options.Environment(workdir=path)
    tfdist.Checkpoints(pathlib.Path("runs") / "a")
    experiment = config.Experiment(data=config.Data(data_dir="gs://tfds-data/datasets"))
    validation.validate(experiment)  # TFDS reads it, through TensorFlow
