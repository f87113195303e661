"""The tensors of a checkpoint: captured from a model under training, and restored on any number of replicas.

Variables that are the same on every replica (weights, trained or frozen, and optimizer) are kept once, others
(BatchNorm's statistics between two averages, random generators, sums of metrics) per replica: the same number of
replicas gets them back bit for bit; on another number, statistics are averaged, sums added up, and random streams
start again from the first replica's.
"""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoints.files import DamagedError
from tfdist.data.spec import Structure
from tfdist.distributed.collectives import broadcast_bits
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError, one_line
from tfdist.keras_bridge import keras_internals, metrics, preconditions, zero

SHARED, OWN, CALLBACKS = "shared", "replicas", "callbacks"  # names begin so: kept once, [replicas, ...], of callbacks


def capture(
    model: keras.Model, distribution: Distribution, callbacks: keras.callbacks.CallbackList
) -> dict[str, Structure]:
    """Returns the state by name, tensors and arrays, without a copy where TensorFlow makes one before the next change.

    Called on all workers; empty on those other than the chief.
    """
    whole = {id(v) for metric in metrics.whole_metrics(model) for v in metric.variables}
    places, own = slice(distribution.first, distribution.first + len(distribution.devices)), {}
    for name, variable in _own(model):
        here = np.stack([keras_internals.read_copy(copy).numpy() for copy in keras_internals.copies(variable)])
        own[name] = np.zeros((distribution.replicas, *here.shape[1:]), here.dtype)
        own[name][places] = here
        if id(variable) in whole:  # each replica has the state of all examples, and elsewhere they are added up
            own[name][1:] = 0
    own = dict(zip(own, broadcast_bits(distribution, list(own.values()))))
    sliced = zero.slots(preconditions.optimizers(model))
    wholes: dict[str, Structure] = {}
    for name, slot in ((name, sliced[id(v)]) for name, v in _shared(model) if id(v) in sliced):
        value = slot.read()  # one at a time on other workers, which keep none
        wholes |= {name: value} if distribution.is_chief else {}
    if not distribution.is_chief:
        return {}
    of_all = {name: v for name, v in _shared(model) if name not in wholes}
    shared = {name: keras_internals.read_copy(keras_internals.copies(v)[0]) for name, v in of_all.items()}
    if distribution.device_kind != "CPU":  # there a copy on write would need twice the memory
        shared = {name: value.numpy() for name, value in shared.items()}
    best = {
        f"{CALLBACKS}/{name}/{i:04d}": np.asarray(array)
        for name, callback in named(callbacks)
        if isinstance(callback, keras.callbacks.EarlyStopping)
        for i, array in enumerate(getattr(callback, "best_weights", None) or [])
    }
    return {**shared, **wholes, **own, **best}


def named(callbacks: keras.callbacks.CallbackList) -> list[tuple[str, keras.callbacks.Callback]]:
    """Names callbacks by class and number: a new process has them in the same order."""
    kinds = [type(callback).__name__ for callback in callbacks.callbacks]
    return [(f"{kind}.{kinds[:i].count(kind)}", callbacks.callbacks[i]) for i, kind in enumerate(kinds)]


def write(prefix: str, tensors: dict[str, Structure]) -> None:
    """Writes what `capture` returned; from any thread."""
    with tf.device("CPU:0"):
        values = [tf.convert_to_tensor(t) for t in tensors.values()]
        tf.raw_ops.SaveV2(
            prefix=prefix, tensor_names=list(tensors), shape_and_slices=[""] * len(values), tensors=values
        )


def read(prefix: str) -> dict[str, np.ndarray]:
    """Reads what `write` has written; raises DamagedError if it cannot, though its checksum may be right."""
    try:
        reader = tf.train.load_checkpoint(prefix)
        return {name: np.asarray(reader.get_tensor(name)) for name in reader.get_variable_to_shape_map()}
    except (tf.errors.OpError, IndexError, ValueError, TypeError, RuntimeError, OSError, MemoryError) as error:
        raise DamagedError(f"its tensors cannot be read ({one_line(error, 120)})") from None


def restore(
    model: keras.Model,
    distribution: Distribution,
    callbacks: keras.callbacks.CallbackList,
    tensors: dict[str, np.ndarray],
) -> None:
    """Restores a state; called on all workers, with the tensors on the chief; UserError for another model."""
    kinds = [[name, str(t.dtype), list(t.shape)] for name, t in sorted(tensors.items())]
    kinds = distribution.peers.gather("the tensors to restore", kinds)[0]
    _check_match(dict((*_shared(model), *_own(model))), kinds)
    values = [tensors.get(name, np.zeros(shape, dtype)) for name, dtype, shape in kinds]
    values = broadcast_bits(distribution, values)
    by_place = dict(zip((_place(name) for name, _, _ in kinds), values))
    sliced = zero.slots(preconditions.optimizers(model))
    for name, variable in _shared(model):
        if id(variable) in sliced:
            sliced[id(variable)].assign(by_place[_place(name)])
        else:
            _assign([variable], [by_place[_place(name)]])
    whole = {id(v) for metric in metrics.whole_metrics(model) for v in metric.variables}
    for name, variable in _own(model):
        rows = by_place[_place(name)]
        if id(variable) in whole:
            rows = np.repeat(rows[:1], distribution.replicas, 0)  # each replica had the state of all examples
        _assign_own(name, keras_internals.copies(variable), rows, distribution)
    refresh(model)
    for name, callback in named(callbacks):
        best = [by_place[place] for place in sorted(by_place) if place.startswith(f"{CALLBACKS}/{name}/")]
        if best and isinstance(callback, keras.callbacks.EarlyStopping):
            callback.best_weights = best


def weights(model: keras.Model, tensors: dict[str, np.ndarray], averaged: bool) -> list[np.ndarray]:
    """Returns the weights in a state, as the training would have ended with them, in the order of `model.weights`.

    Args:
      model: like the one that the state was taken of, under no strategy; else UserError.
      averaged: the optimizer keeps averages of the weights, with which a training ends.
    """
    shared, own = _parts(model)
    variables = dict((*_named(SHARED, {"model": shared}), *_named(OWN, {"model": own})))
    kept = {name: t for name, t in tensors.items() if name.split("/")[1] == "model"}
    _check_match(variables, [[name, str(t.dtype), list(t.shape)] for name, t in sorted(kept.items())])
    by_place, values = {_place(name): t for name, t in kept.items()}, {}
    for name, variable in variables.items():
        value = by_place[_place(name)]
        values[id(variable)] = _combined(value) if name.startswith(f"{OWN}/") else value
    if averaged:
        of_optimizer = [n for n in sorted(tensors) if n.startswith(f"{SHARED}/optimizer/") and n.endswith("_average")]
        trained = model.trainable_variables
        if [tensors[name].shape for name in of_optimizer] != [tuple(variable.shape) for variable in trained]:
            raise UserError(
                f"the checkpoint has averages of {len(of_optimizer)} weights, and the model with "
                f"optimizer.ema_momentum has {len(trained)}",
                "use the experiment that it was made with",
            )
        for variable, name in zip(trained, of_optimizer):
            values[id(variable)] = tensors[name]
    return [values[id(v)] for v in model.weights]


def assign(model: keras.Model, distribution: Distribution, arrays: list[np.ndarray]) -> None:
    """Assigns the chief's weights to a model; called on all workers, with the arrays on the chief."""
    empty = [np.zeros(v.shape, keras_internals.copies(v)[0].dtype.as_numpy_dtype) for v in model.weights]
    arrays = broadcast_bits(distribution, arrays if distribution.is_chief else empty)
    _assign(model.weights, arrays)
    refresh(model)


def share(model: keras.Model, distribution: Distribution) -> None:
    """Broadcasts weights, statistics, seeds and optimizer from the chief's first replica; called on all workers.

    The random layers of each replica get seeds of their own again.
    """
    optimizers = [v for optimizer in preconditions.optimizers(model) for v in keras_internals.state(optimizer)]
    variables = [*model.trainable_variables, *model.non_trainable_variables, *optimizers]
    values = [keras_internals.read_copy(keras_internals.copies(v)[0]).numpy() for v in variables]
    values = broadcast_bits(distribution, values if distribution.is_chief else [np.zeros_like(v) for v in values])
    _assign(variables, values)
    refresh(model)
    separate_streams(model, distribution)


def refresh(model: keras.Model) -> None:
    """Makes layers use assigned weights: Keras' Normalization computes with constants derived from them."""
    for layer in keras_internals.flat_layers(model):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def separate_streams(model: keras.Model, distribution: Distribution, apart: bool = True) -> None:
    """Gives the random layers of each replica a stream of its own, or if not `apart`, that of replica 0: Keras'."""
    if distribution.replicas == 1:
        return
    seeds = [keras_internals.copies(v) for v in model.non_trainable_variables if keras_internals.is_seed(v)]
    states = [keras_internals.read_copy(of_one[0]).numpy().tolist() for of_one in seeds]
    chief = distribution.peers.gather("the seeds of random layers", states)[0]
    for of_one, state in zip(seeds, chief):
        for replica, copy in enumerate(of_one, distribution.first):
            offset = np.array([replica * apart * 0x9E3779B1 % 2**32, 0], np.uint64)
            copy.assign(((np.array(state, np.uint64) + offset) % 2**32).astype(copy.dtype.as_numpy_dtype))


def _shared(model: keras.Model) -> list[tuple[str, keras.Variable]]:
    parts = {"model": _parts(model)[0], "carried": keras_internals.carried_states(model), "optimizer": []}
    for number, optimizer in enumerate(preconditions.optimizers(model)):
        parts[f"optimizer{number + 1}" if number else "optimizer"] = keras_internals.state(optimizer)
    return _named(SHARED, parts)


def _own(model: keras.Model) -> list[tuple[str, keras.Variable]]:
    return _named(OWN, {"model": _parts(model)[1], "metrics": model.metrics_variables})


def _parts(model: keras.Model) -> tuple[list, list]:
    """Returns the model's variables that are the same on every replica, and those that are not."""
    fixed = keras_internals.fixed_variables(model)
    ids = set(map(id, fixed))
    return [*model.trainable_variables, *fixed], [v for v in model.non_trainable_variables if id(v) not in ids]


def gathered_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables with statistics of each replica, without the state of random generators."""
    return [v for v in _parts(model)[1] if not keras_internals.is_seed(v)]


def _named(kind: str, parts: dict[str, list]) -> list[tuple[str, keras.Variable]]:
    return [(f"{kind}/{p}/{i:04d}/{v.path}", v) for p, variables in parts.items() for i, v in enumerate(variables)]


def _assign(variables: list[keras.Variable], values: list[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        for copy in keras_internals.copies(variable):
            copy.assign(value)


def _assign_own(name: str, variables: Sequence[tf.Variable], rows: np.ndarray, distribution: Distribution) -> None:
    """Assigns this worker's copies of a variable, from rows of the replicas that the checkpoint was taken of."""
    if len(rows) == distribution.replicas:
        values = list(rows[distribution.first : distribution.first + len(variables)])
    elif name.startswith(f"{OWN}/metrics/"):
        total = rows.sum(0, dtype=np.float64 if rows.dtype.kind == "f" else None).astype(rows.dtype)
        own = range(distribution.first, distribution.first + len(variables))
        values = [total if replica == 0 else np.zeros_like(total) for replica in own]
    else:
        values = [_combined(rows)] * len(variables)
    for copy, value in zip(variables, values):
        copy.assign(value)


def _combined(rows: np.ndarray) -> np.ndarray:
    """Returns the mean over replicas [replicas, ...] of floating-point values, the first replica's of others."""
    mean = rows.dtype.kind == "f" or rows.dtype.name == "bfloat16"
    return rows.astype(np.float64).mean(0).astype(rows.dtype) if mean else rows[0]


def _check_match(variables: dict[str, keras.Variable], kinds: list[list]) -> None:
    """Raises UserError, which names it, if a variable is not in the checkpoint, or one of the checkpoint not here.

    `kinds` are name, dtype and shape of each tensor of the checkpoint.
    """
    error = lambda why: UserError(
        f"the checkpoint does not match this model ({why})", "build the same model, or start from scratch"
    )
    tensors = {_place(n): (n, dtype, shape) for n, dtype, shape in kinds if not n.startswith(f"{CALLBACKS}/")}
    names = {_place(name): name for name in variables}
    odd = sorted(names.keys() ^ tensors.keys())
    if odd:
        extra = odd[0] in tensors
        where = "the model has no such variable" if extra else "the checkpoint has none for it"
        raise error(f"{tensors[odd[0]][0] if extra else names[odd[0]]}: {where}")
    for place, name in names.items():
        variable, (_, dtype, shape) = variables[name], tensors[place]
        shape = shape[1:] if name.startswith(f"{OWN}/") else shape
        mine = keras_internals.copies(variable)[0].dtype.name
        if list(variable.shape) != shape or mine != dtype:
            raise error(f"{name} is {dtype}{shape} in the checkpoint and {mine}{list(variable.shape)} in the model")


def _place(name: str) -> str:
    """Returns kind and number: Keras numbers names within a process, so the same model may have others."""
    return "/".join(name.split("/")[:3])
