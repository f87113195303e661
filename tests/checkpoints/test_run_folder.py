"""The run folder on a bad day: links, deletion in mid-run, disks that become read-only."""

import errno
import json
import os
import pathlib
import shutil

import pytest

from tfdist import config
from tfdist.checkpoints import own_work
from tfdist.checkpoints.run_folder import LOCK, RunFolder
from tfdist.config import validation
from tfdist.errors import TrainingError, UserError
from tfdist.monitoring.recorder import Result
from tfdist.train import results


@pytest.fixture
def begun(tmp_path):
    """A run under way, with one line of history."""
    folder = RunFolder(str(tmp_path / "run"))
    folder.create()
    own_work.write_experiment(folder, config.Experiment(name="kept"))
    folder.write("environment.json", {"strategy": "default"})
    folder.append("history.jsonl", {"epoch": 1})
    yield folder
    folder.release()


def names(path):
    return sorted(p.name for p in path.iterdir())


@pytest.mark.parametrize("name", [".", "..", "a/b", "a\\b", "", "x" * 201, "é" * 101, "a\n"])
def test_a_name_is_one_component_of_a_path(name):
    with pytest.raises(UserError, match="becomes a folder") as error:
        validation.validate(config.Experiment(name=name))
    assert "\n" not in str(error.value) and len(str(error.value)) < 150


@pytest.mark.parametrize("name", ["...", "x" * 200, "run.1", "é", "-"])
def test_names_that_are_folders(name, tmp_path):
    validation.validate(config.Experiment(name=name))
    (tmp_path / f"compare-{name}.1000").mkdir()


# -- setting aside ----------------------------------------------------------


def test_a_link_stays_and_its_target_is_set_aside(tmp_path):
    target, link = tmp_path / "disk" / "a", tmp_path / "runs" / "link"
    target.mkdir(parents=True)
    link.parent.mkdir()
    link.symlink_to("../disk/a")
    (target / "result.json").write_text("{}")
    folder = RunFolder(str(link))
    folder.create()
    assert folder.set_aside() == tmp_path / "disk" / "a.1"
    folder.write("x.json", {})
    folder.release()
    assert link.is_symlink() and names(link.parent) == ["link"]
    assert names(target) == ["x.json"] and names(tmp_path / "disk" / "a.1") == ["result.json"]


def test_a_link_to_a_folder_to_come(tmp_path):
    (tmp_path / "link").symlink_to("disk/run")
    folder = RunFolder(str(tmp_path / "link"))
    folder.create()
    folder.write("x.json", {})
    folder.release()
    assert names(tmp_path / "disk" / "run") == ["x.json"]


def test_a_dangling_link_is_not_taken_for_a_free_name(begun, tmp_path):
    (tmp_path / "run.1").symlink_to("nowhere")
    assert begun.set_aside() == tmp_path / "run.2"


def test_the_folder_that_one_is_in_is_not_set_aside(tmp_path, monkeypatch):
    (tmp_path / "result.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"--workdir=\. holds an earlier run, and this command runs inside of it"):
        RunFolder(".").set_aside()
    assert names(tmp_path) == ["result.json"]


@pytest.fixture
def mounted(monkeypatch):
    """A folder that cannot be renamed, as one on which a disk is mounted; what is in it can."""

    def mount(path, number=errno.EBUSY):
        theirs = pathlib.Path.rename

        def rename(self, target):
            if self == path:
                raise OSError(number, os.strerror(number))
            return theirs(self, target)

        monkeypatch.setattr(pathlib.Path, "rename", rename)

    return mount


def test_a_run_where_a_disk_is_mounted_is_set_aside_within(begun, mounted):
    """A container that is started again has its volume there: it must not fail for ever."""
    mounted(begun.path)
    (begun.path / "logs").mkdir()
    was = {name: (begun.path / name).read_bytes() for name in ("experiment.json", "history.jsonl")}
    assert begun.set_aside() == begun.path / "earlier.1"
    assert not begun.holds_run and names(begun.path) == [".lock", "earlier.1", "logs"]
    assert {name: (begun.path / "earlier.1" / name).read_bytes() for name in was} == was
    begun.write("result.json", {})
    assert begun.set_aside() == begun.path / "earlier.2"
    assert names(begun.path) == [".lock", "earlier.1", "earlier.2", "logs"]


def test_a_folder_that_cannot_be_moved(begun, mounted):
    mounted(begun.path, errno.EIO)
    with pytest.raises(UserError, match=r"cannot be set aside \(Input/output error\): choose"):
        begun.set_aside()


# -- in mid-run -------------------------------------------------------------


def test_a_pipe_instead_of_a_file_is_not_waited_for(begun, said):
    """Nobody may ever read it."""
    (begun.path / "history.jsonl").unlink()
    os.mkfifo(begun.path / "history.jsonl")
    begun.append("history.jsonl", {"epoch": 2})
    assert said == [
        f"WARNING: {begun.path}/history.jsonl cannot be written (No such device or address): training goes on"
    ]


def test_a_folder_that_is_deleted_is_made_whole_again(begun, said):
    before = {name: (begun.path / name).read_text() for name in ("experiment.json", "environment.json")}
    shutil.rmtree(begun.path)
    begun.append("history.jsonl", {"epoch": 2})
    assert said == [
        f"WARNING: {begun.path} was deleted while this run went on: experiment.json, environment.json are written "
        "again, what history.jsonl and checkpoints held is lost"
    ]
    begun.write("result.json", {})
    assert {name: (begun.path / name).read_text() for name in before} == before and len(said) == 1
    assert json.loads((begun.path / "history.jsonl").read_text()) == {"epoch": 2}
    with pytest.raises(UserError, match="is in use by another run"):  # the lock is there again, too
        RunFolder(str(begun.path)).create()


def test_a_folder_that_another_run_has_taken(begun, tmp_path):
    shutil.rmtree(begun.path)
    other = RunFolder(str(begun.path))
    other.create()
    for action in (
        lambda: begun.append("history.jsonl", {"epoch": 2}),
        lambda: begun.write("result.json", {}),
        lambda: begun.save_model(None),
    ):
        with pytest.raises(TrainingError, match="was deleted while this run went on, and another one has taken its"):
            action()
    assert names(begun.path) == [LOCK]
    begun.release()
    assert names(begun.path) == [LOCK], "the lock is the other run's"
    other.release()


@pytest.mark.parametrize("method", ["unlink", "mkdir"])
def test_a_disk_that_becomes_read_only_is_one_line(method, begun, monkeypatch):
    """The report is there by then, and cannot be deleted to make room."""

    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    begun.write_text("report.html", "")
    monkeypatch.setattr(os, "replace", read_only)
    monkeypatch.setattr(pathlib.Path, method, read_only)
    with pytest.raises(TrainingError, match=r"result.json cannot be written \(Read-only file system\): free or repair"):
        results.write(begun, Result(**dict.fromkeys(Result.__dataclass_fields__)), None, silent=True)


# -- without touching it ----------------------------------------------------


def test_a_dry_run_looks_whether_the_folder_could_be_made(begun, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    before = names(tmp_path)
    for path in ("file", "file/x"):
        with pytest.raises(UserError, match=r"cannot be written \(\S+/file is no folder\): choose another folder"):
            RunFolder(str(tmp_path / path), writes=False).could_be_created()
    with pytest.raises(UserError, match=r"is in use by another run \(process \d+ on "):
        RunFolder(str(begun.path), writes=False).could_be_created()
    RunFolder(str(tmp_path / "a" / "b"), writes=False).could_be_created()
    begun.release()
    RunFolder(str(begun.path), writes=False).could_be_created()
    assert names(tmp_path) == before


def test_a_folder_without_the_right_to_write(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(UserError, match=r"cannot be written \(Permission denied\)"):
        RunFolder(str(tmp_path / "run"), writes=False).could_be_created()
