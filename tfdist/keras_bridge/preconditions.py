"""What `fit`, `evaluate` and `predict` refuse, before anything is compiled."""

import contextlib
import inspect
import numbers
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras
import tensorflow as tf

from tfdist import config
from tfdist.config import field_syntax
from tfdist.data import sources
from tfdist.data.spec import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError, one_line
from tfdist.keras_bridge import keras_internals

EVALUATION = ("test_step", "compute_loss", "compute_metrics", "get_metrics_result")  # what decides what is measured
TRAINING = ("train_step", *EVALUATION[1:], "trainable_weights", "trainable_variables")  # and what an update does
PREDICTION = ("predict_step",)  # the method that decides what is predicted
UNUSED = ("make_train_function", "make_test_function", "make_predict_function", "reset_metrics")
"""Methods in whose place tfdist does something else."""
OF_OUR_STEP = ("accumulate", "virtual_replicas", "reduce_dtype", "lr_multipliers", "layer_decay", "zero_stage")
"""Options that a step of the model's own knows nothing of."""

PADDED = (
    "which is not exact where the rows of some replicas are filled up and all exchange statistics or losses: make the "
    "batch size and the examples of an epoch divisible by the number of replicas, times accumulate"
)  # what is wrong, and what helps, with what would count the padding of `HostSlice`


def replaced(model: keras.Model, methods: tuple[str, ...]) -> str:
    """Returns the first of these methods that the model, its class or a patch of Keras has of its own, or ""."""
    overridden = lambda name: inspect.getattr_static(model, name) is not getattr(keras.Model, name)
    return next((name for name in methods if overridden(name) or not keras_internals.is_theirs(model, name)), "")


def optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers of a model: that of `compile`, then those that are its attributes, as a GAN has them."""
    values = [getattr(model, "optimizer", None)]
    for value in vars(model).values():
        values.extend(
            value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        )
    return list({id(o): o for o in values if isinstance(o, keras.optimizers.Optimizer)}.values())


def scope(model: keras.Model, distribution: Distribution, virtual_replicas: int = 0, accumulate: int = 1) -> None:
    """Refuses a model of another strategy, with methods which tfdist does not call, or not for virtual replicas."""
    by_keras = keras.distribution.distribution()  # which Keras' TensorFlow backend takes and never looks at
    if by_keras is not None:
        what = f"keras.distribution.set_distribution({type(by_keras).__name__}) has no effect on the TensorFlow backend"
        raise UserError(what, "leave it out, tfdist.connect() chooses the devices")
    if unused := replaced(model, UNUSED):
        what = f"{type(model).__name__} has its own {unused}, which tfdist does not call"
        raise UserError(what, "leave it out, and do what it does in train_step, test_step or predict_step")
    if model.distribute_strategy is not distribution.strategy:
        raise UserError(
            f"the model was created under {type(model.distribute_strategy).__name__} and is used with the "
            f"distribution {distribution.name!r}",
            "create it in the main thread, inside `with distribution.scope():` of the one that "
            "tfdist.connect() returned, and use it with that",
        )
    stateful = keras_internals.stateful_layers(model)
    if stateful and accumulate * max(virtual_replicas, distribution.replicas) > 1:
        raise UserError(
            f"layer {stateful[0].name!r} is stateful: it carries each row of a batch on to the next, and replicas have "
            "rows of their own; use --strategy=default without accumulation or virtual_replicas, or stateful=False"
        )
    if virtual_replicas:
        virtual(model, distribution, virtual_replicas)


def created_in_scope(model: keras.Model, distribution: Distribution) -> None:
    """Refuses weights, optimizers and metrics that all replicas would share, and add their parts to at once."""
    if not isinstance(
        distribution.strategy,
        tf.distribute.MirroredStrategy | tf.distribute.MultiWorkerMirroredStrategy | tf.distribute.TPUStrategy,
    ):
        return
    shared = [v for v in model.trainable_variables if not isinstance(v.value, tf.distribute.DistributedValues)]
    if shared:
        raise UserError(
            f"the weights {shared[0].path!r} were created outside of the distribution's scope",
            "create their layer in `with distribution.scope():`, too; freeze that of a SavedModel (trainable=False)",
        )
    metrics = [m for metric in model.metrics for m in getattr(metric, "metrics", [metric])]
    for kind, owners in ("optimizer", optimizers(model)), ("metric", metrics):
        for owner in owners:
            if not all(isinstance(v.value, tf.distribute.DistributedValues) for v in owner.variables):
                what = f"{kind} {owner.name!r} was created outside of the distribution's scope"
                raise UserError(what, "create it inside `with distribution.scope():`, as the model")


def not_of_horovod(kind: str, things: Iterable[object]) -> None:
    """Refuses what Horovod wraps around a Keras of before 3, where it ends with a TypeError: its part is tfdist's."""
    for thing in things:
        if any(base.__module__.partition(".")[0] == "horovod" for base in type(thing).__mro__):
            raise UserError(
                f"{kind} {type(thing).__name__!r} is Horovod's own, and what it does tfdist does by itself under every "
                "strategy: " + ("give compile() the optimizer without it" if kind == "optimizer" else "leave it out")
            )


def model_fits(model: keras.Model, distribution: Distribution, accumulate: int, virtual_replicas: int = 0) -> None:
    """Refuses a model that is not compiled, or that computes what cannot be summed over replicas and micro-batches."""
    scope(model, distribution, virtual_replicas, accumulate)
    parts = accumulate * max(virtual_replicas, distribution.replicas)
    if not model.compiled:
        raise UserError("the model is not compiled", "call model.compile(optimizer, loss) first")
    not_of_horovod("optimizer", optimizers(model))
    for optimizer in optimizers(model) if (own := replaced(model, TRAINING)) else ():
        classes = [base for base in type(optimizer).__mro__ if base.__module__.startswith("keras.")]
        if any("apply" in vars(o) and not keras_internals.is_theirs(o, "apply") for o in (optimizer, *classes)):
            what = f"{type(model).__name__} has its own {own}, and apply of optimizer {optimizer.name!r} is replaced"
            raise UserError(what, "override apply in a subclass of the optimizer, where tfdist can sum the gradients")
    factors = keras_internals.compiled_with(model)[1]
    if any(not isinstance(factor, numbers.Number | None) for factor in keras.tree.flatten(factors)):
        what = f"loss_weights, the third argument of compile(), must be numbers, got {one_line(factors, 100)}"
        raise UserError(what, "give metrics by name: compile(optimizer, loss, metrics=[...])")
    layers = keras_internals.flat_layers(model)
    for layer in layers:
        if layer.compute_dtype in distribution.lacks:
            raise UserError(
                f"layer {layer.name!r} computes in {layer.compute_dtype}, which --strategy={distribution.name} cannot",
                "use mixed_bfloat16 or float32 (train.precision)",
            )
        # Keras takes cuDNN's kernel for layers that then do not support XLA. TensorFlow gives it the address of a
        # float32 as the value of padding (`padding_fill` in cuda_dnn.cc), of which cuDNN reads 8 bytes in float64.
        by_cudnn = getattr(layer, "use_cudnn", False) and not layer.supports_jit
        if by_cudnn and layer.compute_dtype == "float64" and distribution.device_kind == "GPU":
            what = f"layer {layer.name!r} computes in float64 by cuDNN, where TensorFlow pads with undefined values"
            raise UserError(what, f"create it with use_cudnn=False (got {layer.use_cudnn!r}), or use float32")
        if isinstance(layer, keras.layers.SpectralNormalization) and accumulate > 1 and not virtual_replicas:
            # In half precision the check of the replicas takes that for rounding.
            what = f"layer {layer.name!r} normalizes by a vector that moves with each of accumulate={accumulate} calls"
            raise UserError(what, "leave out accumulate, or the layer")
    if model.run_eagerly and distribution.workers > 1:
        raise UserError(
            "the model was compiled with run_eagerly=True, which is for looking at one process: debug it with "
            "--strategy=default or mirrored, or leave run_eagerly out"
        )
    regularized = [layer.name for layer in layers if layer.activity_regularizer is not None]
    if regularized and parts > 1 and not activity_is_a_mean():
        raise UserError(
            f"layer {regularized[0]} has an activity_regularizer, which Keras {keras.__version__} sums up over a "
            "replica's batch",
            "upgrade Keras, or use the default strategy without accumulation",
        )


def virtual(model: keras.Model, distribution: Distribution, virtual_replicas: int) -> None:
    """Refuses virtual replicas where not every device can compute the same bits, by the strategy or the model."""
    if not isinstance(virtual_replicas, int) or virtual_replicas < distribution.replicas:
        raise UserError(
            f"virtual_replicas={virtual_replicas!r} must be an integer, and at least the "
            f"{distribution.replicas} replicas, each of which computes one",
            "use more virtual_replicas or fewer devices",
        )
    if distribution.static_shapes:
        raise UserError(f"virtual_replicas cannot be used with --strategy={distribution.name}", "leave them out")
    if model.run_eagerly:
        raise UserError("virtual_replicas are compiled, and the model has run_eagerly=True", "leave out one of them")
    if synchronizes(model):
        raise UserError(
            "a BatchNormalization with synchronized=True needs the rows of all replicas at once, and a device computes "
            "its virtual replicas one after the other",
            "use model.sync_batch_norm=False (synchronized=False), which normalizes each virtual replica by itself, "
            "alike on any number of devices",
        )


def activity_is_a_mean() -> bool:
    """Tells whether Keras divides an activity regularizer's value by the batch size; it did not before its PR 22021."""
    layer = keras.layers.Activation("linear", activity_regularizer=keras.regularizers.L1(1.0), dtype="float32")
    layer(keras.ops.ones((2, 1)))
    return float(layer.losses[0]) == 1.0


def reduce_dtype(name: str, distribution: Distribution) -> None:
    """Refuses a type in which gradients cannot travel."""
    among("reduce_dtype", name, config.CHOICES["optimizer.reduce_dtype"])
    if name in (*distribution.lacks, *distribution.unsummed):
        instead = "bfloat16" if name == "float16" else "float16"
        raise UserError(f"reduce_dtype={name!r} cannot be used with --strategy={distribution.name}", f"use {instead}")


_OF_PROCESS = ("name", "seed", "layers", "input_layers", "output_layers", "dtype", "vocabulary", "build_config")
"""What configurations of the same model have of their own in each process, or what is compared elsewhere."""


def same_model(model: keras.Model, distribution: Distribution, compiled: bool) -> None:
    """Refuses, on all workers, a model of one of them with other layers, or if `compiled` with another loss."""
    if distribution.workers == 1:
        return
    layers = keras_internals.flat_layers(model)
    facts: dict[str, object] = {f"layer {i}": type(layer).__name__ for i, layer in enumerate(layers)}
    facts["number of layers"] = len(layers)
    parts = {f"layer {i} ({type(layer).__name__})": layer for i, layer in enumerate(layers)}
    facts |= {f"{name} dtype": layer.compute_dtype for name, layer in parts.items()}
    if compiled and getattr(model, "compiled", False):
        parts |= zip(("loss", "loss_weights", "metrics", "weighted_metrics"), keras_internals.compiled_with(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a lambda, which is not loaded from there
        for name, part in parts.items():
            with contextlib.suppress(Exception):  # a layer of the user's need not have a configuration
                facts |= _settings(name, part)
    fix = "build and compile the same model on all workers"
    distribution.peers.check_same(facts, "the model", "layers or arguments of compile()", fix)


def same_weights(model: keras.Model, distribution: Distribution) -> None:
    """Refuses, on all workers, a model of one of them with weights of other shapes, which none could broadcast."""
    facts = {f"shape of weight {i}": str(tuple(v.shape)) for i, v in enumerate(model.variables)}
    facts["number of weights"] = str(len(model.variables))
    distribution.peers.check_same(facts, "the weights", "weights", "build the same model on all workers")


def _settings(name: str, value: object) -> dict[str, object]:
    """Returns what is simple in a configuration, by names for people."""
    if isinstance(value, str | int | float | None):
        return {name: str(value)}
    if isinstance(value, list | tuple) and len(value) <= 32:  # a vocabulary has more
        value = dict(enumerate(value))
    if isinstance(value, dict):
        own = value.get("class_name")
        if own and "config" in value:
            inner = {"__lambda__": None, "function": value["config"]}.get(own, own)
            return {name: inner} | (_settings(name, value["config"]) if inner == own else {})
        parts = [_settings(f"{name} {key}", part) for key, part in value.items() if key not in _OF_PROCESS]
        return {key: setting for part in parts for key, setting in part.items()}
    config = value.get_config() if hasattr(value, "get_config") and not isinstance(value, type) else {}
    return {name: getattr(value, "__name__", type(value).__name__)} | _settings(name, config)


def among(name: str, choice: str, choices: tuple[str, ...]) -> None:
    """Refuses an unknown choice for the option `name`."""
    if choice not in choices:
        raise UserError(f"unknown {name} {choice!r}{field_syntax.suggest(choice, choices)}")


def synchronizes(model: keras.Model) -> bool:
    """Whether a layer exchanges statistics between replicas in its forward pass."""
    return any(getattr(layer, "synchronized", False) for layer in keras_internals.flat_layers(model))


def use_xla(model: keras.Model, distribution: Distribution) -> bool:
    """Tells whether XLA compiles this model's step, after all that `--jit` says."""
    if distribution.jit == "off":
        return False
    own = replaced(model, (*TRAINING, *EVALUATION))
    if own and distribution.jit == "on":
        raise UserError(f"--jit=on cannot compile {type(model).__name__}, which has its own {own}", "use --jit=off")
    refused = bool(own) or (distribution.replicas > 1 and synchronizes(model))
    if distribution.jit == "auto":
        return not refused and all(getattr(layer, "supports_jit", True) for layer in keras_internals.flat_layers(model))
    if refused:
        what = "--jit=on cannot compile synchronized BatchNorm over several replicas"
        raise UserError(what, "use --jit=off, model.sync_batch_norm=False or synchronized=False")
    return True


def padded(model: keras.Model, adding: Sequence[str]) -> None:
    """Refuses layers that would count filler, in a pass that all replicas must run alike; `adding` call `add_loss`."""
    if adding:
        raise UserError(f"layer {adding[0]!r} calls add_loss or has an activity regularizer, {PADDED}")
    for layer in keras_internals.flat_layers(model, include_self=False):
        alone = isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and not layer.synchronized
        if alone or keras_internals.own_metrics(layer):
            what = "normalizes with the rows of its own replica" if alone else "has a metric"
            raise UserError(f"layer {layer.name!r} {what}, {PADDED}")


def targets(model: keras.Model, output_shape: tuple, source: sources.Source) -> None:
    """Refuses labels of sparse cross-entropy that are no classes of the output: on a GPU they would turn into NaN."""
    if replaced(model, (*TRAINING, *EVALUATION)):
        return  # only its author knows what the targets mean
    y, losses = source.targets, keras_internals.loss_entries(model)
    if y is None or keras.tree.is_nested(y) or len(losses) != 1:
        return
    only = losses[0].loss
    if isinstance(only, keras.losses.SparseCategoricalCrossentropy) or only.name == "sparse_categorical_crossentropy":
        classes, ignored = output_shape[-1], getattr(only, "ignore_class", None)
        if ignored is not None:
            y = y[y != ignored]
        if classes is not None and y.size:
            sources.check_labels(y, classes, "an output")


_OF_INPUTS = re.compile(
    r"[Ll]ayer ['\"]\S+ (is incompatible|expects) .*|Expected shape .*|Missing data for input .*"
    r"|The structure of `inputs` .*|Cast string to \w+ is not supported|Computed output size would be zero.*",
    re.DOTALL,
)  # in what Keras says where the data has other inputs than a layer


def input_misfit(error: Exception) -> UserError | None:
    """Returns in one line what Keras complains of on pages: data that a layer does not take; None of other errors."""
    text = str(error).partition("\x1b[0m")[0]
    found = _OF_INPUTS.search(text)
    if not found:
        return None
    reason = re.sub(r"(shape ?=?|received: )\(1,", r"\1(None,", one_line(found[0].partition("\n\n")[0], 300))
    fix = "change the data (a tf.data.Dataset must have batches), or the model's inputs"
    return UserError(f"the data does not fit the model's inputs ({reason})", fix)


_OF_SIZE = re.compile(
    r"Where|Unique.*|DynamicPartition|NonMaxSuppression.*|ListDiff|Ragged.*|Sparse(Feature)?Cross(V2|Hashed)?"
)  # operations whose result has a shape that depends on the data
_OF_HOST = re.compile(
    r"(Eager)?PyFunc(Stateless)?|Print(V2)?|LookupTable.*|Timestamp|String.*|Decode(Jpeg|Png|Image).*"
)  # operations that only the host has


def static(model: keras.Model, forward: Callable[[Structure], Structure], x: Structure) -> None:
    """Refuses a model that takes text, asks Python or the host, or whose shapes depend on the data; names the layer."""
    specs = keras.tree.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), x)
    graph = tf.function(forward, autograph=False).get_concrete_function(specs).graph
    bodies = {f.signature.name: f for f in graph.as_graph_def().library.function}
    inputs = {id(tensor.op) for tensor in graph.inputs}
    names = {layer.name for layer in keras_internals.flat_layers(model, include_self=False)}
    for operation in graph.get_operations():
        if id(operation) in inputs:
            continue  # who takes it is said, and not where it comes from
        tensors = [*operation.inputs, *operation.outputs]
        if any(tensor.dtype == tf.string for tensor in tensors):
            _refuse(operation.name, names, "takes text", "encode it as numbers in the data set")
        for kind in (operation.type, *_called(operation.node_def, bodies)):
            if _OF_HOST.fullmatch(kind):
                _refuse(operation.name, names, f"needs the host ({kind})", "move it into the data set")
            if _OF_SIZE.fullmatch(kind):
                what = f"gives shapes that depend on the data ({kind})"
                _refuse(operation.name, names, what, "pad to one shape and mask")


def _refuse(operation: str, layers: set[str], what: str, advice: str) -> None:
    parts = [re.sub(r"_\d+$", "", part) if part not in layers else part for part in operation.split("/")]
    name = next((part for part in reversed(parts) if part in layers), "")
    whose = f"layer {name!r}" if name else "the model"
    raise UserError(f"{whose} {what}, and replicas compute with numbers in static shapes here", advice)


def _called(node: tf.compat.v1.NodeDef, bodies: dict) -> Iterator[str]:
    """Yields the types of the operations in the branches, loops and functions that a node calls."""
    waiting, seen = [node], set()
    while waiting:
        for value in waiting.pop().attr.values():
            for name in (value.func.name, *(function.name for function in value.list.func)):
                if name in bodies and name not in seen:
                    seen.add(name)
                    waiting += bodies[name].node_def
                    yield from (inner.op for inner in bodies[name].node_def)
