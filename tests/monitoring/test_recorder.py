"""`history.jsonl` of a run that goes on from a checkpoint, and the starts of the workers in `result.json`."""

import errno
import json

import keras
import pytest

from tfdist import config
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.cluster.discovery import Cluster
from tfdist.config import local_files, schedule
from tfdist.monitoring import recorder as recorder_lib
from tfdist.monitoring.recorder import HISTORY, TIMELINE, Recorder, Segments


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture
def recording(tmp_path, model):
    def make():
        recorder = Recorder(RunFolder(str(tmp_path)), schedule.make(config.Experiment(), 1000, 1))
        recorder.set_model(model)
        return recorder

    return make


def train(recorder, epochs):
    for epoch in epochs:
        recorder.on_epoch_begin(epoch)
        recorder.on_train_batch_end(9)
        recorder.on_epoch_end(epoch, {"loss": 1 / (epoch + 1)})


def lines(folder):
    return [json.loads(line) for line in (folder / HISTORY).read_text().splitlines()]


@pytest.fixture
def interrupted(recording, tmp_path):
    """The lines and the checkpoint of a run of three epochs and one that went back, and another epoch after it."""
    recorder = recording()
    train(recorder, range(2))
    recorder.on_rollback(20, [20, 21])
    train(recorder, [2])
    state, written = json.loads(json.dumps(recorder.get_state())), lines(tmp_path)
    train(recorder, [3])
    recorder.evaluated({"loss": 0.1})
    assert len(lines(tmp_path)) == 6 and len(written) == 4
    return written, state


DAMAGES = {
    "none": (lambda raw: raw, 0), "cut off": (lambda raw: raw + b'{"epoch": 7, "upd', 0),
    "missing": (lambda raw: None, 4), "no text": (lambda raw: b"\xff" + raw[1:], 1),
    "another digit": (lambda raw: raw.replace(b'"loss": 0.5', b'"loss": 0.7'), 1),
    "another number of updates": (lambda raw: raw.replace(b'"updates": 10,', b'"updates": "x",'), 1),
    "a line that is two": (lambda raw: raw.replace(b'"loss": 0.5', b'"loss"\n 0.5'), 1),
    "without its beginning": (lambda raw: raw.partition(b"\n")[2], 1),
}  # fmt: skip


@pytest.mark.parametrize("damage, lost", DAMAGES.values(), ids=DAMAGES)
def test_a_resume_writes_the_lines_again_that_a_checkpoint_knows(damage, lost, interrupted, recording, tmp_path, said):
    written, state = interrupted
    content = damage((tmp_path / HISTORY).read_bytes())
    (tmp_path / HISTORY).unlink() if content is None else (tmp_path / HISTORY).write_bytes(content)
    recorder = recording()
    recorder.set_state(state)
    assert lines(tmp_path) == written
    warning = f"WARNING: {tmp_path}/{HISTORY} is damaged: {lost} of its lines are written again from the checkpoint"
    assert said == [warning] * bool(lost)
    train(recorder, [3])
    assert recorder.get_state()["lines"] == lines(tmp_path) and len(lines(tmp_path)) == 5


def test_a_checkpoint_of_an_earlier_version_knows_no_lines(interrupted, recording, tmp_path, said):
    written, state = interrupted
    del state["lines"]
    (tmp_path / HISTORY).write_bytes(b"\xff" + (tmp_path / HISTORY).read_bytes()[1:])
    recorder = recording()
    recorder.set_state(state)
    assert lines(tmp_path) == written[1:] == recorder.get_state()["lines"]
    assert said == [f"WARNING: {tmp_path}/{HISTORY} is damaged: 1 of its lines cannot be read and are left out"]


def test_going_back_keeps_what_was_noted_of_going_back(recording, tmp_path, said):
    recorder = recording()
    train(recorder, range(1))
    state = json.loads(json.dumps(recorder.get_state()))
    for skipped in ([10], [10, 11]):
        train(recorder, [1])
        recorder.set_state(state)
        recorder.on_rollback(10, skipped)
    assert [line.get("rollback", {}).get("skipped") for line in lines(tmp_path)] == [None, [10], [10, 11]] and not said
    later = recording()
    later.set_state(recorder.get_state())
    assert later.rollbacks == recorder.rollbacks == [{"to": 10, "skipped": [10]}, {"to": 10, "skipped": [10, 11]}]


def test_lines_that_wait_for_the_disk_come_into_their_own_file(tmp_path, monkeypatch):
    folder, opened = RunFolder(str(tmp_path)), local_files.opened_to_append

    def full(path):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(local_files, "opened_to_append", full)
    folder.append(TIMELINE, {"a": 1})
    folder.append(HISTORY, {"b": 1})
    monkeypatch.setattr(local_files, "opened_to_append", opened)
    folder.append(HISTORY, {"b": 2})
    folder.append(TIMELINE, {"a": 2})
    assert (tmp_path / HISTORY).read_text() == '{"b": 1}\n{"b": 2}\n'
    assert (tmp_path / TIMELINE).read_text() == '{"a": 1}\n{"a": 2}\n'


# -- starts of the workers: the launcher and the checkpoints are played here


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(recorder_lib.time, "time", lambda: now[0])
    return now


def started(attempt, workers, nodes=1, rounds=(), launch="a"):
    told = {"launch": launch, "since": 90.0, "nodes": nodes, "rounds": [*rounds]}
    return Segments(Cluster("tfdist.launch", 0, workers, attempt=attempt), {"TFDIST_ROUNDS": json.dumps(told)})


def brief(rows):
    keys = ("attempt", "nodes", "workers", "from_update", "updates", "ended", "seconds_lost")
    assert all(set(row) == set(keys) for row in rows)
    return [tuple(row[key] for key in keys) for row in rows]


def test_a_run_that_nothing_has_started_again():
    alone = Segments()
    alone.updated()
    assert brief(alone.record(30, "completed")) == [(0, 1, 1, 0, 30, "completed", None)]


def test_what_was_kept_of_each_and_what_was_lost(clock):
    """The second saves nothing before it ends, and the third makes its updates again."""
    first = started(0, 2, 2)
    first.updated()
    clock[0] = 140.0
    state = json.loads(json.dumps(first.get_state()))  # a checkpoint at update 10
    rounds = [[2, 2, "node 1 is lost", 150.0]]
    clock[0] = 160.0
    second = started(1, 1, 1, rounds)
    second.resume(10, state)
    second.updated()
    rounds.append([1, 1, "node 2 joined", 170.0])
    clock[0] = 175.5
    third = started(2, 3, 2, rounds)
    third.resume(10, state)
    third.updated()
    assert brief(third.record(40, "completed")) == [
        (0, 2, 2, 0, 10, "node 1 is lost", None),  # when the second made its first update, no checkpoint knows
        (1, 1, 1, 10, 0, "node 2 joined", 5.5),
        (2, 2, 3, 10, 30, "completed", None),
    ]
    clock[0] = 195.5
    parts = {"start": 10.0, "recomputed": 10.0, "restarts": 25.5, "training": 60.0}
    assert third.goodput() == {"share": round(60 / 105.5, 4), **parts}
    second.resume(10, second.get_state())
    assert brief(second.record(20, "stopped")) == [
        (0, 2, 2, 0, 10, "node 1 is lost", 10.0),
        (1, 1, 1, 10, 10, "stopped", None),
    ]


def test_a_clock_that_is_set_back_gives_no_negative_time(clock):
    first = started(0, 1)
    first.updated()
    clock[0] = 50.0
    second = started(1, 1, 1, [[1, 1, "killed", 150.0]])
    second.resume(10, first.get_state())
    second.updated()
    third = started(2, 1, 1, [[1, 1, "killed", 150.0], [1, 1, "killed", 151.0]])
    third.resume(20, second.get_state())
    assert [row["seconds_lost"] for row in third.record(40, "completed")] == [0.0, None, None]


def test_a_run_that_goes_back_to_before_it_has_begun():
    one = started(1, 1, rounds=[[1, 1, "x", 1.0]])
    one.resume(10, {})
    one.resume(5, one.get_state())  # a rollback
    one.resume(20, one.get_state())
    assert [row["from_update"] for row in one.record(30, "completed")] == [5, 5]


def test_checkpoints_of_another_launch_tell_nothing():
    before = started(0, 2, launch="b")
    before.updated()
    one = started(1, 1, rounds=[[1, 1, "x", 1.0]])
    one.resume(10, before.get_state())
    assert [row["from_update"] for row in one.record(30, "completed")] == [10, 10]
