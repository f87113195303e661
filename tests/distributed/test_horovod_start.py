"""Horovod's start where a process does not come, with the server of horovodrun that each tells its address."""

import contextlib
import http.client
import os
import sys

import pytest
from support import processes

http_server = pytest.importorskip("horovod.runner.http.http_server")

WAIT = """
import threading
from tfdist.distributed.strategies import horovod_start
with horovod_start.bounded(0.2):
    threading.Event().wait(30)
"""
RAISE = "or raise --start_timeout"


def ended(size="2", **variables):
    """What a process says, and its exit code, in which Horovod would wait for ever."""
    environ = os.environ | {"HOROVOD_SIZE": size, "HOROVOD_LOCAL_SIZE": "2", **variables}
    done = processes.run(
        [sys.executable, "-c", WAIT], env=environ, stdout=processes.PIPE, stderr=processes.STDOUT, text=True
    )
    return done.returncode, done.stdout


def test_who_has_not_come_is_named():
    server = http_server.KVStoreServer(verbose=0)
    port = server.start_server()
    try:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            connection.request("PUT", "/global/1", b"an address")  # as Horovod does
            assert connection.getresponse().status == http.client.OK
        where = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
        code, said = ended(**where)
        missing = f"worker 0 ({os.uname().nodename}) of 2 has not come within 0.2 s"
        assert (code, said) == (2, f"tfdist: error: {missing}: look at the output of the others, {RAISE}\n")
        assert "tfdist: error: worker 0, worker 2 of 3 has not come within 0.2 s" in ended("3", **where)[1]
    finally:
        server.shutdown_server()


def test_a_start_by_mpi_is_bounded_too():
    code, said = ended()
    assert code == 2 and "tfdist: error: Horovod has not started within 0.2 s: look at the output" in said
