"""Functions that a run folder names are called only if the folder is the user's own work, or trusted."""

import dataclasses
import inspect
import json
import os
import re
import shutil

import pytest

from tfdist import config
from tfdist.checkpoints import own_work
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.errors import UserError
from tfdist.export.__main__ import export
from tfdist.inference import trained_model


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A user without a key yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "tfdist" / "run_folder_key"


def naming(**fields):
    e = config.Experiment()
    for name, value in fields.items():
        group, _, field = name.partition("_")
        setattr(getattr(e, group), field, value)
    return e


@pytest.fixture
def folder(tmp_path):
    """A run of this user with a function of its own."""
    path = tmp_path / "run"
    own_work.write_experiment(RunFolder(str(path)), naming(data_name="mine:data"))
    return path


def read(folder, changes=None, trust_code=False):
    asked = trained_model.ModelRequest(str(folder), "", "", config.Experiment(), changes or {}, trust_code)
    return trained_model.read_experiment(asked)


def refused(folder, **kwargs):
    with pytest.raises(UserError) as error:
        read(folder, **kwargs)
    assert "\n" not in str(error.value) and "--trust_code" in str(error.value)
    return str(error.value)


def test_a_strangers_folder_is_not_run(run, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME")  # it would need a fresh interpreter
    e = naming(data_name="os:system", data_options="command='touch called'")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "experiment.json").write_text(json.dumps(dataclasses.asdict(e)))
    done = run("tfdist.evaluate", "--workdir=foreign")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "data.name='os:system', a function that would be called, and there is no mark" in done.stderr
    asked = trained_model.ModelRequest(str(tmp_path / "foreign"), "", "", config.Experiment(), {})
    with pytest.raises(UserError, match="give --trust_code if you know who made it"):
        export(asked, ["saved_model"], tmp_path / "out", False)
    assert not (tmp_path / "called").exists()
    run("tfdist.evaluate", "--workdir=foreign", "--trust_code")
    assert (tmp_path / "called").exists(), "and with the flag it is called"


@pytest.mark.parametrize("field, value", [
    ("data_name", "os:system"),
    ("data_name", "namespace:of/others"),  # of TFDS, which fetches code then
    ("data_name", "tfdist.distributed.child_process:start"),  # with arguments of the folder
    ("model_name", "os:system"), ("optimizer_name", "os:system"), ("train_loss", "os:system(command='true')"),
    ("train_metrics", "accuracy, os:system"), ("train_callbacks", "EarlyStopping(patience=3), os:system"),
])  # fmt: skip
def test_every_field_that_names_code(field, value, tmp_path):
    (tmp_path / "experiment.json").write_text(json.dumps(dataclasses.asdict(naming(**{field: value}))))
    assert f"{field.replace('_', '.')}=" in refused(tmp_path)


def test_all_fields_that_take_a_function_are_looked_at():
    """Their documentation says that they take one."""
    documented = set()
    for group in ("Data", "Model", "Optimizer", "Train", "Eval", "Checkpoint"):
        text = inspect.getsource(getattr(config, group))
        for field, words in re.findall(r'(\w+): \w+ = [^\n]*\n +"""(.*?)"""', text, re.DOTALL):
            if "package.module:function" in words:
                documented.add(f"{group.lower()}.{field}")
    named = dict.fromkeys(documented, "mine:function")
    assert own_work.functions(naming(**{name.replace(".", "_"): value for name, value in named.items()})) == named
    assert len(named) == 6


def test_what_names_no_function():
    assert not own_work.functions(config.Experiment())
    assert not own_work.functions(naming(data_name="csv:a.csv", train_loss="mse", train_metrics="accuracy"))


def test_own_work_is_run(folder, tmp_path, home):
    assert read(folder).data.name == "mine:data"
    assert home.stat().st_mode & 0o777 == 0o600 and len(home.read_bytes()) == 32
    shutil.copytree(folder, tmp_path / "copy")
    folder.rename(tmp_path / "moved")
    key = home.read_bytes()
    own_work.write_experiment(RunFolder(str(tmp_path / "second")), naming(model_name="mine:model"))
    assert home.read_bytes() == key
    for name in ("copy", "moved", "second"):
        read(tmp_path / name)


def test_a_folder_without_functions_needs_no_key(tmp_path, home):
    own_work.write_experiment(RunFolder(str(tmp_path / "run")), config.Experiment())
    read(tmp_path / "run")
    assert not home.exists() and [p.name for p in (tmp_path / "run").iterdir()] == ["experiment.json"]


def test_a_function_of_the_command_line_is_the_users(folder):
    (folder / own_work.MARK).unlink()
    assert read(folder, {"config.data.name": "other:data"}).data.name == "other:data"


def test_what_was_changed_is_not_own_work(folder):
    path = folder / "experiment.json"
    path.write_text(path.read_text().replace("mine:data", "os:system"))
    assert "os:system" in refused(folder) and "is not yours, or experiment.json was changed" in refused(folder)


def test_another_users_folder(folder, monkeypatch):
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert f"experiment.json belongs to another user (number {uid})" in refused(folder)
    read(folder, trust_code=True)


def test_another_installation(folder, home):
    home.unlink()
    assert f"there is no key to check its mark with ({home})" in refused(folder)
    own_work.write_experiment(RunFolder(str(folder.parent / "b")), naming(data_name="mine:data"))
    assert "its mark (experiment.mark) is not yours" in refused(folder)


def test_a_key_that_others_can_read_is_none(folder, home, said):
    home.chmod(0o644)
    assert f"is open to others ({home}; chmod 600 makes it yours)" in refused(folder)
    own_work.write_experiment(RunFolder(str(folder)), naming(data_name="mine:data"))
    assert said[-1].startswith("WARNING: your key for marks is open to others")
    assert not (folder / own_work.MARK).exists()


def test_a_damaged_key(folder, home):
    home.write_bytes(b"short")
    assert "your key for marks is damaged" in refused(folder)


def test_a_home_that_cannot_be_written(tmp_path, monkeypatch, said):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    own_work.write_experiment(RunFolder(str(tmp_path / "run")), naming(data_name="mine:data"))
    assert "your key for marks cannot be used" in said[-1] and "will ask for --trust_code" in said[-1]
    assert "there is no mark" in refused(tmp_path / "run")


def test_trust_code_is_for_run_folders():
    with pytest.raises(UserError, match=r"--trust_code is for runs, of --model=m.keras no code is called"):
        trained_model.check(trained_model.ModelRequest("", "m.keras", "", config.Experiment(), {}, True))
