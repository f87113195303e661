"""Recomputes a batch of the training on every device, with virtual replicas: a device that is broken has other bits.

Silent data corruption is what Dixit et al. (*Silent Data Corruptions at Scale*, 2021) found on about one CPU of a
thousand. The sums of virtual replicas depend on no device and no order, so that each device alone must find what all
find together; a difference is neither rounding nor chance.
"""

import collections
import hashlib
from collections.abc import Callable

import keras

from tfdist.data.arrays import crc
from tfdist.errors import TrainingError, UserError
from tfdist.step.step import Step
from tfdist.verification.equivalence_probe import METRIC, STATE, Comparison, EquivalenceProbe, ProbeResult


class Audit:
    """Compares losses and gradients of a batch over all devices, after each `every` updates; 0 for never."""

    def __init__(self, step: Step, virtual_replicas: int, every: int):
        self._step, self._every, self._passed = step, every, 0
        self._probe: EquivalenceProbe | None = None
        self._comparison = Comparison("train", "virtual replicas", virtual_replicas)

    def after(self, update: int, done: int, batch_of: Callable[[], tuple | None]) -> None:
        """Recomputes, if one of the last `done` updates makes it due, the last batch with the weights of now.

        Raises:
          UserError: workers know no batch that is the same on all of them.
          TrainingError: a device, or the sum over all, has other bits. It names them.
        """
        if not self._every or update // self._every == (update - done) // self._every:
            return
        peers, place_of, rows = self._step.distribution.peers, self._step.distribution.place_of, batch_of() or ()
        known = {*peers.gather("the batch to audit", crc(rows) if rows else None)}
        if None in known or len(known) > 1:
            raise UserError("audit recomputes a batch, and the data has none that all workers know", "leave it out")
        probe = self._probe
        if probe is None or not probe.look_at(rows, len(keras.tree.flatten(rows)[0])):
            probe = self._probe = EquivalenceProbe(self._step, rows, self._comparison, on_each=True)
        with peers.during("compiling"):
            digests = [_digests(probe.run(whole)) for whole in (True, False)]
        every = peers.gather(f"the audit after update {update}", digests)
        alone, together = ([digest for worker in every for digest in worker[i]] for i in (0, 1))
        (usual, times), *_ = collections.Counter(alone).most_common()
        other = [place_of(i) for i, digest in enumerate(alone) if digest != usual]
        if not other and {*together} == {usual}:
            self._passed = update
            return
        found = f"{' and '.join(other)} found another gradient than {place_of(alone.index(usual))}"
        if not other:
            found = "the sum over all devices is another than each device found by itself"
        elif 2 * times <= len(alone):
            found += ", and it cannot be told which is right"
        raise TrainingError(
            f"audit after update {update}: {found}, from the same rows and weights: look for broken hardware, and "
            f"resume elsewhere from a checkpoint of update {self._passed} or before"
        )


def _digests(result: ProbeResult) -> list[str]:
    """Returns a digest of the losses and gradients of each device of this worker."""
    losses = [value for name, value in result.values.items() if not name.startswith((METRIC, STATE))]
    devices = zip(*losses, *result.gradient)
    return [hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest() for arrays in devices]
