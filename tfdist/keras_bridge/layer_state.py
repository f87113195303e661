"""What layers and users' code change in a forward pass: noted, undone, averaged over replicas, or refused."""

import contextlib
import functools
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable

from tfdist.distributed.distribution import Distribution
from tfdist.keras_bridge import ema, keras_internals, preconditions, zero


class _Traced(threading.local):
    """The replica that is being traced, each in a thread of its own."""

    real: tf.Tensor | None = None  # which rows count, bool [rows]; None for all, see `present`
    present: tf.Tensor | None = None  # whether it has a row at all, a bool scalar; None for certainly
    parts: int = 1  # into how many the global batch is taken apart, see `MicroBatch`
    share: tf.Tensor | None = None  # its part of the examples, of a step whose gradients are of its own mean


traced = _Traced()


@contextlib.contextmanager
def restored_without_rows(
    model: keras.Model,
    replicas: int,
    present: tf.Tensor | None,
    real: tf.Tensor | None = None,
    compiled_metrics: bool = False,
    parts: int = 1,
    share: tf.Tensor | None = None,
) -> Iterator[None]:
    """Undoes, after it, what a forward pass over a row that is not this replica's has changed in the layers.

    Args:
      present, real, parts, share: see `traced`. Layers that know of `real` leave the other rows out.
      compiled_metrics: undoes what has changed in these, too.
    """
    variables = [] if present is None else _changed(model, replicas, compiled_metrics)
    before = [tf.identity(v.value) for v in variables]
    traced.real, traced.present, traced.parts, traced.share = real if present is None else None, present, parts, share
    try:
        yield
    finally:
        traced.real, traced.present, traced.parts, traced.share = None, None, 1, None
    for variable, value in zip(variables, before):
        after = tf.where(present, tf.convert_to_tensor(variable.value), value)
        keras_internals.write_copy(variable.value, after)


def share(model: keras.Model, distribution: Distribution, present: tf.Tensor | None) -> None:
    """Gives a replica that has no row, after a pass in training, what the layers of those that have some have kept.

    Else a state that does not depend on the rows, as that of SpectralNormalization, would lag behind there, and
    with it the mean over the replicas.
    """
    if present is None or distribution.replicas == 1:
        return
    of_metrics = {id(v) for v in model.metrics_variables}
    changed = _changed(model, distribution.replicas, False)
    kept = [v for v in changed if id(v) not in of_metrics and v.dtype not in ("bool", "string")]
    if not kept:
        return
    values = [tf.convert_to_tensor(v.value) for v in kept]
    own = [tf.cast(value, tf.float64) for value in [*values, present]]
    *sums, count = distribution.all_sum([tf.where(present, value, tf.zeros_like(value)) for value in own])
    for variable, value, total in zip(kept, values, sums):
        mean = tf.cast(total / tf.maximum(count, 1.0), value.dtype)
        after = tf.where(tf.logical_or(present, tf.equal(count, 0.0)), value, mean)
        keras_internals.write_copy(variable.value, after)


def _changed(model: keras.Model, replicas: int, compiled_metrics: bool) -> list[keras.Variable]:
    """Statistics of layers and what metrics have summed up, compiled ones only if asked for.

    Not those of synchronized BatchNorm, which has not counted such a row and has the statistics of all replicas;
    nor the state of random generators, which every replica moves on alike.
    """
    compiled, of_losses = keras_internals.compiled_metrics(model), keras_internals.loss_metrics(model)
    fixed, layers = keras_internals.fixed_variables(model), keras_internals.flat_layers(model)
    others = [] if compiled_metrics else [*of_losses, *([compiled] if compiled else [])]
    kept = {id(v) for v in [*fixed, *(v for metric in others for v in metric.variables)]}
    for layer in layers if replicas > 1 else []:
        if getattr(layer, "synchronized", False):
            kept.update(id(v) for v in keras_internals.own_variables(layer))
    variables = {id(v): v for v in [*model.non_trainable_variables, *model.metrics_variables]}
    return [v for key, v in variables.items() if key not in kept and not keras_internals.is_seed(v)]


class Write(NamedTuple):
    """A variable of TensorFlow that Python code writes, or traces a write of; of a mirrored one, a replica's copy."""

    variable: tf.Variable
    before: Any  # its value before
    threads: set[int]  # that wrote it; each replica is traced in its own


@contextlib.contextmanager
def noting_writes(of_created: bool = False) -> Iterator[list[Write]]:
    """Yields a list that holds, after it, the variables that are written within it, and not created within it.

    `of_created`: also those, but for what a layer writes while it is built, which is what they begin with.

    No public hook sees a write, and those of a user's code may go to variables that no object of Keras knows.
    """
    noted: dict[int, Write] = {}
    created: dict[int, tf.Variable] = {}  # held, or their ids would be given away
    kinds = (BaseResourceVariable, ResourceVariable)  # which has some methods of its own
    writing = [n for n in vars(BaseResourceVariable) if n.startswith(("assign", "scatter_", "batch_scatter_update"))]

    def note(variable: tf.Variable) -> None:
        if id(variable.handle) in noted:
            noted[id(variable.handle)].threads.add(threading.get_ident())
        elif id(variable.handle) not in created or (of_created and not building()):
            with tf.init_scope():
                if not tf.is_symbolic_tensor(variable.handle) and variable.is_initialized():
                    noted[id(variable.handle)] = Write(variable, variable.numpy(), {threading.get_ident()})

    def noting(name: str, original: Callable) -> Callable:
        @functools.wraps(original)
        def method(self: tf.Variable, *args: Any, **kwargs: Any) -> Any:
            if name != "__init__":
                note(self)
                return original(self, *args, **kwargs)
            original(self, *args, **kwargs)
            created[id(self.handle)] = self

        return method

    building = lambda: any(f.f_code.co_name == keras_internals.MAYBE_BUILD for f, _ in traceback.walk_stack(None))
    changes = [(k, n, functools.partial(noting, n)) for k in kinds for n in [*writing, "__init__"] if n in vars(k)]
    writes: list[Write] = []
    try:
        with keras_internals.patched(*changes, alone=False):
            yield writes
    finally:
        writes += noted.values()


class Snapshot:
    """What variables have on every replica at the time when it is made."""

    def __init__(self, variables: Sequence[keras.Variable | tf.Variable]):
        self._values = [(copy, copy.numpy()) for v in variables for copy in keras_internals.copies(v)]

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
    others: list[Write] = []
    try:
        with noting_writes(of_created=True) as others:
            yield
    finally:
        for write in others:
            write.variable.assign(write.before)
        before.put_back()


def foreign(model: keras.Model, writes: Iterable[Write], generators: bool = False) -> list[Write]:
    """Returns the writes to variables that neither the model nor its metrics or optimizers own.

    `generators`: also to the state of random generators, but for Keras' own, of calls without a seed.
    """
    kept = keras_internals.carried_states(model) + keras_internals.unseeded()
    owned = _ids([*model.variables, *model.metrics_variables, *kept])
    left_out = lambda name: "seed_generator" in name and not generators
    others = [w for w in writes if id(w.variable) not in owned and not left_out(w.variable.name)]
    if not others:
        return []
    optimizers = preconditions.optimizers(model)
    owned = _ids(v for optimizer in optimizers for v in [*keras_internals.state(optimizer), *zero.slices(optimizer)])
    return [w for w in others if id(w.variable) not in owned]


def _ids(variables: Iterable[keras.Variable]) -> set[int]:
    """Returns the ids of TensorFlow's variables behind Keras', on every replica."""
    return {id(copy) for v in variables for copy in keras_internals.copies(v)}


def average_statistics(model: keras.Model, distribution: Distribution, virtual_replicas: int = 0) -> None:
    """Averages what each replica has gathered by itself (BatchNorm), before anybody looks at it.

    With virtual replicas every device has the same, and a mean over three of them would round it.
    """
    if virtual_replicas or distribution.replicas == 1:
        return
    variables = averaged(model)
    key = [id(distribution), *map(id, variables)]
    if _AVERAGING.get(model, ([],))[0] != key:
        _AVERAGING[model] = key, averaging(variables, distribution)
    with distribution.peers.during("call"):
        _AVERAGING[model][1]()


_AVERAGING: weakref.WeakKeyDictionary[keras.Model, tuple[list[int], Callable[[], object]]] = weakref.WeakKeyDictionary()


def averaged(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables with what each replica gathers by itself and that is averaged."""
    kept = {id(v) for v in keras_internals.fixed_variables(model)}  # rounding would let go of those, bit by bit
    gathered = [v for v in model.non_trainable_variables if id(v) not in kept]
    return [v for v in gathered if v.dtype.startswith(("float", "bfloat"))]


def averaging(variables: list[keras.Variable], distribution: Distribution) -> Callable[[], object]:
    """Returns a function, compiled at its first call, that sets each variable to its mean over all replicas."""

    def mean() -> None:
        sums = distribution.all_sum([tf.convert_to_tensor(v.value) for v in variables])
        for variable, total in zip(variables, sums):
            keras_internals.write_copy(variable.value, total / distribution.replicas)

    def traced() -> None:
        with keras_internals.without_gradient_registry():
            distribution.run(mean, ())

    return tf.function(traced, autograph=False) if variables else lambda: None


def settle(model: keras.Model, distribution: Distribution, virtual_replicas: int = 0) -> None:
    """Makes of a model whose training was interrupted what it would be had it ended there."""
    average_statistics(model, distribution, virtual_replicas)
    ema.finalize(keras_internals.inner_optimizer(model.optimizer), model.trainable_variables)


_RANDOM = """
AllCandidateSampler FixedUnigramCandidateSampler FractionalAvgPool FractionalMaxPool LearnedUnigramCandidateSampler
LogUniformCandidateSampler Multinomial ParameterizedTruncatedNormal RandomCrop RandomGamma RandomPoisson
RandomPoissonV2 RandomShuffle RandomStandardNormal RandomUniform RandomUniformInt RngReadAndSkip RngSkip
SampleDistortedBoundingBox SampleDistortedBoundingBoxV2 StatefulRandomBinomial StatefulStandardNormal
StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt StatefulUniformInt
ThreadUnsafeUnigramCandidateSampler TruncatedNormal UniformCandidateSampler
"""
"""Names of operations that depend on what a device has drawn before."""
WRITES = ("Assign", "ResourceScatter")
"""Prefixes of operations that change a variable."""


def kinds_of(graph: tf.Graph) -> set[str]:
    """Returns the types of the operations of a graph and its functions, but for tfdist's own calls of Python."""
    functions = graph.as_graph_def().library.function
    nodes = [(op.name, op.type) for op in graph.get_operations()]
    nodes += [(node.name, node.op) for f in functions for node in f.node_def]
    return {kind for name, kind in nodes if not name.rpartition("/")[2].startswith("tfdist")}


PYTHON = {"EagerPyFunc", "PyFunc"}
"""Operations that call Python, which may draw numbers and keep a state that no graph shows; `PyFuncStateless` not."""


def drawing(kinds: set[str]) -> list[str]:
    """Returns which of these types of operations depend on what a device has drawn before."""
    return sorted(kinds.intersection(_RANDOM.split()))


def inference_only(model: keras.Model, others: Iterable[keras.Layer] = ()) -> contextlib.AbstractContextManager[None]:
    """Calls random layers, and `others`, while a step is traced within it, as for inference: they pass on inputs."""
    layers = {id(layer): layer for layer in [*keras_internals.random_layers(model), *others]}
    inference = lambda call: lambda *args, **kwargs: call(*args, **{**kwargs, "training": False})
    return keras_internals.replaced("call", [(layer, inference(layer.call)) for layer in layers.values()])
