"""Run folders whose checksums are right and whose content is not: one line each."""

import hashlib
import json
import math
import os
import pathlib
import re
import shutil

import keras
import pytest
from conftest import REPOSITORY

from tfdist import config
from tfdist.checkpoints import files, resume, training_run
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.cluster import env_vars
from tfdist.config import schedule
from tfdist.config.runtime_options import ResumeOptions
from tfdist.data import spec_file
from tfdist.doctor import checkpoints as doctor
from tfdist.errors import TrainingError, UserError
from tfdist.inference import trained_model
from tfdist.monitoring import recorder
from tfdist.monitoring.report import run_files

OLD = REPOSITORY / "tests/checkpoints/run_folder_0.1.0/interrupted"
DEEP = "[" * 100_000


@pytest.fixture
def folder(tmp_path):
    return pathlib.Path(shutil.copytree(OLD, tmp_path / "run"))


def forge(checkpoint, name, content):
    """Puts another file into a checkpoint, and the right checksums beside it."""
    (checkpoint / name).write_bytes(content)
    manifest = json.loads((checkpoint / files.MANIFEST).read_bytes())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / files.MANIFEST).write_bytes(files._manifest_bytes(manifest["files"], manifest["experiment"]))
    files.verify(checkpoint)


def asked(folder, checkpoint=""):
    return trained_model.ModelRequest(str(folder), "", checkpoint, config.Experiment(), {})


def changed(path, value):
    """The state of a real checkpoint with one value of another kind; `DROP` leaves the field out."""
    state = json.loads((OLD / "checkpoints/40" / files.STATE).read_bytes())
    *owners, last = path.split(".")
    owner = state
    for name in owners:
        owner = owner[name]
    owner[last] = value
    if value == "DROP":
        del owner[last]
    return json.dumps(state)


FORGED = [
    ("{}", "no object 'position'"), ("[]", "a list instead of an object"), ("3", "a int instead of an object"),
    (DEEP, "cannot be read"), (changed("position", []), "no object 'position'"),
    (changed("position.update", "DROP"), "no 'update' in 'position'"),
    (changed("position.epoch", -1), "'epoch' in 'position'"),
    (changed("position.update", 10**30), "'update' in 'position'"),
    (changed("position.other", 1), "'other' in 'position'"),
    (changed("position.logs", {"loss": "low"}), "'logs' in 'position'"),
    (changed("best.update", "x"), "'update' in 'best'"),
    (changed("history", {"loss": 3}), "no 'history' as it should be"),
    (changed("epochs", [[]]), "no 'epochs' as it should be"), (changed("run", "x"), "no 'run' as it should be"),
    (changed("callbacks", "DROP"), "no 'callbacks' as it should be"),
    (changed("experiment", []), "no 'experiment' as it should be"),
    (changed("experiment", {"config.seed": None}), "no 'experiment' as it should be"),
    (changed("history", {"loss": [{"array": [[1], [2, 3]]}]}), "no 'history' as it should be"),
    (changed("history", {"loss": [10**400]}), "no 'history' as it should be"),
    (changed("position.epoch", 10**15), "'epochs' end with 1, and 'epoch' is 1000000000000000 in 'position'"),
    (changed("position.update", 41), "'update' is 41 and 'begun' 10 in 'position', in epoch 1 of epochs of 30 updates"),
    (changed("position.update", 9), "'begun' is 10 in 'position', of 9 updates"),
    (changed("position.begun", 31), "'update' is 40 and 'begun' 31 in 'position', in epoch 1 of epochs of 30 updates"),
    (changed("position.examples", 10**9), "'examples' is 1000000000 in 'position', after 10 updates of 48 examples"),
    (changed("position.examples", math.nan), "'examples' is nan in 'position', after 10 updates of 48 examples"),
]  # fmt: skip


@pytest.mark.parametrize("text, why", FORGED, ids=[why for _, why in FORGED])
def test_a_forged_state_is_not_used(text, why, folder, said):
    for name in ("30", "40"):
        forge(folder / "checkpoints" / name, files.STATE, text.encode())
    fields = config.flat(json.loads((folder / "experiment.json").read_bytes()))
    with pytest.raises(UserError, match=r"none of the 2 checkpoints in .* is valid: .*--resume=never"):
        resume.choose(folder / "checkpoints", {}, fields, False)
    assert len(said) == 2 and all(why in line and "\n" not in line for line in said)
    assert all(why in finding.problem for finding in doctor.examine(folder / "checkpoints"))
    assert resume.load(folder / "checkpoints" / "40", files.Disk()) is None
    assert trained_model.read_experiment(asked(folder, "latest")).name == "small"


def test_a_state_of_another_update_than_its_folder(folder):
    (folder / "checkpoints/40").rename(folder / "checkpoints/41")
    with pytest.raises(files.DamagedError, match=r"state.json is of update 40, and the folder is called 41"):
        files.read_state(folder / "checkpoints/41")
    (folder / "checkpoints/41").rename(folder / "checkpoints/40.1")  # a second one after the same update
    files.read_state(folder / "checkpoints/40.1")


RECORDED = {"updates": 1, "in_epoch": 1, "epochs": 0, "seconds": 1.5, "history": {}, "rollbacks": [], "segments": {}}
BAD_CALLBACKS = [
    ("Recorder.0", {}, "updates is None"),
    ("Recorder.0", [], "'list' object is not a mapping"),
    ("Recorder.0", RECORDED | {"updates": "x"}, "updates is 'x'"),
    ("Recorder.0", RECORDED | {"seconds": math.inf}, "seconds is inf"),
    ("Recorder.0", RECORDED | {"history": {"loss": [[1], [[2, 3], 4]]}}, "history is "),
    ("Recorder.0", RECORDED | {"segments": {"launch": "x", "begun": [[0, "x", None]]}}, "update is "),
    ("Recorder.0", RECORDED | {"segments": {"launch": "x", "begun": [[0]]}}, "missing 2 required positional arg"),
    ("Recorder.0", RECORDED | {"segments": {"launch": "x"}}, "'begun'"),
    ("EarlyStopping.0", {"wait": [1]}, "wait is [1]"),
]


@pytest.mark.parametrize("name, state, why", BAD_CALLBACKS)
def test_a_forged_state_of_a_callback(name, state, why, tmp_path):
    plan = schedule.make(config.Experiment(), 1000, 1)
    launched = recorder.Segments(environ={env_vars.ROUNDS: json.dumps({"launch": "x"})})
    ours = [recorder.Recorder(RunFolder(str(tmp_path)), plan, launched), keras.callbacks.EarlyStopping()]
    callbacks = keras.callbacks.CallbackList(ours)
    with pytest.raises(UserError, match=rf"the callback {re.escape(name)} can go on with \(.*{re.escape(why)}"):
        training_run.restore_callbacks(callbacks, {name: state})
    training_run.restore_callbacks(callbacks, {"Recorder.0": RECORDED, "EarlyStopping.0": {"wait": 3, "best": None}})


def test_a_resume_believes_the_newest_checkpoint(folder, said):
    """A digit has changed in experiment.json, and the run was said to be of another experiment."""
    fields = json.loads((folder / "experiment.json").read_bytes())
    experiment = trained_model.experiment_from(fields)
    (folder / "experiment.json").write_text(json.dumps(fields | {"seed": 77}))
    run = RunFolder(str(folder))
    resume.same_experiment(run, experiment, ResumeOptions(), 0)
    assert said == [
        f"WARNING: {folder}/experiment.json is damaged (config.seed is 77 there and {experiment.seed} here): "
        "it is written again, since the newest checkpoint is of this experiment"
    ]
    experiment.seed = 78
    with pytest.raises(UserError, match=r"is of another experiment \(config.seed is 77 there and 78 here\)"):
        resume.same_experiment(run, experiment, ResumeOptions(), 0)


@pytest.mark.parametrize("text", ["[]", "{}", "3", DEEP, '{"status": []}', '{"accumulate": 1e999}'])
def test_other_files_of_another_shape(text, folder):
    for name in ("result.json", resume.ACCUMULATE, "environment.json"):
        (folder / name).write_text(text)
    (folder / "history.jsonl").write_text(text + "\n[1]\n" + '{"updates": 1}\n')
    run = RunFolder(str(folder))
    assert not run.completed and resume.read_accumulate(run) == 1
    run.cut("history.jsonl", lambda line: line.get("updates", 0) == 1)
    assert (folder / "history.jsonl").read_text() == '{"updates": 1}\n'
    run_files.read(folder)
    (folder / "data.json").write_text(text)
    with pytest.raises(UserError, match=r"data.json cannot be used"):
        spec_file.read(folder)


@pytest.mark.parametrize("field, value, why", [
    ("classes", math.inf, "it has inf instead of an integer"),
    ("classes", 2**63, "it has classes=9223372036854775808"), ("classes", {}, "it has {} instead of an integer"),
    ("classes", True, "it has True instead of an integer"), ("classes", 0, "it has classes=0"),
    ("shape", 3, "it has 3 instead of a list"), ("shape", [-1], "it has shape=(-1,)"),
    ("shape", [8, "8"], "it has '8' instead of an integer"), ("maximum", None, "it has None instead of a number"),
    ("dtype", "uint", "it has dtype='uint'"), ("names", [1], "it has 1 instead of a text"),
    ("columns", [3], "it has 3 instead of an object"), ("target", {"name": "y", "kind": "date"}, "it has columns=()"),
])  # fmt: skip
def test_a_description_of_data_that_cannot_be(field, value, why, folder):
    content = json.loads((folder / "data.json").read_bytes())
    content["spec"][field] = value
    (folder / "data.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"data.json cannot be used \(ValueError: {re.escape(why)}\): copy it back"):
        spec_file.read(folder)


def resumed(folder):
    fields = config.flat(json.loads((OLD / "experiment.json").read_bytes()))
    return resume.choose(folder / "checkpoints", {}, fields, True)


@pytest.mark.parametrize("content", [b"", b"no sstable", "cut"])
@pytest.mark.parametrize("name", ["tensors.index", "tensors.data-00000-of-00001"])
def test_forged_tensors_are_not_used(name, content, folder, said):
    """Their checksums are right, and the error was one of TensorFlow's."""
    for checkpoint in (folder / "checkpoints" / number for number in ("30", "40")):
        whole = (checkpoint / name).read_bytes()
        forge(checkpoint, name, whole[: len(whole) // 2] if content == "cut" else content)
    with pytest.raises(UserError, match=r"none of the 2 checkpoints in .* is valid"):
        resumed(folder)
    assert all(f"{number} is not used: its tensors cannot be read (" in " ".join(said) for number in (30, 40))


@pytest.mark.parametrize("kind", ["pipe", "endless", "folder"])
def test_what_is_no_file_is_not_waited_for(kind, folder):
    """A pipe was waited for without end, and a file of four terabytes that takes no room was read into the memory."""
    for path in [*folder.glob("*.json*"), *folder.glob("checkpoints/*/*.json"), folder / ".lock"]:
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            with open(path, "wb") as file:
                file.truncate(1 << 42)
    with pytest.raises(UserError, match=r"holds no run \(no experiment.json that can be read\)"):
        trained_model.read_experiment(asked(folder))
    run = RunFolder(str(folder))
    run.could_be_created()
    assert run.earlier() is None and not run.completed and resume.read_accumulate(run) == 1
    with pytest.raises(UserError, match=r"data.json cannot be used"):
        spec_file.read(folder)
    with pytest.raises(UserError, match=r"none of the 2 checkpoints in .* is valid"):
        resumed(folder)
    with pytest.raises(TrainingError, match=r"history.jsonl cannot be written \("):
        run.cut("history.jsonl", lambda line: True)
    assert run_files.read(folder).experiment == {}


def test_a_folder_of_checkpoints_that_leads_to_itself(folder):
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").symlink_to("checkpoints")
    with pytest.raises(UserError, match=r"checkpoints cannot be read \(Too many levels of symbolic links\): correct "):
        resumed(folder)
    assert resume.continues(RunFolder(str(folder)), ResumeOptions(), 0, False)
    assert doctor.newest_size(folder / "checkpoints") == 0
