"""ZeRO stage 1: optimizer state in slices, one per replica, each of which updates its slice of every weight.

Rajbhandari et al. 2020, arXiv:1910.02054. Gradients are summed and clipped as without it; then each replica updates its
slice by the same kernel, and all gather the slices. Elementwise optimizers give the same bits that way. Outside of a
training the optimizer has its state in whole, as Keras made it; only Keras' own variables are ever seen there.
"""

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.config.messages import logger
from tfdist.distributed import collectives
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals

ALIGNED = 64
"""Slices have multiples of so many elements, and what is left at the end of a weight is updated by all replicas. CPUs
compute whole vectors in other roundings (of 1 / sqrt(x), say) than the elements behind the last whole one: so each
element is where it would be in the whole weight."""
ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Nadam", "Lion", "Adamax", "Adagrad", "Adadelta", "Ftrl")
"""Classes of `keras.optimizers` that update each element by itself; subclasses may do something else."""


def check(optimizer: keras.optimizers.Optimizer, distribution: Distribution) -> None:
    """Raises UserError for what cannot be trained with zero_stage=1 in the same bits."""
    base = keras_internals.inner_optimizer(optimizer)
    if type(base) not in [getattr(keras.optimizers, name) for name in ELEMENTWISE]:
        what = f"zero_stage=1 cannot slice the state of {type(base).__name__}, which may look across a weight"
        raise UserError(what, f"use one of {', '.join(ELEMENTWISE)} of Keras itself, or zero_stage=0")
    if distribution.static_shapes:
        raise UserError(f"zero_stage=1 cannot be used with --strategy={distribution.name}", "use zero_stage=0")


class Slot:
    """One variable of an optimizer's state, in whole or in slices; on the host, by all workers."""

    def __init__(self, variable: keras.Variable, distribution: Distribution):
        self.variable, self._distribution = variable, distribution
        self._whole = variable.value
        self.slice = _of_replica(variable, distribution).value

    def cut(self) -> None:
        """Keeps a slice on each replica; what is compiled with the whole variable must find it again afterwards."""
        value = self.variable.numpy()
        keras_internals.set_tensorflow_variable(self.variable, self.slice)
        self.assign(value)
        _fill(self._whole, np.zeros(0, value.dtype))
        vars(self.variable).update(numpy=self.numpy, assign=self.assign)

    def join(self) -> None:
        """Makes it whole on every replica."""
        value = self.read()
        for name in ("numpy", "assign"):
            del vars(self.variable)[name]
        _fill(self._whole, value)
        keras_internals.set_tensorflow_variable(self.variable, self._whole)
        _fill(self.slice, np.zeros(0, value.dtype))

    def assign(self, value: np.ndarray) -> None:
        """Gives each replica of this worker its slice of a whole value."""
        flat, distribution = np.asarray(value).reshape(-1), self._distribution
        size = _sliced_size(self.variable, distribution)
        for replica, copy in enumerate(keras_internals.copies(self.slice), distribution.first):
            own = flat[replica * size : (replica + 1) * size], flat[distribution.replicas * size :]
            _fill(copy, np.concatenate(own))

    def read(self) -> np.ndarray:
        """Returns the whole value; called by all workers."""
        distribution, size = self._distribution, _sliced_size(self.variable, self._distribution)
        own = np.stack([keras_internals.read_copy(copy).numpy() for copy in keras_internals.copies(self.slice)])
        rows = np.zeros((distribution.replicas, size), own.dtype)
        rows[distribution.first :][: len(own)] = own[:, :size]
        (rows,) = collectives.broadcast_bits(distribution, [rows])
        return np.concatenate([rows.reshape(-1), own[0, size:]]).reshape(self.variable.shape)

    def numpy(self) -> np.ndarray:
        """Stands for the method of the variable, with which Keras writes an optimizer: all of it or an error."""
        if self._distribution.workers > 1:
            raise UserError(
                f"{self.variable.path} is in slices on {self._distribution.workers} workers within fit with "
                "zero_stage=1, and one of them asks for all of it",
                "save the model after fit, or by the checkpoints of tfdist",
            )
        return self.read()


class SlicedState:
    """The state of a built optimizer, in slices within `fit`; kept with it, as compiled functions are."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, distribution: Distribution):
        self._distribution = distribution
        large = lambda variable: _sliced_size(variable, distribution) > 0
        self.slots = [Slot(variable, distribution) for variable in filter(large, keras_internals.slots(optimizer))]
        weights = dict(enumerate(keras_internals.optimized_variables(optimizer)))
        self.slices = {place: _of_replica(w, distribution) for place, w in weights.items() if large(w)}
        """A slice of each large weight, in which it is updated, by its place; empty between updates."""

    def join(self) -> None:
        """Gives the optimizer its state in whole; called by all workers."""
        with self._distribution.peers.during("saving"):
            for slot in self.slots:
                slot.join()

    # In a replica, while an update is traced.

    def load(self, place: int, weight: keras.Variable) -> None:
        """Copies this replica's slice of a weight to where it is updated."""
        if place in self.slices:
            keras_internals.write_copy(self.slices[place].value, self._own(weight.value, weight))

    def taken(self, place: int, grad: tf.Tensor, weight: keras.Variable) -> tuple[tf.Tensor, keras.Variable]:
        """Returns this replica's slices of a gradient and, as it is now, of its weight; a small weight in whole."""
        self.load(place, weight)
        return (self._own(grad, weight), self.slices[place]) if place in self.slices else (grad, weight)

    def _own(self, tensor: tf.Tensor, weight: keras.Variable) -> tf.Tensor:
        # The gradients of an embedding do not know their shape.
        flat, replicas = tf.reshape(tensor, [math.prod(weight.shape)]), self._distribution.replicas
        size = _sliced_size(weight, self._distribution)
        own = tf.slice(flat, [self._distribution.replica_id() * size], [size])
        return own if size * replicas == flat.shape[0] else tf.concat([own, flat[size * replicas :]], 0)

    def spread(self, weights: dict[int, keras.Variable], nothing: tf.Tensor) -> None:
        """Writes the slices of all replicas over the weights, which are given by their places.

        `nothing`: 0, an integer scalar, which TensorFlow cannot know while it traces: then it takes an empty value for
        a variable that it has created with a shape.
        """
        sliced = {place: weight for place, weight in weights.items() if place in self.slices}
        own = [keras_internals.read_copy(self.slices[place].value) for place in sliced]
        sizes = [_sliced_size(weight, self._distribution) for weight in sliced.values()]
        wholes = collectives.gathered_slices([o[:size] for o, size in zip(own, sizes)], self._distribution)
        for weight, whole, mine, size in zip(sliced.values(), wholes, own, sizes):
            whole = whole if size == mine.shape[0] else tf.concat([whole, mine[size:]], 0)
            keras_internals.write_copy(weight.value, tf.reshape(whole, weight.value.shape))
        for part in self.slices.values():
            keras_internals.write_copy(part.value, tf.zeros([nothing], part.dtype))


def _sliced_size(whole: keras.Variable, distribution: Distribution) -> int:
    """Returns the elements of a replica's slice, without those at the end that all replicas update."""
    return math.prod(whole.shape) // (ALIGNED * distribution.replicas) * ALIGNED


def _of_replica(like: keras.Variable, distribution: Distribution) -> keras.Variable:
    """Makes a variable for a slice, of which every replica has a value of its own; empty, to need no memory yet."""
    size = math.prod(like.shape) - (distribution.replicas - 1) * _sliced_size(like, distribution)
    kind = {"trainable": False, "synchronization": "on_read", "aggregation": "none"}
    with distribution.scope():
        variable = keras.Variable("zeros", (size,), like.dtype, name=f"{like.name}_slice", **kind)
    _fill(variable.value, np.zeros(0, variable.value.dtype.as_numpy_dtype))
    return variable


def _fill(variable: tf.Variable, value: np.ndarray) -> None:
    """Writes all copies, of whatever size: one of nothing frees the memory, and the variable stays the same object."""
    for copy in keras_internals.copies(variable):
        with tf.device(copy.device):
            tf.raw_ops.AssignVariableOp(resource=copy.handle, value=tf.constant(value), validate_shape=False)


_KEPT: dict[int, SlicedState] = {}
_ACTIVE: dict[int, SlicedState] = {}
"""By the id of an optimizer, until it is gone; those in slices now."""


def begin(model: keras.Model, distribution: Distribution) -> SlicedState | None:
    """Slices the state of a model's built optimizer; None on one device."""
    optimizer = keras_internals.inner_optimizer(model.optimizer)
    if distribution.replicas == 1:
        logger.info("zero_stage=1 saves nothing on one device: it trains as with zero_stage=0")
        return None
    key = id(optimizer)
    if key not in _KEPT:
        _KEPT[key] = SlicedState(optimizer, distribution)
        for entries in (_KEPT, _ACTIVE):
            weakref.finalize(optimizer, entries.pop, key, None).atexit = False
    _ACTIVE[key] = _KEPT[key]
    for slot in _KEPT[key].slots:
        slot.cut()
    return _KEPT[key]


def end(model: keras.Model) -> None:
    """Makes the state of a model's optimizer whole, if it is in slices; called by all workers."""
    state = _ACTIVE.pop(id(keras_internals.inner_optimizer(model.optimizer)), None)
    if state:
        state.join()


@contextlib.contextmanager
def whole_after(model: keras.Model, distribution: Distribution) -> Iterator[None]:
    """Makes the state whole, also after an error; but for one of several workers, where others may be gone."""
    try:
        yield
    finally:
        if distribution.workers == 1:
            end(model)


def slots(optimizers: Sequence[keras.optimizers.Optimizer]) -> dict[int, Slot]:
    """Returns what is in slices now of the state of these optimizers, by the id of its variable."""
    states = [_ACTIVE.get(id(keras_internals.inner_optimizer(optimizer))) for optimizer in optimizers]
    return {id(slot.variable): slot for state in states if state for slot in state.slots}


def slices(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the slices of weights that an optimizer has here, besides its state."""
    state = _ACTIVE.get(id(keras_internals.inner_optimizer(optimizer)))
    return [*state.slices.values()] if state else []


def ready(model: keras.Model, distribution: Distribution, stage: int) -> None:
    """Raises UserError for what cannot be trained with this stage in the same bits, before anything is built."""
    if stage not in (0, 1):
        raise UserError(f"zero_stage must be 0 or 1, got {stage!r}")
    if id(keras_internals.inner_optimizer(model.optimizer)) in _ACTIVE:
        what = "the state of the optimizer is in slices: a fit with zero_stage=1 goes on, or was broken off by an error"
        raise UserError(what, "compile() the model with a new optimizer, and resume from a checkpoint")
    if stage:
        check(model.optimizer, distribution)


def saved_bytes(optimizer: keras.optimizers.Optimizer, distribution: Distribution) -> int:
    """Returns the bytes of a built optimizer's state that a replica need not keep; 0 if it cannot be sliced."""
    try:
        check(optimizer, distribution)
    except UserError:
        return 0
    slots = keras_internals.slots(optimizer)
    return sum((distribution.replicas - 1) * _sliced_size(v, distribution) * v.value.dtype.size for v in slots)
