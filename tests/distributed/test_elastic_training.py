"""Nodes come and go while a run with shards trains: it ends with the bits of one device that nothing has disturbed.

What happens is put in order by what the workers print, never by a clock: a callback of the chief holds the training
at certain updates until the test lets it go on.
"""

import contextlib
import json
import os
import random
import signal
import sys

import psutil
import pytest
from support import network_hosts
from support.launchers import free_port, launch  # noqa: F401  launch is a fixture

pytestmark = pytest.mark.faults
LIMIT_S = 180
"""For anything that happens while programs start: no test depends on how fast that is."""
EPOCHS, UPDATES, EVERY = 14, 420, 10
FLAGS = [
    *("--config=digits_mlp", "--config.train.shards=4", f"--config.train.epochs={EPOCHS}"),
    *("--config.train.steps_per_call=1", f"--config.checkpoint.every={EVERY} steps"),
    *("--progress=plain", "--notensorboard", "--workdir=run"),
]
GATES = '''
"""Holds the training of the chief at certain updates, until whoever runs it opens a named pipe."""
import os
import keras

class Gates(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        gate = f"gate-{int(self.model.optimizer.iterations)}"
        if os.environ["RANK"] == "0" and os.path.exists(gate) and not os.path.exists(f"{gate}-passed"):
            print(gate, flush=True)
            open(gate).close()
'''
EVENTS = ("kill", "stop", "leave", "join", "worker")


class History:
    """A run on several nodes, and what happens to it."""

    def __init__(self, launch, folder, tfds_dir, most):  # noqa: F811
        self._launch, self._folder, self._tfds_dir = launch, folder, str(tfds_dir)
        self._port, self._most = free_port(), most
        (folder / "gates.py").write_text(GATES)
        self.nodes = []

    def begin(self):
        """All nodes that there may be begin together."""
        self.start(0)
        self._wait(lambda: self._count("waiting for up to"))
        for _ in range(1, self._most):
            self.start(1)

    def start(self, rank):
        where = ["--master_addr=127.0.0.1", f"--master_port={self._port}", f"--node_rank={rank}"]
        flags = [f"--nnodes=1:{self._most}", "--scale_wait=0", "--join_timeout=500", "--max_restarts=20", *where]
        train = [*FLAGS, "--config.train.callbacks=gates:Gates"]
        self.nodes.append(self._launch(*flags, "--", *train, TFDS_DATA_DIR=self._tfds_dir))

    def possible(self):
        """What can happen now."""
        return [
            event
            for event in EVENTS
            if event == "worker" or (len(self.nodes) < self._most if event == "join" else len(self.nodes) > 1)
        ]

    def happens(self, event, update):
        """Waits for the update, lets the event happen, and lets the training go on when node 0 knows of it."""
        leader, last = self.nodes[0], self.nodes[-1]
        self._wait(lambda: f"[0] gate-{update}" in leader.out)
        told = {"join": " join", "leave": " leaves; ", "worker": "root cause"}.get(event, " is lost")
        before = self._count(told)
        if event == "join":
            self.start(1)
        elif event == "leave":
            last.signal(signal.SIGTERM)
        elif event == "kill":
            last.signal(signal.SIGKILL)
        else:
            workers = psutil.Process(last.process.pid).children()
            for process in workers if event == "worker" else (psutil.Process(last.process.pid), *workers):
                process.send_signal(signal.SIGKILL if event == "worker" else signal.SIGSTOP)
        if event in ("kill", "stop", "leave"):
            self.nodes.pop()
        self._wait(lambda: self._count(told) > before)
        self.open(update)
        if event == "leave":
            last.process.wait(LIMIT_S)
            assert last.end() == 143, last.err

    def _wait(self, true):
        """Waits for something that a line of node 0's launcher makes true."""
        leader = self.nodes[0]
        with leader._news:
            assert leader._news.wait_for(true, LIMIT_S), leader.out + leader.err

    def _count(self, text):
        """Lines of node 0's launcher, not of its workers, with `text` in them."""
        leader = self.nodes[0]
        return sum(line.startswith("tfdist: ") and text in line for line in [*leader.out, *leader.err])

    def open(self, update):
        """Lets the training go on: whoever waits at the gate, and whoever comes there later."""
        gate = self._folder / f"gate-{update}"
        (self._folder / f"{gate.name}-passed").touch()
        with contextlib.suppress(OSError):  # nobody waits there any more
            os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))

    def result(self):
        """What it has left, once all have ended well."""
        for node in self.nodes:
            node.process.wait(LIMIT_S)
        codes = [node.end() for node in self.nodes]
        assert codes == [0] * len(codes), self.nodes[0].out + self.nodes[0].err
        return json.loads((self._folder / "run/result.json").read_text())


@pytest.fixture
def history(launch, tmp_path, tfds_dir):  # noqa: F811
    """Begins such a run on so many nodes."""

    def begin(most, updates):
        made = History(launch, tmp_path, tfds_dir, most)
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
    """After the death the run goes on from the checkpoint before; nothing is lost when a node joins or leaves."""
    run = history(2, [55, 155, 255])
    run.happens("kill", 55)
    run.happens("join", 155)
    run.happens("leave", 255)
    result = run.result()
    assert_same(result, undisturbed)
    first, alone, both, last = result["segments"]
    assert [s["workers"] for s in result["segments"]] == [2, 1, 2, 1]
    assert first["updates"] == 50 and "node 1 (" in first["ended"] and " is lost: " in first["ended"]
    assert 155 <= both["from_update"] <= 200 and alone["ended"].endswith(" joined")
    assert 255 <= last["from_update"] <= 300 and both["ended"].endswith(" leaves")
    assert last["ended"] == "completed" and sum(s["updates"] for s in result["segments"]) == UPDATES
    assert all(s["seconds_lost"] > 0 for s in result["segments"][:-1])


@pytest.mark.whole
@pytest.mark.parametrize("number", range(6))
def test_whatever_happens(number, history, undisturbed):
    """The seed is in the output; TFDIST_TEST_SEED repeats one."""
    seed = int(os.environ.get("TFDIST_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    draw = random.Random(seed)
    # Not too close to each other: what happens second shall happen to workers that have started again.
    updates = [place + draw.randrange(10) for place in sorted(draw.sample(range(1, 350, 50), draw.randint(1, 4)))]
    print(f"TFDIST_TEST_SEED={seed}: at updates {updates}")
    run = history(3, updates)
    for update in updates:
        event = draw.choice(run.possible())
        print(f"{event} at update {update}, with {len(run.nodes)} nodes")
        run.happens(event, update)
    result = run.result()
    assert_same(result, undisturbed)
    assert len(result["segments"]) == len(updates) + 1
