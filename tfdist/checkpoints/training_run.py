"""The state of a training that a checkpoint holds beside its tensors (`state.json`): capture and restore."""

import contextlib
import copy
import csv
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoints import resume, state_shape, training_state
from tfdist.cluster.peers import differing_facts
from tfdist.config import cpu_kernels
from tfdist.config.messages import logger
from tfdist.config.user_functions import RATE
from tfdist.data.spec import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError, one_line
from tfdist.keras_bridge import keras_internals, preconditions

State: TypeAlias = dict[str, Any]  # a callback's state by name, as JSON can hold it
_KNOWN: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best", "epochs_since_last_save", *keras_internals.BATCHES_SEEN),
    keras.callbacks.SwapEMAWeights: (keras_internals.EMA_IN_MODEL,),
}

_LESS = "less_is_better"  # of a ModelCheckpoint, which finds it out at the end of an epoch, and needs it at batches
_ROWS, _KEYS = "rows", "keys"  # of a CSVLogger: what its file holds, which `on_train_begin` empties, and its columns


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingRun:
    """A training that checkpoints are taken of and restored into."""

    model: keras.Model
    distribution: Distribution
    callbacks: keras.callbacks.CallbackList
    global_batch: int
    updates_per_epoch: int | None
    seed: int
    examples: int | None = None  # of the data, where known: with one more, each would come at another place
    virtual_replicas: int = 0
    facts: Mapping[str, object] = dataclasses.field(default_factory=dict)  # `Source.facts`: other data is noticed

    def identity(self) -> dict[str, int | None]:
        return identity(self.global_batch, self.updates_per_epoch, self.seed, self.examples)


def identity(
    global_batch: int, updates_per_epoch: int | None, seed: int, examples: int | None
) -> dict[str, int | None]:
    """Returns what determines the order of the examples, by names for messages."""
    sizes: dict[str, int | None] = {} if examples is None else {"number of examples": examples}
    return {"global batch": global_batch, "updates per epoch": updates_per_epoch, "seed of the order": seed, **sizes}


def state_of(
    run: TrainingRun,
    position: resume.Position,
    experiment: Mapping[str, str],
    data_sha256: str,
    facts: Mapping[str, object],
    best: Mapping[str, float | int | None],
) -> dict[str, object]:
    """Returns the content of `state.json`: all that training has changed and that is no tensor.

    `best` are the `value` of the metric of `checkpoint.best` in the best epoch, and the `update` at its end.
    """
    return {
        "position": dataclasses.asdict(position) | {"logs": {k: _plain(k, v) for k, v in position.logs.items()}},
        "run": run.identity(),
        "replicas": run.distribution.replicas,
        "arithmetic": run.distribution.arithmetic() if run.virtual_replicas else {},
        "strategy": run.distribution.name,
        "cpu_kernels": cpu_kernels.in_use(),
        "experiment": dict(experiment),
        "data_sha256": data_sha256,
        "facts": dict(facts),
        "keras_random": keras_internals.random_state(),  # of calls of keras.random without a seed
        "callbacks": capture_callbacks(run.callbacks),
        "history": {k: [_plain(k, v) for v in values] for k, values in run.model.history.history.items()},
        "epochs": list(run.model.history.epoch),
        "best": dict(best),
    }


def restore(
    run: TrainingRun,
    checkpoint: resume.LoadedCheckpoint | None,
    experiment: Mapping[str, str],
    facts: Mapping[str, object],
) -> tuple[resume.Position | None, dict[str, Any]]:
    """Restores a checkpoint into the run; called on all workers, with the checkpoint, if any, on the chief.

    Learning rates stay as they are if the experiment differs from the checkpoint's, or that rate among the facts, which
    are empty where no call of `fit` begins. Returns the position to resume at, and the best epoch; UserError if the
    model is another one.
    """
    model = run.model
    mine = checkpoint.state if checkpoint else None
    state = run.distribution.peers.gather("the checkpoint to resume from", mine)[0]
    if state is None:
        return None, {}
    if not run.virtual_replicas:  # else `arithmetic` has it
        made, kernels = state.get("cpu_kernels"), cpu_kernels.in_use()
        if run.distribution.device_kind == "CPU" and made not in (None, kernels):
            what = f"the checkpoint was made with --cpu_kernels={made} and this run has {kernels}"
            logger.info(f"{what}: it goes on, and agrees to rounding")
    optimizer = keras_internals.inner_optimizer(model.optimizer)
    rates = keras_internals.rate_variables(preconditions.optimizers(model))
    rates_here = {number: float(rate.numpy()) for number, rate in rates.items()}
    counters = [keras_internals.counter(keras_internals.inner_optimizer(o)) for o in preconditions.optimizers(model)]
    counted = [int(counter.numpy()) for counter in counters]
    training_state.restore(model, run.distribution, run.callbacks, checkpoint.tensors if checkpoint else {})
    if run.virtual_replicas or state["replicas"] != run.distribution.replicas:
        training_state.separate_streams(model, run.distribution, apart=not run.virtual_replicas)
    there = state.get("arithmetic", {}) if run.virtual_replicas else {}
    own = run.distribution.arithmetic() if there else {}
    odd = [
        f"{name} {there.get(name, 'unknown')} there and {own.get(name, 'unknown')} here"
        for name in {**there, **own}
        if there.get(name) != own.get(name)
    ]
    if odd and run.distribution.is_chief:
        logger.info(f"WARNING: results may not be bit-identical from here on: {'; '.join(odd)}")
    if state.get("keras_random"):
        keras_internals.set_random_state(state["keras_random"])
    restore_callbacks(run.callbacks, state["callbacks"])
    others = [callback for name, callback in training_state.named(run.callbacks) if name not in state["callbacks"]]
    anew = {type(callback).__name__ for callback in filter(starts_anew, others)}
    if anew and run.distribution.is_chief:
        why = "no checkpoint has their state: give them get_state and set_state, as tfdist.Callback has"
        logger.info(f"WARNING: the callbacks {', '.join(sorted(anew))} start anew, {why}")
    model.history.history = {name: [_value(v) for v in values] for name, values in state["history"].items()}
    model.history.epoch = list(state["epochs"])
    position = resume.Position(**state["position"])
    position.logs = {name: _value(v) for name, v in position.logs.items()}
    if any(state["run"].get(name, value) != value for name, value in run.identity().items()):
        position.update = position.epoch * (run.updates_per_epoch or 0)
        counter, steps = keras_internals.counter(optimizer), optimizer.gradient_accumulation_steps or 1
        # Within an accumulation it stays there, as the gradients that have been added up do.
        _assign(counter, position.update - position.update % steps + int(counter.numpy()) % steps)
    odd_facts = [name for name, *_ in differing_facts(state.get("facts", {}), facts)]
    # At the beginning of `fit`, the model of the last one goes on, whose rate may have been set after that.
    goes_on = bool(facts) and any(counted) and counted == [int(counter.numpy()) for counter in counters]
    for number in rates:
        if goes_on or resume.differences(experiment, state["experiment"]) or f"{RATE} {number}" in odd_facts:
            _assign(rates[number], rates_here[number])
    return position, {"value": None, "update": None, **state["best"]}


def _keeps_state(callback: Any) -> bool:
    """Tells whether a callback keeps its state itself, as `tfdist.Callback`; its `get_state` may be None."""
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def starts_anew(callback: keras.callbacks.Callback) -> bool:
    """Returns whether what a callback of the user's own has gathered cannot be restored: it may be anywhere."""
    theirs = type(callback).__module__.partition(".")[0] in ("keras", "tfdist")
    return isinstance(callback, keras.callbacks.LambdaCallback) or not (theirs or _keeps_state(callback))


def capture_callbacks(callbacks: keras.callbacks.CallbackList) -> dict[str, State]:
    """Returns the callbacks' states by name, as far as JSON can hold them."""
    plain = lambda value: value.item() if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0 else value
    states = {}
    for name, callback in training_state.named(callbacks):
        own = callback.get_state() if _keeps_state(callback) else None
        known = {field: plain(getattr(callback, field, None)) for field in _known(callback)}
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.monitor_op is not None:
            known[_LESS] = callback.monitor_op is keras.ops.less
        if isinstance(callback, keras.callbacks.CSVLogger):
            known |= {_ROWS: "", _KEYS: callback.keys}
            with contextlib.suppress(OSError), open(callback.filename, newline="") as file:
                known[_ROWS] = file.read()
        # It is written beside the updates that follow, in which the callback may go on with the same list. What cannot
        # be copied cannot be written either, which the writing tells.
        with contextlib.suppress(Exception):
            own = copy.deepcopy(own)
        if own is not None or known:
            states[name] = known if own is None else own
    return states


def _put_back(logger: keras.callbacks.CSVLogger, rows: str, keys: list[str] | None) -> None:
    """Lets the file go on behind the rows of a checkpoint, without those of later epochs; `keys`: of this fit."""
    file = logger.csv_file
    if file:
        file.truncate(0)
        file.seek(0)
        file.write(rows)
        file.flush()
        if keys is None:
            logger.append_header = not rows
        else:  # not by `append_header`, which another fit with the same object would find
            logger.keys = list(keys)
            logger.writer = csv.DictWriter(file, ["epoch", *keys], delimiter=logger.sep)


def _known(callback: keras.callbacks.Callback) -> list[str]:
    return [field for kind, fields in _KNOWN.items() if isinstance(callback, kind) for field in fields]


def restore_callbacks(callbacks: keras.callbacks.CallbackList, states: dict[str, State]) -> None:
    """Restores the callbacks' states; after `on_train_begin`, in which they reset it. UserError if one cannot."""
    for name, callback in training_state.named(callbacks):
        if name not in states:
            continue
        state = states[name]
        try:
            if _keeps_state(callback):
                callback.set_state(state)
                continue
            if isinstance(callback, keras.callbacks.CSVLogger) and isinstance(state.get(_ROWS), str):
                _put_back(callback, state[_ROWS], state.get(_KEYS))
            if isinstance(callback, keras.callbacks.ModelCheckpoint) and isinstance(state.get(_LESS), bool):
                callback.monitor_op = keras.ops.less if state[_LESS] else keras.ops.greater
            for field in state.keys() & set(_known(callback)):  # a file sets no other attribute of the callback
                state_shape.require(state, {field: state_shape.optional(state_shape.number)})
                setattr(callback, field, state[field])
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            what = f"the checkpoint has no state that the callback {name} can go on with ({one_line(error, 120)})"
            raise UserError(what, "use the code that it was taken with, or move that checkpoint away") from error


def _assign(variable: keras.Variable, value: float) -> None:
    for each in keras_internals.copies(variable):
        each.assign(tf.cast(value, each.dtype))


def _plain(name: str, value: Structure) -> object:
    """Returns a metric (by class an array), or what else a callback has put into the logs, as JSON can hold it."""
    with contextlib.suppress(TypeError, ValueError):  # it is neither a number nor an array of them
        if np.asarray(value).dtype.kind in "biufV":  # V is bfloat16
            return {"array": np.asarray(value).tolist()} if np.ndim(value) else float(value)
    try:
        return {"json": json.loads(json.dumps(value))}
    except (TypeError, ValueError):
        what = f"a callback has put {name!r} into the logs, a {type(value).__name__}, which no checkpoint can hold"
        raise UserError(what, "make it a number, an array or text, or an attribute of the callback") from None


def _value(stored: float | dict) -> Any:
    """Returns what `_plain` got."""
    if isinstance(stored, dict):
        return np.asarray(stored["array"]) if "array" in stored else stored["json"]
    return stored
