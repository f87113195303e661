"""Horovod's start where a process does not come, with horovodrun's own store."""

import concurrent.futures
import contextlib
import os
import sys

import pytest
from support import processes

from tfdist.distributed.strategies import horovod
from tfdist.errors import UserError

http_server = pytest.importorskip("horovod.runner.http.http_server")
HOST = os.uname().nodename


@pytest.fixture
def store():
    """Gives the variables of horovodrun for so many workers, of which the store knows nothing yet."""
    server = http_server.KVStoreServer(verbose=0)
    port = server.start_server()

    def variables(rank, size, local_size=2):
        where = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
        counts = {"HOROVOD_RANK": rank, "HOROVOD_SIZE": size, "HOROVOD_LOCAL_SIZE": local_size}
        return where | {name: str(value) for name, value in counts.items()}

    yield variables
    with contextlib.suppress(Exception):
        server.shutdown_server()


def met(*environs, limit=30.0):
    """What each of some workers gets, or the line with which it ends."""

    def meet(environ):
        try:
            return horovod.meet(limit, environ)
        except UserError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(environs)) as pool:
        return list(pool.map(meet, environs))


def test_all_come(store):
    assert met(*(store(rank, 3) for rank in (2, 0, 1))) == [(HOST,) * 3] * 3


def test_who_is_missing(store):
    line = f"timed out after 0.2 s waiting for worker 1 ({HOST}) of 2: look at its output, or raise --start_timeout"
    assert met(store(0, 2), limit=0.2) == [line]


def test_all_hear_who_is_missing_on_other_hosts(store):
    line = "timed out after 1 s waiting for worker 1, worker 3 of 4: look at its output, or raise --start_timeout"
    assert met(store(0, 4), store(2, 4), limit=1.0) == [line, line]


def test_the_chief_is_missing(store, monkeypatch):
    monkeypatch.setattr(horovod, "_GRACE_S", 0.0)
    assert met(store(1, 2), limit=0.2)[0].startswith(f"timed out after 0.2 s waiting for worker 0 ({HOST}) of 2: ")


def test_horovodrun_is_not_there(store, monkeypatch):
    monkeypatch.setattr(horovod, "_UNREACHABLE_S", 0.0)
    environ = store(0, 2) | {"HOROVOD_GLOO_RENDEZVOUS_PORT": "1"}
    assert met(environ)[0].startswith("horovodrun cannot be reached at 127.0.0.1:1 ([Errno 111] Connection refused): ")


@pytest.mark.parametrize("words", ["", "[" * 100_000, "{}", '{"hosts": ["a"]}', '{"hosts": [1, 2]}', '{"problem": 1}'])
def test_what_a_stranger_leaves_in_the_store_is_passed_over(store, words):
    environ = store(1, 2)
    address, port = (environ[f"HOROVOD_GLOO_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT"))
    horovod._Store(address, int(port)).put("all", words)
    assert met(environ) == [()]


def test_a_start_that_does_not_end_in_cpp():
    """As MPI's, which has no such store."""
    assert horovod.meet(1.0, {"OMPI_COMM_WORLD_SIZE": "2"}) == ()
    waits = (
        "import threading\nfrom tfdist.distributed.strategies import horovod\n"
        "with horovod.bounded(0.2):\n    threading.Event().wait(30)"
    )
    done = processes.run(
        [sys.executable, "-c", waits], env={**os.environ}, stdout=processes.PIPE, stderr=processes.STDOUT, text=True
    )
    assert done.returncode == 2
    assert "tfdist: error: Horovod has not started within 0.2 s: look at the output of the other" in done.stdout
