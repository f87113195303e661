"""`tfdist.launch` on several nodes: launchers that meet over the loopback device, each with real workers."""

import json
import os
import re
import signal
import socket

import pytest
from support.covering import first
from support.launchers import MEET, free_port, launch, pipes  # noqa: F401  launch is a fixture

import tfdist
from tfdist.cluster import registration, wire
from tfdist.errors import UserError
from tfdist.launch import node_agent

HOST = socket.gethostname()
TWICE = (
    rf"tfdist: error: two processes joined as node 1 \({HOST}, process \d+ and {HOST}, process \d+\): "
    "give each node its own --node_rank"
)


@pytest.fixture
def node(launch):  # noqa: F811
    """Starts the launcher of one of two nodes."""
    port = free_port()

    def start(rank, *arguments, flags=(), nnodes=2, **environ):
        place = [f"--nnodes={nnodes}", f"--node_rank={rank}", "--master_addr=127.0.0.1", f"--master_port={port}"]
        return launch(*place, *flags, "--", *arguments, **environ)

    start.port = port
    return start


@pytest.mark.parametrize("one", first(1, [1, 0]))
def test_nodes_with_different_numbers_of_workers(one, node, tmp_path):
    act = ["actor.py", "*=env:RANK+WORLD_SIZE+LOCAL_RANK+LOCAL_WORLD_SIZE+GROUP_RANK;env:MASTER_PORT+TFDIST_SECRET"]
    counts = {0: 1, 1: 2}
    started = {rank: node(rank, *act, flags=[f"--nproc_per_node={counts[rank]}"]) for rank in (one, 1 - one)}
    assert [started[rank].end() for rank in (0, 1)] == [0, 0], started[0].err + started[1].err
    assert started[0].said("[0] ")[0] == "RANK=0 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=0"
    assert started[1].said("[1] ")[0] == "RANK=1 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 GROUP_RANK=1"
    assert started[1].said("[2] ")[0] == "RANK=2 WORLD_SIZE=3 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1"
    meetings = {started[0].said("[0] ")[1], started[1].said("[1] ")[1], started[1].said("[2] ")[1]}
    assert len(meetings) == 1 and f"MASTER_PORT={node.port}" not in meetings.pop()


def test_the_socket_of_rank_0_can_be_reached_from_the_other_node(node, tmp_path):
    (tmp_path / "meet.py").write_text(MEET)
    zero, one = node(0, "meet.py"), node(1, "meet.py")
    assert (zero.end(), one.end()) == (0, 0), zero.err + one.err
    assert zero.said("[0] ") == ["{'rank': '1'}"]


def test_the_name_of_a_pod_may_become_known_after_its_start(monkeypatch):
    """A cluster's DNS learns it from a Service, which lists a pod that runs."""
    known, failing, lines = socket.getaddrinfo, [1, 1, 1], []
    unknown = lambda *_, **__: (_ for _ in ()).throw(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    lookup = lambda host, *rest, **more: (unknown if failing and failing.pop() else known)("127.0.0.1", *rest, **more)
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(registration, "RETRY_S", 0)
    with pytest.raises(UserError, match=r"--master_addr=job-0\.job is not known"):
        node_agent.listen("job-0.job", 0)
    node_agent.listen("job-0.job", 0, 1000, lines.append).close()
    assert not failing and "waiting for the name of this machine, job-0.job (name or" in lines[0]


def test_a_failure_is_told_everywhere(node):
    act = ["actor.py", "0=hold", "1=err:that was it;kill:SIGKILL"]
    zero, one = node(0, *act), node(1, *act)
    assert (zero.end(), one.end()) == (137, 137)
    for launcher in (zero, one):
        assert f"root cause: rank 1 (on {HOST}, process " in launcher.until("root cause")
        assert "tfdist:   that was it" in launcher.err


@pytest.mark.parametrize("asked", first(1, [1, 0]))
def test_a_signal_to_one_launcher_stops_all_nodes(asked, node, tmp_path):
    pipes(tmp_path, "a", "b")
    act = ["actor.py", "0=polite;open:a;meet:b;say:both;hold", "1=polite;meet:a;open:b;hold"]
    started = [node(0, *act), node(1, *act)]
    started[0].until("[0] both")
    started[asked].signal(signal.SIGINT)
    assert [s.end() for s in started] == [143, 143]
    assert "[0] saved" in started[0].out and "[1] saved" in started[1].out


def test_restarts_on_all_nodes(node, tmp_path):
    pipes(tmp_path, "a")  # rank 0 has told its attempt before rank 1 is killed
    act = ["actor.py", "*=env:TFDIST_ATTEMPT+MASTER_PORT", "0=first;open:a;hold", "1=first;meet:a;kill:SIGKILL"]
    zero, one = node(0, *act, flags=["--max_restarts=2"]), node(1, *act, flags=["--max_restarts=2"])
    assert (zero.end(), one.end()) == (0, 0)
    assert [line.split()[0] for line in one.said("[1] ")] == ["TFDIST_ATTEMPT=0", "TFDIST_ATTEMPT=1"]
    assert zero.said("[0] ") == one.said("[1] ")
    assert len(set(zero.said("[0] "))) == 2
    assert "tfdist: restart 1 of 2 in 1 s" in zero.out and "tfdist: restart 1 of 2 in 1 s" in one.out


@pytest.fixture
def both(node, tmp_path):
    """Starts two launchers whose workers live until they are ended, in the first round of each or `always`."""
    pipes(tmp_path, "f")

    def start(survivor, *flags, always=True):
        once = ["" if always else f"once:{rank};" for rank in (0, 1)]
        act = [f"{survivor}={once[survivor]}meet:f;say:both;hold", f"{1 - survivor}={once[1 - survivor]}open:f;hold"]
        again = lambda rank: node(rank, "actor.py", *act, flags=flags)
        started = again(0), again(1)
        started[survivor].until(f"[{survivor}] both")
        return *started, again

    return start


@pytest.mark.parametrize("killed", first(1, [1, 0]))
def test_a_launcher_that_is_killed_ends_the_run(killed, both):
    started = both(1 - killed)
    started[killed].signal(signal.SIGKILL)
    assert started[1 - killed].end() == 1
    cause = started[1 - killed].until("root cause")
    assert f"tfdist: root cause: node {killed} ({HOST}) is lost: connection " in cause


@pytest.mark.parametrize("killed, told", first(1, [(1, "restart 1 of 1"), (0, "root cause")]))
def test_a_lost_node_may_come_back_for_a_restart(killed, told, both):
    *started, again = both(1 - killed, "--max_restarts=1", always=False)
    started[killed].signal(signal.SIGKILL)
    started[1 - killed].until(told)
    back = again(killed)
    assert (started[1 - killed].end(), back.end()) == (0, 0), started[1 - killed].err + back.err


@pytest.mark.whole
def test_a_lost_node_that_does_not_come_back(both):
    zero, one, _ = both(0, "--max_restarts=1", "--start_timeout=3")
    one.signal(signal.SIGKILL)
    assert zero.end() == 1  # what ended the run, and no wrong input
    assert "error: timed out after 3 s waiting for node 1 of 2" in zero.err[-1]


@pytest.mark.whole
def test_a_silent_launcher_is_lost(both):
    """As when a cable is cut: no end of the connection is ever seen."""
    zero, one, _ = both(0)
    one.signal(signal.SIGSTOP)
    assert zero.end() == 1
    assert f"node 1 ({HOST}) is lost: silent for " in zero.until("root cause")
    one.signal(signal.SIGCONT)
    assert one.end() == 1
    assert f"node 0 ({HOST}) is lost: " in one.until("root cause")


def test_a_node_that_never_comes(node):
    zero = node(0, "actor.py", flags=["--start_timeout=1"])
    assert zero.end() == 2
    assert zero.err == [
        f"tfdist: error: timed out after 1 s waiting for node 1 of 2 at 127.0.0.1:{node.port}: start python -m "
        f"tfdist.launch --nnodes=2 --node_rank=1 --master_addr=127.0.0.1 --master_port={node.port} ... there, or raise "
        f"--start_timeout"
    ]


@pytest.mark.whole
def test_several_nodes_that_never_come_and_one_that_waits_with_node_0(node):
    zero = node(0, "actor.py", flags=["--start_timeout=4"], nnodes=4)
    two = node(2, "actor.py", nnodes=4)
    assert (zero.end(), two.end()) == (2, 2)
    for launcher in (zero, two):
        assert len(launcher.err) == 1
        assert launcher.err[0].startswith("tfdist: error: timed out after 4 s waiting for nodes 1, 3 of 4 at ")


def test_node_0_that_never_comes(node):
    one = node(1, "actor.py", flags=["--start_timeout=1"])
    assert one.end() == 2
    assert one.err == [
        f"tfdist: error: timed out after 1 s waiting for node 0 at 127.0.0.1:{node.port} (connection refused): start "
        "it there with --node_rank=0, correct --master_addr and --master_port, open that port, or raise --start_timeout"
    ]


@pytest.mark.parametrize(
    "rank, code, number", first(1, [(1, 143, signal.SIGTERM), (0, 130, signal.SIGINT), (1, 130, signal.SIGINT)])
)
def test_a_signal_while_waiting_for_the_others(rank, code, number, node):
    launcher = node(rank, "actor.py")
    launcher.until("waiting for node")
    launcher.signal(number)
    assert launcher.end() == code
    assert launcher.err == [f"tfdist: {number.name}: no worker was running"]


TRAIN = ["--config.model.name=mlp"]


@pytest.mark.parametrize(
    "theirs, message",
    [
        (dict(nnodes=3), "node 1 (HOST) differs from node 0 in --nnodes: 3 and 2: start all nodes with the same flags"),
        (dict(flags=["--max_restarts=1"]),
         "node 1 (HOST) differs from node 0 in --max_restarts: 1 and 0: start all nodes with the same"),
        (dict(arguments=["actor.py"]),
         "node 1 (HOST) differs from node 0 in --config.name: nothing and digits: start all"),
        (dict(arguments=["--config.train.epochs=7"]),
         "node 1 (HOST) differs from node 0 in --config.model.name: cnn and mlp: start"),
        (dict(arguments=[*TRAIN, "--jit=on"]),
         "node 1 (HOST) differs from node 0 in --jit: on and auto: start all nodes with the same"),
    ],
)  # fmt: skip
def test_nodes_that_differ(theirs, message, node):
    zero = node(0, *TRAIN)
    one = node(1, *theirs.get("arguments", TRAIN), **{k: v for k, v in theirs.items() if k != "arguments"})
    assert (zero.end(), one.end()) == (2, 2)
    for launcher in (zero, one):
        assert len(launcher.err) == 1
        assert message in re.sub(rf"{HOST}, process \d+", "HOST", launcher.err[0])


def test_what_belongs_to_a_node_may_differ(node):
    """Devices, threads and folders: node 1 gets as far as the meeting, which ends because node 2 never comes."""
    zero = node(0, *TRAIN, flags=["--start_timeout=3"], nnodes=3)
    one = node(1, *TRAIN, "--devices=none", "--threads=2", "--workdir=elsewhere", nnodes=3)
    assert (zero.end(), one.end()) == (2, 2)
    assert "timed out after 3 s waiting for node 2 of 3" in one.err[0]


def test_the_same_node_rank_twice_at_the_start(node):
    started = [node(0, "actor.py", nnodes=3), node(1, "actor.py", nnodes=3), node(1, "actor.py", nnodes=3)]
    assert [s.end() for s in started] == [2, 2, 2]
    assert len({*started[0].err, *started[1].err, *started[2].err}) == 1 and re.fullmatch(TWICE, started[0].err[0])


def test_a_launcher_with_a_taken_rank_does_not_disturb_the_run(node, tmp_path):
    pipes(tmp_path, "end")
    hold = os.open(tmp_path / "end", os.O_RDWR)
    act = ["actor.py", "0=say:here;last:end"]
    zero, one = node(0, *act), node(1, *act)
    zero.until("[0] here")
    late = node(1, *act)
    assert late.end() == 2
    assert re.fullmatch(TWICE, late.err[0])
    os.close(hold)
    assert (zero.end(), one.end()) == (0, 0)
    assert zero.err == [late.err[0].replace("error", "rejected")]


def test_a_second_node_0(node):
    zero = node(0, "actor.py")
    zero.until("waiting for node 1 of 2")
    again = node(0, "actor.py")
    assert again.end() == 2
    assert again.err == [
        f"tfdist: error: --master_port={node.port} is taken on 127.0.0.1: choose another, the same on all nodes"
    ]
    one = node(1, "actor.py")
    assert (zero.end(), one.end()) == (0, 0)


def test_the_secret_keeps_others_out(node):
    """The one who does not know it is told, and the run waits for the one who does."""
    zero = node(0, "actor.py", "*=say:done", TFDIST_SECRET="right")
    zero.until("waiting for node 1 of 2")
    wrong = node(1, "actor.py", "*=say:done", TFDIST_SECRET="wrong")
    assert wrong.end() == 2
    assert len(wrong.err) == 1 and f"handshake with node 0 at 127.0.0.1:{node.port} failed (" in wrong.err[0]
    assert wrong.err[0].endswith(
        "set the same TFDIST_SECRET on all nodes or on none, and --master_port to that of node 0's launcher"
    )
    one = node(1, "actor.py", "*=say:done", TFDIST_SECRET="right")
    assert (zero.end(), one.end()) == (0, 0)
    assert zero.err == ["tfdist: rejected a connection from 127.0.0.1: it does not know the secret of this job"]


def hello(node, *program):
    facts = {"the version of tfdist": tfdist.__version__, "--nnodes": "2", "--max_restarts": 0}
    facts["the command"] = " ".join(program)
    return dict(kind="node", rank=node, facts=facts, host="elsewhere", pid=1, address="", nproc=1)


@pytest.mark.whole
def test_node_0_beats(node):
    """While nothing happens the others must hear that it lives; the test stands in for node 1."""
    zero = node(0, "actor.py", "*=env:WORLD_SIZE")
    zero.until("waiting for node 1 of 2")
    connection = wire.connect("127.0.0.1", node.port)
    connection.send(hello(1, "actor.py", "'*=env:WORLD_SIZE'"))
    assert connection.receive(30) == {"welcome": HOST}
    order = connection.receive(30)
    assert order["order"] == "round" and (order["round"]["world"], order["round"]["first"]) == (2, 1)
    assert connection.receive(30) == {"beat": 1}
    connection.send({"event": "ended"})
    message = connection.receive(30)
    while "beat" in message:
        message = connection.receive(30)
    assert message == {"order": "over", "code": 0, "line": ""}
    assert zero.end() == 0
    assert zero.said("[0] ") == ["WORLD_SIZE=2"]


def test_the_others_beat(node):
    with wire.listen("127.0.0.1", node.port) as server:
        one = node(1, "actor.py")
        connection = wire.accept(server.accept()[0])
        assert connection.receive(30) == {**hello(1, "actor.py"), "host": HOST, "pid": one.process.pid}
        connection.send({"welcome": "elsewhere"})
        assert connection.receive(30) == {"beat": 1}
        connection.send({"order": "over", "code": 7, "line": ""})
        assert one.end() == 7
        connection.close()


TWO_WORKERS = ["--config.model.name=mlp", "--config.optimizer.warmup=0%", "--config.train.epochs=1"]


@pytest.mark.whole
def test_training_on_two_nodes(node, tmp_path, tfds_dir):
    environ = {"TFDS_DATA_DIR": str(tfds_dir)}
    started = [node(rank, *TWO_WORKERS, f"--workdir=out{rank}", **environ) for rank in (0, 1)]
    assert [s.end() for s in started] == [0, 0], started[0].err + started[1].err
    result = json.loads((tmp_path / "out0" / "result.json").read_text())
    assert (result["status"], result["strategy"], result["workers"]) == ("completed", "multi_worker", 2)
    assert (tmp_path / "out1" / "logs" / "rank-1.log").exists() and not (tmp_path / "out1" / "result.json").exists()
