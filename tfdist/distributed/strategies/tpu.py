"""`tf.distribute.TPUStrategy`: one replica on each core of a TPU, all of them driven by this process.

Traced for emulated cores, and never run on a TPU: see docs/strategies.md.
"""

import contextlib
import faulthandler
import json
import pathlib
import re
import signal
import sys
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import TYPE_CHECKING, TypeVar

from tfdist.distributed import child_process, tpu_host
from tfdist.distributed.distribution import Distribution, of_strategy
from tfdist.errors import UserError, one_line

if TYPE_CHECKING:
    import tensorflow as tf

T = TypeVar("T")
WITHOUT_A_SIGN_S = 8.0  # time limit for the start of a TPU on a machine that shows no sign of one
IMPORT_S = 8.0  # extra seconds for a trial in another process, which imports TensorFlow
_GRACE_S = 10.0


def create(name: str, reason: str, limit: float) -> Distribution:
    """Starts the system of a TPU (`local`, or by its name in the Cloud), which alone proves that there is one.

    Raises UserError, which says what to do, if it does not start within `limit` seconds.
    """

    try:
        strategy = _within(limit, lambda: _started(name))
    except futures.TimeoutError:
        raise UserError(_late(name, limit)) from None
    except Exception as error:  # TensorFlow, its client of the Cloud and libtpu raise errors of many kinds
        raise UserError(_explained(name, f"{type(error).__name__}: {error}")) from error
    return of(strategy, reason)


def _started(name: str) -> "tf.distribute.Strategy":
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)  # proves nothing
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)


def try_elsewhere(name: str, limit: float, environ: Mapping[str, str]) -> None:
    """Starts the TPU system, as `create`, in a process of its own, on a machine where no device of a TPU is seen.

    There, tensorflow-tpu 2.20 was seen to end the process with a segmentation fault, and not with an error.
    """
    done = child_process.answer([sys.executable, "-m", "tfdist.distributed.strategies.tpu", name], limit, env=environ)
    if done is None:
        raise UserError(_late(name, limit))
    if done.returncode < 0:
        ended = signal.Signals(-done.returncode).name
        raise UserError(_explained(name, f"No TPU devices: its start ended a process by {ended}"))
    if done.returncode:
        raise UserError(_explained(name, done.stdout or done.stderr.strip().rpartition("\n")[2]))


def of(strategy: "tf.distribute.Strategy", reason: str) -> Distribution:
    """Describes a strategy that has been started."""
    replicas = strategy.num_replicas_in_sync
    alone = {"replica_id": lambda: 0, "all_sum": lambda tensors: tensors} if replicas == 1 else {}
    return of_strategy(
        strategy,
        name="tpu",
        reason=reason,
        devices=tuple(f"TPU:{core}" for core in range(replicas)),
        jit="off",  # a TPU compiles all of a step anyway
        static_shapes=True,
        lacks=("float16", "float64"),
        **alone,
    )


def _within(limit: float, work: Callable[[], T]) -> T:
    """Returns what `work` gives; raises its error, or `futures.TimeoutError` if it takes longer than `limit` seconds.

    It runs in a thread, which cannot be ended. Should it hold Python's lock, so that nobody can notice, the process
    ends with a list of what its threads do.
    """
    with contextlib.suppress(RuntimeError, OSError, ValueError):  # nowhere to write the list
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(limit + _GRACE_S, exit=True, file=sys.__stderr__)
    try:
        return child_process.later(work).result(limit)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _late(name: str, limit: float) -> str:
    return (
        f"--tpu={name} has not started within {limit:g} s: look whether another process holds it (its lock is "
        "/tmp/libtpu_lockfile), restart the machine or runtime, or give it more time with --start_timeout"
    )


def _explained(name: str, message: str) -> str:
    """Returns the line for an error, given with its type: by the first pattern in `tpu_errors.json` that it has."""
    kind, _, text = one_line(message, 240).partition(": ")
    for known in json.loads(pathlib.Path(__file__).with_name("tpu_errors.json").read_text()):
        if re.search("|".join(known["errors"]), message):
            install = tpu_host.install_line()
            what = known["meaning"].format(install=install, build=tpu_host.problem().rpartition(": ")[2] or install)
            return f"--tpu={name} cannot be used: {what} ({text})"
    return f"--tpu={name} cannot be used ({kind}: {text}): see what python -m tfdist.doctor finds"


def main() -> None:
    """The program of `try_elsewhere`: ends with 1 and the error on standard output if the TPU does not start."""
    try:
        _started(sys.argv[1])
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
