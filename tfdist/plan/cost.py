"""The cost of an update on W workers, from figures that were measured on one machine. Pure; no TensorFlow.

An all-reduce of S bytes over a ring of W workers takes 2(W - 1) steps, in each
of which every worker sends S/W bytes to its neighbour (Patarasuk and Yuan,
*Bandwidth optimal all-reduce algorithms for clusters of workstations*, 2009;
Thakur, Rabenseifner and Gropp, *Optimization of collective communication
operations in MPICH*, 2005, section 4.5). In TensorFlow's ring each worker asks
its neighbour for all that it is to receive before anything is there, so that
only the first step waits for the question: 2 W - 1 messages follow each other.

    seconds = (2 W - 1) (a + L) + 2 (W - 1) / W * S * b

Here a is the work of the processes with a message, whatever its size, L the
link's latency, and b the time of a byte: the link's, and that of the
processors, which copy and add. Of 2, 3 and 4 workers at 5 and 20 ms, small sums
took 3.1, 5.2 and 7.0 times the latency. Nothing is taken to
happen at the same time: sums begin within the backward pass (docs/speed.md),
but on CPUs most of their time is work of the same processors. What a sum takes
besides, since workers come to it at different moments, is measured with two of
them and taken to be the same for more.

Workers of one machine alone sum in its memory instead: each writes its bytes
and reads those of all, so that a byte of the array is moved W + 3 times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfdist.config import call_length
from tfdist.distributed.shared_memory_sum import MOST

PAYLOAD = 1448 / 1538
"""Share of what an Ethernet link carries that is the payload of TCP, with frames of 1,500 bytes."""
BACKWARD = 2 / 3
"""Share of a pass that goes backward, which has two products for each one forward."""
AT_ONCE = 8
"""Messages that are under way at the same time, see `tfdist/distributed/strategies/multi_worker.py`."""
AGREEMENT_TRIPS = 2
"""How often something crosses the link between two calls of several updates each, for the workers to agree to go on."""


@dataclasses.dataclass(frozen=True, slots=True)
class NetworkLink:
    """What connects two machines; each has one of its own in either direction, as with a switch."""

    bits_per_second: float
    latency: float
    """Seconds, one way."""


@dataclasses.dataclass(frozen=True, slots=True)
class MessageWork:
    """What a message costs the processes at both ends of it, on this machine without a network."""

    step_seconds: float
    """Of one of the messages of a sum that follow each other, or of a sum in memory, without a payload."""
    byte_seconds: float
    """Of each byte that a worker sends and receives."""


@dataclasses.dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of an update on one device: `update + micro * accumulate + example * examples`."""

    update: float
    micro: float
    """Of each micro-batch, however small."""
    example: float

    def seconds(self, examples: float, accumulate: int) -> float:
        """Returns the seconds of an update of so many examples in so many micro-batches."""
        return self.update + self.micro * accumulate + self.example * examples


@dataclasses.dataclass(frozen=True, slots=True)
class Epoch:
    """The updates of an epoch, which calls of several do not go beyond."""

    full: int = 1 << 20
    """With a whole batch."""
    tail: bool = False
    """Whether there is another one with fewer examples, which is a call of its own."""

    def calls(self, updates: int) -> float:
        """Returns how many calls there are for each update, if one makes at most so many of them."""
        return (-(-self.full // updates) + self.tail) / (self.full + self.tail)


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What is trained, as far as its cost depends on it."""

    batch: int
    """Examples of an update, over all workers."""
    accumulate: int
    dtype: str
    """Type in which gradients travel."""
    messages: tuple[int, ...]
    """Bytes of each sum of an update."""
    ready: tuple[float, ...] = ()
    """For each sum, the share of the backward pass after which its gradients are there; 1 where nothing is given."""
    in_passes: tuple[int, ...] = ()
    """Bytes of the sums inside the passes of a micro-batch, which everything waits for: synchronized BatchNorm."""
    epoch: Epoch = Epoch()

    @property
    def size(self) -> int:
        """Returns the bytes that an update sums."""
        return sum(self.messages) + self.accumulate * sum(self.in_passes)

    @property
    def sums(self) -> int:
        """Returns how many sums an update has."""
        return len(self.messages) + self.accumulate * len(self.in_passes)


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """An update on W workers."""

    nodes: int
    workers: int
    rows: int
    """Examples of the worker that has the most."""
    seconds: float
    compute: float
    """Seconds of computing."""
    exposed: float
    """Seconds that the exchange adds to it."""
    parts: dict[str, float]
    """Seconds of each cause."""
    updates_per_second: float
    examples_per_second: float
    efficiency: float
    """The speed over that of one worker, by worker."""


def crossings(workers: int) -> int:
    """Returns how many messages of a sum follow each other; see the top of this module."""
    return 2 * workers - 1 if workers > 1 else 0


def ring(size: float, workers: int, step: float, byte: float) -> float:
    """Returns the seconds of an all-reduce of `size` bytes; see the top of this module.

    Args:
      step: seconds of a message without a payload.
      byte: seconds of a byte.
    """
    return crossings(workers) * step + 2 * (workers - 1) / workers * size * byte


@dataclasses.dataclass(frozen=True, slots=True)
class HostSums:
    """What sums cost workers of one machine alone, which make them in its memory; measured with two of them."""

    work: Mapping[str, MessageWork]
    """By the type in which gradients travel."""
    sum_seconds: float = 0.0
    """As of `Machines`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Machines:
    """Machines of one kind in a ring."""

    link: NetworkLink
    work: Mapping[str, MessageWork]
    """By the type in which gradients travel."""
    compute: Compute
    """Of one worker among its machine's `per_node`."""
    per_node: int = 1
    sum_seconds: float = 0.0
    """What each sum of an update takes besides, since workers come to it at different moments; see `pair`."""
    host: HostSums | None = None
    """None for machines whose workers sum through the network, even among themselves."""

    def local_exchange(self, job: Job, workers: int) -> float:
        """Returns the seconds of an update's sums among workers of one machine, without `sum_seconds`."""
        parts = self._parts(job, workers, False, 1)
        return parts["messages"] + parts["copies"]

    def predict(self, job: Job, nodes: int) -> Prediction | None:
        """Predicts an update on so many machines; None where a worker would have no example in a micro-batch."""
        workers = nodes * self.per_node
        if job.batch < workers * job.accumulate:
            return None
        rows = -(-job.batch // workers)
        compute = self.compute.seconds(rows, job.accumulate)
        parts = self._parts(job, workers, nodes > 1, rows)
        seconds = sum(parts.values())
        alone = self.compute.seconds(job.batch, job.accumulate)
        return Prediction(
            nodes=nodes,
            workers=workers,
            rows=rows,
            seconds=seconds,
            compute=compute,
            exposed=seconds - compute,
            parts=parts,
            updates_per_second=1 / seconds,
            examples_per_second=job.batch / seconds,
            efficiency=alone / seconds / workers,
        )

    def _parts(self, job: Job, workers: int, remote: bool, rows: int) -> dict[str, float]:
        """Returns the seconds of an update by cause; what is hidden behind the passes counts for none."""
        if self.host and not remote and 1 < workers <= MOST:
            return self._parts_in_memory(self.host, job, workers, rows)
        plain, own = self.work["float32"], self.work[job.dtype]
        latency = crossings(workers) * self.link.latency if remote else 0.0
        wire = 8 / self.link.bits_per_second / PAYLOAD if remote else 0.0
        inner = [job.accumulate * ring(size, workers, 1.0, 0.0) for size in job.in_passes]
        carried = [job.accumulate * ring(size, workers, 0.0, 1.0) for size in job.in_passes]
        steps = [ring(size, workers, 1.0, 0.0) for size in job.messages]
        sent = [ring(size, workers, 0.0, 1.0) for size in job.messages]
        parts = {
            "examples": self.compute.example * rows,
            "fixed": self.compute.update + self.compute.micro * job.accumulate,
            "bandwidth": wire * sum(sent),
            "latency": latency * len(job.messages),
            "messages": own.step_seconds * sum(steps) + plain.step_seconds * sum(inner),
            "copies": own.byte_seconds * sum(sent) + plain.byte_seconds * sum(carried),
            "waiting": self.sum_seconds * job.sums if workers > 1 else 0.0,
        }
        messages = [
            Transfer(end, own.step_seconds * step + own.byte_seconds * size, wire * size, latency)
            for end, step, size in zip(job.ready or (1.0,) * len(job.messages), steps, sent)
        ]
        passes = self.compute.micro * job.accumulate + self.compute.example * rows
        of_link = parts["bandwidth"] + parts["latency"]
        if of_link:
            left = exposed(messages, passes, BACKWARD * passes / job.accumulate) / of_link
            parts |= {cause: left * parts[cause] for cause in ("bandwidth", "latency")}
        parts["bandwidth"] += wire * sum(carried)
        parts["latency"] += latency * job.accumulate * len(job.in_passes)
        if remote:
            # A call ends with the sum of its metrics, and an agreement; an epoch with another one.
            agreed = AGREEMENT_TRIPS * self.link.latency
            lasts = call_length.seconds(self.link.latency) - latency
            calls = job.epoch.calls(max(1, int(lasts / max(sum(parts.values()), 1e-6))))
            parts["latency"] += calls * (latency + agreed) + agreed / (job.epoch.full + job.epoch.tail)
        return parts

    def _parts_in_memory(self, host: HostSums, job: Job, workers: int, rows: int) -> dict[str, float]:
        plain, own = host.work["float32"], host.work[job.dtype]
        moved = (workers + 3) / (2 + 3)  # beside the two workers of which it was measured
        return {
            "examples": self.compute.example * rows,
            "fixed": self.compute.update + self.compute.micro * job.accumulate,
            "bandwidth": 0.0,
            "latency": 0.0,
            "messages": own.step_seconds * len(job.messages) + plain.step_seconds * (job.sums - len(job.messages)),
            "copies": moved * own.byte_seconds * sum(job.messages)
            + moved * plain.byte_seconds * job.accumulate * sum(job.in_passes),
            "waiting": host.sum_seconds * job.sums,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """A sum of an update, on its way."""

    ready: float
    """The share of the backward pass after which it can begin."""
    work: float
    """Seconds of the processors."""
    wire: float
    """Seconds in which it keeps the link busy."""
    latency: float
    """Seconds in which it waits for the link, while others may use it."""


def exposed(transfers: Sequence[Transfer], passes: float, backward: float) -> float:
    """Returns the seconds that the link adds to what the processors do.

    Args:
      passes: seconds of all passes.
      backward: seconds of the last backward pass, in which sums may begin.
    """
    processor = link = 0.0
    ends: list[float] = []
    for number, transfer in enumerate(sorted(transfers, key=lambda t: t.ready)):
        before = ends[number - AT_ONCE] if number >= AT_ONCE else 0.0
        begun = max(processor, before, passes - backward * (1 - transfer.ready))
        processor = begun + transfer.work
        # Half of the work is the sender's, before anything is on the link. The link carries one sum while the
        # processors work for the next.
        link = max(link, begun + transfer.work / 2) + transfer.wire
        ends.append(link + transfer.latency + transfer.work / 2)
    return max(0.0, max(ends, default=0.0) - passes - sum(transfer.work for transfer in transfers))


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns `fixed, per_example` of the line through points (examples, seconds), none of them negative.

    Points count by how far they are from the line in relation to their seconds, so that small batches, which many
    workers have, are as right as large ones.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    x = sum(w * examples for w, (examples, _) in zip(weights, points)) / total
    y = sum(w * seconds for w, (_, seconds) in zip(weights, points)) / total
    spread = sum(w * (examples - x) ** 2 for w, (examples, _) in zip(weights, points))
    if not spread:
        return 0.0, y / x
    slope = sum(w * (examples - x) * (seconds - y) for w, (examples, seconds) in zip(weights, points)) / spread
    if slope <= 0:
        return y, 0.0
    if y - slope * x < 0:  # through the origin
        return 0.0, sum(w * e * s for w, (e, s) in zip(weights, points)) / sum(
            w * e * e for w, (e, _) in zip(weights, points)
        )
    return y - slope * x, slope


def compute_of(
    points: Sequence[tuple[float, float]], accumulate: int, more: tuple[float, float, int] | None
) -> Compute:
    """Returns the cost of computing.

    Args:
      points: (examples, seconds) of updates with `accumulate` micro-batches.
      more: (examples, seconds, micro-batches) of one with more of them; None takes all that is fixed for the
        micro-batches' part, which is the most that it can be.
    """
    fixed, example = fitted(points)
    micro = fixed / accumulate
    if more is not None:
        examples, seconds, count = more
        micro = min(micro, max(0.0, (seconds - example * examples - fixed) / (count - accumulate)))
    return Compute(fixed - accumulate * micro, micro, example)
