"""A small run that several files of tests look at after its end, and the commands that do."""

import dataclasses
import json
import os
import sys

import pytest
from conftest import REPOSITORY

from support import processes

TRAIN = [
    "--config.model.options=channels=(4,), units=8", "--config.train.epochs=2", "--config.optimizer.warmup=0%",
    "--config.optimizer.ema_momentum=0.9", "--config.checkpoint.every=20 steps", "--config.checkpoint.keep=2",
    "--config.checkpoint.best=val_accuracy", "--notensorboard",
]  # fmt: skip


def command(*arguments, folder, tfds_dir, starter=(sys.executable, "-m"), path="", **environ):
    """A finished process; its standard error is to be one line of tfdist's, or nothing."""
    drop = ("CUDA_VISIBLE_DEVICES", "TF_CONFIG")
    env = {k: v for k, v in os.environ.items() if k not in drop} | {"TFDS_DATA_DIR": str(tfds_dir)} | environ
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [path, str(REPOSITORY)]))
    words = [*starter, *map(str, arguments)]
    return processes.run(words, cwd=folder, env=env, text=True, capture_output=True, timeout=300)


def made_run(folder, experiment, model, spec):
    """A folder as a run with this model would have left it."""
    from tfdist.checkpoints import files, integrity, own_work
    from tfdist.checkpoints.run_folder import RunFolder
    from tfdist.monitoring import recorder

    model.save(folder / "model.keras")
    own_work.write_experiment(RunFolder(str(folder)), experiment)
    result = {
        "weights_sha256": recorder.fingerprint(model)[0],
        "files": {"model.keras": files.checksum(folder / "model.keras")},
    }
    for name, content in {
        "data": {"format": 1, "spec": dataclasses.asdict(spec)},
        "result": integrity.sealed(result),
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tfds_dir):
    """A folder with the run `run`: 60 updates of a small CNN with BatchNorm and averaged weights."""
    folder = tmp_path_factory.mktemp("trained")
    done = command("tfdist.train", *TRAIN, "--workdir=run", folder=folder, tfds_dir=tfds_dir)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def after(trained, tfds_dir):
    """Runs a command beside the run."""
    return lambda *arguments, **options: command(*arguments, folder=trained, tfds_dir=tfds_dir, **options)
