"""Where scaling ends, why, and what would change it. Pure; no TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdist.plan.cost import Job, Machines, NetworkLink, Prediction
from tfdist.plan.quantities import MOST_NODES, in_bits

LEAST = 0.5
"""Efficiency below which scaling is said to have ended: half of what is paid for is lost."""
FASTER = 10
"""By how much a faster link is faster, in the advice: the usual step from one kind of network to the next."""
_WORTH = 1.1
"""How many times as fast a change must make it to be named."""
_CAUSES = {
    "bandwidth": "the link's bandwidth",
    "latency": "the link's latency",
    "messages": "what the processors do for each message",
    "copies": "what the processors copy and add of each message",
    "waiting": "what workers wait for each other at each sum",
    "fixed": "what an update takes however few its examples are",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """A way to train on the same machines."""

    name: str
    job: Job
    other_training: bool = False
    """Whether its updates are others, and so its weights."""


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """The end of scaling."""

    last: Prediction
    """With the most machines that are still worth it, among 1, 2, 4, 8, ..."""
    beyond: Prediction | None
    """With twice as many; None where the batch has no examples for them."""


def end(machines: Machines, job: Job) -> End | None:
    """Returns where the efficiency falls below `LEAST`; None where the batch is too small for one machine."""
    last, nodes = machines.predict(job, 1), 2
    if last is None:
        return None
    while nodes <= MOST_NODES:
        beyond = machines.predict(job, nodes)
        if beyond is None or beyond.efficiency < LEAST:
            return End(last, beyond)
        last, nodes = beyond, 2 * nodes
    return End(last, None)


def verdict(machines: Machines, variants: Sequence[Variant]) -> str:
    """Says in one line where scaling ends, why, and what to change.

    Args:
      variants: what was asked for, and then what could be used in its place.
    """
    job = variants[0].job
    found = end(machines, job)
    if found is None:
        return (
            f"The batch of {job.batch} examples is too small for one machine of {machines.per_node} workers "
            f"and {job.accumulate} micro-batches: use a larger one"
        )
    last, beyond = found.last, found.beyond
    where = f"Scaling ends at {_machines(last.nodes)} (efficiency {last.efficiency:.2f})"
    if beyond is None:
        most = job.batch // (machines.per_node * job.accumulate)
        return f"{where}: a batch of {job.batch} has examples for {_machines(most)}, and tfdist never changes it"
    cause = max(_CAUSES, key=lambda name: beyond.parts[name])
    text = (
        f"{where}: with {beyond.nodes} it is {beyond.efficiency:.2f}, "
        f"and most of what they lose is due to {_CAUSES[cause]}"
    )
    changes = _changes(machines, variants, beyond)
    if not changes:
        return f"{text}; nothing that is known here would change that much"
    return f"{text}. There, {'; '.join(changes)}"


def _machines(count: int) -> str:
    return f"{count} machine{'s' * (count != 1)}"


def _changes(machines: Machines, variants: Sequence[Variant], there: Prediction) -> list[str]:
    """Returns what would make it faster on as many machines, the best first, with how many times as fast it would be.

    A larger batch is judged by its examples per second.
    """
    faster = dataclasses.replace(machines.link, bits_per_second=FASTER * machines.link.bits_per_second)
    nearer = NetworkLink(machines.link.bits_per_second, 0.0)
    rates = {
        f"a link of {in_bits(faster.bits_per_second)}": _rate(machines, faster, variants[0].job, there.nodes),
        "a link without latency": _rate(machines, nearer, variants[0].job, there.nodes),
    }
    for variant in variants[1:]:
        if variant.other_training:
            text = (
                f"--config.train.batch_size={variant.job.batch} --config.train.accumulate={variant.job.accumulate} "
                "(another training)"
            )
        else:
            text = f"--config.optimizer.reduce_dtype={variant.job.dtype}"
        rates[text] = _rate(machines, machines.link, variant.job, there.nodes)
    ratios = {text: rate / there.examples_per_second for text, rate in rates.items()}
    worth = sorted((text for text in ratios if ratios[text] >= _WORTH), key=lambda text: -ratios[text])
    return [f"{text} makes it {ratios[text]:.1f} times as fast" for text in worth]


def _rate(machines: Machines, link: NetworkLink, job: Job, nodes: int) -> float:
    prediction = dataclasses.replace(machines, link=link).predict(job, nodes)
    return prediction.examples_per_second if prediction else 0.0
