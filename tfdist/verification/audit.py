"""Recomputes a batch of the training on every device, with virtual replicas: a device that is broken has other bits.

Silent data corruption is what Dixit et al. (*Silent Data Corruptions at Scale*, 2021) found on about one CPU of a
thousand. The sums of virtual replicas depend on no device and no order, so that each device alone must find what all
find together; a difference is neither rounding nor chance.
"""

import collections
import hashlib
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.config.messages import logger
from tfdist.data.arrays import crc
from tfdist.errors import TrainingError
from tfdist.step.step import Step
from tfdist.verification.equivalence_probe import METRIC, STATE, Comparison, EquivalenceProbe, ProbeResult


class Audit:
    """Compares losses and gradients of a batch over all devices, after each `every` updates."""

    def __init__(self, step: Step, virtual_replicas: int, every: int):
        self._step, self._comparison, self._every = (
            step,
            Comparison("train", "virtual replicas", virtual_replicas),
            every,
        )
        self._probe: _Probe | None = None
        self._warned = False

    def after(self, update: int, done: int, batch_of: Callable[[], tuple | None]) -> None:
        """Recomputes, if one of the last `done` updates makes it due, the last batch with the weights of now.

        Raises:
          TrainingError: a device, or the sum over all, has other bits. It names them.
        """
        if not self._every or update // self._every == (update - done) // self._every:
            return
        gather, rows = self._step.distribution.peers.gather, batch_of() or ()
        if None in (known := gather("the batch to audit", crc(rows) if rows else None)) or len(set(known)) > 1:
            if not self._warned:
                self._warned = True
                logger.info("WARNING: the data keeps no batch that all workers know: nothing can be audited")
            return
        number = int(keras.tree.flatten(rows)[0].shape[0])
        if self._probe is None or not self._probe.look_at(rows, number):
            self._probe = _Probe(self._step, rows, self._comparison)
        with self._step.distribution.peers.during("compiling"):
            alone, together = (_digests(self._probe.run(whole)) for whole in (True, False))
        every = gather(f"the audit after update {update}", (alone, together))
        self._compare([d for worker, _ in every for d in worker], [d for _, worker in every for d in worker], update)

    def _compare(self, alone: Sequence[str], together: Sequence[str], update: int) -> None:
        place_of = self._step.distribution.place_of
        (usual, times), *_ = collections.Counter(alone).most_common()
        other = [place_of(i) for i, digest in enumerate(alone) if digest != usual]
        if not other and set(together) == {usual}:
            return
        found = f"{' and '.join(other)} found another gradient than {place_of(alone.index(usual))}"
        if other and 2 * times <= len(alone):
            found += ", and it cannot be told which is right"
        elif not other:
            found = "the sum over all devices is another than each device computes by itself"
        raise TrainingError(
            f"audit after update {update}: {found}, from the same rows and weights: look for broken hardware, and "
            f"resume elsewhere from a checkpoint before update {max(0, update - self._every)}"
        )


class _Probe(EquivalenceProbe):
    """Computes all rows in virtual replicas: all of them on each device, or shared by the devices."""

    @property
    def count(self) -> int:
        return int(keras.tree.flatten(self.rows)[0].shape[0])

    def _layout(self, whole: bool):
        return super()._layout(False)

    def _of_replicas(self, value):
        return tf.stack(self._distribution.local(value))


def _digests(result: ProbeResult) -> list[str]:
    """Returns a digest of the losses and gradients of each device of this worker."""
    losses = [value for name, value in result.values.items() if not name.startswith((METRIC, STATE))]
    arrays = [*losses, *result.gradient]
    return [hashlib.sha256(b"".join(array[i].tobytes() for array in arrays)).hexdigest() for i in range(len(arrays[0]))]
