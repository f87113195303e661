"""What layers change and collect in a forward pass, kept apart where several replicas are traced on the same layers."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras
import tensorflow as tf

from tfdist.distributed.distribution import Distribution
from tfdist.keras_bridge import ema, keras_internals, preconditions

_tracing = threading.local()  # replicas are traced in threads


def real_rows() -> tf.Tensor | None:
    """Returns which rows of the replica that is being traced count, bool [rows]; None for all, see `present`."""
    return getattr(_tracing, "real", None)


def present() -> tf.Tensor | None:
    """Returns whether the replica that is being traced has a row at all, a bool scalar; None for certainly."""
    return getattr(_tracing, "present", None)


class LayerState:
    """The variables that the layers of a model change in a forward pass.

    Args:
      model: built.
      replicas: of the model, over all workers.
    """

    def __init__(self, model: keras.Model, replicas: int):
        self._model: Callable[[], keras.Model] = weakref.ref(model)  # see Step.model
        self._replicas = replicas

    @contextlib.contextmanager
    def restored_without_rows(
        self, present: tf.Tensor | None, real: tf.Tensor | None = None, compiled_metrics: bool = False
    ) -> Iterator[None]:
        """Undoes, after it, what a forward pass over a row that is not this replica's has changed in the layers.

        Args:
          present: whether the replica has a row of its own, a bool scalar; None for certainly.
          real: which rows count, bool [rows]; None for all. Layers that know of it leave the others out.
          compiled_metrics: undoes what has changed in these, too.
        """
        if present is None:
            _tracing.real = real
            try:
                yield
            finally:
                _tracing.real = None
            return
        variables = self._changed(compiled_metrics)
        before = [tf.identity(v.value) for v in variables]
        _tracing.present = present
        try:
            yield
        finally:
            _tracing.present = None
        for variable, value in zip(variables, before):
            after = tf.where(present, tf.convert_to_tensor(variable.value), value)
            # Not the variable's own assign, which would meet the other replicas: each writes its copy.
            tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=after)

    def share(self, present: tf.Tensor | None, all_sum: Callable[[list[tf.Tensor]], list[tf.Tensor]]) -> None:
        """Gives a replica that has no row, after a pass in training, what the layers of those that have some have kept.

        Else a state that does not depend on the rows, as that of SpectralNormalization, would lag behind there, and
        with it the mean over the replicas.

        Args:
          present: as for `restored_without_rows`.
          all_sum: sums tensors over the replicas.
        """
        if present is None or self._replicas == 1:
            return
        of_metrics = {id(v) for v in self._model().metrics_variables}
        kept = [v for v in self._changed(False) if id(v) not in of_metrics and v.dtype not in ("bool", "string")]
        if not kept:
            return
        values = [tf.convert_to_tensor(v.value) for v in kept]
        own = [tf.cast(value, tf.float64) for value in [*values, present]]
        *sums, count = all_sum([tf.where(present, value, tf.zeros_like(value)) for value in own])
        for variable, value, total in zip(kept, values, sums):
            mean = tf.cast(total / tf.maximum(count, 1.0), value.dtype)
            after = tf.where(tf.logical_or(present, tf.equal(count, 0.0)), value, mean)
            tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=after)

    def _changed(self, compiled_metrics: bool) -> list[keras.Variable]:
        """Statistics of layers and what metrics have summed up, compiled ones only if asked for.

        Not those of synchronized BatchNorm, which has not counted such a row and has the statistics of all replicas;
        nor the state of random generators, which every replica moves on alike.
        """
        model = self._model()
        fixed = fixed_variables(model)
        compiled, of_losses = keras_internals.compiled_metrics(model), keras_internals.loss_metrics(model)
        layers = keras_internals.flat_layers(model) if self._replicas > 1 else []
        others = [] if compiled_metrics else [*of_losses, *([compiled] if compiled else [])]
        kept = {id(v) for v in [*fixed, *itertools.chain(*[metric.variables for metric in others])]}
        for layer in layers:
            if getattr(layer, "synchronized", False):
                kept.update(id(v) for v in keras_internals.own_variables(layer))
        variables = {id(v): v for v in [*model.non_trainable_variables, *model.metrics_variables]}
        return [v for key, v in variables.items() if key not in kept and not keras_internals.is_seed(v)]


def fixed_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables that training does not change: weights of frozen layers, statistics of a frozen BatchNorm.

    They are the same on every replica. What else a frozen layer has of state is not known to stay.
    """
    frozen: set[int] = set()
    for layer in keras_internals.flat_layers(model):
        if not layer.trainable:
            whole = isinstance(layer, keras.layers.BatchNormalization)
            frozen |= {id(v) for v in (layer.weights if whole else keras_internals.own_trainable_variables(layer))}
    return [v for v in model.non_trainable_variables if id(v) in frozen] if frozen else []


class Snapshot:
    """What variables have on every replica at the time when it is made."""

    def __init__(self, variables: Sequence[keras.Variable | tf.Variable]):
        raw = [v if isinstance(v, tf.Variable) else v.value for v in variables]
        copies = [copy for v in raw for copy in getattr(v, "values", (v,))]
        self._values = [(copy, copy.numpy()) for copy in copies]

    def put_back(self) -> None:
        """Gives the variables what they had."""
        for copy, value in self._values:
            copy.assign(value)


@contextlib.contextmanager
def unchanged(variables: Sequence[keras.Variable | tf.Variable]) -> Iterator[None]:
    """Restores variables, on every replica, and all others that Python code writes within it.

    These may belong to no layer, such as a variable of a module in which a layer counts its calls.
    """
    before = Snapshot(variables)
    others: list[keras_internals.Write] = []
    try:
        with keras_internals.noting_writes() as others:
            yield
    finally:
        for write in others:
            write.variable.assign(write.before)
        before.put_back()


def foreign(model: keras.Model, writes: Iterable[keras_internals.Write]) -> list[keras_internals.Write]:
    """Returns the writes to variables that neither the model nor its metrics or optimizers own.

    The state of random generators is left out, which a call of keras.random without a seed writes.
    """
    optimizers = [v for optimizer in preconditions.optimizers(model) for v in optimizer.variables]
    values = [v.value for v in [*model.variables, *model.metrics_variables, *optimizers]]
    owned = {id(copy) for value in values for copy in getattr(value, "values", (value,))}
    return [w for w in writes if id(w.variable) not in owned and "seed_generator" not in w.variable.name]


class _OfThread(threading.local):
    """A list of which each thread has its own."""

    def __init__(self) -> None:
        self.items: list[tf.Tensor] = []


class _Losses:
    """Stands for the list in which a layer collects what it is given by `add_loss`."""

    def __init__(self) -> None:
        self._own = _OfThread()

    def extend(self, losses: list[tf.Tensor]) -> None:
        self._own.items.extend(losses)

    def append(self, loss: tf.Tensor) -> None:
        self._own.items.append(loss)

    def clear(self) -> None:
        self._own.items.clear()

    def __getitem__(self, index: int | slice) -> tf.Tensor | list[tf.Tensor]:
        return self._own.items[index]

    def __iter__(self) -> Iterator[tf.Tensor]:
        return iter(self._own.items)

    def __len__(self) -> int:
        return len(self._own.items)


def separate_losses(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Gives each replica lists of its own for what layers add by `add_loss`, while a step is traced.

    Replicas are traced in threads on the same layers. In an all-reduce within the forward pass, as synchronized
    BatchNorm has, one waits for the next, which would clear the lists of all.
    """
    return keras_internals.added_losses(model, _Losses)


def average_statistics(model: keras.Model, distribution: Distribution, virtual_replicas: int = 0) -> None:
    """Averages what each replica has gathered by itself (BatchNorm), before anybody looks at it.

    With virtual replicas every device has the same, and a mean over three of them would round it.
    """
    if virtual_replicas:
        return
    with distribution.peers.during("call"):
        # Rounding would let go of what is frozen, bit by bit.
        kept = {id(v) for v in fixed_variables(model)}
        gathered = [v for v in model.non_trainable_variables if id(v) not in kept]
        distribution.average([v for v in gathered if v.dtype.startswith(("float", "bfloat"))])


def settle(model: keras.Model, distribution: Distribution, virtual_replicas: int = 0) -> None:
    """Makes of a model whose training was interrupted what it would be had it ended there."""
    average_statistics(model, distribution, virtual_replicas)
    ema.finalize(keras_internals.inner_optimizer(model.optimizer), model.trainable_variables)
