"""What type checkers, editors and readers of an error see of the public names."""

import configparser
import dataclasses
import inspect
import json
import os
import subprocess
import sys

import pytest
from conftest import REPOSITORY

import tfdist
from tfdist import config
from tfdist.config.runtime_options import PlacementOptions

SCRIPT = """
import numpy as np
import tfdist
from tfdist import evaluate, predict

distribution = tfdist.connect("mirrored", devices="none", virtual_devices=2, threads=1)
replicas: int = distribution.replicas
x = np.ones((4, 2))
data = tfdist.load_data("csv:x.csv", options="target=y", image_size=64)

def train(model, rate: float) -> str:
    kept = tfdist.Checkpoints("run", every="1 epoch")
    tfdist.Report("run").on_checkpoint(3)
    tfdist.fit(tfdist.synchronize_batch_norm(model), data.train, epochs=3, distribution=distribution, checkpoints=kept)
    return str(evaluate(model, data.eval)) + str(predict(model, x, batch_size=2))

tfdist.patch_keras(distribution)
tfdist.unpatch_keras()

class Watch(tfdist.Callback):
    def on_checkpoint(self, update: int) -> None:
        raise tfdist.UserError("x", "y") from tfdist.TrainingError("z")

tfdist.connect(strategey="mirrored")  # wrong
tfdist.connect("mirrored", virtual_devices="2")  # wrong
tfdist.load_data("digits", imagesize=3)  # wrong
tfdist.load_data("digits").trian  # wrong
tfdist.fit(None, x, epoch=3)  # wrong
tfdist.fit(None, x, epochs="3")  # wrong
evaluate(None, x, batchsize=3)  # wrong
predict(None, x, verbse=0)  # wrong
tfdist.Checkpoints("run", evry="1 epoch")  # wrong
tfdist.Report(3)  # wrong
tfdist.remat(model, blocks=3)  # wrong
tfdist.patch_keras(distributon=distribution)  # wrong
tfdist.fitt  # wrong
tfdist.UserError("x").fixx  # wrong
"""


def _mypy(script):
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", f"--cache-dir={script.parent}", script.name]
    environ = os.environ | {"MYPYPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=script.parent, env=environ, capture_output=True, text=True)
    return {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error: " in line}


def _pyright(script):
    """Optional, since its wheel needs node: `pip install 'pyright[nodejs]'`."""
    pytest.importorskip("pyright")
    (script.parent / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(REPOSITORY)]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", f"--pythonpath={sys.executable}"]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True)
    found = [d for d in json.loads(done.stdout)["generalDiagnostics"] if d["severity"] == "error"]
    return {d["range"]["start"]["line"] + 1 for d in found}


@pytest.mark.parametrize("check", [_mypy, _pyright])
def test_type_checkers_know_the_signatures_of_all_public_names(check, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    wrong = {number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# wrong")}
    assert all(name in SCRIPT for name in tfdist.__all__ if name != "Distribution")
    assert check(script) == wrong


def test_the_wheel_says_that_it_is_typed():
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    assert setup["options.package_data"]["tfdist"] == "py.typed" and (REPOSITORY / "tfdist/py.typed").exists()


def test_only_public_names_are_listed():
    assert [name for name in dir(tfdist) if not name.startswith("__")] == sorted(tfdist.__all__)


@pytest.mark.parametrize(("function", "owner", "others"), [
    (tfdist.connect, PlacementOptions, set()),
    (tfdist.load_data, config.Data, {"name", "shuffle", "batch_size", "seed"}),  # fit shuffles
])  # fmt: skip
def test_options_of_a_function_are_the_fields_they_stand_for(function, owner, others):
    parameters = {p.name: p.default for p in inspect.signature(function).parameters.values()}
    fields = {field.name: field.default for field in dataclasses.fields(owner)}
    assert {k: v for k, v in parameters.items() if k not in others} == {
        k: v for k, v in fields.items() if k not in others
    }


def test_a_misspelt_option_is_one_line_that_suggests_the_right_name():
    with pytest.raises(tfdist.UserError, match=r"^connect\(\) has no option 'strategey': did you mean 'strategy'\?"):
        tfdist.connect(strategey="x")
    with pytest.raises(tfdist.UserError, match=r"^fit\(\) has no option 'epoch': did you mean 'epochs'\? .*$"):
        tfdist.fit(None, None, epoch=3)
