"""Runs a generated program by Keras and by tfdist, and compares what they end with."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from programs.generated import user_code
from programs.generated.writer import Program

TOLERANCE = {"float64": 1e-8, "float32": 1e-4, "mixed_bfloat16": 0.1}
RANDOM = re.compile(
    r"(AlphaDropout|GaussianDropout|Spatial\w+|L\.Dropout|dropout=|GaussianNoise)\(?0\.[1-9]|dropout=0\.[1-9]"
    r"|L\.(Random\w+|AugMix|RandAugment)|GaussianNoise"
)
"""Layers whose random numbers depend on the number of replicas."""

REFUSALS = [
    ("leaves nothing to minimize", r"reduction='none'"),
    ("smaller than", r"batch_size=[12]\b|n, draw = 1,|uneven\(data, (1|4|5)\)|n, draw = 5,[^$]*uneven"),
    ("smaller than", r"(once|Rows)\(data, 1\b|batch\(1\)"),
    ("add it up over the replicas", r"RunningMaximum|renorm|KeepsMean"),
    ("is not a mean over examples", r"OwnObjective|LogsMore|OwnStep"),
    ("does not add up over parts of a batch", r"OwnObjective|LogsMore|OwnStep"),
    # An objective of one's own is computed part by part, also around a loss that looks across the batch.
    ("disagree on this model", r"OwnObjective[\s\S]*losses\.Dice"),
    # Weights of a column times the classes of each row are the weights of all rows for each row in Keras.
    ("metric 'f", r"draw\.weights\(n, 1\)[^$]*(F1Score|FBetaScore)|(F1Score|FBetaScore)[^$]*draw\.weights\(n, 1\)"),
]
"""Words of refusals that may come, and what there must be in the program."""


@dataclasses.dataclass
class Outcome:
    """What a program has come to."""

    seen: list[tuple[str, Any]]
    """What its calls have returned and its callbacks were told, in order."""
    error: Exception | None = None


class Keras:
    """Makes the calls of a program, which Keras answers, and notes what they return."""

    def __init__(self, eagerly: bool = False):
        self.notes: list[tuple[str, Any]] = []
        self.eagerly = eagerly

    def fit(self, model, *args, **kwargs):
        with self.judging(model):
            history = model.fit(*args, **kwargs, verbose=0)
        self.notes.append(("history", history.history))
        self._look(model)

    def evaluate(self, model, *args, **kwargs):
        with self.judging(model):
            self.notes.append(("evaluate", model.evaluate(*args, **kwargs, return_dict=True, verbose=0)))

    def predict(self, model, *args, **kwargs):
        with self.judging(model):
            self.notes.append(("predict", model.predict(*args, **kwargs, verbose=0)))

    def on_batch(self, model, x, y, w, sizes):
        """Calls of one batch, whose sizes differ."""
        for size in sizes:
            batch = keras.tree.map_structure(lambda a, end=size: None if a is None else a[:end], (x, y, w))
            with self.judging(model):
                self.notes.append(("test_on_batch", model.test_on_batch(*batch)))
                self.notes.append(("train_on_batch", model.train_on_batch(*batch, return_dict=True)))
                self.notes.append(("predict_on_batch", model.predict_on_batch(batch[0])))
        self._look(model)

    def set_rate(self, model, rate, assign):
        with contextlib.suppress(TypeError, AttributeError):  # of a schedule
            if assign:
                model.optimizer.learning_rate.assign(rate)
            else:
                model.optimizer.learning_rate = rate

    def _look(self, model):
        self.notes.append(("weights", model.get_weights()))
        self.notes.append(("optimizer", [np.asarray(v) for v in model.optimizer.variables]))

    @contextlib.contextmanager
    def judging(self, model):
        """Keeps a model from what is known to be wrong of Keras: see `programs.surface.program`."""
        if "apply" in vars(model.optimizer):  # in a callback
            yield
            return
        model.run_eagerly = model.run_eagerly or self.eagerly
        model.jit_compile, model.steps_per_execution = False, 1
        optimizer = model.optimizer
        apply = optimizer.apply
        dense = lambda g: None if g is None else tf.convert_to_tensor(g)
        optimizer.apply = lambda grads, variables=None: apply([dense(g) for g in grads], variables)
        try:
            yield
        finally:
            del optimizer.apply


class Patched(Keras):
    """Makes the same calls, which tfdist answers while the patch is installed."""

    def judging(self, model):
        return contextlib.nullcontext()


def run(program: Program, api: Keras, folder: pathlib.Path) -> Outcome:
    """Runs a program, whose errors are part of what comes of it."""
    keras.backend.clear_session(free_memory=False)
    keras.config.set_floatx("float64" if program.precision == "float64" else "float32")
    keras.config.set_dtype_policy(program.precision)
    keras.utils.set_random_seed(3)
    folder.mkdir(parents=True, exist_ok=True)
    names = {n: getattr(keras, n) for n in ("callbacks", "losses", "metrics", "optimizers")}
    names |= {"keras": keras, "L": keras.layers, "np": np, "tf": tf, "schedules": keras.optimizers.schedules}
    names |= {
        **vars(user_code),
        "rows": rows,
        "once": once,
        "uneven": uneven,
        "tensors": tensors,
        "part": part,
        "undecayed": undecayed,
    }
    try:
        exec(compile(program.text, f"program {program.seed}", "exec"), {**names, "api": api, "folder": folder})
    except NameError:  # of the writer
        raise
    except Exception as error:
        return Outcome(api.notes, error)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    return Outcome(api.notes)


def by_keras(program: Program, folder: pathlib.Path) -> Outcome:
    # In a graph the batch that ends data of unknown length counts as an update, and ScheduleFreeAdamW goes wrong.
    return run(program, Keras(re.search(r"ScheduleFree|filter\(|once\(", program.text) is not None), folder)


def by_tfdist(program: Program, distribution: tfdist.Distribution, folder: pathlib.Path) -> Outcome:
    """Runs the same text after `patch_keras`."""
    tfdist.patch_keras(distribution)
    try:
        return run(program, Patched(), folder)
    finally:
        tfdist.unpatch_keras()


def rows(data):
    return tf.data.Dataset.from_tensor_slices(data)


def once(data, size):
    """Yields the batches of arrays."""
    yield from itertools.islice(user_code.endless(data, size), len(user_code.Rows(data, size)))


def uneven(data, size):
    """Batches of `size` and of fewer."""
    every = rows(data)
    half = len(every) // 2
    return every.take(half).batch(size).concatenate(every.skip(half).batch(max(1, size // 2)))


def tensors(data):
    return keras.tree.map_structure(tf.convert_to_tensor, data)


def part(data):
    """The first third of the rows."""
    return keras.tree.map_structure(lambda a: a[: max(1, len(a) // 3)], data)


def undecayed(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def complaint(program: Program, got: Outcome, expected: Outcome, replicas: int) -> str:
    """Returns what is wrong with what tfdist has come to, or nothing."""
    if isinstance(got.error, tfdist.UserError):
        return "" if expected.error is not None else refusal(program, str(got.error))
    if isinstance(got.error, tfdist.TrainingError) and re.search("finite|loss is nan", str(got.error)):
        return "" if any(_has_nan(value) for _, value in expected.seen) else f"false: {got.error}"
    if expected.error is not None:
        return ""
    if got.error is not None:
        return f"{type(got.error).__name__}: {got.error}"
    if replicas > 1 and RANDOM.search(program.text):
        return ""
    if re.search(r"Discretization[\s\S]*BatchNormalization[\s\S]*n, draw = [13],", program.text):
        return ""  # equal rows: what normalization leaves of them is rounding, which Nadam makes steps of
    if re.search(r"MelSpectrogram[\s\S]*Lamb\b", program.text):
        return ""  # whose filter banks are float32 in any type, and what rounding leaves Lamb makes steps of
    if re.search(r"SpectralNormalization[\s\S]*ScheduleFree", program.text):
        return ""  # whose averages begin, op by op, at the weights that the first forward pass has normalized
    return difference(program, got.seen, expected.seen)


def refusal(program: Program, line: str) -> str:
    for words, cause in REFUSALS:
        if words in line and re.search(cause, program.text):
            return "" if "\n" not in line else f"more than a line: {line}"
    return f"refused: {line}"


def difference(program: Program, got: list, expected: list) -> str:
    """Returns the first difference that is more than rounding, or nothing."""
    names = [name for name, _ in got], [name for name, _ in expected]
    if names[0] != names[1]:
        return f"order of events: {names[0]}, expected {names[1]}"
    tolerance = TOLERANCE["mixed_bfloat16" if "bfloat16" in program.text else program.precision]
    for turn, ((name, ours), (_, theirs)) in enumerate(zip(got, expected)):
        if keras.tree.is_nested(ours) != keras.tree.is_nested(theirs):
            return f"{turn} {name}: {ours}, expected {theirs}"
        if isinstance(ours, dict):
            several = sum(key.endswith("_loss") and key != "val_loss" for key in theirs) > 1
            if ours.keys() != theirs.keys():
                return f"{turn} {name}: has {sorted(ours)}, expected {sorted(theirs)}"
            keys = [key for key in ours if not (several and re.search(r"[ab]_loss$", key))]
            # Keras' logs share the memory of metrics that are arrays, which the validation then overwrites.
            validates = any(key.startswith("val_") for key in theirs)
            shared = [k for k, v in theirs.items() if validates and np.ndim(v[0] if isinstance(v, list) else v)]
            keys = [key for key in keys if key not in shared or key.startswith("val_")]
            pairs = [(key, ours[key], theirs[key]) for key in keys]
        else:
            flat = keras.tree.flatten(ours), keras.tree.flatten(theirs)
            if len(flat[0]) != len(flat[1]):
                return f"{turn} {name}: {len(flat[0])} arrays, expected {len(flat[1])}"
            pairs = [(i, a, b) for i, (a, b) in enumerate(zip(*flat))]
        for key, a, b in pairs:
            a, b = _numbers(a), _numbers(b)
            if a.shape != b.shape:
                return f"{turn} {name} {key}: shape {a.shape}, expected {b.shape}"
            size = np.max(np.abs(b[np.isfinite(b)]), initial=1e-3)
            if not np.allclose(a, b, 10 * tolerance, 10 * tolerance * size, equal_nan=True):
                return f"{turn} {name} {key}: {a.ravel()[:8]}, expected {b.ravel()[:8]}"
    return ""


def _numbers(value) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(v, "float64")) for v in keras.tree.flatten(value)] or [np.zeros(0)])


def _has_nan(value) -> bool:
    return not np.isfinite(_numbers(list(value.values()) if isinstance(value, dict) else value)).all()
