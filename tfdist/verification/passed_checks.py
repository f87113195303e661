"""Which models have passed `strategy_check`, kept in the user's cache, so that only a new one pays for it."""

from __future__ import annotations

import hashlib
import inspect
import os
import pathlib

import keras
import tensorflow as tf

from tfdist.config import cpu_kernels
from tfdist.data.structures import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.keras_bridge import keras_internals, own_steps
from tfdist.verification.two_ways import Question


def fingerprint(model: keras.Model, distribution: Distribution, rows: Structure, question: Question) -> str:
    """Returns a digest of all that decides whether replicas agree on a model: its code, its settings and the versions.

    Args:
      rows: some of the data.
      question: what is compared; only a training knows of optimizers, and a prediction not even of losses.

    Returns:
      Hexadecimal digits; an empty string if some of the code cannot be read, and the model is to be checked each time.
    """
    import tfdist

    methods = {"train": own_steps.TRAINING, "test": own_steps.EVALUATION, "predict": own_steps.PREDICTION}
    if own_steps.replaced(model, methods[question.kind]):
        return ""  # what its step uses may be anything
    optimizers = own_steps.optimizers(model) if question.kind == "train" else []
    parts: list[str] = [tf.__version__, keras.__version__, tfdist.__version__, distribution.name]
    parts += [str(distribution.replicas), question.kind, str(question), distribution.jit, cpu_kernels.in_use()]
    parts += [f"{tuple(t.shape[1:])} {t.dtype}" for t in keras.tree.flatten(rows)]
    try:
        for layer in keras_internals.flat_layers(model):
            parts += _described(layer)
        parts += [f"{v.name} {v.shape} {v.dtype} {v.trainable}" for v in model.variables]
        for optimizer in optimizers:
            parts += _described(optimizer)
        for used in keras_internals.compiled_with(model) if question.kind != "predict" else []:
            parts += _described(used)
    except (OSError, TypeError, ValueError, NotImplementedError):
        return ""
    text = "\n".join(parts)
    # Keras numbers the layers of a process: the same model has other names each time that it is built.
    named = [*keras_internals.flat_layers(model), *optimizers]
    for number, name in enumerate(dict.fromkeys(thing.name for thing in named)):
        text = text.replace(repr(name), f"#{number}")
    return hashlib.sha256(text.encode()).hexdigest()


def is_known(mark: str) -> bool:
    """Returns whether a model with this fingerprint has passed."""
    return (_folder() / mark).exists()


def remember(mark: str) -> None:
    """Notes that a model with this fingerprint has passed; where the cache cannot be written, it is checked again."""
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        (_folder() / mark).touch()
    except OSError:
        return


def _folder() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base, "tfdist", "checked")


def _described(thing: object) -> list[str]:
    """Returns the settings of an object of Keras', and the code of what is the user's own.

    Raises:
      OSError, TypeError: there is no source to read.
    """
    if isinstance(thing, str | int | float | bool | None):
        return [repr(thing)]
    if isinstance(thing, dict):
        return [part for key, value in thing.items() for part in (repr(key), *_described(value))]
    if isinstance(thing, list | tuple):
        return [part for value in thing for part in _described(value)]
    if inspect.isfunction(thing):
        closed = [cell.cell_contents for cell in thing.__closure__ or ()]
        return [inspect.getsource(thing), *(part for value in closed for part in _described(value))]
    kind = thing if isinstance(thing, type) else type(thing)
    parts = [f"{kind.__module__}.{kind.__qualname__}"]
    if not kind.__module__.startswith(("keras.", "tfdist.")):
        parts.append(inspect.getsource(kind))
    if not isinstance(thing, type) and hasattr(thing, "get_config"):
        parts.append(repr(thing.get_config()))
    return parts
