"""`tfdist.launch --nnodes=MIN:MAX`: nodes come and go while the job runs. Launchers meet over the loopback device."""

import json
import math
import re
import signal
import socket

import pytest
from support.covering import first
from support.launchers import free_port, launch, marked, planned  # noqa: F401  two are fixtures

from tfdist import config
from tfdist.errors import UserError
from tfdist.launch import machines
from tfdist.launch import plan as launch_plan
from tfdist.launch.failure_policy import AttemptOutcome

HOST = socket.gethostname()
STAGES = r'''
"""A worker that does one thing in each round: arguments are what to do in the first, the second, and so on."""
import os, signal, sys
attempt = int(os.environ["TFDIST_ATTEMPT"])
def saved(*_):
    print("saved", flush=True)
    os._exit(143)
def hold():
    while True:
        signal.pause()
what, _, value = sys.argv[1:][min(attempt, len(sys.argv) - 2)].partition(":")
if what == "hold":
    signal.signal(signal.SIGTERM, saved)
elif what == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(*(f"{n}={os.environ[n]}" for n in ("TFDIST_ATTEMPT", "RANK", "WORLD_SIZE", "GROUP_RANK")), flush=True)
if what in ("hold", "deaf"):
    hold()
elif what == "odd":
    os._exit(2) if os.environ["RANK"] == "1" else hold()
elif what == "exit":
    os._exit(int(value))
elif what == "rounds":
    print(os.environ.get("TFDIST_ROUNDS", "nothing"), flush=True)
'''


@pytest.fixture
def node(launch, tmp_path):  # noqa: F811
    """Starts the launcher of another node."""
    (tmp_path / "stages.py").write_text(STAGES)
    port = free_port()

    def start(*stages, nnodes="1:2", flags=()):
        where = [f"--nnodes={nnodes}", "--master_addr=127.0.0.1", f"--master_port={port}"]
        return launch(*where, *flags, "--", "stages.py", *stages)

    start.port = port
    return start


def place(attempt, rank, world, group):
    return f"TFDIST_ATTEMPT={attempt} RANK={rank} WORLD_SIZE={world} GROUP_RANK={group}"


ALONE = ["--join_timeout=0", "--scale_wait=0"]


@pytest.fixture
def pair(node):
    """Starts two nodes, of which the first leads, and waits until the workers of both run."""

    def start(*stages, nnodes="1:2", flags=(), leads=()):
        zero = node(*stages, nnodes=nnodes, flags=[*flags, *leads])
        zero.until("waiting for ")
        one = node(*stages, nnodes=nnodes, flags=flags)
        zero.until(place(0, 0, 2, 0))
        one.until(place(0, 1, 2, 1))
        return zero, one

    return start


def test_a_node_that_comes_later_joins(node):
    program = ["hold", "end"]
    zero = node(*program, flags=ALONE)
    zero.until(place(0, 0, 1, 0))
    one = node(*program, flags=ALONE)
    assert (zero.end(), one.end()) == (0, 0), zero.err + one.err
    assert zero.said("[0] ") == [place(0, 0, 1, 0), "saved", place(1, 0, 2, 0)]
    assert one.said("[1] ") == [place(1, 1, 2, 1)]
    joins = f"tfdist: node 1 ({HOST}) joins: the workers stop after the update in progress"
    assert joins in zero.out and joins in one.out
    assert not zero.err and not one.err


@pytest.mark.parametrize("restarts", [pytest.param("0", marks=pytest.mark.whole), "1"])
def test_a_node_that_dies_is_gone_on_without_and_no_restart_is_counted(restarts, pair):
    zero, one = pair("hold", f"exit:{3 * int(restarts)}", "end", flags=[f"--max_restarts={restarts}"])
    zero.until("waiting for up to 1 more node")
    one.signal(signal.SIGKILL)
    assert zero.end() == 0, zero.err
    assert zero.said("[0] ")[-1] == place(1 + int(restarts), 0, 1, 0)
    assert f"tfdist: node 1 ({HOST}) is lost: connection " in zero.err[0]
    assert len([line for line in zero.err if "root cause" in line]) == int(restarts)
    assert len([line for line in zero.out if "restart 1 of 1" in line]) == int(restarts)


def test_a_node_that_is_asked_to_stop_leaves_and_the_others_go_on(node):
    program = ["hold", "end"]
    zero = node(*program)
    one = node(*program)
    for launcher in (zero, one):
        launcher.until("TFDIST_ATTEMPT=0")
    leader, other = (zero, one) if zero.said("[0] ") else (one, zero)
    other.signal(signal.SIGTERM)
    assert (leader.end(), other.end()) == (0, 143), zero.err + one.err
    assert leader.said("[0] ")[1:] == ["saved", place(1, 0, 1, 0)] and other.said("[1] ")[1:] == ["saved"]
    assert other.err[-1] == "tfdist: SIGTERM: this node has left the job"


@pytest.mark.whole
def test_node_0_that_is_asked_to_stop_stops_all(node):
    zero = node("hold", flags=["--node_rank=0"])
    one = node("hold", flags=["--node_rank=1"])
    zero.until(place(0, 0, 2, 0))
    one.until(place(0, 1, 2, 1))
    zero.signal(signal.SIGTERM)
    assert (zero.end(), one.end()) == (143, 143)
    assert zero.said("[0] ")[1:] == one.said("[1] ")[1:] == ["saved"]


@pytest.mark.whole
def test_too_few_are_left_and_nobody_comes(node, pair):
    zero, one = pair("hold", nnodes="2:3", flags=["--rejoin_timeout=1"], leads=["--join_timeout=0"])
    zero.until("waiting for 1 more node of at least 2 at 127.0.0.1:")
    one.signal(signal.SIGKILL)
    assert zero.end() == 1
    assert zero.err[-1] == (
        f"tfdist: error: timed out after 1 s waiting for 1 more node of at least 2 at 127.0.0.1:{node.port}: start "
        f"python -m tfdist.launch --nnodes=2:3 --master_addr=127.0.0.1 --master_port={node.port} ... there, or raise "
        "--rejoin_timeout"
    )


def test_too_few_are_left_and_another_one_comes(node, pair):
    zero, one = pair("hold", "end", nnodes="2:3", leads=["--join_timeout=0"])
    one.signal(signal.SIGKILL)
    zero.until("is lost")
    two = node("hold", "end", nnodes="2:3")
    assert (zero.end(), two.end()) == (0, 0), zero.err + two.err
    assert two.said("[1] ") == [place(1, 1, 2, 1)]


@pytest.mark.whole
def test_too_few_at_the_start(node):
    zero = node("end", nnodes="3:4", flags=["--start_timeout=1"])
    assert zero.end() == 2
    assert len(zero.err) == 1
    assert "error: timed out after 1 s waiting for 2 more nodes of at least 3 at 127.0.0.1:" in zero.err[0]


@pytest.mark.whole
def test_a_failure_of_the_program_is_none_of_the_membership(node):
    zero = node("exit:3")
    zero.until("waiting for up to 1 more node")
    one = node("exit:3")
    assert (zero.end(), one.end()) == (3, 3)
    assert "root cause: rank " in zero.err[0] and not any("is lost" in line for line in zero.err + one.err)


@pytest.mark.whole
def test_one_that_finds_no_place_waits_for_one(node, pair):
    program = ["hold", "hold", "end"]
    zero, one = pair(*program)
    two = node(*program)
    two.until(f"node 2 ({HOST}) waits for a place among 2 nodes")
    one.signal(signal.SIGKILL)
    two.until(place(1, 1, 2, 1))
    zero.until(place(1, 0, 2, 0))
    three = node(*program)  # and one that waits may go again
    three.until("waits for a place")
    three.signal(signal.SIGINT)
    assert three.end() == 130
    assert three.err == ["tfdist: SIGINT: this node has left the job"]
    two.signal(signal.SIGTERM)
    assert (zero.end(), two.end()) == (0, 143), zero.err + two.err
    assert zero.said("[0] ")[-1] == place(2, 0, 1, 0)


@pytest.mark.whole
def test_several_that_come_join_at_once(node):
    program = ["hold", "rounds"]
    flags = ["--join_timeout=0", "--scale_wait=1000"]
    zero = node(*program, nnodes="1:3", flags=flags)
    zero.until(place(0, 0, 1, 0))
    one = node(*program, nnodes="1:3", flags=flags)
    one.until("has joined")
    two = node(*program, nnodes="1:3", flags=flags)  # with it there are as many as there may be
    assert (zero.end(), one.end(), two.end()) == (0, 0, 0), zero.err
    assert zero.said("[0] ")[2] == place(1, 0, 3, 0)
    told = json.loads(zero.said("[0] ")[3])
    assert told["nodes"] == 3
    [[nodes, workers, why, _]] = told["rounds"]
    assert (nodes, workers, why) == (1, 1, f"node 1 ({HOST}), node 2 ({HOST}) joined")
    assert one.said("[1] ")[1] == "nothing"  # only the chief records


@pytest.mark.whole
def test_a_launcher_that_does_not_fit_is_turned_away_alone(node):
    zero = node("hold", "end", flags=ALONE)
    zero.until(place(0, 0, 1, 0))
    for nnodes, flags, stages, message in [
        ("1:3", [], ["hold", "end"], "differs from node 0 in --nnodes: 1:3 and 1:2: start all nodes with the same"),
        ("2", ["--node_rank=1"], ["hold", "end"], "differs from node 0 in --nnodes: 2 and 1:2"),
        ("1:2", [], ["hold"], "differs from node 0 in the command: "),
    ]:
        odd = node(*stages, nnodes=nnodes, flags=flags)
        assert odd.end() == 2
        assert len(odd.err) == 1 and message in odd.err[0]
        assert message in zero.until(message)
    one = node("hold", "end", flags=ALONE)
    assert (zero.end(), one.end()) == (0, 0)


def test_a_node_with_which_the_program_refuses_to_run_is_sent_away(node):
    """Another data set or processor there, say: the job goes on as it was."""
    program = ["hold", "odd", "end"]
    zero = node(*program, flags=ALONE)
    zero.until(place(0, 0, 1, 0))
    one = node(*program, flags=ALONE)
    assert (zero.end(), one.end()) == (0, 2), zero.err + one.err
    assert zero.said("[0] ")[-1] == place(2, 0, 1, 0)
    assert re.fullmatch(
        rf"tfdist: error: node 1 \({HOST}\) cannot take part: rank 1 \(on {HOST}, process \d+\) ended with exit code 2",
        one.err[-1],
    )


@pytest.mark.whole
def test_node_0_by_hand_where_another_one_is(node):
    zero = node("hold", "end", flags=["--node_rank=0", *ALONE])
    zero.until(place(0, 0, 1, 0))
    again = node("hold", "end", flags=["--node_rank=0"])
    assert again.end() == 2
    assert again.err == [
        f"tfdist: error: --master_port={node.port} is taken on 127.0.0.1: choose another, the same on all nodes"
    ]
    zero.signal(signal.SIGTERM)
    assert zero.end() == 143


@pytest.mark.whole
def test_a_node_that_is_cut_off_comes_back(pair):
    """As when a cable is pulled and put back: no end of a connection is ever seen by the one who stays."""
    zero, one = pair("hold", "hold", "end", leads=ALONE[1:])
    one.signal(signal.SIGSTOP)
    zero.until(f"node 1 ({HOST}) is lost: silent for ")
    zero.until(place(1, 0, 1, 0))
    one.signal(signal.SIGCONT)
    assert (zero.end(), one.end()) == (0, 0), zero.err + one.err
    assert one.said("[1] ")[-1] == place(2, 1, 2, 1)
    assert f"root cause: node 0 ({HOST}) is lost: " in one.until("root cause")


@pytest.mark.whole
def test_node_0_that_dies_ends_the_job(node, pair):
    zero, one = pair("hold", flags=["--rejoin_timeout=1"])
    zero.signal(signal.SIGKILL)
    assert one.end() == 1
    assert f"error: timed out after 1 s waiting for node 0 at 127.0.0.1:{node.port} (" in one.err[-1]


ELASTIC = ["--master_addr=127.0.0.1", "--nnodes=2:4"]
NOT_A_RANGE = "--nnodes must be an integer of at least 1, or MIN:MAX such as 2:4, got "


@pytest.mark.parametrize("size", [":", "a:b", "2:", ":3", "1:2:3", "-1:2", "2:-1", "2.0:4", "2: 4", "2:9999999999"])
def test_what_is_no_range_of_nodes(size, planned):  # noqa: F811
    with pytest.raises(UserError) as caught:
        planned(f"--nnodes={size}", "--", "actor.py")
    assert str(caught.value) == NOT_A_RANGE + size


@pytest.mark.parametrize("size", ["4:2", "0:3", "0:1", "1:1", "4:0", "2:1000000"])
def test_a_range_of_nodes_that_cannot_be(size, planned):  # noqa: F811
    with pytest.raises(UserError) as caught:
        planned(f"--nnodes={size}", *ELASTIC[:1], "--", "actor.py")
    assert str(caught.value) == f"--nnodes={size} is MIN:MAX, where MIN is 1 to MAX, and MAX 2 to 100000"


@pytest.mark.parametrize("flags", [["--nnodes="], ["--nnodes=2", "--node_rank="], ["--nnodes=2:4", "--node_rank="]])
def test_an_empty_number_is_not_taken_for_none(flags, planned):  # noqa: F811
    """It is that of a script whose variable is not set, on all nodes."""
    with pytest.raises(UserError, match=rf"{flags[-1]}? must be an integer of at least \d, got nothing$"):
        planned(*flags, *ELASTIC[:1], "--", "actor.py")


@pytest.mark.parametrize(
    "arguments, environ, message",
    [
        (ELASTIC, dict(TF_CONFIG="{}"), "the number of nodes change, and TF_CONFIG fixes it: unset that, or give"),
        (ELASTIC, dict(SLURM_STEP_NUM_TASKS="3"), "change, and SLURM_STEP_NUM_TASKS=3 fixes it: unset that, or give"),
        (ELASTIC, dict(MLP_WORKER_NUM="2", MLP_ROLE_INDEX="1", MLP_WORKER_0_HOST="w", MLP_WORKER_0_PORT="7"),
         "change, and MLP_WORKER_NUM=2 fixes it"),
        (["--nnodes=2:4"], {}, "--nnodes=2:4 needs --master_addr: the address of node 0"),
        (["--nnodes=2:4", "--master_addr=10.0.0.5"], {}, "--nnodes=2:4 needs TFDIST_SECRET in the environment"),
        ([*ELASTIC, "--master_port=0"], {}, "--master_port=0 means any free port, which other nodes cannot know"),
        ([*ELASTIC, "--join_timeout=-1"], {}, "--join_timeout must be a number of seconds, got -1"),
        ([*ELASTIC, "--scale_wait=nan"], {}, "--scale_wait must be a number of seconds, got nan"),
        ([*ELASTIC, "--rejoin_timeout=0"], {}, "--rejoin_timeout must be a positive number of seconds, got 0"),
        (["--join_timeout=3"], {}, "--join_timeout is for --nnodes=MIN:MAX, where nodes may join and leave"),
        (["--nnodes=2", "--scale_wait=3"], {}, "--scale_wait is for --nnodes=MIN:MAX"),
        (["--rejoin_timeout=3"], {}, "--rejoin_timeout is for --nnodes=MIN:MAX"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_a_range_of_nodes(arguments, environ, message, planned):  # noqa: F811
    with pytest.raises(UserError, match=re.escape(message)):
        planned(*arguments, "--", "actor.py", **environ)


@pytest.mark.parametrize(
    "fields, requeue, message",
    [
        ({}, True, "--requeue after -- would put the whole job into the queue whenever a node joins or leaves"),
        ({"batch_size": 3}, False, "may become 4 workers, too many for train.batch_size=3: use at least 4, or fewer"),
        ({"accumulate": 13}, False,
         "may become 4 workers, too many for train.batch_size=32: use at least 52, or fewer"),
        ({"virtual_replicas": 3}, False,
         "may become 4 workers, too many for train.virtual_replicas=3: use at least 4, or fewer nodes"),
        (None, False, "--nnodes=2:4 needs checkpoints to go on from, and checkpoint.every=off: set it to a time"),
    ],
)  # fmt: skip
def test_experiments_that_do_not_go_with_a_range_of_nodes(fields, requeue, message):
    checkpoint = config.Checkpoint(every="60 seconds" if fields is not None else "off")
    experiment = config.Experiment(train=config.Train(**(fields or {})), checkpoint=checkpoint)
    nodes = machines.Nodes(4, 2, True, 0, "127.0.0.1", 29500, "1", machines.Waits())
    with pytest.raises(UserError, match=re.escape(message)):
        launch_plan._check_elastic(experiment, requeue, nodes, 1)


@pytest.mark.parametrize("flags, message", first(1, [
    (["--config.train.virtual_replicas=3"], "may become 4 workers, too many for train.virtual_replicas=3"),
    (["--strategy=horovod"], "--strategy=horovod is not for workers of"),
]))  # fmt: skip
def test_such_flags_are_refused_before_anything_starts(flags, message, launch):  # noqa: F811
    launcher = launch(*ELASTIC, "--", *flags)
    assert launcher.end() == 2
    assert len(launcher.err) == 1 and message in launcher.err[0]


@pytest.mark.parametrize("flags, environ, node", [
    ([], {}, -1), ([], dict(JOB_COMPLETION_INDEX="0"), 0),
    ([], dict(JOB_COMPLETION_INDEX="7"), 1),  # a number of its own, which says nothing but that it is not node 0
    (["--node_rank=3"], {}, 1), ([], dict(SLURM_STEP_NUM_TASKS="1"), -1),
])  # fmt: skip
def test_which_node_this_is(flags, environ, node, planned):  # noqa: F811
    plan = planned(*ELASTIC, *flags, "--", "actor.py", **environ)
    assert (plan.nodes.rank, plan.nodes.min, plan.nodes.max) == (node, 2, 4)


def outcome_of(members=(0, 1, 2), new=()):
    return AttemptOutcome({n: f"node {n} (h)" for n in members}, elastic=True, new=new)


def exited(rank, code, node=None, lost=False, culprit=-1):
    told = dict(rank=rank, pid=1, host="h", code=code, lost=lost, lines=["x"], culprit=culprit, complaint="")
    return rank if node is None else node, {"event": "exit", "exit": told}


def lost(node):
    return node, {"event": "lost", "line": f"node {node} (h) is lost: closed"}


def ended(node):
    return node, {"event": "ended"}


def signalled(node, name="SIGTERM"):
    return node, {"event": "signal", "name": name}


JOIN, SUSPECT = "join", "suspect"
GONE, ALSO_GONE = exited(0, 1, lost=True, culprit=1), exited(2, 1, lost=True, culprit=1)
INTERRUPT, KILLED = signalled(0, "SIGINT"), exited(0, -9)
LEAVES, ENDS = ["say", "stop"], ["end", "say", "kill", "say"]


@pytest.mark.parametrize(
    "story, orders, code, changes",
    [
        # what is heard at which second; what is ordered; exit code; whether the next round has other nodes
        ([(0, exited(0, 0)), (1, exited(1, 0))], [], 0, False),
        ([(0, lost(1)), (1, GONE), (1, ended(0)), (2, ended(2))], ["say", "end"], 1, True),
        ([(0, GONE), (0.5, ALSO_GONE), (1.9, lost(1))], ["say", "end"], 1, True),  # noticed by workers first
        ([(0, GONE), (2.1, lost(1))], ["end", "say"], 1, True),  # and even so late
        ([(0, GONE), (1, SUSPECT), (2.9, SUSPECT), (4.8, lost(1))], ["say", "end"], 1, True),
        ([(0, GONE), (3, ended(0))], ["end"], 1, False),  # only its worker is gone: a failure of the program
        ([(0, exited(1, -9)), (1.9, lost(1))], ["say", "end"], 1, True),  # a machine that goes down
        ([(0, exited(1, -9)), (2.1, lost(1))], ["end", "say"], 1, True),
        ([(0, exited(1, -9)), (2.1, ended(1))], ["end"], 137, False),
        ([(0, exited(0, -9)), (1, lost(1))], ["end", "say"], 137, False),  # that was no consequence
        ([(0, lost(1)), (1, lost(2)), (2, ended(0))], ["say", "end", "say"], 1, True),
        ([(0, lost(7))], [], 0, False),  # it only waited for a place
        ([(0, signalled(7))], [], 0, False),
        # a node comes
        ([(0, JOIN), (3, exited(0, 143)), (3, exited(1, 143)), (4, exited(2, 143))], ["stop"], 1, True),
        ([(0, JOIN), (3, exited(0, -15)), (3, exited(1, 1, lost=True)), (4, exited(2, 143))], ["stop"], 1, True),
        ([(0, JOIN), (3, exited(0, 0)), (3, exited(1, 0)), (4, exited(2, -15))], ["stop"], 0, False),  # at the end
        ([(0, JOIN), (299, exited(0, 143)), (301, exited(1, -9))], ["stop", "kill", "say"], 1, True),
        ([(0, JOIN), (3, exited(0, 143)), (34, exited(1, -9))], ["stop", "kill", "say"], 1, True),
        ([(0, JOIN), (3, exited(0, 1)), (4, exited(1, 143)), (5, ended(0))], ["stop", "end"], 1, False),
        ([(0, JOIN), (3, signalled(0)), (4, exited(0, 143))], ["stop", "say", "stop"], 143, False),
        ([(0, JOIN), (3, lost(1)), (4, exited(0, 143))], ["stop", "say", "end"], 1, True),
        # a node leaves
        ([(0, signalled(1)), (3, exited(0, 143)), (3, exited(1, 143))], LEAVES, 1, True),
        ([(0, signalled(1)), (1, signalled(1, "SIGINT")), (3, exited(0, 143))], LEAVES, 1, True),
        ([(0, signalled(1)), (1, signalled(2)), (3, exited(0, 143))], [*LEAVES, "say"], 1, True),
        ([(0, signalled(1)), (1, signalled(0)), (3, exited(0, 143))], [*LEAVES, "say", "stop"], 143, False),
        ([(0, signalled(0)), (1, signalled(1)), (3, exited(0, 143))], LEAVES, 143, False),
        ([(0, signalled(0)), (1, lost(1)), (3, exited(0, 143))], [*LEAVES, "end"], 1, False),
        ([(0, signalled(1)), (31, exited(0, -9))], [*LEAVES, "kill", "say"], 1, True),
        ([(0, signalled(1)), (3, exited(1, 143)), (3, ended(1)), (4, lost(1))], [*LEAVES, "say"], 1, True),
        ([(0, INTERRUPT), (1, INTERRUPT), (1, exited(0, -9))], [*LEAVES, "kill", "say"], 130, False),
        ([(0, exited(0, 3)), (1, signalled(1))], ["end"], 3, False),  # the round is ending already
        ([(0, signalled(1)), (10, signalled(2)), (31, exited(0, -9))], [*LEAVES, "say", "kill", "say"], 1, True),
        ([(0, signalled(1)), (1, signalled(0)), (2, GONE)], [*LEAVES, "say", "stop", "end"], 1, False),
        # workers that take others with them: these have STOP_S to save, and no more than they had before
        ([(0, JOIN), (3, exited(1, 1, lost=True)), (34, exited(2, -9))], ["stop", "kill", "say"], 1, True),
        ([(0, signalled(1)), (10, exited(1, 1, lost=True)), (31, exited(0, -9))], [*LEAVES, "kill", "say"], 1, True),
        ([(0, JOIN), (3, exited(1, 3)), (34, exited(0, -9))], ["stop", "end", "kill", "say"], 3, False),
        ([(0, signalled(1)), (10, exited(1, 3)), (31, exited(0, -9))], [*LEAVES, "end", "kill", "say"], 3, False),
        ([(0, exited(1, 0)), (0, ended(1)), (1, lost(1)), (2, GONE), (5, ended(0))], ["say", "end"], 1, False),
        # who has come to the end
        ([(0, JOIN), (3, exited(0, 0)), (4, exited(1, 143))], ["stop"], 0, False),
        ([(0, JOIN), (3, exited(1, 0)), (4, exited(0, 143))], ["stop"], 1, True),
        # whoever does not end is killed, and whoever cannot be killed ends the job
        ([(0, exited(1, 143)), (31, exited(0, -9))], ["kill", "say"], 137, False),
        ([(0, exited(1, 143)), (31, lost(1))], ["kill", "say", "end"], 137, False),
        ([(0, lost(1)), (31, ended(0))], ["say", "end", "say"], 1, False),
        ([(0, INTERRUPT), (1, exited(1, 3)), (2, INTERRUPT), (3, KILLED)], [*LEAVES, "kill", "end", "say"], 130, False),
        ([(0, exited(1, 143)), (1, exited(0, 3)), (2, lost(2)), (30.5, KILLED)], ENDS, 3, False),
    ],
)  # fmt: skip
def test_what_a_round_comes_to(story, orders, code, changes):
    """The decisions alone, by a clock that the test sets."""
    outcome = outcome_of()
    given = []
    for now, news in story:
        while outcome.deadline <= now:
            given += outcome.orders(outcome.deadline)
        if news is JOIN:
            assert not outcome.settled
            outcome.grow("node 3 (h) joined", now)
        elif news is SUSPECT:
            outcome.suspect([1], now)
        else:
            outcome.hear(*news, now)
        given += outcome.orders(now)
    given += outcome.summary()
    assert [o["order"] for o in given] == orders
    assert (outcome.code, outcome.changes) == (code, changes)
    assert outcome.changes <= bool(outcome.reason) and (outcome.since < math.inf) == bool(outcome.reason)


def heard(*news, members=(0, 1, 2), new=()):
    """A outcome that has heard all of it at once, as when the launcher was busy."""
    outcome = outcome_of(members, new)
    for each in news:
        outcome.hear(*each, 0.0)
    return outcome


def orders(outcome, now):
    return [order["order"] for order in outcome.orders(now)]


def test_the_exit_of_nodes_that_leave():
    outcome = heard(signalled(1, "SIGINT"), signalled(1), signalled(2))
    assert outcome.leaving == {
        1: (130, "SIGINT: this node has left the job"),
        2: (143, "SIGTERM: this node has left the job"),
    }


def test_a_failure_is_told_though_another_node_is_lost_meanwhile():
    outcome = heard(exited(1, 3), lost(2))
    assert orders(outcome, 1.9) == ["say"]
    [end] = outcome.orders(2.0)
    assert end["text"] == "rank 1 (on h, process 1) ended with exit code 3"


@pytest.mark.parametrize("story, may", [
    ([exited(0, 3)], True), ([exited(0, 2)], False), ([exited(0, 0), exited(1, 0), exited(2, 0)], False),
    ([signalled(0), exited(0, 3)], False), ([lost(1)], True),
])  # fmt: skip
def test_whether_a_restart_may_help(story, may):
    assert heard(*story).may_restart == may
    stuck = heard(*story)
    stuck.orders(0.0)
    for _ in range(3):
        stuck.orders(min(1000.0, stuck.deadline))
    assert not (stuck.may_restart and not stuck.busy)


@pytest.mark.parametrize("story, gone", [
    ([exited(1, 2)], [1]),
    ([exited(0, 3), exited(1, 2)], []),  # another failure came first
    ([exited(0, 1, lost=True), exited(1, 2)], [1]),  # that one was a consequence
    ([signalled(0), exited(1, 2)], []),  # all stop
    ([signalled(2), exited(1, 2)], [2, 1]),
    ([lost(2), exited(1, 2)], []),  # the workers end already
    ([lost(2), (1, {"event": "cannot", "line": "node 1 (h) cannot start its workers: No space left"})], []),
])  # fmt: skip
def test_when_a_refusal_is_laid_to_a_node_that_has_just_come(story, gone):
    outcome = heard(*story, new=[1])
    assert list(outcome.leaving) == gone
    assert outcome.changes == (1 in gone or story[0] == lost(2))


def test_a_refusal_while_others_save_does_not_end_these():
    outcome = heard(new=[1])
    outcome.grow("node 3 joined", 0.0)
    assert orders(outcome, 0.0) == ["stop"]
    outcome.hear(*exited(1, 2), 1.0)
    assert orders(outcome, 1.0) == ["say"] and outcome.deadline == 1.0 + 30.0 and outcome.changes
    outcome = heard(signalled(2), new=[1])
    outcome.orders(0.0)
    outcome.hear(*exited(1, 2), 10.0)
    assert outcome.deadline == 30.0


@pytest.mark.parametrize("code, new, changes", [(2, [1], True), (3, [1], False), (2, [], False)])
def test_whether_a_refusal_is_laid_to_nodes_that_have_just_come(code, new, changes):
    outcome = outcome_of([0, 1], new)
    node, news = exited(0, code)
    news["exit"]["error"] = "worker 1 has another processor"
    outcome.hear(*exited(1, 1, lost=True), 0.0)  # it has noticed that before
    outcome.hear(node, news, 0.0)
    given = outcome.orders(0.0)
    assert (outcome.changes, list(outcome.leaving)) == (changes, new if changes else [])
    assert [order["order"] for order in given] == (["say", "end"] if changes else ["end"])
    if changes:
        assert outcome.leaving[1] == (2, "error: node 1 (h) cannot take part: worker 1 has another processor")


@pytest.mark.parametrize("news", [exited(1, 0), exited(1, 143), exited(1, 3), lost(1), signalled(1), signalled(0)])
def test_nobody_joins_a_round_that_is_about_to_end(news):
    outcome = outcome_of()
    assert not outcome.settled
    outcome.hear(*news, 0.0)
    assert outcome.settled
