"""Nodes come and go while a run with shards trains: it ends with the bits of one device that nothing has disturbed.

What happens is put in order by what the workers print, never by a clock: a callback of the chief holds the training
at certain updates until the test lets it go on.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time

import psutil
import pytest
from support import network_hosts
from support.launchers import free_port, launch  # noqa: F401  launch is a fixture

pytest_plugins = ("support.network_hosts",)  # its fixtures
pytestmark = pytest.mark.faults
LIMIT_S = 180
"""For anything that happens while programs start: no test depends on how fast that is."""
EPOCHS, UPDATES, EVERY = 7, 210, 10
FLAGS = [
    *("--config=digits_mlp", "--config.train.virtual_replicas=4", f"--config.train.epochs={EPOCHS}"),
    *("--config.train.steps_per_call=1", f"--config.checkpoint.every={EVERY} steps"),
    *("--progress=plain", "--notensorboard", "--workdir=run"),
]
GATES = '''
"""Holds the training of the chief at certain updates, until whoever runs it opens a named pipe.

The state is held in memory after every update, and not by the clock.
"""
import math, os
import keras
from tfdist.checkpoints import manager
manager.HELD_S, manager.HELD_SHARE = 0.0, math.inf

class Gates(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        gate = f"gate-{int(self.model.optimizer.iterations)}"
        if os.environ["RANK"] == "0" and os.path.exists(gate) and not os.path.exists(f"{gate}-passed"):
            print(gate, flush=True)
            open(gate).close()
'''
TOLD = {"join": " join", "leave": " leaves; ", "kill": " is lost", "stop": " is lost", "worker": "root cause"}
"""What can happen, and what node 0 says when it knows of it."""


class History:
    """A run on several nodes, and what happens to it."""

    def __init__(self, launch, folder, tfds_dir, most, hosts=None):  # noqa: F811
        self._launch, self._folder, self._most = launch, folder, most
        self._port, self._hosts = free_port(), hosts
        self._environ = {"TFDS_DATA_DIR": str(tfds_dir), "TFDIST_SECRET": "of all nodes"}
        self._names = itertools.cycle(network_hosts.MORE[1:])
        (folder / "gates.py").write_text(GATES)
        self._gates = contextlib.ExitStack()
        self.nodes, self._left = [], []
        self.happened = 0
        """Each time all workers were started again."""

    def begin(self):
        """All nodes that there may be begin together."""
        self.start(0)
        self._wait(lambda: self._count("waiting for up to"))
        for _ in range(1, self._most):
            self.start(1)

    def start(self, rank):
        """Starts a launcher: on this machine, or on its hosts in turn, the first of which is node 0's."""
        name = "h1" if rank == 0 else next(self._names)
        address, host = (network_hosts.ADDRESSES["h1"], self._hosts.on(name)) if self._hosts else ("127.0.0.1", ())
        where = [f"--master_addr={address}", f"--master_port={self._port}", f"--node_rank={rank}"]
        flags = [f"--nnodes=1:{self._most}", "--scale_wait=0", "--join_timeout=500", "--max_restarts=20", *where]
        train = [*FLAGS, "--config.train.callbacks=gates:Gates"]
        self.nodes.append(self._launch(*flags, "--", *train, host=host, **self._environ))

    def possible(self):
        """What can happen now."""
        able = {"join": len(self.nodes) < self._most, "worker": True}
        return [event for event in TOLD if able.get(event, len(self.nodes) > 1)]

    def happens(self, event, update, victim=-1):
        """Waits for the update, lets the event happen, and lets the training go on when node 0 knows of it."""
        self._wait(lambda: f"[0] gate-{update}" in self.nodes[0].out)
        self._lets(event, victim)
        self.open(update)

    def happens_at(self, event, line, victim=-1):
        """Lets the event happen as soon as the workers have been started again, and the victim's have said a line."""
        launcher, words = self.nodes[victim], f" workers here, restart {self.happened};"
        begun = lambda lines: next((n for n, said in enumerate(lines) if words in said), len(lines))
        self._wait(lambda: any(line in said for said in launcher.out[begun(launcher.out) :]), launcher)
        self._lets(event, victim)

    def _lets(self, event, victim):
        """Lets the event happen, and waits until node 0 knows of it."""
        launcher, before = self.nodes[victim], self._count(TOLD[event])
        if event == "join":
            self.start(1)
        elif event == "leave":
            launcher.signal(signal.SIGTERM)
        elif event == "kill":
            launcher.signal(signal.SIGKILL)
        else:
            workers, end = [], time.monotonic() + LIMIT_S
            while not workers:  # its line comes before they do
                assert time.monotonic() < end, launcher.out
                workers = psutil.Process(launcher.process.pid).children()
            for process in workers if event == "worker" else (psutil.Process(launcher.process.pid), *workers):
                process.send_signal(signal.SIGKILL if event == "worker" else signal.SIGSTOP)
        self._wait(lambda: self._count(TOLD[event]) > before)
        if event in ("kill", "stop", "leave"):
            self.nodes.remove(launcher)
        if event == "leave":
            self._left.append(launcher)
        self.happened += 1

    def _wait(self, true, launcher=None):
        """Waits for something that a line of a launcher makes true: of node 0's, unless told otherwise."""
        launcher = launcher or self.nodes[0]
        with launcher._news:
            assert launcher._news.wait_for(true, LIMIT_S), [*self.nodes[0].out, *self.nodes[0].err, *launcher.out]

    def _count(self, text):
        """Lines of node 0's launcher, not of its workers, with `text` in them."""
        leader = self.nodes[0]
        return sum(line.startswith("tfdist: ") and text in line for line in [*leader.out, *leader.err])

    def open(self, update):
        """Lets the training go on: whoever waits at the gate, and whoever comes there later."""
        gate = self._folder / f"gate-{update}"
        (self._folder / f"{gate.name}-passed").touch()
        # For reading, too, which waits for nobody; and kept, since the chief has said so before it waits.
        self._gates.callback(os.close, os.open(gate, os.O_RDWR))

    def result(self):
        """What it has left, once all have ended well."""
        with self._gates:
            for node in (*self.nodes, *self._left):
                node.process.wait(LIMIT_S)
        assert {node.end() for node in self.nodes} == {0}, self.nodes[0].out + self.nodes[0].err
        assert {node.end() for node in self._left} <= {143}
        return json.loads((self._folder / "run/result.json").read_text())


@pytest.fixture
def history(launch, tmp_path, tfds_dir):  # noqa: F811
    """Begins such a run on so many nodes."""

    def begin(most, updates, hosts=None):
        made = History(launch, tmp_path, tfds_dir, most, hosts)
        for update in updates:
            os.mkfifo(tmp_path / f"gate-{update}")
        made.begin()
        return made

    return begin


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tfds_dir):
    """What one device ends with."""
    folder = tmp_path_factory.mktemp("undisturbed")
    words = [sys.executable, "-m", "tfdist.train", "--strategy=default", *FLAGS]
    program = network_hosts.Program(words, network_hosts.clean(tfds_dir), folder)
    assert program.end() == 0, program.text
    return json.loads((folder / "run/result.json").read_text())


def assert_same(found, expected):
    for name in ("status", "updates", "epochs", "weights_sha256", "history", "evaluation"):
        assert found[name] == expected[name], name


def test_a_node_dies_another_joins_and_leaves(history, undisturbed):
    """After the death the run goes on from the chief's memory; nothing is lost when a node joins or leaves."""
    run = history(2, [35, 85, 135])
    run.happens("kill", 35)
    run.happens("join", 85)
    run.happens("leave", 135)
    result = run.result()
    assert_same(result, undisturbed)
    first, alone, both, last = result["segments"]
    assert [s["workers"] for s in result["segments"]] == [2, 1, 2, 1]
    assert first["updates"] == 34 and "node 1 (" in first["ended"] and " is lost: " in first["ended"]
    assert 85 <= both["from_update"] <= 120 and alone["ended"].endswith(" joined")
    assert 135 <= last["from_update"] <= 170 and both["ended"].endswith(" leaves")
    assert last["ended"] == "completed" and sum(s["updates"] for s in result["segments"]) == UPDATES
    assert all(s["seconds_lost"] > 0 for s in result["segments"][:-1])


SOON = ("starting rank", "] tfdist: resuming after", "] tfdist: strategy")
"""Lines of a start: what happens then happens to workers that load TensorFlow, or that go on from a checkpoint."""


def lines_after(event, update):
    """Lines of the start after an event that are sure to come."""
    # Before the first checkpoint, workers go on from one only if they have stopped in order.
    certain = update > EVERY or event in ("join", "leave")
    return [line for line in SOON if certain or "resuming" not in line]


@pytest.mark.whole
@pytest.mark.parametrize("number", range(30))
def test_whatever_happens(number, history, more_hosts, undisturbed):
    """The nodes are three hosts. The seed is in the output; TFDIST_TEST_SEED repeats one."""
    seed = int(os.environ.get("TFDIST_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    draw = random.Random(seed)
    # Not too close to each other: what happens second shall happen to workers that have started again.
    updates = [place + draw.randrange(10) for place in sorted(draw.sample(range(1, 180, 30), draw.randint(1, 3)))]
    print(f"TFDIST_TEST_SEED={seed}: at updates {updates}", flush=True)
    run = history(3, updates, more_hosts)
    for update in updates:
        event, victim = draw.choice(run.possible()), draw.randrange(-len(run.nodes) + 1, 0) if run.nodes[1:] else -1
        print(f"{event} of {victim} at update {update}, with {len(run.nodes)} nodes", flush=True)
        run.happens(event, update, victim)
        if draw.random() < 0.4:
            lines = lines_after(event, update)
            event, victim, line = draw.choice(run.possible()), -1, draw.choice(lines)
            # Others than the chief print nothing, and node 0 cannot be spared.
            victim = 0 if "] " in line and event in ("join", "worker") else -1
            line = line if victim == 0 else "starting rank"
            print(f"{event} of {victim} at {line!r}, with {len(run.nodes)} nodes", flush=True)
            run.happens_at(event, line, victim)
    result = run.result()
    assert_same(result, undisturbed)
    assert len(result["segments"]) == run.happened + 1
