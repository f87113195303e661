"""`result.json` tells of each start of the workers; the launcher and the checkpoints are played here."""

import json

import pytest

from tfdist.cluster.discovery import Cluster
from tfdist.monitoring import segments as segments_lib
from tfdist.monitoring.segments import Segments


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(segments_lib.time, "time", lambda: now[0])
    return now


def started(attempt, workers, nodes=1, rounds=(), launch="a"):
    told = {"launch": launch, "nodes": nodes, "rounds": [*rounds]}
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
