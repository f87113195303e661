"""`tfdist.connect` as cells of a notebook call it."""

import resource
import socket
import threading
import types

import tensorflow as tf
from support.refusals import refused

import tfdist
from tfdist.config.runtime_options import PlacementOptions
from tfdist.distributed import gpus, tf_devices
from tfdist.distributed.strategies import multi_worker


def test_asked_again_it_returns_what_it_returned(connect):
    two = tfdist.connect("mirrored", virtual_devices=2)
    assert tfdist.connect("mirrored", virtual_devices=2) is two
    assert tfdist.connect("mirrored", virtual_devices=3) is not two
    assert tfdist.connect("mirrored", virtual_devices=2, jit="on") is not two


def test_a_worker_waits_for_the_chiefs_server():
    """gRPC, refused once, asks again after ever longer pauses, which on a busy machine took more than 25 s."""
    with socket.socket() as chief:
        chief.bind(("127.0.0.1", 0))  # as while it is reserved: it refuses
        peers = types.SimpleNamespace(rank=1, failure="", addresses=(f"127.0.0.1:{chief.getsockname()[1]}",))
        waiting = threading.Thread(target=multi_worker._wait_for_the_chief, args=(peers,))
        waiting.start()
        chief.listen()
        waiting.join(60)
        assert not waiting.is_alive() and chief.accept()
    peers.failure = "lost worker 0"
    multi_worker._wait_for_the_chief(peers)  # and does not, once the run has failed


def test_too_little_address_space_is_refused_before_tensorflow_is_imported(monkeypatch):
    """TensorFlow would end the process in C++, or wait for memory for ever."""
    monkeypatch.setattr(tf_devices, "start", lambda: (tf, [], []))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3_000_000_000, resource.RLIM_INFINITY))
    with refused(r"^ulimit -v allows 3.0 GB of address space, and TensorFlow needs 4 GB or more: raise it, or run"):
        tf_devices.prepare(PlacementOptions(), gpus.Survey(), gpus.Selection((), None))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (5_000_000_000, resource.RLIM_INFINITY))
    assert tf_devices.prepare(PlacementOptions(), gpus.Survey(), gpus.Selection((), None)) == ("CPU:0",)
