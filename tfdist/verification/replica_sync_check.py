"""Compares replicated state, weights and optimizers, over all replicas bit by bit.

It starts equal and gets equal updates, so it stays equal; unless a weight or a learning rate was changed on one worker
alone, or memory or a network is broken. Then every further update would be silently wrong. `Audit` recomputes, besides.
"""

import collections
import hashlib
import weakref
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.data.arrays import crc
from tfdist.distributed.collectives import INTEGERS
from tfdist.distributed.distribution import Distribution
from tfdist.errors import TrainingError, UserError
from tfdist.keras_bridge import keras_internals, preconditions, zero
from tfdist.step.step import Step
from tfdist.verification.equivalence_probe import METRIC, STATE, Comparison, EquivalenceProbe, ProbeResult

EVERY = 1000  # updates between two comparisons
PIECE = 1 << 16  # elements of a weight that are summed at a time


class ReplicaSyncCheck:
    """The comparison of a model's state over replicas and workers, each `every` updates.

    `optimizers`: whether to compare their state, too: slots, learning rate, number of updates, loss scale.
    """

    def __init__(self, distribution: Distribution, optimizers: bool = True, every: int = EVERY):
        self._distribution = distribution
        self._optimizers = optimizers
        self._every = every
        self._next = 0
        self._traced: tuple[list[int] | None, Callable[[], tuple[tf.Tensor, ...]]] = (None, tuple)
        """The checksums as a compiled function, and the ids of the variables that it reads."""

    def check_if_due(self, model: keras.Model, updates: int) -> None:
        """Compares at the first call, and every so many updates."""
        if updates >= self._next:
            self._next = updates - updates % self._every + self._every
            self.check(model, f"after update {updates}")

    def check(self, model: keras.Model, when: str) -> None:
        """Compares; all workers call this. The TrainingError names the first variable that differs, and where."""
        if self._distribution.replicas == 1:
            return
        variables = [*model.trainable_variables, *keras_internals.fixed_variables(model)]
        if self._optimizers:
            optimizers = preconditions.optimizers(model)
            sliced = zero.slots(optimizers)  # of which each replica has its own
            variables += [v for one in optimizers for v in keras_internals.state(one) if id(v) not in sliced]
        gather, place_of = self._distribution.peers.gather, self._distribution.place_of
        shapes = [tuple(variable.shape) for variable in variables]
        digest = [hashlib.sha256(repr((shapes, sums)).encode()).hexdigest() for sums in self._checksums(variables)]
        if len({d for worker in gather(f"the weights {when}", digest) for d in worker}) == 1:
            return
        alone = [self._checksums([variable]) for variable in variables]
        detail = [[sums[i] for sums in alone] for i in range(len(digest))]
        sums = [own for worker in gather("the weights in detail", detail) for own in worker]
        for i, variable in enumerate(variables):
            different = [place_of(r) for r, own in enumerate(sums) if own[i : i + 1] != sums[0][i : i + 1]]
            if different:
                raise TrainingError(
                    f"the replicas are no longer the same {when}: {variable.path} differs on {', '.join(different)} "
                    f"from {place_of(0)}: change weights and optimizers on all workers alike, and look for broken "
                    "memory if nothing did"
                )
        raise TrainingError(
            f"the replicas are no longer the same {when}: worker 0 has fewer variables than others: build model and "
            "optimizer on all workers alike"
        )

    def _checksums(self, variables: list[keras.Variable]) -> list[list]:
        """Returns the checksums of each replica of this worker, by `_checksums_of` on other devices."""
        distribution = self._distribution
        if distribution.static_shapes:
            return [sums.numpy().tolist() for sums in self._compiled(variables)()]
        sums = []
        for i, device in enumerate(distribution.devices):
            copies = [own[i % len(own)] for own in map(keras_internals.copies, variables)]
            with tf.device(device):  # one by one: tracing takes a hundred times as long
                on_host = distribution.device_kind == "CPU"
                sums.append([*map(crc, copies)] if on_host else _checksums_of(copies).numpy().tolist())
        return sums

    def _compiled(self, variables: list[keras.Variable]) -> Callable[[], tuple[tf.Tensor, ...]]:
        """Returns the same as a function for TPUs, which would compile each operation by itself."""
        ids = [id(variable) for variable in variables]
        if self._traced[0] != ids:
            distribution = self._distribution
            of_replica = lambda: _checksums_of([variable.value for variable in variables])

            def checksums() -> tuple[tf.Tensor, ...]:  # a scope on a TPU cannot be named <lambda>
                return distribution.local(distribution.run(of_replica, ()))

            self._traced = ids, tf.function(checksums, autograph=False)
        return self._traced[1]


_CHECKS_OF_WEIGHTS: dict[int, tuple[tf.distribute.Strategy, ReplicaSyncCheck]] = {}
"""By the id of the model, until it is gone: `evaluate` may be called again and again, and tracing takes longer."""


def check_weights(model: keras.Model, distribution: Distribution, when: str) -> None:
    """Compares a model's weights alone, which are all that is measured or predicted with."""
    strategy, check = _CHECKS_OF_WEIGHTS.get(id(model), (None, None))
    if check is None or strategy is not distribution.strategy:
        if check is None:
            weakref.finalize(model, _CHECKS_OF_WEIGHTS.pop, id(model), None).atexit = False
        check = ReplicaSyncCheck(distribution, optimizers=False)
        _CHECKS_OF_WEIGHTS[id(model)] = distribution.strategy, check
    check.check(model, when)


def _checksums_of(variables: Sequence[tf.Variable]) -> tf.Tensor:
    """Returns a checksum of each large variable, and of all small ones of a type together, int64 [checksums, 2]."""
    parts: dict[object, list[tf.Tensor]] = {}
    for variable in variables:
        value = tf.convert_to_tensor(variable)
        value = tf.cast(value, tf.int8) if value.dtype == tf.bool else value
        bits = tf.reshape(tf.bitcast(value, INTEGERS[value.dtype.size]), [-1])
        parts.setdefault(bits.dtype if bits.shape[0] < PIECE else id(variable), []).append(bits)
    # A model of Rescaling alone has nothing to stack.
    sums = [_checksum(tf.concat(bits, 0) if len(bits) > 1 else bits[0]) for bits in parts.values()]
    return tf.stack(sums) if sums else tf.zeros([0, 2], tf.int64)


def _checksum(bits: tf.Tensor) -> tf.Tensor:
    """Returns the sum of numbers, and of them times odd ones, which a swap changes too; both modulo 2^64.

    By pieces: as 64-bit integers, all of a large weight would take several times its memory.
    """

    def with_piece(start: tf.Tensor, size: int, sums: tf.Tensor) -> tf.Tensor:
        piece = tf.cast(tf.slice(bits, [start], [size]), tf.int64)
        odd = 2 * tf.range(start, start + size) + 1
        return sums + tf.stack([tf.reduce_sum(piece), tf.reduce_sum(piece * odd)])

    whole = bits.shape[0] // PIECE * PIECE
    sums = with_piece(tf.constant(whole, tf.int64), bits.shape[0] - whole, tf.zeros([2], tf.int64))
    if whole:
        next_piece = lambda start, sums: (start + PIECE, with_piece(start, PIECE, sums))
        start = tf.zeros([], tf.int64), sums
        sums = tf.while_loop(lambda start, _: start < whole, next_piece, start, parallel_iterations=1)[1]
    return sums


class Audit:
    """Recomputes a batch on every device after each `every` updates, 0 for never: one that is broken has other bits.

    Silent data corruption is what Dixit et al. (*Silent Data Corruptions at Scale*, 2021) found on about one CPU of a
    thousand. The sums of virtual replicas depend on no device and no order, so that each device alone must find what
    all find together; a difference is neither rounding nor chance.
    """

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
