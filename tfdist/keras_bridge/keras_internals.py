"""All private names of Keras that tfdist uses, and of TensorFlow where it meets Keras, each behind a small function.

Each docstring gives the reason why nothing public does. tests/keras_bridge/test_keras_internals.py says of each when a
new version has moved it and what that would break, and checks that these names are used nowhere else.
"""

import collections
import contextlib
import copy
import functools
import inspect
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common import remat as keras_remat
from keras.src.backend.tensorflow import numpy as backend_numpy
from keras.src.backend.tensorflow import random as backend_random
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses import loss as losses_of_keras
from keras.src.models.functional import Functional
from keras.src.ops.function import Function
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random import seed_generator
from keras.src.trainers.compile_utils import CompileLoss
from keras.src.utils import naming, rng_utils
from tensorflow.python.distribute import mirrored_run
from tensorflow.python.distribute.distribute_lib import ReplicaContextBase, StrategyBase
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.framework import config, ops
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import custom_gradient, gen_math_ops, gradients_util

from tfdist.config import user_functions
from tfdist.data.spec import Structure
from tfdist.errors import UserError

_PATCHED = threading.RLock()
"""Held while a class or module of Keras is changed: of two threads that trace at once, one would undo the other's."""


@contextlib.contextmanager
def patched(*changes: tuple[type | types.ModuleType, str, Callable[[Any], Any]], alone: bool = True) -> Iterator[None]:
    """Replaces, within it, attributes of classes or modules: (owner, name, makes the new one of theirs).

    `alone` keeps other threads from doing so meanwhile.
    """
    with _PATCHED if alone else contextlib.nullcontext():
        before = [(owner, name, name in vars(owner), getattr(owner, name, None)) for owner, name, _ in changes]
        for (owner, name, make), (*_, theirs) in zip(changes, before):
            setattr(owner, name, make(theirs))
        try:
            yield
        finally:
            for owner, name, own, theirs in before:
                setattr(owner, name, theirs) if own else delattr(owner, name)


@contextlib.contextmanager
def replaced(name: str, values: Sequence[tuple[Any, object]]) -> Iterator[None]:
    """Gives objects another attribute, within it, past Keras' tracker; in pairs, as layers need not have a hash."""
    # The end of an inner change must leave what an outer one has set.
    before = [(owner, vars(owner)[name]) for owner, _ in values if name in vars(owner)]
    for owner, value in values:
        vars(owner)[name] = value
    try:
        yield
    finally:
        for owner, _ in values:
            vars(owner).pop(name, None)  # a list of metrics may name one twice
        for owner, value in before:
            vars(owner)[name] = value


def is_theirs(owner: object, name: str) -> bool:
    """Returns whether a method or property is Keras' code, by its globals, which decorators that pose as it lack."""
    own = inspect.getattr_static(owner, name)
    return getattr(getattr(own, "fget", own), "__globals__", {}).get("__name__", "").startswith(("keras.", "tfdist."))


# Layers and models.


def flat_layers(layer: keras.Layer, include_self: bool = True, recursive: bool = True) -> list[keras.Layer]:
    """Returns the layers within a layer or model; `model.layers` leaves out those inside of layers."""
    return list(layer._flatten_layers(include_self, recursive))


def nodes(model: keras.Layer) -> list:
    """Returns the calls of layers and operations of which the graphs of layers in a model consist, each in order."""
    depths = [graph._nodes_by_depth for graph in flat_layers(model) if isinstance(graph, keras.Function)]
    return [n for nodes in depths for depth in sorted(nodes, reverse=True) for n in nodes[depth] if not n.is_input]


def batch_norms(model: keras.Layer) -> list[keras.layers.BatchNormalization]:
    """Returns the BatchNormalization layers of a model, those inside of others included."""
    return [layer for layer in flat_layers(model) if isinstance(layer, keras.layers.BatchNormalization)]


def own_trainable_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the weights that a layer has itself and trains unless it is frozen.

    `layer.trainable_variables` also has those of layers inside it, and none at all of a frozen layer.
    """
    return list(layer._trainable_variables)


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the weights that a layer has itself; `layer.weights` also has those of the layers inside it."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


own_metrics = operator.attrgetter("_metrics")
"""The metrics that a layer has itself; `layer.metrics` also has those of the layers inside it."""
takes_training = operator.attrgetter("_call_has_training_arg")
"""Whether a model's `call` has an argument `training`; Keras has read the signature, wrappers and all."""
producing_layer = operator.attrgetter("_keras_history.operation")
"""The layer or operation that a symbolic tensor comes from; in public, only layers know their outputs."""
is_deterministic = config.is_op_determinism_enabled
"""Whether `tf.config.experimental.enable_op_determinism` has been called, which nothing public tells."""
MAYBE_BUILD = "_maybe_build"
"""The method in which a layer that is called builds itself, by a `build` of its own or without."""
uncast = operator.attrgetter("_value")
"""What holds a Keras variable, in its own type; `value` casts it within a layer. None before it has a value."""


def fixed_batch(model: keras.Model) -> int | None:
    """Returns the batch size that a model was made for, or None; a model that is no graph of layers has no inputs."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    return inputs[0].shape[0] if inputs else None


def stateful_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers that carry each row of a batch on to the same row of the next."""
    return [layer for layer in flat_layers(model) if getattr(layer, "stateful", False)]


def carried_states(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of stateful recurrent layers, which Keras has in no list of a layer's variables."""
    return keras.tree.flatten([getattr(layer, "states", None) or [] for layer in stateful_layers(model)])


def vocabularies(model: keras.Model) -> list[list[str]]:
    """Returns what the lookup layers of a model have read or been adapted to, which is in no list of variables."""
    layers = [layer for layer in flat_layers(model) if hasattr(layer, "get_vocabulary")]
    weights = [np.asarray(getattr(layer, "idf_weights", ())).tolist() for layer in layers]
    return [[*map(str, layer.get_vocabulary()), *map(str, known)] for layer, known in zip(layers, weights)]


def input_structure(model: keras.Model) -> Structure:
    """Returns the inputs nested as the model takes them, where Keras' own exporters look; `model.inputs` is flat."""
    return getattr(model, "_inputs_struct", model.inputs[0])


def copies(variable: keras.Variable | tf.Variable) -> tuple[tf.Variable, ...]:
    """Returns this worker's copies of a variable, in order of replicas; of a mirrored one there are several."""
    raw = variable if isinstance(variable, tf.Variable) else variable.value
    return tuple(getattr(raw, "values", (raw,)))


def let_first_replica_speak(variable: keras.Variable) -> None:
    """Lets code outside of the replicas read the first's copy of a metric's variable, and assign the same to all.

    TensorFlow would add them up, and assign a part to each, as Keras asks for. TPUs' have a policy.
    """
    for decides in (variable.value, getattr(variable.value, "_policy", None)):
        if hasattr(decides, "_aggregation"):
            decides._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA  # type: ignore[union-attr]


def read_copy(copy: tf.Variable) -> tf.Tensor:
    """Reads this replica's copy of a variable; the variable's own method would meet the other replicas."""
    return tf.raw_ops.ReadVariableOp(resource=copy.handle, dtype=copy.dtype)


def write_copy(copy: tf.Variable, value: tf.Tensor) -> None:
    """Writes this replica's copy of a variable; the variable's own method would meet the other replicas."""
    tf.raw_ops.AssignVariableOp(resource=copy.handle, value=value)


def is_seed(variable: keras.Variable) -> bool:
    """Returns whether a variable is the state of a random generator, which only its path tells."""
    return "seed_generator" in variable.path


def global_seed() -> int:
    """Returns the seed of `keras.utils.set_random_seed`, 0 without; nothing public tells it."""
    return rng_utils.get_random_seed() or 0


def unseeded() -> list[keras.Variable]:
    """Returns the state of Keras' generator for whatever gives no seed; nothing before its first use."""
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return [] if generator is None else [generator.state]


def random_state() -> list[int] | None:
    """Returns the numbers of `unseeded`, None before its first use."""
    return [int(value) for state in unseeded() for value in state.numpy()] or None


def set_random_state(state: list[int] | None) -> None:
    """Puts that generator into a state that `random_state` has returned."""
    if state is None:
        global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, None)
    else:
        seed_generator.global_seed_generator().state.assign(state)


def fixed_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables that training does not change: weights of frozen layers, statistics of a frozen BatchNorm.

    They are the same on every replica. What else a frozen layer has of state is not known to stay.
    """
    frozen: set[int] = set()
    for layer in flat_layers(model):
        if not layer.trainable:
            whole = isinstance(layer, keras.layers.BatchNormalization)
            frozen |= {id(v) for v in (layer.weights if whole else own_trainable_variables(layer))}
    return [v for v in model.non_trainable_variables if id(v) in frozen] if frozen else []


class _Losses(threading.local, collections.UserList):
    """Stands for the list in which a layer collects what it is given by `add_loss`; each thread has its own."""

    __getitem__ = property(operator.attrgetter("data.__getitem__"))  # a slice is a plain list, as Keras expects


@contextlib.contextmanager
def separate_losses(model: keras.Model) -> Iterator[None]:
    """Gives each replica lists of its own for what layers add by `add_loss`; nothing public says where they are.

    Replicas are traced in threads on the same layers. In an all-reduce within the forward pass, as synchronized
    BatchNorm has, one waits for the next, which would clear the lists of all.
    """
    layers = flat_layers(model)
    theirs = [layer._losses for layer in layers]
    with replaced("_losses", [(layer, _Losses()) for layer in layers]):
        try:
            yield
        finally:
            for losses in theirs:
                losses.clear()


def adding_losses(model: keras.Model) -> list[str]:
    """Returns the names of the layers that have added losses in the last call; in public there is only one list."""
    return [layer.name for layer in flat_layers(model) if len(layer._losses)]


def loss_owner(model: keras.Model, loss: tf.Tensor) -> keras.Layer:
    """Returns the layer that has given a loss to a `keras.StatelessScope`, which keeps those of all in a list."""
    return next((layer for layer in flat_layers(model) if id(loss) in layer._loss_ids), model)


def random_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns Keras' layers that draw random numbers in training alone; only their attributes and signatures tell."""
    seeded = lambda layer: any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values())
    of_keras = [layer for layer in flat_layers(model) if type(layer).__module__.startswith("keras.")]
    return [layer for layer in of_keras if layer._call_has_training_arg and seeded(layer)]


def rows_draw_alike() -> AbstractContextManager[None]:
    """Lets `keras.random`, within it, draw the same for each row and each time: parts of a batch draw what it does."""

    def first_row(shape: Sequence | tf.Tensor) -> Sequence:
        shape = tf.unstack(shape) if tf.is_tensor(shape) else shape
        return [1, *shape[1:]] if len(shape) else shape

    def alike(theirs: Callable) -> Callable:
        return lambda shape, *a, seed=None, **k: tf.broadcast_to(theirs(first_row(shape), *a, seed=0, **k), shape)

    def dropout(theirs: Callable) -> Callable:
        return lambda x, rate, noise_shape=None, seed=0: theirs(x, rate, first_row(noise_shape or tf.shape(x)), seed=0)

    changes = [(backend_random, name, alike) for name in ("normal", "uniform", "randint", "truncated_normal")]
    return patched(*changes, (backend_random, "dropout", dropout), alone=False)


MOMENTS = "_moments"
"""The method of BatchNormalization that computes mean and variance of (inputs, mask); no option says how they sum."""


def remat_mode(layer: keras.Layer) -> str:
    """Returns the mode of the `keras.RematScope` in which a layer was created, empty for none; only a record says."""
    return getattr(getattr(layer, "_remat_mode", None), "mode", None) or ""


def set_remat(layer: keras.Layer) -> None:
    """Makes of a layer one that was created in `keras.RematScope()`, which it cannot be afterwards in public."""
    layer._remat_mode = keras_remat.RematMode("full", 0, [])


def graph_of(layer: object) -> Functional | None:
    """Returns the Functional model that a layer is, or that a Sequential model has made of itself; None of others."""
    graph = getattr(layer, "_functional", None) if isinstance(layer, keras.Sequential) else layer
    return graph if isinstance(graph, Functional) else None


def call_state() -> tuple[threading.local, dict[str, Any]]:
    """Returns what Keras knows of the call of a layer, its type and whether it trains, and where (not public) it is."""
    state = global_state.GLOBAL_STATE_TRACKER  # looked up each time, as clear_session() replaces it
    return state, {name: copy.copy(getattr(state, name, None)) for name in ("autocast_scope", "current_call_ctx")}


def settings_in_threads() -> AbstractContextManager[None]:
    """Gives threads in which replicas are traced, within it, the settings of this one: Keras has some for each."""
    state, names = global_state.GLOBAL_STATE_TRACKER, ("dtype_policy", "flash_attention", "custom_objects_scope_dict")
    settings = {name: value for name, value in vars(state).items() if name in names}
    knowing = lambda theirs: lambda thread: (vars(state).update(settings), theirs(thread))
    return patched((mirrored_run._MirroredReplicaThread, "run", knowing))


_RECOMPUTED = next(c for c in inspect.unwrap(tf.recompute_grad).__code__.co_consts if inspect.iscode(c))
"""The code of the function that `tf.recompute_grad` gives to `tf.custom_gradient`; it closes over what it was given."""


def answer_rematerialization(
    call: Callable[[Callable, tuple, dict[str, Any]], Any],
    run: Callable[[list[Any], dict[int, Any], set[int], Callable], None],
    is_divided: Callable[[Functional], bool],
) -> None:
    """Lets others compute, from now on, what `tf.recompute_grad` was given, and the nodes of Functional models.

    No public function replaces what has been wrapped already, or calls a part of the nodes. `call` returns
    NotImplemented to leave a function to TensorFlow. Of the models that `is_divided` tells, `run` takes the nodes in
    order, the values of tensors by their ids, which it adds to, the ids of those that are returned, and how to run one.
    """

    def decorated(theirs: Callable, f: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        outputs = NotImplemented
        if getattr(f, "__code__", None) is _RECOMPUTED:
            outputs = call(inspect.getclosurevars(f).nonlocals["f"], args, kwargs)
        return theirs(f, args, kwargs) if outputs is NotImplemented else outputs

    theirs = Function._run_through_graph

    def through(self: Functional, inputs: Any, operation_fn: Callable = lambda op: op, **options: Any) -> Any:
        if options or not is_divided(self):
            return theirs(self, inputs, operation_fn, **options)

        def run_node(node: Any, known: dict[int, Any]) -> None:
            args, kwargs = node.arguments.fill_in(known)
            outputs = operation_fn(node.operation)(*args, **kwargs)
            known.update(zip(map(id, node.outputs), keras.tree.flatten(outputs)))

        known = dict(zip(map(id, self.inputs), keras.tree.flatten(inputs)))
        nodes, reached = [], set(known)
        for _, at_depth in sorted(self._nodes_by_depth.items(), reverse=True):
            for node in at_depth:
                if node.operation and not node.is_input and reached.issuperset(map(id, node.input_tensors)):
                    nodes.append(node)
                    reached.update(map(id, node.outputs))
        run(nodes, known, {id(x) for x in self.outputs}, run_node)
        return keras.tree.pack_sequence_as(self._outputs_struct, [known[id(x)] for x in self.outputs])

    for name in ("_graph_mode_decorator", "_eager_mode_decorator"):
        setattr(custom_gradient, name, functools.partial(decorated, getattr(custom_gradient, name)))
    Function._run_through_graph = through


@contextlib.contextmanager
def computing_in(model: keras.Model, dtype: str) -> Iterator[None]:
    """Lets all layers and losses, within it, compute in a type, and leaves their variables as they are.

    A policy has a public name for float16 and bfloat16 on float32 variables only.
    """
    policies = [(layer, keras.DTypePolicy("float32")) for layer in flat_layers(model)]
    for layer, policy in policies:
        policy._compute_dtype, policy._variable_dtype = dtype, layer.variable_dtype
    losses = {id(entry.loss): entry.loss for entry in loss_entries(model) if isinstance(entry.loss, keras.losses.Loss)}
    with replaced("_dtype_policy", policies), replaced("_dtype", [(loss, dtype) for loss in losses.values()]):
        yield


def reset_layer_names() -> None:
    """Lets Keras number layers from the start; the public `clear_session` would also delete the state of others."""
    naming.reset_uids()


MASK = "_keras_mask"
"""The attribute of a tensor with the mask that a layer has attached to its output; Keras has no other place for it.
What is sliced or brought out of XLA loses it."""
LOGITS = "_keras_logits"
"""The attribute with what a softmax or sigmoid was given, of which Keras computes the loss."""


def logits(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns what Keras computes the loss of such an output of, where losses look for it; None of others."""
    is_computed = tf.is_symbolic_tensor(tensor) and tensor.op.type in ("Softmax", "Sigmoid")
    return getattr(tensor, LOGITS, tensor.op.inputs[0] if is_computed else None)


# Compiled losses and metrics.


class MatchedLoss(NamedTuple):
    """One loss of a compiled model with what Keras would call it with."""

    entry: Any  # Keras' record: `loss`, `loss_weights`, `name`
    y_true: Structure
    y_pred: Structure
    sample_weight: tf.Tensor | None
    mask: tf.Tensor | None  # that the layers have attached to `y_pred`


compiled_loss = operator.attrgetter("_compile_loss")
"""A model's CompileLoss, or None; `model.loss` is only what the user has given, in any mixture of forms."""
compiled_metrics = operator.attrgetter("_compile_metrics")
"""A model's CompileMetrics, or None; `model.metrics` does not tell which output a metric is for."""


def loss_entries(model: keras.Model) -> list[Any]:
    """Returns the single losses of a built CompileLoss, if any; in public there is only their weighted sum."""
    return list(model._compile_loss._flat_losses or []) if model._compile_loss else []


def matched_losses(
    compiled: CompileLoss, y: Structure, y_pred: Structure, sample_weight: Structure
) -> list[MatchedLoss]:
    """Returns which targets and outputs belong to which loss, matched by Keras itself.

    Keras accepts targets, outputs and losses in many mixtures of lists and dicts. Rather than repeat its rules, a
    built CompileLoss is called here with each loss replaced by a recorder.
    """
    entries = list(compiled._flat_losses)
    matched: list[MatchedLoss] = []

    def recorder(entry: object) -> Callable:
        def record(y_true: Structure, prediction: Structure, sample_weight: tf.Tensor | None = None) -> tf.Tensor:
            matched.append(MatchedLoss(entry, y_true, prediction, sample_weight, getattr(prediction, MASK, None)))
            return tf.zeros(())

        return record

    recorders = [entry._replace(loss=recorder(entry)) for entry in entries]
    with replaced("_flat_losses", [(compiled, recorders)]), replaced("_metrics", [(compiled, [None] * len(entries))]):
        compiled(y, y_pred, sample_weight)
    return matched


@contextlib.contextmanager
def asking_rows() -> Iterator[list[str]]:
    """Notes, within it, which code that is not Keras' asks a shape for a number of rows that it does not tell."""
    asked: list[str] = []

    def noting(theirs: Callable) -> Callable:
        def method(shape: tf.TensorShape, *key: Any) -> Any:
            asks = key in ((), (0,)) and shape.rank and shape.dims[0].value is None
            if asks and user_functions.is_own_module(names := sys._getframe(1).f_globals):
                asked.append(names.get("__name__", ""))
            return theirs(shape, *key)

        return method

    with patched(
        *((tf.TensorShape, name, noting) for name in ("__getitem__", "__iter__", "as_list", "is_fully_defined"))
    ):
        yield asked


def rows_are_no_bias() -> AbstractContextManager[None]:
    """Lets `keras.ops.add` add `[rows, 1]` to `[rows, columns]` where both are as many and known, within it.

    Keras takes that for a bias of the columns, in a replica with as many rows alone. Nothing public turns it off.
    """

    def make(theirs: Callable) -> Callable:
        def add(a: Any, b: Any) -> tf.Tensor:
            of_a, of_b = (getattr(value, "shape", ()) for value in (a, b))
            if len(of_b) < 2 or len(of_a) != len(of_b) or any(size != 1 for size in of_b[1:]):
                return theirs(a, b)
            dtype = keras.backend.result_type(a.dtype, b.dtype)
            return tf.add(keras.ops.cast(a, dtype), keras.ops.cast(b, dtype))

        return add

    return patched((backend_numpy, "add", make))


def unscaled_losses(in_replicas: bool = True) -> AbstractContextManager[None]:
    """Lets the Keras losses that users call in a loss function or beside `add_loss` return their own value.

    Keras divides it by the strategy's number of replicas, since its `fit` adds the replicas' gradients up. tfdist
    weighs each replica by its rows, and the loss would be divided twice. Nothing public turns the division off.

    `in_replicas`: in replica context, too; a loop of the user's own over `strategy.run` needs the division there.
    """

    def as_it_is(theirs: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
        return lambda value: value if in_replicas or tf.distribute.in_cross_replica_context() else theirs(value)

    names = "scale_loss_for_distribution", "unscale_loss_for_distribution"
    # The lock is not for what lasts: threads that trace replicas wait for it.
    return patched(*((losses_of_keras, name, as_it_is) for name in names), alone=in_replicas)


def compiled_with(model: keras.Model) -> list[object]:
    """Returns losses, weights and metrics as `compile` was given them; in public only what they serialize to."""
    given = model._compile_config.config
    return [given[name] for name in ("loss", "loss_weights", "metrics", "weighted_metrics")]


def loss_metrics(model: keras.Model) -> list[keras.Metric]:
    """Returns the metrics in which Keras itself averages the losses; `model.metrics` does not tell them from others."""
    compiled = model._compile_loss
    return [model._loss_tracker] + (compiled.metrics if compiled else [])


class MetricArguments(NamedTuple):
    """What Keras would update some metrics with."""

    metrics: Sequence[keras.Metric]
    y_true: Structure
    y_pred: Structure
    weight: tf.Tensor | None


def metric_arguments(
    model: keras.Model, y: Structure, y_pred: Structure, weight: Structure | None
) -> list[MetricArguments]:
    """Returns the compiled metrics of each output with their arguments, by Keras' own rules.

    In public there is only `update_state` for all, which takes no slices of weights and many small operations.
    """
    compiled = model._compile_metrics
    if compiled is None:
        return []
    outputs, targets = compiled._flatten_y(y_pred), compiled._flatten_y(y)
    weights = [None] if weight is None else compiled._flatten_y(weight)
    if len(weights) < len(targets):
        weights = [weights[0]] * len(targets)
    of_rows = lambda w, m: w if m is None or len(w.shape) != 1 else tf.reshape(w, [-1] + [1] * (len(m.shape) - 1))
    weights = [w if w is None else of_rows(w, getattr(o, MASK, None)) for w, o in zip(weights, outputs)]  # not of steps
    unweighted, weighted = compiled._flat_metrics, compiled._flat_weighted_metrics
    pairs = [MetricArguments(g.metrics, t, o, None) for g, t, o in zip(unweighted, targets, outputs) if g]
    return pairs + [MetricArguments(g.metrics, *rest) for g, *rest in zip(weighted, targets, outputs, weights) if g]


def create_late_variables(metric: keras.Metric, y_true: tf.Tensor, y_pred: tf.Tensor) -> None:
    """Creates the variables of a metric of Keras that makes them at its first update, once it knows the shapes.

    Nothing public does. Made during the first update, they would be missing where metrics are reset and in checkpoints.
    """
    kinds = (keras.metrics.AUC, keras.metrics.FBetaScore, keras.metrics.R2Score)
    # A subclass with an `update_state` of its own may hand on other shapes than it is given.
    if any(type(metric).update_state is kind.update_state for kind in kinds) and not metric._built:
        shapes = [y_pred.shape] if isinstance(metric, keras.metrics.AUC) else [y_true.shape, y_pred.shape]
        if isinstance(metric, keras.metrics.R2Score) and sorted(map(len, shapes)) == [1, 2]:  # which it makes the same
            shapes = [max(shapes, key=len)] * 2
        metric._build(*shapes)


def mean_updates(update: Callable) -> AbstractContextManager[None]:
    """Replaces, within it, what updates `keras.metrics.Mean` by `update(theirs, metric, values, weights or None)`.

    By class: a step's means need not be the model's metrics. `theirs` takes the last three.
    """

    def make(theirs: Callable) -> Callable:
        return lambda self, values, sample_weight=None: update(theirs, self, values, sample_weight)

    return patched((keras.metrics.Mean, "update_state", make))


def restored_epoch(model: keras.Model) -> int:
    """Returns the epoch that `keras.callbacks.BackupAndRestore` has gone back to, and forgets it; 0 for none.

    The callback leaves it in this attribute for Keras' `fit`, and nowhere else.
    """
    epoch, model._initial_epoch = model._initial_epoch, None
    return epoch or 0


def metrics_in_order(model: keras.Model, logs: dict[str, Any]) -> list[float] | float:
    """Returns the values of `logs` as Keras' `evaluate` does with return_dict=False: a list, or its only entry.

    Nothing public tells the order: `model.metrics_names` has one name for all compiled metrics.
    """
    return model._flatten_metrics_in_order(logs)


RESETS_ON_BATCH = "reset_metrics" in TensorFlowTrainer.train_on_batch.__code__.co_names
"""Whether `train_on_batch` and `test_on_batch` return what a batch alone has come to, as since Keras 3.15; before, they
went on from call to call, and nothing public tells."""
averaged_function = operator.attrgetter("_fn", "_fn_kwargs")
"""The function that a MeanMetricWrapper averages, and its options; `get_config` gives them serialized."""

# Optimizers.


def inner_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer itself, out of a `LossScaleOptimizer` if it is wrapped in one; this name is public."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def updating(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns those that write weights: what is in a `MultiOptimizer`, or the optimizer; these names are public."""
    inner = inner_optimizer(optimizer)
    return list(getattr(inner, "optimizers", [inner]))


def state(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables of an optimizer, which lists none that one in a `LossScaleOptimizer` sets as an attribute.

    Such is Nadam's product of momenta: `LossScaleOptimizer.build` turns off what would take it into the list.
    """
    values = [value for one in updating(optimizer) for value in vars(one).values() if isinstance(value, keras.Variable)]
    return list({id(v): v for v in [*optimizer.variables, *values]}.values())


def rate_setting(
    optimizer: keras.optimizers.Optimizer,
) -> keras.Variable | keras.optimizers.schedules.LearningRateSchedule | None:
    """Returns a variable or the schedule of the learning rate; `optimizer.learning_rate` is a schedule's value now."""
    return getattr(optimizer, "_learning_rate", None)


def rate_variables(optimizers: Sequence[keras.optimizers.Optimizer]) -> dict[int, keras.Variable]:
    """Returns the learning rates that a program may assign, by number of the optimizers, those within others too."""
    rates = [rate_setting(one) for optimizer in optimizers for one in updating(optimizer)]
    return {number: rate for number, rate in enumerate(rates, 1) if isinstance(rate, keras.Variable)}


counter = operator.attrgetter("_iterations")
"""The variable in which an optimizer counts batches; in public, `iterations` are divided where it accumulates them."""
accumulators = operator.attrgetter("_accumulated_gradients")
"""An optimizer's sums of gradients, one for each variable, which `optimizer.variables` has without a name."""
adam_slots = operator.attrgetter("_momentums", "_velocities")
"""The first and the second moments of Adam, one for each variable, which `optimizer.variables` has without a name."""
UPDATING = ("apply_gradients", "apply", "update_step", "assign", "assign_sub", "_clip_gradients", "_apply_weight_decay")
"""Methods of optimizers that make an update, in place of which users may set their own, also of the private ones."""
optimized_variables = operator.attrgetter("_trainable_variables")
"""The weights that an optimizer was built for; in public it tells only its own variables."""


def slots(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns an optimizer's state of each weight; `optimizer.variables` has it without a name, among others.

    Averages of the weights and sums of gradients are not among it.
    """
    weights = optimizer._trainable_variables
    others = "_variables", "_trainable_variables", "_accumulated_gradients", "_model_variables_moving_average"
    lists = [own for name, own in vars(optimizer).items() if isinstance(own, list | tuple) and name not in others]
    return [slot for own in lists if len(own) == len(weights) for slot in own if isinstance(slot, keras.Variable)]


def set_tensorflow_variable(variable: keras.Variable, value: tf.Variable) -> None:
    """Puts another variable of TensorFlow behind one of Keras, which keeps its name and shape; nothing public does."""
    variable._value = value


@contextlib.contextmanager
def known_slices(optimizer: keras.optimizers.Optimizer, slices: Mapping[int, keras.Variable]) -> Iterator[None]:
    """Lets an optimizer find, within it, the slots of each weight by a slice of it, too, given by its place.

    Only a private table tells the place of a weight.
    """
    keys = {optimizer._var_key(part): place for place, part in slices.items()}
    optimizer._trainable_variables_indices.update(keys)
    try:
        yield
    finally:
        for key in keys:
            del optimizer._trainable_variables_indices[key]


def update_steps(update: Callable) -> AbstractContextManager[None]:
    """Lets optimizers call `update(optimizer, gradients, variables, rate)`, clipped, within it; no hook is there."""
    return patched((TFOptimizer, "_backend_update_step", lambda theirs: lambda self, *given: update(self, *given)))


def places(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> list[int]:
    """Returns where the slots of these weights are among those of an optimizer, which may have been built for more."""
    try:
        return [optimizer._get_variable_index(variable) for variable in variables]
    except KeyError:
        what = f"optimizer {optimizer.name!r} was built for other weights, and has no state for those to train now"
        raise UserError(what, "give compile() a new one") from None


def weight_averages(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Returns the moving averages of these weights; in public they can only replace the weights for good."""
    return [optimizer._model_variables_moving_average[i] for i in places(optimizer, variables)]


def decays(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Returns whether weight decay is for this variable; what `exclude_from_weight_decay` was told is private."""
    return optimizer._use_weight_decay(variable)


def variable_key(optimizer: keras.optimizers.Optimizer, variable: keras.Variable | tf.Variable) -> str:
    """Returns what the optimizer knows a variable by: the same for a Keras variable, its tf.Variable and its copies."""
    return optimizer._var_key(variable)


def without_reduction() -> AbstractContextManager[None]:
    """Keeps optimizers, within it, from summing gradients over replicas; Keras has an option for that no longer.

    By class: an optimizer may hand its gradients on to others that it holds, Keras' own or anybody's. Each replica
    accumulates gradients by itself, as under XLA: replicas cannot meet within the branches of Keras (issue 20582).
    """
    as_they_are = lambda theirs: lambda self, grads_and_vars: grads_and_vars

    def each_by_itself(theirs: Callable) -> Callable:
        def apply(self: BaseOptimizer, grads: list[tf.Tensor], variables: list[keras.Variable]) -> None:
            strategies = [tf.distribute.get_strategy().extended] if self.gradient_accumulation_steps else []
            with replaced("_use_merge_call", [(strategy, lambda: False) for strategy in strategies]):
                theirs(self, grads, variables)

        return apply

    return patched(
        (TFOptimizer, "_all_reduce_sum_gradients", as_they_are),
        (BaseOptimizer, "_backend_apply_gradients", each_by_itself),
    )


@contextlib.contextmanager
def scaled_rates(
    optimizer: keras.optimizers.Optimizer, factor: Callable[[keras.Variable | tf.Variable], float]
) -> Iterator[None]:
    """Lets an optimizer, within it, multiply its learning rate by `factor` of each variable; Keras has one rate.

    Weight decay and the optimizers that look the rate up for themselves go through private methods.
    """
    # Grappler would move the factor within the products of an update, in one replica and not in the other.
    times = lambda rate, own: rate if own == 1 else tf.ensure_shape(rate * own, [])
    step, decay, rate = optimizer.update_step, optimizer._apply_weight_decay, optimizer._get_current_learning_rate
    # Replicas are traced in threads that meet in each update of a variable, so they are at the same one.
    now = [1.0]

    def scaled_step(gradient: tf.Tensor, variable: tf.Variable, rate: tf.Tensor) -> None:
        step(gradient, variable, times(rate, factor(variable)))

    def scaled_decay(variables: list[keras.Variable]) -> None:
        for variable in variables:
            now[0] = factor(variable)
            decay([variable])
        now[0] = 1.0

    scaled_rate = lambda: times(rate(), now[0])
    with (
        replaced("update_step", [(optimizer, scaled_step)]),
        replaced("_apply_weight_decay", [(optimizer, scaled_decay)]),
        replaced("_get_current_learning_rate", [(optimizer, scaled_rate)]),
    ):
        yield


def optimizer_updates(update: Callable) -> AbstractContextManager[None]:
    """Replaces, within it, what optimizers do when a `train_step` of the user's gives them gradients.

    By class: an optimizer may be anybody's, and an attribute of its own would stay with it if it is copied. It is
    `update(theirs, optimizer, gradients, variables or None)`; `theirs` takes the last three.
    """

    def make(theirs: Callable) -> Callable:
        return lambda self, grads, trainable_variables=None: update(theirs, self, grads, trainable_variables)

    of_others = [getattr(keras.optimizers, name, None) for name in ("LossScaleOptimizer", "MultiOptimizer")]
    return patched(*((owner, "apply", make) for owner in (BaseOptimizer, *of_others) if owner))


# Callbacks.

BATCHES_SEEN = ("_batches_seen_since_last_saving", "_last_batch_seen")
"""ModelCheckpoint counts in these attributes the batches since its last file, and nothing public tells the number."""
EMA_IN_MODEL = "_ema_weights_in_model"
"""SwapEMAWeights tells by this attribute whether the model has the averaged weights, as at the end of an epoch."""
profiles_batches = operator.attrgetter("_should_trace")
"""Whether a callback keras.callbacks.TensorBoard profiles; what it has read from `profile_batch` is kept privately."""


def measured_by(model: keras.Model, evaluate: Callable, predict: Callable) -> AbstractContextManager[None]:
    """Answers `model.evaluate` and `model.predict`, within it, for this model alone; called with the model, too.

    Nothing else lets what a callback calls reach anybody but Keras. An attribute of the model would go with its copies,
    for which it would speak, too.
    """

    def answering(answer: Callable) -> Callable:
        def make(theirs: Callable) -> Callable:
            @functools.wraps(theirs)
            def method(self: keras.Model, *arguments: object, **options: object) -> object:
                return (answer if self is model else theirs)(self, *arguments, **options)

            return method

        return make

    changes = (keras.Model, "evaluate", answering(evaluate)), (keras.Model, "predict", answering(predict))
    return patched(*changes, alone=False)  # a callback may measure in a thread of its own


# TensorFlow: strategies, and its bookkeeping of gradients.


def one_replica_in_sync() -> AbstractContextManager[None]:
    """Lets strategies say, within it, that they have one replica: to Keras' losses, and to losses that ask for it.

    They say so in a replica only; a TPU's counts, outside of them, for how many it traces.
    """

    def make(theirs: Any) -> property:
        return property(lambda strategy: theirs.fget(strategy) if tf.distribute.in_cross_replica_context() else 1)

    return patched((StrategyBase, "num_replicas_in_sync", make))


@contextlib.contextmanager
def outside_scope() -> Iterator[None]:
    """Leaves, within it, every scope of a strategy that this thread is in.

    In a scope of several workers each new variable is a collective, and Keras makes variables where it writes a model,
    which the chief does alone. Nothing public leaves a scope that a caller has entered.
    """
    graph = ops.get_default_graph()
    strategies, creators = graph._distribution_strategy_stack, graph._variable_creator_stack
    before = [*strategies]
    strategies.clear()
    graph._variable_creator_stack = []
    try:
        yield
    finally:
        strategies[:] = before
        graph._variable_creator_stack = creators


def variables_as_numbers() -> AbstractContextManager[None]:
    """Lets `float(optimizer.learning_rate)`, `int` and `np.array` work, within it, under every strategy.

    Keras hands all to TensorFlow's variable, and that of a strategy lacks these methods, which the plain one has. So a
    callback that works on one device would end the training on two. Nothing public is between them.
    """
    methods = {
        "__float__": lambda variable: float(variable.numpy()),
        "__int__": lambda variable: int(variable.numpy()),
        "__array__": lambda variable, dtype=None, copy=None: np.array(variable.numpy(), dtype, copy=copy),
    }
    added = {name: method for name, method in methods.items() if name not in vars(DistributedVariable)}
    return patched(*((DistributedVariable, n, lambda _, new=m: new) for n, m in added.items()), alone=False)


_inside = threading.local()  # replicas are traced in threads that take turns within an all-reduce


def unregistered_gradients() -> AbstractContextManager[None]:
    """Lets `without_gradient_registry` apply to what `tf.custom_gradient` is given in this thread, within it."""
    return replaced("reduce", [(_inside, True)])


@contextlib.contextmanager
def without_gradient_registry() -> Iterator[None]:
    """Lets all-reduces look for no variables while a step is traced; afterwards nothing keeps their gradients.

    `tf.custom_gradient` walks back through the graph to find the variables that the function has read. An all-reduce
    reads none, and the walk leads through the whole model of the other replicas, anew for each synchronized BatchNorm
    and direction: of MobileNet's first epoch on two replicas it was three quarters. And it enters the gradient into
    TensorFlow's registry for good, with the tensors it closes over: the graph of each `fit` stayed in memory, 130 MB of
    MobileNet's. There is no option for either.
    """
    entered: list[str] = []

    def all_reduce(theirs: Callable) -> Callable:
        def reduce(self: tf.distribute.ReplicaContext, *arguments: object, **options: object) -> object:
            with unregistered_gradients():
                return theirs(self, *arguments, **options)

        return reduce

    def search(theirs: Callable) -> Callable:
        return lambda input_ops, output_ops: [] if getattr(_inside, "reduce", False) else theirs(input_ops, output_ops)

    def entry(theirs: Callable) -> Callable:
        def name() -> str:
            new = theirs()
            if getattr(_inside, "reduce", False):
                entered.append(new)
            return new

        return name

    with patched(
        (ReplicaContextBase, "all_reduce", all_reduce),
        (custom_gradient, "_get_dependent_variables", search),
        (custom_gradient, "generate_name", entry),
    ):
        try:
            yield
        finally:
            for name in entered:
                ops.gradient_registry._registry.pop(name, None)


recording = lambda tape: replaced("tape", [(_inside, tape)])
"""Lets `plain_gradients` know, within it, the persistent tape of this thread."""


def plain_gradients() -> AbstractContextManager[None]:
    """Lets TensorFlow differentiate loops and branches as under a tape that is not persistent, within it.

    Under one that is, it puts each into a function with gradients of all within, as gradients of gradients may be asked
    for: an update of an LSTM takes a third longer. Of a tape of the user's own they are.
    """

    def make(theirs: Callable) -> Callable:
        def types(tensors: Sequence) -> int:
            tape, found = getattr(_inside, "tape", None), theirs(tensors)
            if tape is None or found != gradients_util.POSSIBLE_GRADIENT_TYPES_HIGHER_ORDER:
                return found
            with tape.stop_recording():
                return found if theirs(tensors) else gradients_util.POSSIBLE_GRADIENT_TYPES_FIRST_ORDER

        return types

    return patched((gradients_util, "PossibleTapeGradientTypes", make))


def sums_in_order() -> AbstractContextManager[None]:
    """Lets TensorFlow add up three tensors and more, within it, always from first to last.

    A gradient tape adds up with `add_n` what flows back into a tensor that is used several times, and has no option for
    how. That operation begins with whichever tensor's memory it may reuse, which is a matter of time.
    """

    def make(theirs: Callable) -> Callable:
        def add_n(inputs: list[tf.Tensor], name: str | None = None) -> tf.Tensor:
            if len(inputs) < 3 or not (inputs[0].dtype.is_floating or inputs[0].dtype.is_integer):
                return theirs(inputs, name=name)
            return tf.reduce_sum(tf.stack(inputs), 0, name=name)

        return add_n

    return patched((gen_math_ops, "add_n", make))


def only_read(op: tf.Operation) -> list[int] | None:
    """Returns the places of the resources that a branch, a loop or a call of a function leaves as they are.

    TensorFlow notes it for what must run in order. None of other operations; nothing public says what is changed in a
    function that another one calls.
    """
    try:
        return list(op.get_attr("_read_only_resource_inputs"))
    except ValueError:
        return None


def another_function(graph: tf.Graph) -> bool:
    """Returns whether what is being traced is a tf.function within that of `graph`, and not a branch or loop of it.

    Nothing public tells these apart.
    """
    now = tf.compat.v1.get_default_graph()
    return now is not graph and type(now) is FuncGraph


def scaled_gradients(factor: tf.Tensor) -> AbstractContextManager[None]:
    """Multiplies, within it, what `tf.GradientTape.gradient` and `tf.gradients` return to code of the user's own."""

    def scaled(gradient: tf.Tensor | tf.IndexedSlices | None) -> tf.Tensor | tf.IndexedSlices | None:
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(scaled(gradient.values), gradient.indices, gradient.dense_shape)
        return None if gradient is None else gradient * tf.cast(factor, gradient.dtype)

    make = lambda theirs: lambda *args, **kwargs: tf.nest.map_structure(scaled, theirs(*args, **kwargs))
    return patched((tf.GradientTape, "gradient", make), (tf, "gradients", make))


_IN_FLOAT32 = (
    keras.layers.BatchNormalization,
    keras.layers.GroupNormalization,
    keras.layers.LayerNormalization,
    keras.layers.RMSNormalization,
    keras.layers.Embedding,  # whose gradient is not summed over its rows
)


def in_float16(model: keras.Model) -> set[int]:
    """Returns the ids of the weights whose gradient a batch on one device sums in float16; of layers, not in public."""
    layers = [layer for layer in flat_layers(model) if layer.compute_dtype == "float16"]
    return {id(v) for layer in layers if not isinstance(layer, _IN_FLOAT32) for v in own_trainable_variables(layer)}
