"""The run folder on a bad day: links, deletion in mid-run, disks that become read-only."""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import keras
import numpy as np
import psutil
import pytest
from conftest import REPOSITORY
from support import processes

from tfdist import config
from tfdist.checkpoints import folder_lock, own_work
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.cluster import env_vars
from tfdist.config import schedule, validation
from tfdist.errors import TrainingError, UserError
from tfdist.monitoring.recorder import Recorder, Result
from tfdist.train import run


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
        with pytest.raises(TrainingError, match="was deleted while this run went on, and another run has taken its"):
            action()
    assert names(begun.path) == [folder_lock.LOCK]
    begun.release()
    assert names(begun.path) == [folder_lock.LOCK], "the lock is the other run's"
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
        run.write_result(begun, Result(**dict.fromkeys(Result.__dataclass_fields__)), silent=True)


# -- without touching it ----------------------------------------------------


def test_a_dry_run_looks_whether_the_folder_could_be_made(begun, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    before = names(tmp_path)
    for path in ("file", "file/x"):
        with pytest.raises(UserError, match=r"cannot be written \(\S+/file is not a folder\): choose another folder"):
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


# -- what is known before the training, and not after it ---------------------


def test_a_umask_that_takes_the_user_s_own_rights(tmp_path):
    """The folder can be written, and no checkpoint within: root needs that capability taken away to see it."""
    if not os.geteuid() and not shutil.which("setpriv"):
        pytest.skip("setpriv is not installed")
    rights = [] if os.geteuid() else ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    code = (
        "import sys; from tfdist.checkpoints.run_folder import RunFolder; from tfdist.errors import UserError\n"
        "try: RunFolder(sys.argv[1]).create()\n"
        "except UserError as error: sys.exit(f'refused: {error}')"
    )
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for mask, message in ((0o277, "(Permission denied): set umask 022 instead of 277"), (0o077, "")):
        path = tmp_path / f"{mask:o}"
        path.mkdir()
        done = processes.run(
            [*rights, sys.executable, "-c", code, path], umask=mask, env=environ, text=True, stderr=processes.PIPE
        )
        expected = f"refused: --workdir={path} cannot be written {message}\n" if message else ""
        assert (done.returncode, done.stderr) == (int(bool(message)), expected)
        assert names(path) in ([], [folder_lock.LOCK])


def test_a_model_is_saved_though_the_clock_is_before_1980(tmp_path, monkeypatch):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    monkeypatch.setattr(time, "time", lambda: 86400.0)
    RunFolder(str(tmp_path)).save_model(model)
    monkeypatch.undo()
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert all(np.array_equal(a, b) for a, b in zip(again.get_weights(), model.get_weights(), strict=True))
    assert zipfile.ZipInfo("x", (2024, 1, 2, 3, 4, 6)).date_time[0] == 2024


def test_the_lines_at_the_end_name_only_what_is_there(begun, monkeypatch):
    def put(name, text, put=begun._put):
        if name == "report.html":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(name, text)

    monkeypatch.setattr(begun, "_put", put)
    result = Result(**{f.name: 0 for f in dataclasses.fields(Result)} | {"status": "completed", "evaluation": {}})
    run.write_result(begun, result)
    assert run.result_lines(result, begun).endswith("/: result.json")
    for there in (False, True):
        if there:
            (begun.checkpoints / "7").mkdir(parents=True)
        with pytest.raises(TrainingError) as error:
            begun.write_text("report.html", "")
        assert str(error.value).endswith("; the existing checkpoints are kept") == there


def test_seconds_of_a_run_are_those_that_have_passed(begun, monkeypatch):
    """NTP and a battery that is empty set the clock: the result of a run then had negative seconds."""
    recorder = Recorder(begun, schedule.make(config.Experiment(), 1437, 1))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    recorder.on_train_batch_end(0)
    assert 0 <= recorder.seconds < 3600 and 0 < recorder.first_update < 24 * 3600
    recorder.set_state({**recorder.get_state(), "seconds": 1000.0})
    assert recorder.get_state()["seconds"] >= 1000


# -- processes that a run leaves behind -------------------------------------

OWNER = """
import ctypes, multiprocessing, os, signal, sys
from tfdist.checkpoints.run_folder import RunFolder

folder = RunFolder(sys.argv[1])
folder.create()
if sys.argv[2] == "os.fork":
    begun, begins = os.pipe()
    child = os.fork() or os.write(begins, b"x") and os.read(0, 1)
    os.read(begun, 1)
elif sys.argv[2] == "C":
    child = ctypes.PyDLL(None).fork() or os.read(0, 1)
elif sys.argv[2] == "Pool":
    pool = multiprocessing.get_context("fork").Pool(1)
    child = pool.apply(os.getpid)
    pool.apply_async(os.read, (0, 1))
else:
    manager = multiprocessing.get_context("fork").Manager()
    child = manager._process.pid
print(child, flush=True)
signal.pause()
"""


@pytest.fixture
def orphan(tmp_path):
    """Kills a process that has taken the folder, and returns the child that it had forked before, which goes on."""
    children = []

    def left_by(way):
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(tmp_path / "run"), way], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        children.append(owner)
        child = psutil.Process(int(owner.stdout.readline()))
        children.append(child)
        with pytest.raises(UserError, match=f"is in use by another run .process {owner.pid} on "):
            RunFolder(str(tmp_path / "run")).create()
        owner.kill()
        owner.wait()
        assert child.is_running()
        yield owner.pid, child.pid
        assert child.is_running(), "it was to outlive the run"

    yield contextlib.contextmanager(left_by)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    for pipe in (children[0].stdin, children[0].stdout):
        pipe.close()


@pytest.mark.parametrize("way", ["os.fork", "Pool", "Manager"])
def test_a_child_that_outlives_a_killed_run_does_not_keep_its_folder(way, orphan, tmp_path):
    with orphan(way):
        again = RunFolder(str(tmp_path / "run"))
        again.create()
        again.release()


def test_that_a_folder_is_kept_by_a_child_of_a_run_that_is_gone_is_told(orphan, tmp_path):
    """Python does not see the fork of a C library, and the lock goes with it."""
    with orphan("C") as (owner, _), pytest.raises(UserError) as error:
        RunFolder(str(tmp_path / "run")).create()
    assert f"is locked by what a run that has ended (process {owner} on " in str(error.value)


def test_a_lock_whose_owner_is_dead_is_waited_for(orphan, tmp_path, monkeypatch):
    """The system ends the workers of a launcher that was killed, but not at once."""
    again = RunFolder(str(tmp_path / "run"))
    with contextlib.suppress(AssertionError), orphan("C") as (_, child):  # which does not outlive the run
        dying = psutil.Process(child)

        def end(_):
            dying.kill()
            dying.wait()

        monkeypatch.setattr(folder_lock.time, "sleep", end)
        again.create()
    assert not dying.is_running()
    again.release()


@pytest.fixture
def lent(begun, monkeypatch):
    """The descriptor by which the one who has begun lends the lock."""
    number = begun.lend()
    monkeypatch.setenv(env_vars.FOLDER_LOCK, str(number))
    return number


def test_a_lock_that_is_lent_is_held_by_both(begun, lent, said):
    worker, rival = RunFolder(str(begun.path)), RunFolder(str(begun.path))
    worker.create()
    worker.release()  # of its share
    with pytest.raises(UserError, match=f"is in use by another run .process {os.getpid()} on "):
        rival.create()
    os.environ[env_vars.FOLDER_LOCK] = str(begun.lend())
    worker.create()
    begun.forget()  # as when it is killed
    with pytest.raises(UserError, match="is in use by another run"):
        rival.create()
    worker.release()
    rival.create()
    rival.release()
    assert not said


def test_who_was_lent_the_lock_of_a_folder_that_is_deleted_has_one_of_its_own(begun, lent, said):
    worker = RunFolder(str(begun.path))
    worker.create()
    shutil.rmtree(begun.path)
    worker.append("history.jsonl", {})
    with pytest.raises(UserError, match="is in use by another run"):
        begun.reserve()
    worker.release()
    begun.reserve()
    assert names(begun.path) == [folder_lock.LOCK, "history.jsonl"]


@pytest.mark.parametrize("claim", ["-1", "x", "999999999", "99999999999999999999", "{other}", "{opened}"])
def test_who_only_says_that_it_was_lent_the_lock_is_refused(claim, begun, monkeypatch):
    with (begun.path / "experiment.json").open() as other, (begun.path / folder_lock.LOCK).open() as opened:
        monkeypatch.setenv(env_vars.FOLDER_LOCK, claim.format(other=other.fileno(), opened=opened.fileno()))
        with pytest.raises(UserError, match="is in use by another run"):
            RunFolder(str(begun.path)).create()


def test_a_forked_child_leaves_the_folder_alone(begun):
    """It has inherited the object, and may come upon its parent's `finally` when it ends by sys.exit."""
    before = {path.name: path.read_bytes() for path in begun.path.iterdir()}
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            begun.write("result.json", {})
            begun.append("history.jsonl", {"epoch": 2})
            begun.remove("environment.json")
            begun.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert {path.name: path.read_bytes() for path in begun.path.iterdir()} == before
    with pytest.raises(UserError, match="is in use by another run"):
        RunFolder(str(begun.path)).create()
    begun.write("result.json", {})
    assert (begun.path / "result.json").exists()


ENDS_BY_EXIT = """
import os, sys
from tfdist.config import local_files
from tfdist.cluster.peers import Peers
from tfdist.trainer import worker_session

folder, peers, child = local_files.temporary_folder(), Peers(), 0

def work():
    global child
    child = os.fork()
    if child == 0:
        sys.exit(3)

if sys.argv[1] == "training":
    try:
        worker_session.reporting_failures(peers, work)
    finally:
        print("after the training", flush=True)
else:
    work()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
print(folder.is_dir())
"""


@pytest.mark.parametrize("where", ["training", "program"])
def test_a_forked_child_that_ends_by_sys_exit_leaves_the_end_of_the_run_to_its_parent(where):
    """It comes upon all that is to be done when a run fails, and upon the exit handlers of its process."""
    # Newer Pythons warn of a fork where NumPy has threads.
    command = [sys.executable, "-W", "ignore", "-c", ENDS_BY_EXIT, where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n") == [*["after the training"] * (where == "training"), "True", ""], done.stderr
    assert (done.returncode, done.stderr) == (0, "")


GETS_A_SIGNAL = """
import multiprocessing, os, select, signal, sys, threading
from tfdist.config.commands import command_line
from tfdist.trainer.worker_session import Signals

def answers(connection):
    while True:
        connection.send(connection.recv() + 1)

def run(argv):
    with Signals() as signals:
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=answers, args=(theirs,), daemon=True)
        child.start()
        ours.send(0), ours.recv()
        print("ready", flush=True)
        sys.stdin.readline()
        assert signals.received
        ours.send(41)
        print(ours.recv(), flush=True)
    if what == "thread":
        command_line.EXIT_S = 0.1
        threading.Thread(target=threading.Event().wait).start()
    elif what == "process":
        command_line.EXIT_S = 0.1
        multiprocessing.get_context("fork").Process(target=threading.Event().wait).start()
    return 143

sys.argv, what = sys.argv[:1], sys.argv[1]
command_line.main(run, command_line.parse_own)
"""


@pytest.mark.parametrize("what", ["pool", "thread", "process"])
def test_a_run_that_a_signal_has_stopped_ends_whatever_its_code_has_started(what):
    """A signal to the process group reaches its children, too: they answer until the run's end, and end then."""
    run = subprocess.Popen(
        [sys.executable, "-c", GETS_A_SIGNAL, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        assert run.stdout.readline() == "ready\n"
        os.killpg(run.pid, signal.SIGTERM)
        out, said = run.communicate("go on\n", timeout=20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert (out, run.returncode) == ("42\n", 143), said  # the children have closed their standard output, too
    assert ("was started here has not ended within 0.1 s" in said) == (what != "pool")
