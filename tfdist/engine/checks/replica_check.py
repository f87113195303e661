"""The sync guard: are the weights of all replicas still the same, bit by bit?

They start equal and get equal updates, so they stay equal; unless a weight was
changed on one worker alone, or memory or a network is broken. Then every
further update would be wrong without a word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import keras
import tensorflow as tf

from tfdist.distributed.distribution import Distribution
from tfdist.errors import TrainingError
from tfdist.models import freezing

EVERY = 1000
"""Updates between two looks."""


class Guard:
    """The comparison of the weights, trained and frozen, over replicas and workers.

    Args:
      every: updates between two looks.
    """

    def __init__(self, model: keras.Model, distribution: Distribution, every: int = EVERY):
        self._variables = [*model.trainable_variables, *freezing.fixed(model)]
        self._distribution = distribution
        self._every = every
        self._next = 0
        self._sums: Callable[[], tuple[tf.Tensor, ...]] | None = None

    def look(self, updates: int) -> None:
        """Compares when it is due: at the first call, and every so many updates.

        Raises:
          TrainingError: the weights differ; it names the first variable that does, and where.
        """
        if self._distribution.replicas == 1 or updates < self._next:
            return
        self._next = updates - updates % self._every + self._every
        mine = [sums.numpy().tolist() for sums in self._checksums()]
        digest = [hashlib.sha256(repr(sums).encode()).hexdigest() for sums in mine]
        gather = self._distribution.peers.gather
        digests = [d for worker in gather(f"the weights after update {updates}", digest) for d in worker]
        if len(set(digests)) == 1:
            return
        everyone = [sums for worker in gather("the weights in detail", mine) for sums in worker]
        for i, variable in enumerate(self._variables):
            different = [self._place(r) for r, sums in enumerate(everyone) if sums[i] != everyone[0][i]]
            if different:
                raise TrainingError(
                    f"the replicas are no longer the same after update {updates}: {variable.path} differs on "
                    f"{', '.join(different)} from {self._place(0)}: change weights on all workers alike, "
                    "and look for broken memory if nothing did"
                )

    def _place(self, replica: int) -> str:
        distribution = self._distribution
        worker, device = divmod(replica, len(distribution.devices))
        on = f" {distribution.devices[device]}" if len(distribution.devices) > 1 else ""
        name = f"worker {worker} ({distribution.peers.hosts[worker]}){on}" if distribution.workers > 1 else on.strip()
        return name

    def _checksums(self) -> tuple[tf.Tensor, ...]:
        """Returns two numbers per variable, int64 [variables, 2], of each replica of this worker."""
        if self._sums is None:
            variables = self._variables

            def one() -> tf.Tensor:
                return tf.stack([_checksum(tf.convert_to_tensor(v.value)) for v in variables])

            distribution = self._distribution

            def sums() -> tuple[tf.Tensor, ...]:
                return distribution.local(distribution.run(one, ()))

            self._sums = tf.function(sums, autograph=False)
        return self._sums()


def _checksum(weight: tf.Tensor) -> tf.Tensor:
    """Returns the sum of the bits, and of the bits times odd numbers, which a swap changes too; both modulo 2^64."""
    bits = tf.bitcast(weight, {2: tf.int16, 4: tf.int32, 8: tf.int64}[weight.dtype.size])
    bits = tf.cast(tf.reshape(bits, [-1]), tf.int64)
    odd = 2 * tf.range(tf.size(bits, tf.int64), dtype=tf.int64) + 1
    return tf.stack([tf.reduce_sum(bits), tf.reduce_sum(bits * odd)])
