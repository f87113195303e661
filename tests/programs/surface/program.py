"""What a program is, the data that programs share, and how one is run by Keras and by tfdist."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist

L = keras.layers

ONE = "default"
SEVERAL = ("mirrored 2", "mirrored 3", "multi_worker 2", "horovod 2")
STRATEGIES = (ONE, *SEVERAL)


@dataclasses.dataclass(frozen=True, eq=False)  # hashable by identity, for caches
class Program:
    """A small program as a user of Keras writes it: a compiled model, data, and a call of fit."""

    name: str
    build: Callable[[], keras.Model]
    """Called in the scope of a strategy; returns a compiled model."""
    data: Callable[[int], Any]
    """By the number of rows: (x,), (x, y) or (x, y, weight), or a data set of batches."""
    fit: Callable[[pathlib.Path], dict] = lambda folder: {}
    """Further arguments of fit, made anew for each run, with a folder to write to."""
    look: Callable[[keras.Model, pathlib.Path], list] = lambda model, folder: []
    """Further numbers to compare after the training."""
    then: tuple[Callable[[keras.Model], keras.Model], ...] = ()
    """What is trained afterwards, in the same way; each is called with what has been trained, in scope."""
    only_fit: str = ""
    """Why there is neither an evaluation nor a prediction."""
    rows: tuple[int, ...] = (61, 72)
    batch: int = 24
    epochs: int = 2
    precision: str = "float32"
    tolerance: float = 1e-6
    unlike_keras: str = ""
    """Why Keras' own fit on one device is not the judge."""
    eagerly: str = ""
    """Why Keras is run eagerly to be the judge."""
    inexact: tuple[str, ...] = ()
    """Values of the history and of evaluate that Keras gets wrong with a batch that is short."""
    unlike_one: str = ""
    """Why several replicas need not give what one device gives; docs/sameness.md must say so."""
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    """Words of the expected refusal, by strategy; "several" stands for all with more than one replica."""

    def __str__(self):
        return self.name

    def refusal(self, strategy: str) -> str:
        return self.refused.get(strategy) or self.refused.get("several" if strategy != ONE else ONE, "")


@dataclasses.dataclass
class Outcome:
    """What a program ends with."""

    weights: np.ndarray
    history: dict
    evaluation: dict
    outputs: list
    seen: list


def by_tfdist(program: Program, rows: int, distribution, folder: pathlib.Path) -> Outcome | str:
    """Runs a program under a strategy. Returns what it ends with, or the line with which tfdist refuses it."""
    try:
        model = _built(program, distribution)
        given, options = _arguments(program, rows, folder)  # after the seed is set, as for Keras: shuffle() takes it
        histories = [tfdist.fit(model, *given, distribution=distribution, **options)]
        for change in program.then:
            with distribution.scope():
                model = change(model)
            histories.append(tfdist.fit(model, *given, distribution=distribution, **options))
        if program.only_fit:
            return _outcome(program, model, histories, {}, [], folder)
        seen = {"verbose": 0, "distribution": distribution, **_batch(options)}
        evaluation = tfdist.evaluate(model, *given, **seen)
        outputs = tfdist.predict(model, given[0], **seen)
    except tfdist.UserError as error:
        return str(error)
    return _outcome(program, model, histories, evaluation, outputs, folder)


def by_keras(program: Program, rows: int, distribution, folder: pathlib.Path) -> Outcome:
    """Runs a program by Keras on one device."""
    model = _as_judge(_built(program, distribution), program)
    given, options = _arguments(program, rows, folder)
    histories = [model.fit(*given, **options)]
    for change in program.then:
        model = _as_judge(change(model), program)
        histories.append(model.fit(*given, **options))
    if program.only_fit:
        return _outcome(program, model, histories, {}, [], folder)
    evaluation = model.evaluate(*given, **_batch(options), return_dict=True, verbose=0)
    outputs = model.predict(given[0], **_batch(options), verbose=0)
    return _outcome(program, model, histories, evaluation, outputs, folder)


def _as_judge(model: keras.Model, program: Program) -> keras.Model:
    model.run_eagerly = bool(program.eagerly)
    model.jit_compile = False  # as it is on a CPU by itself; XLA would round differently
    optimizer = model.optimizer
    if optimizer is not None:  # see test_keras_adam_mistakes_a_sparse_gradient_that_repeats_a_row
        apply = optimizer.apply
        optimizer.apply = lambda grads, variables=None: apply([_dense(g) for g in grads], variables)
    return model


def _dense(gradient):
    return None if gradient is None else tf.convert_to_tensor(gradient)


def _built(program: Program, distribution) -> keras.Model:
    keras.backend.clear_session(free_memory=False)  # names count from the start
    keras.config.set_floatx("float64" if program.precision == "float64" else "float32")
    keras.config.set_dtype_policy(program.precision)
    keras.utils.set_random_seed(3)
    with distribution.scope():
        return program.build()


def _arguments(program: Program, rows: int, folder: pathlib.Path) -> tuple[tuple, dict]:
    """Returns the positional arguments of fit, and the others."""
    data = program.data(rows)
    options: dict[str, Any] = {"epochs": program.epochs, "verbose": 0}
    if isinstance(data, tuple):
        options |= {"batch_size": program.batch, "shuffle": False}
        if len(data) == 3:
            options["sample_weight"] = data[2]
            data = data[:2]
    else:
        data = (data,)
    return data, options | program.fit(folder)


def _batch(options: dict) -> dict:
    return {name: options[name] for name in ("batch_size",) if name in options}


def _outcome(program, model, histories, evaluation, outputs, folder) -> Outcome:
    history: dict[str, list] = {}
    for name, values in (item for one in histories for item in one.history.items()):
        history[name] = history.get(name, []) + [np.asarray(v).tolist() for v in values]
    return Outcome(
        np.concatenate([np.ravel(w).astype("float64") for w in model.get_weights()] or [np.zeros(1)]),
        history,
        {name: np.asarray(value).tolist() for name, value in evaluation.items()},
        [np.asarray(o) for o in keras.tree.flatten(outputs)],
        [np.asarray(v).tolist() for v in program.look(model, folder)],
    )


def assert_agrees(got: Outcome | str, expected: Outcome, program: Program, inexact: tuple[str, ...] = ()) -> None:
    """Fails unless two outcomes are the same to rounding."""
    assert isinstance(got, Outcome), f"refused: {got}"
    tolerance = program.tolerance
    for name, ours, theirs in (("history", got.history, expected.history), ("", got.evaluation, expected.evaluation)):
        assert ours.keys() == theirs.keys(), f"{name} has {sorted(ours)}, expected {sorted(theirs)}"
        for key in ours.keys() - {*inexact, *(f"val_{i}" for i in inexact)}:
            np.testing.assert_allclose(
                ours[key], theirs[key], rtol=10 * tolerance, atol=tolerance, err_msg=f"{name} {key}"
            )
    distance = np.linalg.norm(got.weights - expected.weights) / max(np.linalg.norm(expected.weights), 1e-30)
    assert distance < tolerance, f"weights differ by {distance}"
    assert len(got.outputs) == len(expected.outputs)
    for a, b in zip(got.outputs, expected.outputs):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=100 * tolerance, atol=10 * tolerance, err_msg="predictions")
    assert len(got.seen) == len(expected.seen)
    for a, b in zip(got.seen, expected.seen):
        np.testing.assert_allclose(a, b, rtol=10 * tolerance, atol=tolerance, err_msg="what the program looked at")


# -- data and models that programs share --------------------------------------


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(*shape, seed: int = 11) -> np.ndarray:
    return rng(seed).normal(size=shape).astype("float32")


def features(n: int, width: int = 6) -> np.ndarray:
    return normal(n, width)


def classes(n: int) -> tuple:
    return features(n), rng().integers(0, 5, n)


def one_hot(n: int) -> tuple:
    return features(n), np.eye(5, dtype="float32")[rng().integers(0, 5, n)]


def several_hot(n: int) -> tuple:
    return features(n), rng().integers(0, 2, (n, 5)).astype("float32")


def signs(n: int) -> tuple:
    return features(n), 2 * rng().integers(0, 2, (n, 5)).astype("float32") - 1


def shares(n: int) -> tuple:
    """Targets that are distributions."""
    y = rng().uniform(0.1, 1.0, (n, 5))
    return features(n), (y / y.sum(-1, keepdims=True)).astype("float32")


def numbers(n: int) -> tuple:
    return features(n), normal(n, 5, seed=12)


def binary(n: int) -> tuple:
    return features(n), rng().integers(0, 2, (n, 1)).astype("float32")


def weighed(data: Callable[[int], tuple]) -> Callable[[int], tuple]:
    """The same data with a weight for each example."""
    return lambda n: (*data(n), rng(5).uniform(0.2, 3.0, n).astype("float32"))


def tokens(n: int, length: int = 5) -> np.ndarray:
    """Sequences of uneven length; 0 is padding."""
    r = rng()
    x = r.integers(1, 12, (n, length))
    x[np.arange(length)[None] >= r.integers(1, length + 1, n)[:, None]] = 0
    return x.astype("int32")


def images(n: int) -> tuple:
    return normal(n, 6, 6, 2), rng().integers(0, 5, n)


def sequences(n: int) -> tuple:
    return normal(n, 5, 3), rng().integers(0, 5, n)


def dense(units: int = 5, activation=None, width: int = 6, **layer) -> keras.Model:
    return keras.Sequential(
        [keras.Input((width,)), L.Dense(6, activation="tanh", **layer), L.Dense(units, activation, **layer)]
    )


def sparse(**kwargs) -> keras.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def compiled(model: keras.Model, loss: Any = None, optimizer: Any = None, **kwargs) -> keras.Model:
    model.compile(optimizer or keras.optimizers.SGD(0.1), sparse() if loss is None else loss, **kwargs)
    return model


def stack(shape: tuple, *layers, dtype: str | None = None, **kwargs) -> keras.Model:
    """A compiled classifier that ends with the given layers and a Dense layer."""
    return compiled(keras.Sequential([keras.Input(shape, dtype=dtype), *layers, L.Dense(5)]), **kwargs)
