"""How workers find each other, and how they miss one that is gone: real processes and sockets, no TensorFlow."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading

import pytest
from conftest import REPOSITORY
from support import processes
from support.running import Running

from tfdist.cluster import heartbeat, wire

MEMBER = r'''
"""One worker: meets the others as the JSON in argv says, then does as it is told."""
import ctypes, dataclasses, json, logging, os, signal, sys, threading, time
from tfdist.cluster import discovery, heartbeat, registration, watch, wire
from tfdist.cluster import peers as peers_lib
from tfdist.config import messages
from tfdist.errors import TrainingError, UserError
signal.alarm(30)  # nothing here may hang
given = json.loads(sys.argv[1])
def stuck():
    """Waits for ever in C, where signal handlers written in Python do not run."""
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)
def say(line):
    print("say:", line, flush=True)
class Said(logging.Handler):
    def emit(self, record):
        say(record.getMessage())
messages.aside.addHandler(Said())
exec(given["before"])
for name, value in given["constants"].items():
    for module in (peers_lib, watch, heartbeat, wire, registration):
        if hasattr(module, name):
            setattr(module, name, value)
try:
    peers = registration.meet(discovery.Cluster("a test", **given["cluster"]), given["facts"], *given["timeouts"])
    say("met")
    exec(given["then"])
except UserError as error:
    say(f"error: {error}")
    sys.exit(2)
except TrainingError as error:
    say(f"failed: {error}")
    sys.exit(1)
'''
QUICK = {"BEAT_S": 0.2, "GRACE_S": 0.3, "EXIT_S": 0.3}
HOST = re.escape(os.uname().nodename)
LIMIT_S = 90  # for any process here; no test depends on how fast it is


class Member(Running):
    """A running worker."""

    def __init__(self, folder, given):
        environ = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
        fds = [given["cluster"][name] for name in ("meeting_fd",) if name in given["cluster"]]
        words = [sys.executable, folder / "member.py", json.dumps(given)]
        super().__init__(words, LIMIT_S, env=environ, cwd=folder, pass_fds=fds, real=True)

    def end(self):
        """Exit code, and all that was said."""
        return super().end(), self.text


@pytest.fixture
def member(tmp_path):
    """Starts workers; afterwards none may be left."""
    (tmp_path / "member.py").write_text(MEMBER)
    started = []

    def start(
        rank, then="peers.leave()", size=2, before="", constants=None, facts=None, start=20, stall=600, **cluster
    ):
        given = {
            "cluster": {"rank": rank, "size": size, **cluster}, "facts": facts or {}, "timeouts": [start, stall],
            "then": then, "before": before, "constants": {**QUICK, **(constants or {})},
        }  # fmt: skip
        started.append(Member(tmp_path, given))
        return started[-1]

    yield start
    left = [m for m in started if m.process.poll() is None]
    for m in left:
        m.process.kill()
        m.process.wait()
    assert not left, f"processes are left: {[m.lines for m in left]}"


@pytest.fixture
def master(port):
    return f"127.0.0.1:{port}"


def ends(*members):
    """What came of them all: `(code, text)` each."""
    return [m.end() for m in members]


# -- meeting --------------------------------------------------------------------


def test_workers_meet_and_agree_in_order_of_rank(member, master):
    then = "print(peers.gather('x', peers.rank * 10), peers.hosts, len(set(peers.addresses))); peers.leave()"
    for code, text in ends(*(member(r, then, size=3, master=master) for r in (2, 1, 0))):
        assert code == 0
        assert f"[0, 10, 20] {(os.uname().nodename,) * 3} 3" in text


def test_meets_on_the_socket_that_the_launcher_opened(member, master, port):
    with wire.listen("127.0.0.1", port) as listener:
        chief = member(0, master=master, meeting_fd=listener.fileno())
    assert [code for code, _ in ends(chief, member(1, master=master))] == [0, 0]


ONE_IS_WRONG = [  # what each of two or three workers is given, and what all of them say
    ([dict(facts={"x": "1"}), dict(facts={"x": "2"})],
     r"worker 1 \(HOST, process \d+\) differs from worker 0 in x: 2 and 1: start all"),
    ([dict(facts={"x": "1"}), dict()], r"worker 1 \(HOST, process \d+\) differs from worker 0 in x: nothing and 1"),
    ([dict(size=2), dict(size=3)],
     r"worker 1 \(HOST, process \d+\) differs from worker 0 in the number of workers: 3 and 2"),
    ([dict(size=3), dict(size=3, rank=1), dict(size=3, rank=1)],
     r"two processes joined as worker 1 \(HOST, process \d+ and HOST, process \d+\): give each"),
]  # fmt: skip


@pytest.mark.parametrize("workers, message", ONE_IS_WRONG, ids=lambda v: v[:40] if isinstance(v, str) else "")
def test_a_worker_that_does_not_fit_ends_the_start_of_all(member, master, workers, message):
    started = [member(**{"rank": i, "master": master, **given}) for i, given in enumerate(workers)]
    for code, text in ends(*started):
        assert code == 2
        assert re.search("say: error: " + message.replace("HOST", HOST), text), text


def test_two_lists_of_workers(member, port):
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        a, b = ([f"127.0.0.1:{port}", f"127.0.0.1:{s.getsockname()[1]}"] for s in (one, two))
    for code, text in ends(*(member(r, master=a[0], addresses=given) for r, given in enumerate((a, b)))):
        assert code == 2
        assert f"differs from worker 0 in the list of workers: {', '.join(b)} and {', '.join(a)}" in text


def test_a_worker_never_comes(member, master):
    [(code, text)] = ends(member(0, size=3, start=0.6, master=master, constants={"PATIENCE_S": 0.1}))
    assert code == 2
    assert "say: waiting for worker 1, worker 2 of 3, " in text
    assert "say: error: timed out after 1 s waiting for worker 1, worker 2 of 3: start it, check its address" in text


def test_those_who_wait_hear_who_is_missing(member, master):
    for code, text in ends(*(member(r, size=3, start=2, master=master) for r in (0, 2))):
        assert code == 2
        assert "say: error: timed out after 2 s waiting for worker 1 of 3: start it" in text


def test_the_chief_never_comes(member, master):
    [(code, text)] = ends(member(1, start=0.6, master=master, constants={"PATIENCE_S": 0.1}))
    assert code == 2
    assert f"say: waiting for worker 0 ({master}) (connection refused), " in text
    assert f"say: error: timed out after 1 s waiting for worker 0 ({master}) (connection refused): start it" in text


def test_a_chief_that_waits_longer_than_this_worker(member, master):
    chief = member(0, size=3, master=master)
    code, text = member(1, size=3, start=1, master=master, constants={"HANDSHAKE_S": 0.2}).end()
    assert code == 2
    assert f"timed out after 1 s waiting until worker 0 ({master}) has all 3 workers: its output says who" in text
    chief.process.kill()
    chief.end()


def test_the_chief_dies_while_it_waits(member, master):
    chief = member(0, size=3, master=master, constants={"PATIENCE_S": 0.1, "REPEAT_S": 0.1})
    chief.until("waiting for")
    other = member(1, size=3, master=master)
    chief.until("waiting for worker 2 of 3")
    chief.process.kill()
    assert "ended before all workers had joined (connection " in other.end()[1]
    assert (other.process.returncode, chief.end()[0]) == (2, -9)


def test_a_worker_that_goes_and_comes_again(member, master):
    chief = member(0, size=3, master=master, constants={"PATIENCE_S": 0.05, "REPEAT_S": 0.05, "CHECK_S": 0.05})
    first = member(1, size=3, master=master)
    chief.until("waiting for worker 2 of 3")
    first.process.kill()
    first.end()
    chief.until(
        f"worker 1 ({os.uname().nodename}, process {first.process.pid}) disconnected before all workers had joined"
    )
    again = [member(r, size=3, master=master) for r in (1, 2)]
    assert [code for code, _ in ends(chief, *again)] == [0, 0, 0]


def test_nothing_tells_where_to_meet(member):
    [(code, text)] = ends(member(1))
    assert code == 2
    assert "error: a test does not tell where worker 0 of 2 is: set MASTER_ADDR and MASTER_PORT" in text


def test_the_port_is_taken(member, master, port):
    with socket.create_server(("127.0.0.1", port)):
        [(code, text)] = ends(member(0, master=master))
    assert code == 2
    assert f"error: worker 0 cannot listen at {master} (address already in use): it must be a free port" in text


@pytest.mark.parametrize("words", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b'{"hello": 1}\n', b"\x00\x00\x12\x04"])
def test_another_program_has_the_chiefs_port(member, master, port, words):
    with socket.create_server(("127.0.0.1", port)) as server:
        worker = member(1, master=master)
        with server.accept()[0] as sock:
            sock.sendall(words)
            code, text = worker.end()
    assert code == 2
    assert f"error: handshake with worker 0 ({master}) failed (it does not speak tfdist's protocol)" in text


def test_a_silent_program_has_the_chiefs_port(member, master, port):
    with socket.create_server(("127.0.0.1", port)):
        [(code, text)] = ends(member(1, start=1, master=master, constants={"HANDSHAKE_S": 0.2}))
    assert code == 2
    assert f"timed out after 1 s waiting for worker 0 ({master}) (no answer within " in text


def test_another_secret(member, master):
    chief, other = member(0, start=2, master=master, secret="a"), member(1, master=master, secret="b")
    code, text = other.end()
    assert code == 2
    assert "(it does not know the secret of this job): another program or job has this port" in text
    code, text = chief.end()
    assert code == 2
    assert "error: timed out after 2 s waiting for worker 1 of 2" in text


STRANGERS = [
    b"", b"GET / HTTP/1.0\r\n\r\n", b'{"nonce": "half', b"{}\n", b"[]\n", b"\xff\x00", b'{"nonce": 1, "proof": 2}\n',
]  # fmt: skip


def strangers(port):
    """Connections that stay open, of programs that are none of ours."""
    found = []
    for words in STRANGERS:
        found.append(socket.create_connection(("127.0.0.1", port)))
        found[-1].sendall(words)
    return found


def test_strangers_do_not_keep_the_workers_apart(member, master, port):
    chief = member(0, master=master, constants={"PATIENCE_S": 0.05})
    chief.until("waiting for")
    open_ones = strangers(port)
    connection = wire.connect("127.0.0.1", port)  # knows the protocol, but is not a worker
    connection.send({"rank": "x"})
    assert "this port is used by a job of tfdist" in connection.receive(5)["refused"]
    assert [code for code, _ in ends(chief, member(1, master=master))] == [0, 0]
    for sock in open_ones:
        sock.close()


def test_strangers_do_not_stand_before_the_call_back(member, port):
    with socket.create_server(("127.0.0.1", 0)) as free:
        mine = free.getsockname()[1]
    addresses = [f"127.0.0.1:{port}", f"127.0.0.1:{mine}"]
    worker = member(1, master=addresses[0], addresses=addresses, constants={"PATIENCE_S": 0.05})
    worker.until("waiting for")
    open_ones = strangers(mine)
    chief = member(0, "print(peers.addresses); peers.leave()", master=addresses[0], addresses=addresses)
    (code, text), (other, _) = ends(chief, worker)
    assert (code, other) == (0, 0)
    assert str(tuple(addresses)) in text
    for sock in open_ones:
        sock.close()


UNREACHABLE = [("refused", "connection refused"), ("elsewhere", "another worker answers there")]


@pytest.mark.parametrize("how, why", UNREACHABLE)
def test_an_address_that_the_chief_cannot_reach(member, port, how, why):
    """The name of worker 1 leads the chief elsewhere, as names do whose hosts file differs."""
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    addresses = [f"127.0.0.1:{port}", f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}"]
    to = ports[1] if how == "elsewhere" else ports[2]
    astray = (
        "import socket; real = socket.create_connection\n"
        f"socket.create_connection = lambda at, *a: real((at[0], {to} if at[1] == {ports[0]} else at[1]), *a)"
    )
    started = [
        member(r, size=3, master=addresses[0], addresses=addresses, before=astray if r == 0 else "") for r in range(3)
    ]
    for code, text in ends(*started):
        assert code == 2
        assert f"cannot be reached at {addresses[1]} ({why}): correct its address in the list" in text


def test_who_comes_late_is_refused_and_the_run_goes_on(member, master, tmp_path):
    os.mkfifo(tmp_path / "go")
    then = "open('go').close() if peers.rank == 0 else None; print(peers.gather('x', 1)); peers.leave()"
    run = [member(r, then, master=master) for r in (0, 1)]
    run[0].until("met")
    code, text = member(1, master=master).end()
    assert code == 2
    assert "error: the run has begun with 2 workers, worker 1 is one of them: give this one another port or" in text
    with open(tmp_path / "go", "w"):
        pass
    for code, text in ends(*run):
        assert (code, "[1, 1]" in text) == (0, True)


# -- after the meeting ------------------------------------------------------------

AHEAD = """
theirs, passed = watch.Watch.give, threading.Event()
def give(self, *vote):
    theirs(self, *vote)
    open("voted", "w").close()
watch.Watch.give = give
send = watch.Watch.send
def delayed(self, message):
    if message.get("gathered") == 0 and passed.wait(0.3):
        say("went ahead")
    send(self, message)
watch.Watch.send = delayed
"""


def test_the_chief_goes_on_when_the_others_know(member, master, tmp_path):
    """Its next step may hold Python's lock until they have made it, too, as the start of TensorFlow's servers does."""
    os.mkfifo(tmp_path / "voted")
    first = member(
        0, "peers.gather('a'); passed.set(); watch.Watch.give = theirs; peers.leave()", before=AHEAD, master=master
    )
    (code, text), (other, _) = ends(
        first, member(1, "open('voted').read(); peers.gather('a'); peers.leave()", master=master)
    )
    assert (code, other) == (0, 0) and "went ahead" not in text, text


def test_the_chief_goes_last(member, master, tmp_path):
    other = "import atexit; atexit.register(lambda: open('gone', 'w').close())"
    first = member(0, "peers.leave(); print('gone:', os.path.exists('gone'))", master=master)
    (code, text), (other_code, _) = ends(first, member(1, before=other, master=master))
    assert (code, other_code) == (0, 0)
    assert "gone: True" in text


def test_a_program_that_does_not_say_that_it_leaves(member, master):
    then = "print(peers.gather('x'))"
    assert [code for code, _ in ends(*(member(r, then, size=3, master=master) for r in range(3)))] == [0, 0, 0]


def test_what_leaves_files_is_done_first_by_the_chief(member, master, tmp_path):
    then = "peers.once(lambda: open('order', 'a').write(str(peers.rank))); peers.leave()"
    assert [code for code, _ in ends(*(member(r, then, size=3, master=master) for r in range(3)))] == [0, 0, 0]
    order = (tmp_path / "order").read_text()
    assert (order[0], sorted(order)) == ("0", ["0", "1", "2"])


ANY = (0, 1)  # who leaves may be gone before the others find out
LOSSES = [  # what workers 0, 1 and 2 do, their exit codes, and what those with code 1 say
    ("killed in C", ["stuck()", "os.kill(os.getpid(), 9)", "stuck()"], [1, -9, 1],
     r"tfdist: failed: lost worker 1 \(HOST\): its process ended"),
    ("killed in gather", ["peers.gather('x')", "os.kill(os.getpid(), 9)", "peers.gather('x')"], [1, -9, 1],
     r"say: failed: lost worker 1 \(HOST\): its process ended"),
    ("chief killed", ["os.kill(os.getpid(), 9)", "stuck()", "peers.gather('x')"], [-9, 1, 1],
     r"failed: lost worker 0 \(HOST\): its process ended"),
    ("raises", ["stuck()", "raise RuntimeError('of \\n two lines')", "peers.gather('x')"], [1, 1, 1],
     r"(lost worker 1 \(HOST\): it stopped: RuntimeError: of two lines|Traceback)"),
    ("fails", ["peers.gather('x')", "peers.fail('bad labels', 2)", "stuck()"], [1, 2, 1],
     r"lost worker 1 \(HOST\): it stopped: bad labels"),
    ("chief fails", ["peers.fail('bad labels', 2)", "peers.gather('x')", "stuck()"], [2, 1, 1],
     r"lost worker 0 \(HOST\): it stopped: bad labels"),
    ("other calls", ["peers.gather('x')", "peers.gather('y')", "peers.gather('x')"], [1, 1, 1],
     r"failed: worker \d \(HOST\) is at '[xy]' while worker \d \(HOST\) is at '[xy]': every worker must make "),
    ("exits in the middle", ["peers.gather('x')", "sys.exit(0)", "peers.gather('x')"], [1, ANY, 1],
     r"failed: worker \d \(HOST\) is at .* every worker must make the same calls"),
    ("finishes early", ["peers.doing('call', 5); stuck()", "peers.leave()", "peers.doing('call', 5); stuck()"],
     [1, 1, 1], r"lost worker 1 \(HOST\): it has finished while the others wait for it"),
    ("stuck in Python",
     ["peers.doing('call', 5); stuck()", "peers.doing('python', 5); time.sleep(99)", "peers.gather('x')"], [1, 1, 1],
     r"lost worker 1 \(HOST\): stuck in Python for \d+ s after update 5 \(--stall_timeout\)"),
    ("stuck together", ["peers.doing('call', 7); stuck()"] * 3, [1, 1, 1],
     r"tfdist: failed: no worker has finished a call for \d+ s since update 7 \(--stall_timeout\)"),
    ("a message without its parts", ["stuck()", "peers.watch.send({'beat': 'call'}); stuck()", "stuck()"], [1, 1, 1],
     r"lost worker 1 \(HOST\): it sent what no process of tfdist sends|lost worker 0 \(HOST\): its process ended"),
    ("a watch that breaks", ["peers.watch._check = None; stuck()", "stuck()", "stuck()"], [1, 1, 1],
     r"the watch on the other workers has failed: TypeError|lost worker 0 \(HOST\): (its process ended|it stopped)"),
    ("killed while others keep back what is printed", ["os.kill(os.getpid(), 9)",
     *["pass\nfrom tfdist.config.commands import standard_streams as s\nwith s.held_back(): stuck()"] * 2], [-9, 1, 1],
     r"tfdist: failed: lost worker 0 \(HOST\): its process ended"),
    ("threads that wait for ever",
     ["peers.gather('x')", "os.kill(os.getpid(), 9)", "threading.Thread(target=stuck).start(); peers.gather('x')"],
     [1, -9, 1], r"failed: lost worker 1 \(HOST\): its process ended"),
]  # fmt: skip

TWINS = {"raises", "chief fails", "exits in the middle", "stuck together", "a message without its parts", "other calls",
         "killed in gather", "a watch that breaks", "killed while others keep back what is printed"}  # fmt: skip
"""Losses like others of the table, which are `whole`."""
CELLS = [pytest.param(*c[1:], id=c[0], marks=[pytest.mark.whole] * (c[0] in TWINS)) for c in LOSSES]


@pytest.mark.parametrize("work, codes, message", CELLS)
def test_all_hear_of_a_loss(member, master, work, codes, message):
    begin = "peers.gather('all there'); "
    constants = {"AHEAD_S": 1, "SILENT_S": 5}
    started = [member(r, begin + do, size=3, stall=1, master=master, constants=constants) for r, do in enumerate(work)]
    results = ends(*started)
    assert all(code in (wanted if wanted is ANY else (wanted,)) for (code, _), wanted in zip(results, codes)), results
    for code, text in results:
        assert code != 1 or re.search(message.replace("HOST", HOST), text), text
        assert "Fatal Python error" not in text


def test_last_words_are_written_before_the_end(member, master, tmp_path):
    then = "peers.watch.last_words = lambda why: open('words', 'w').write(why); peers.gather('x'); stuck()"
    ends(member(0, then, master=master), member(1, "peers.gather('x'); os.kill(os.getpid(), 9)", master=master))
    assert (tmp_path / "words").read_text() == f"lost worker 1 ({os.uname().nodename}): its process ended"


def test_a_call_that_cannot_end_is_not_waited_for_but_a_thread_is(member, master):
    """Such as the one that writes a checkpoint: the interpreter would wait for it, too."""
    then = (
        "import threading; told = threading.Event(); peers.watch.last_words = lambda why: told.set()\n"
        "work = lambda: (told.wait(), sum(range(10**7)), say('written'))\n"
        "threading.Thread(target=work, name='tfdist checkpoint').start()\n"
        "threading.Thread(target=stuck, name='pool').start()\n"
        "peers.gather('x'); peers.doing('call'); stuck()"
    )
    constants = {"GRACE_S": 1000.0, "IN_CALL_S": 0.1}
    die = "peers.gather('x'); os.kill(os.getpid(), 9)"
    (code, text), _ = ends(member(0, then, master=master, constants=constants), member(1, die, master=master))
    assert code == 1 and text.endswith("its process ended\nsay: written"), text


@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_worker(member, master, silent):
    constants = {"SILENT_S": 1.0}
    then = (
        "peers.watch.start_timeout = 0; peers.doing('python'); peers.gather('a'); print('beating', flush=True); stuck()"
    )
    started = [member(r, then, size=3, master=master, constants=constants) for r in range(3)]
    for one in started:
        one.until("beating")
    started[silent].process.send_signal(signal.SIGSTOP)
    others = [m for r, m in enumerate(started) if r != silent]
    for code, text in ends(*others):
        assert code == 1
        assert re.search(rf"lost worker {silent} \({HOST}\): silent for \d+ s", text), text
    started[silent].process.send_signal(signal.SIGCONT)  # as after a suspended laptop: the run is over
    code, text = started[silent].end()
    assert (code, "lost worker" in text) == (1, True)


def test_a_worker_that_is_stopped_when_it_has_just_saved(member, master):
    """Before its next beat it would still be given the time that saving may take."""
    saves = "peers.doing('python'); peers.gather('a')\nwith peers.during('saving'): pass\nos.kill(os.getpid(), 19)"
    options = {"master": master, "constants": {"SILENT_S": 1.0}, "start": 1000}
    first, other = member(0, "peers.gather('a'); peers.gather('b')", **options), member(1, saves, **options)
    code, text = first.end()
    assert code == 1 and re.search(rf"lost worker 1 \({HOST}\): silent for \d s$", text), text
    other.process.send_signal(signal.SIGCONT)
    assert other.end()[0] == 1


def test_a_worker_that_is_stopped_when_all_is_over(member, master):
    """Nobody needs it any more, but whoever has started the workers waits for its end."""
    options = {"master": master, "constants": {"SILENT_S": 1.0, "EXIT_WAIT_S": 1.5}}
    words = "peers.watch.last_words = lambda why: say('the result is lost'); peers.leave()"
    first, other = (
        member(0, words, **options),
        member(1, "peers.leave(); os.kill(os.getpid(), signal.SIGSTOP)", **options),
    )
    code, text = first.end()
    assert code == 1 and re.search(rf"lost worker 1 \({HOST}\): silent for \d s at the end of the run$", text), text
    assert "the result is lost" not in text
    other.process.send_signal(signal.SIGCONT)
    assert other.end()[0] == 0


SIGNALS = [
    ([signal.SIGTERM], 143, "SIGTERM"),
    ([signal.SIGINT], 143, "SIGINT"),
    ([signal.SIGINT, signal.SIGINT], 130, "SIGINT"),
]


@pytest.mark.parametrize("numbers, expected, name", SIGNALS)
def test_a_signal_that_the_main_thread_cannot_see(member, master, numbers, expected, name):
    wait = (
        "for s in (signal.SIGTERM, signal.SIGINT): signal.signal(s, lambda *_: None)\n"
        "with peers.seeing_signals():\n  peers.doing('call', 3); peers.gather('x'); peers.doing('call', 3); "
        "say('in C'); stuck()"
    )
    constants = {"SIGNAL_S": 99 if expected == 130 else 0.5}
    started = [member(r, wait, master=master, constants=constants) for r in (0, 1)]
    for one in started:
        one.until("in C")
    while len(numbers) > 1 and started[1].process.poll() is None:  # two at once may count as one
        started[1].process.send_signal(numbers[0])
        with contextlib.suppress(processes.TimeoutExpired):
            started[1].process.wait(0.1)
    if len(numbers) == 1:
        started[1].process.send_signal(numbers[0])
    (code, text), (other, theirs) = ends(*started)
    line = f"stopped by {name} after update 3, which cannot be saved: no update has ended since"
    assert (other, f"tfdist: failed: {line}" in theirs) == (expected, True)
    assert (code, f"lost worker 1 ({os.uname().nodename}): it stopped: {line}" in text) == (1, True)


def states(**phases):
    return {int(rank[1:]): heartbeat.State(phase, 4, 100.0 - seconds) for rank, (phase, seconds) in phases.items()}


STALLS = [  # at 100 s, with 10 s allowed
    (states(r0=("call", 11), r1=("python", 9)), {}, None),
    (states(r0=("call", 9), r1=("python", 11)), {}, None),
    (states(r0=("call", 11), r1=("python", 11)), {}, (1, "stuck in Python for 11 s after update 4 (--stall_timeout)")),
    (states(r0=("python", 11), r1=("waiting", 11)), {}, (0,
                                                         "stuck in Python for 11 s after update 4 (--stall_timeout)")),
    (states(r0=("call", 11), r1=("call", 11)), {},
     (None, "no worker has finished a call for 11 s since update 4 (--stall_timeout)")),
    (states(r0=("call", 11), r1=("waiting", 12)), {1: "the weights after update 4"}, (1,
     "it is at 'the weights after update 4' while others have been in a call for 11 s since update 4 "
     "(--stall_timeout): every worker must have as much data, and make the same calls")),
    (states(r0=("call", 11)) | {1: heartbeat.State("waiting", 5, 88.0)}, {1: "update 5"},
     (None, "no worker has finished a call for 11 s since update 4 (--stall_timeout)")),
    (states(r0=("call", 50), r1=("compiling", 50)), {}, None),
    (states(r0=("call", 50), r1=("saving", 50)), {}, None),
    (states(r0=("starting", 50), r1=("waiting", 50)), {}, None),
    (states(r0=("waiting", 61), r1=("compiling", 61)), {}, (1, "compiling for 61 s after update 4 (--stall_timeout)")),
    (states(r0=("call", 11), r1=("waiting", 50)), {1: heartbeat.END},
     (1, "it has finished while the others wait for it: every worker must make the same updates")),
    (states(r0=("call", 9), r1=("waiting", 50)), {1: heartbeat.END}, None),
    (states(r0=("python", 50), r1=("waiting", 50)), {1: heartbeat.END}, None),
    (states(r0=("call", 50), r1=("waiting", 50), r2=("python", 50)), {1: heartbeat.END}, None),
]  # fmt: skip


@pytest.mark.parametrize("found, waiting, expected", STALLS)
def test_who_is_to_blame_for_a_stall(found, waiting, expected):
    assert heartbeat.find_stall(found, waiting, 100.0, 10.0) == expected


# -- the wire -----------------------------------------------------------------------


def pair():
    """Two ends of a connection."""
    with wire.listen("127.0.0.1", 0) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]


def shake(client_secret, server_secret):
    """Both sides of a handshake, each the connection or the error."""
    found = {}

    def serve(listener):
        try:
            found["server"] = wire.accept(listener.accept()[0], server_secret)
        except wire.WireError as error:
            found["server"] = str(error)

    with wire.listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=serve, args=[listener])
        thread.start()
        try:
            found["client"] = wire.connect(*listener.getsockname(), client_secret)
        except wire.WireError as error:
            found["client"] = str(error)
        thread.join()
    return found["client"], found["server"]


def test_messages_arrive_whole_and_in_order():
    client, server = shake("s", "s")
    for i in range(3):
        client.send({"i": i, "text": "\n{é" * 50000})
    assert [server.receive(5)["i"] for i in range(3)] == [0, 1, 2]
    client.close()
    with pytest.raises(wire.WireError, match="connection closed"):
        server.receive(5)


@pytest.mark.parametrize("mine, theirs", [("", "a"), ("a", ""), ("a", "b")])
def test_a_secret_is_proved_by_the_client_first(mine, theirs):
    client, server = shake(mine, theirs)
    assert server == "it does not know the secret of this job"
    assert client == "it does not know the secret of this job"


def test_the_server_must_know_the_secret_too():
    with wire.listen("127.0.0.1", 0) as listener:
        threading.Thread(target=_echo, args=[listener], daemon=True).start()
        with pytest.raises(wire.WireError, match="does not know the secret"):
            wire.connect(*listener.getsockname(), "s")


def _echo(listener):
    """Answers as somebody who has seen a handshake but knows no secret."""
    sock = listener.accept()[0]
    sock.sendall(json.dumps({"tfdist": 1, "nonce": "0" * 32}).encode() + b"\n")
    proof = json.loads(sock.recv(1000))["proof"]
    sock.sendall(json.dumps({"proof": proof}).encode() + b"\n")


BROKEN = [
    (b'{"half": ', "no answer within 0 s"), (b"", "no answer within 0 s"),
    (b"garbage", "it does not speak tfdist's protocol"), (b"{not json}\n", "it does not speak tfdist's protocol"),
    (b'{"long": "' + b"x" * 5000, "a message that is too long"),
    (b'{"long": "' + b"x" * 5000 + b'"}\n', "a message that is too long"),
    (b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}\n", "a message that is nested too deeply"),
    (b'{"a": ' + b"[" * 2000 + b"\n", "a message that is nested too deeply"),
]  # fmt: skip


@pytest.mark.parametrize("words, problem", BROKEN, ids=lambda v: v[:20])
def test_what_is_not_a_message(words, problem):
    near, far = pair()
    with near, far:
        near.sendall(words)
        with pytest.raises(wire.WireError, match=problem):
            wire.Connection(far).receive(0.2)


def test_brackets_in_texts_are_no_nesting():
    client, server = shake("s", "s")
    message = {"text": '\\"' + "[{" * 5000, "flat": [[i] for i in range(500)]}
    client.send(message)
    assert server.receive(5) == message


UNFIT = [  # answers to the challenge that Python's own functions do not take, or take for something else
    {"nonce": "0" * 32, "proof": "\u00e9" * 64},
    {"nonce": "\ud800", "proof": "0" * 64},
    {"nonce": ["0"] * 32, "proof": {}},
    {"nonce": "0" * 32},
]


@pytest.mark.parametrize("answer", UNFIT, ids=range(len(UNFIT)))
def test_an_unfit_answer_to_the_challenge(answer):
    near, far = pair()
    with near, far:
        near.sendall(json.dumps(answer).encode() + b"\n")
        with pytest.raises(wire.WireError, match="does not speak tfdist's protocol"):
            wire.accept(far, "s")


def test_listens_on_the_address_given_alone():
    with wire.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), 5)
