"""Horovod: one process per replica, its own rendezvous and its own all-reduce. The only module that imports it.

Under Keras 3 only its collectives work; `hvd.DistributedOptimizer` and its Keras callbacks reduce nothing, or crash.
Its C++ side waits for processes that may never come, and then aborts; so the workers wait for each other first, where
it can be said who is missing: through the store of horovodrun, in which Gloo's ranks leave their addresses, too.
"""

import contextlib
import functools
import http.client
import json
import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tfdist.cluster import schema, wire
from tfdist.cluster.addresses import join
from tfdist.cluster.discovery import HOROVODRUN, Cluster
from tfdist.cluster.peers import Peers
from tfdist.config.commands import standard_streams
from tfdist.distributed import horovod_install
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError, one_line, printable

if TYPE_CHECKING:
    import tensorflow as tf

_UNREACHABLE_S = 15.0  # Horovodrun is lost if it has not answered for so long
_ASK_S = 3.0
_PAUSE_S = (0.05, 1.0)  # between questions, at first and at most: horovodrun answers all workers in one process
_GRACE_S = 5.0  # extra seconds for the others, which hear from the chief who is missing
_ALL = "all"
_LATE_FIX = "look at its output, or raise --start_timeout"


def start(limit: float) -> tuple[ModuleType, tuple[str, ...]]:
    """Starts Horovod once all others have come, for which they have `limit` seconds; raises UserError.

    Returns its module, and the host name of each process by rank, or none if they are unknown.
    """
    problem = horovod_install.problem()
    if problem:
        raise UserError(problem)
    try:
        import horovod.tensorflow as hvd

        hosts = meet(limit, os.environ)
        with bounded(limit):
            hvd.init()
    except UserError:
        raise
    except Exception as error:  # an ImportError, an OSError of a library, or a RuntimeError of its rendezvous
        raise UserError(
            f"Horovod does not start ({one_line(error, 200)})",
            "start with horovodrun or mpirun, or rebuild it with python -m tfdist.horovod_build",
        ) from error
    return hvd, hosts


def cluster(hvd: ModuleType, hosts: tuple[str, ...]) -> Cluster:
    """Returns the workers as Horovod has found them, and where they meet for their heartbeats, agreed on through it."""
    import numpy as np

    listener, text = None, ""
    if hvd.rank() == 0:
        listener = wire.listen(_own_host(hvd), 0)
        text = f"{join(*listener.getsockname()[:2])} {secrets.token_hex(16)}"
    line = np.zeros(256, np.uint8)
    line[: len(text)] = np.frombuffer(text.encode(), np.uint8)
    if hvd.size() > 1:
        line = hvd.broadcast(line, 0, name="tfdist.rendezvous").numpy()
    master, secret = line.tobytes().rstrip(b"\0").decode().split()
    return Cluster(
        HOROVODRUN,
        rank=hvd.rank(),
        size=hvd.size(),
        local_rank=hvd.local_rank(),
        local_size=hvd.local_size(),
        master=master,
        hosts=hosts,
        secret=secret,
        meeting_fd=listener.detach() if listener else None,
    )


def _own_host(hvd: ModuleType) -> str:
    """Returns an address at which the other workers reach this machine: of the interface that leads to horovodrun."""
    if hvd.local_size() == hvd.size():
        return "127.0.0.1"
    driver = (
        os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((driver, 9))  # sends nothing: it asks for the route
        return probe.getsockname()[0]


def create(hvd: ModuleType, name: str, reason: str, peers: Peers, jit: str) -> Distribution:
    """Builds the strategy of one replica on device `name` of this process, and Horovod between the processes."""
    import keras
    import tensorflow as tf

    from tfdist.distributed.collectives import bucketed, gather_by_sum

    reduce = functools.partial(hvd.grouped_allreduce, op=hvd.Sum)

    def all_sum(tensors: "list[tf.Tensor]") -> "list[tf.Tensor]":
        # It knows no bfloat16; a sum in float32 is at least as good.
        known = [tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t for t in tensors]
        return [tf.cast(s, t.dtype) for s, t in zip(bucketed(known, reduce), tensors)]

    def all_gather(tensors: "list[tf.Tensor]") -> "list[tf.Tensor]":
        return gather_by_sum(tensors, all_sum, hvd.rank(), hvd.size())

    def broadcast(variables: "list[keras.Variable]") -> None:
        hvd.broadcast_variables([v.value for v in variables], root_rank=0)

    def all_reduce(reduce_op: "tf.distribute.ReduceOp | str", value: object, options: object = None) -> object:
        op = hvd.Average if getattr(reduce_op, "value", reduce_op).upper() == "MEAN" else hvd.Sum
        return tf.nest.map_structure(lambda t: hvd.allreduce(t, op=op), value)

    exchanges: dict[str, Any] = {"all_sum": all_sum, "all_gather": all_gather, "broadcast": broadcast}
    return Distribution(
        name="horovod",
        reason=reason,
        strategy=tf.distribute.get_strategy(),
        replicas=hvd.size(),
        devices=(name,),
        jit=jit,
        replica_id=hvd.rank,
        communication="horovod",
        unsummed=("bfloat16",),
        all_reduce=all_reduce,
        peers=peers,
        **exchanges if hvd.size() > 1 else {},
    )


def meet(limit: float, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Waits until all workers that horovodrun has started are there, `limit` seconds at most; raises UserError.

    Returns the host name of each by rank; nothing where there is no horovodrun.
    """
    try:
        rank, size = int(environ["HOROVOD_RANK"]), int(environ["HOROVOD_SIZE"])
        store = _Store(environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    except (KeyError, ValueError):
        return ()
    here = f" ({platform.node()})" if environ.get("HOROVOD_LOCAL_SIZE") == environ["HOROVOD_SIZE"] else ""
    store.put(f"rank-{rank}", platform.node())
    return _await_chief(store, size, limit, here) if rank else _await_all(store, size, limit, here)


def _await_all(store: "_Store", size: int, limit: float, here: str) -> tuple[str, ...]:
    """Waits for all workers, and sends them all host names, or who is missing."""
    hosts: dict[int, str] = {}
    for _ in _pauses(limit):
        for rank in set(range(size)) - set(hosts):
            host = store.get(f"rank-{rank}")
            if host is not None:
                hosts[rank] = printable(host, 253)
        if len(hosts) == size:
            break
    missing = ", ".join(f"worker {r}{here}" for r in range(size) if r not in hosts)
    if missing:
        problem = f"timed out after {limit:g} s waiting for {missing} of {size}: {_LATE_FIX}"
        store.put(_ALL, json.dumps({"problem": problem}))
        raise UserError(problem)
    names = [hosts[r] for r in range(size)]
    store.put(_ALL, json.dumps({"hosts": names}))
    return tuple(names)


def _await_chief(store: "_Store", size: int, limit: float, here: str) -> tuple[str, ...]:
    """Waits for the answer of the chief."""
    for _ in _pauses(limit + _GRACE_S):
        text = store.get(_ALL)
        if text is not None:
            break
    else:
        chief_joined = store.get("rank-0") is not None
        who = f"all {size} workers to reach worker 0{here}" if chief_joined else f"worker 0{here} of {size}"
        raise UserError(f"timed out after {limit:g} s waiting for {who}", _LATE_FIX)
    try:
        hosts = schema.each(schema.line(253), size, size)
        read = schema.named(hosts=schema.record(hosts=hosts), problem=schema.record(problem=schema.line(4000)))
        found = read(json.loads(text))
    except (ValueError, RecursionError, wire.WireError):  # the store takes what anybody gives it
        return ()
    if "problem" in found:
        raise UserError(found["problem"])
    return tuple(found["hosts"])


def _pauses(limit: float) -> Iterator[None]:
    """Gives turns with growing pauses between them, the last one so many seconds later."""
    deadline, pause = time.monotonic() + limit, _PAUSE_S[0]
    while (left := deadline - time.monotonic()) > 0:
        yield
        time.sleep(min(pause, left))
        pause = min(2 * pause, _PAUSE_S[1])
    yield


class _Store:
    """Texts that horovodrun keeps for its workers."""

    def __init__(self, address: str, port: int):
        self._address, self._port = address, port

    def put(self, key: str, text: str) -> None:
        """Leaves a text for the others."""
        self._ask("PUT", key, text.encode())

    def get(self, key: str) -> str | None:
        """Returns what somebody has left; None if nobody has."""
        status, content = self._ask("GET", key)
        return content.decode(errors="replace") if status == http.client.OK else None

    def _ask(self, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        begun = time.monotonic()
        while True:
            try:
                with contextlib.closing(http.client.HTTPConnection(self._address, self._port, timeout=_ASK_S)) as link:
                    link.request(method, f"/tfdist/{key}", body)
                    answer = link.getresponse()
                    return answer.status, answer.read()
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() - begun >= _UNREACHABLE_S:
                    what = f"horovodrun cannot be reached at {self._address}:{self._port} ({one_line(error, 200)})"
                    raise UserError(what, "look at its output, and at the network") from None
            time.sleep(_PAUSE_S[1])


@contextlib.contextmanager
def bounded(limit: float) -> Iterator[None]:
    """Ends this process with a line and exit code 2 if what is done inside, in C++, takes more seconds."""
    started = threading.Event()

    def watch() -> None:
        if not started.wait(limit):
            # The main thread is in C++, where no exception reaches it.
            standard_streams.write_error(
                f"tfdist: error: Horovod has not started within {limit:g} s: look at the output of the other workers, "
                "or raise --start_timeout\n"
            )
            os._exit(2)

    threading.Thread(target=watch, name="tfdist horovod start", daemon=True).start()
    try:
        yield
    finally:
        started.set()
