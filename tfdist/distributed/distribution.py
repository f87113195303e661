"""A started strategy for the rest of tfdist: the few operations in which the strategies differ."""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from tfdist.cluster.peers import Peers
from tfdist.config import cpu_kernels
from tfdist.errors import UserError

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

T = TypeVar("T")
INSTRUCTIONS = ("avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "sve")
"""For which TensorFlow and its libraries have code of their own, as Linux names them."""


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Distribution:
    """A strategy that has been started.

    `run`, `local`, `average` and `broadcast` are called in cross-replica context, `all_sum`, `all_gather` and
    `replica_id` inside the function given to `run`. On one replica each is the identity, so that callers need not ask.
    """

    name: str
    """Name as in `--strategy`: `default`, `mirrored`, `multi_worker`, `tpu` or `horovod`."""
    reason: str
    """Why this strategy, in words for a person."""
    strategy: "tf.distribute.Strategy"
    """The `tf.distribute.Strategy` under whose scope variables are created."""
    replicas: int
    """Copies of the model over all workers."""
    devices: tuple[str, ...]
    """TensorFlow names of this worker's devices, one per replica, e.g. `CPU:1`."""
    jit: str
    """Compilation by XLA of forward and backward pass: `on`, `off`, or `auto` for where the model allows it."""
    run: Callable[[Callable[..., Any], tuple[Any, ...]], Any] = lambda fn, args: fn(*args)
    """`run(fn, args)`: calls `fn(*args)` once per local replica, returns per-replica values."""
    local: Callable[[Any], tuple[Any, ...]] = lambda value: (value,)
    """This worker's values of a per-replica value, in order of replicas."""
    replica_id: "Callable[[], int | tf.Tensor]" = lambda: 0
    """Index of the current replica among all, an int or an int32 scalar."""
    all_sum: "Callable[[list[tf.Tensor]], list[tf.Tensor]]" = lambda tensors: tensors
    """Sums each dense tensor of a list over all replicas."""
    all_gather: "Callable[[list[tf.Tensor]], list[tf.Tensor]]" = lambda tensors: tensors
    """Concatenates each flat tensor of a list over all replicas, in their order; on all it has the same size."""
    broadcast: "Callable[[list[keras.Variable]], None]" = lambda variables: None
    """Gives each variable the chief's value, where creating it under `scope` did not."""
    creating: Callable[[AbstractContextManager[object]], AbstractContextManager[object]] = lambda scope: scope
    """Wraps the scope of the strategy in which variables are created."""
    peers: Peers = dataclasses.field(default_factory=Peers)
    """The workers, in touch with each other."""
    process: int = dataclasses.field(default_factory=os.getpid)
    """Id of the process that connected it."""
    static_shapes: bool = False
    """Whether replicas want shapes that are known when a step is traced, as those on a TPU do. The host then gathers
    their rows, fills them up to one number and gives them to the replicas, in which no clock is read."""
    communication: str = ""
    """Transport of sums between workers: `shared memory`, `ring`, `nccl` or `horovod`; "" in one process."""
    all_reduce: Callable | None = None  # of layers, such as a synchronized BatchNorm: not that of the context
    lacks: tuple[str, ...] = ()
    """Types in which its devices cannot compute."""
    unsummed: tuple[str, ...] = ()
    """Types in which gradients cannot travel, besides."""
    _calling: Any = dataclasses.field(default_factory=threading.RLock)  # held by the thread that is in a call

    @property
    def device_kind(self) -> str:
        """The kind of its devices: `CPU`, `GPU` or `TPU`."""
        return self.devices[0].partition(":")[0]

    @property
    def timed(self) -> bool:
        """Whether the host's clock tells what a replica waits for: a GPU computes behind its back, a TPU has none."""
        return self.device_kind == "CPU" and not self.static_shapes

    @property
    def workers(self) -> int:
        """Number of processes."""
        return self.peers.size

    @property
    def rank(self) -> int:
        """Index of this process among the workers, 0 for the chief."""
        return self.peers.rank

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief, which writes the files of the run."""
        return self.rank == 0

    @property
    def first(self) -> int:
        """Index of this worker's first replica among all."""
        return self.rank * len(self.devices)

    @contextlib.contextmanager
    def one_thread(self, alone: bool = False) -> Iterator[None]:
        """Refuses a call on several replicas, or if `alone` on any, while another thread is in one.

        Replicas share what is patched while they are traced and checked, and workers make the same calls in one order.
        """
        with contextlib.ExitStack() as held:
            if self.replicas > 1 or alone:
                if not self._calling.acquire(blocking=False):
                    what = "threads of the script call models at once, which several replicas, and --workdir, exclude"
                    raise UserError(what, "make these calls one after the other, or use --strategy=default")
                held.callback(self._calling.release)
            yield

    def per_replica(self, values: list[T]) -> T:
        """Makes an argument of `run` of one value for each replica; in cross-replica context, not between workers."""
        if self.replicas == 1:
            return values[0]
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: values[context.replica_id_in_sync_group]
        )

    def place_of(self, replica: int) -> str:
        """Returns where a replica is, for a person: its worker, host and device, as far as there are several."""
        worker, device = divmod(replica, len(self.devices))
        on = f" {self.devices[device]}" if len(self.devices) > 1 else ""
        return f"worker {worker} ({self.peers.hosts[worker]}){on}" if self.workers > 1 else on.strip()

    def arithmetic(self) -> dict[str, str]:
        """Returns what decides about the last bit on this worker besides the experiment, by names for people."""
        import keras
        import tensorflow as tf

        threads = tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))
        found = {
            "TensorFlow": tf.__version__,
            "Keras": keras.__version__,
            "threads per replica": str(threads),
            "CPU kernels": cpu_kernels.in_use(),
            "instructions": " ".join(name for name in INSTRUCTIONS if name in cpu_kernels.cpu_flags()),
            "XLA": self.jit,
        }
        seen = tf.config.list_physical_devices("GPU") if self.device_kind == "GPU" else []
        names = {str(tf.config.experimental.get_device_details(device).get("device_name")) for device in seen}
        return found | ({"GPU": ", ".join(sorted(names))} if names else {})

    def announcement(self) -> str:
        """Returns the strategy, why it was chosen, and its devices, in one line for a person."""
        xla = {"off": "", "on": ", compiled by XLA", "auto": ", compiled by XLA where it can"}[self.jit]
        replicas = f"{self.replicas} replica{'s' * (self.replicas > 1)} on {', '.join(self.devices)}"
        return f"strategy {self.name}, because {self.reason}: {replicas}{xla}"

    def __repr__(self):
        here = f"{', '.join(self.devices)}" + (f" of worker {self.rank} of {self.workers}" if self.workers > 1 else "")
        return f"<Distribution {self.name}: {self.replicas} replica{'s' * (self.replicas > 1)}, here on {here}>"

    def scope(self) -> AbstractContextManager[object]:
        """Returns the context in which model, optimizer and metrics must be created."""
        return self.creating(self.strategy.scope())


def not_forked(process: int) -> None:
    """Refuses a fork of the process that has started devices: it would wait for threads of TensorFlow's."""
    if process != os.getpid():
        what = "this process was forked after its parent had started several devices, and TensorFlow runs in none such"
        raise UserError(what, "start it with multiprocessing.get_context('spawn'), or use --strategy=default")


def of_strategy(strategy: "tf.distribute.Strategy", **fields: Any) -> Distribution:
    """Describes a strategy of TensorFlow's that is started, with its own collectives where `fields` have no others."""
    import tensorflow as tf

    replica = tf.distribute.get_replica_context
    calls = {
        "run": lambda fn, args: strategy.run(fn, args=args),
        "local": strategy.experimental_local_results,
        "replica_id": lambda: replica().replica_id_in_sync_group,
        "all_sum": lambda tensors: replica().all_reduce(tf.distribute.ReduceOp.SUM, tensors),
        "all_gather": lambda tensors: [replica().all_gather(tensor, 0) for tensor in tensors],
    }
    return Distribution(strategy=strategy, replicas=strategy.num_replicas_in_sync, **calls | fields)
