"""Measures the distance between the weights with which two runs have ended, and names where most of it is.

The weights are read from the checkpoint at the end of a run, which has Keras' names; `model.keras` has numbers instead
of names, and may need the user's classes to be read. TensorFlow is imported to read.
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist.checkpoints import files
from tfdist.config.commands import standard_streams
from tfdist.errors import UserError

TOLERANCE = {"float32": 1e-5, "float64": 1e-11, "mixed_bfloat16": 1e-2, "mixed_float16": 1e-3}
"""Largest distance after a whole run, by precision: ten times that of the tests' few updates."""
TOLERANCE_OF_SUMS = {"float32": 0.0, "bfloat16": 1e-2, "float16": 1e-3}
"""Smallest tolerance when gradients travel in this type."""
CHECK_TOLERANCE = 1e-6  # largest distance after the check in float64: rounding is 1e-12 there, a wrong sum 1e-3 or more
CHECK_UPDATES = 100
_SEED = "seed_generator"
_NAME = re.compile(r"(shared|replicas)/model/(\d+)/(.+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Distance of a run's weights, b, from those of the reference, a."""

    distance: float
    """|a - b| / |a|, with the Euclidean norm over all weights of the model: 0 where all bits are the same."""
    variable: str  # in which most of it is; empty if nothing differs
    largest: float  # max |a - b| in that variable
    scale: float  # max |a| in that variable


def tolerance(precision: str, reduce_dtype: str) -> float:
    """Returns the largest distance at which two runs count as the same."""
    return max(TOLERANCE[precision], TOLERANCE_OF_SUMS[reduce_dtype])


def check_flags(updates: int, warms_up: bool) -> dict[str, str]:
    """Returns fields of an experiment of that length that separate a wrong sum from rounding that has grown.

    Rounding grows with time, in some models to a few percent (see the README). In float64 it is still negligible then.
    A schedule need not fit into so few updates: the learning rate is constant, behind a warm-up if there is one.
    """
    few = min(updates, CHECK_UPDATES)
    return {
        "config.train.epochs": "0",
        "config.train.steps": str(few),
        "config.train.precision": "float64",
        "config.optimizer.reduce_dtype": "float32",
        "config.model.sync_batch_norm": "True",
        "config.optimizer.schedule": "constant",
        "config.optimizer.schedule_options": "",
        "config.optimizer.warmup": "50%" if warms_up else "0",
        "config.eval.every": "1 epoch",
    }


def difference(reference: pathlib.Path, other: pathlib.Path) -> Difference:
    """Compares the weights in two run folders; raises ValueError if they cannot be read, or are of another model."""
    readers = _reader(reference), _reader(other)
    names, other_names = map(_names, readers)
    if names.keys() != other_names.keys():
        odd = min(names.keys() ^ other_names.keys())
        raise ValueError(f"the models are not the same: {odd} is in one of them only")
    names = {place: name for place, name in names.items() if _SEED not in name}  # those differ on purpose
    shown = _shown(names)
    total, norm, worst, most = 0.0, 0.0, ("", 0.0, 0.0), 0.0
    for place, name in names.items():
        a, b = _values(readers[0], place, name), _values(readers[1], place, other_names[place])
        if a.shape != b.shape:
            raise ValueError(f"the models are not the same: {shown[place]} is {list(a.shape)} and {list(b.shape)}")
        norm += float(np.square(a).sum())
        square = float(np.square(a - b).sum())
        total += square
        if square > most or math.isnan(square):
            worst = shown[place], float(np.abs(a - b).max()), float(np.abs(a).max(initial=0))
            most = math.inf if math.isnan(square) else square
    return Difference(math.sqrt(total) / (math.sqrt(norm) or 1.0), *worst)


def _reader(folder: pathlib.Path) -> Any:
    """Returns a reader of the newest checkpoint in a run folder; raises ValueError if none can be read."""
    try:
        path = files.newest_first(folder / "checkpoints")[0]
        files.verify(path)
    except IndexError:
        raise ValueError(f"{folder} has no checkpoint") from None
    except (OSError, UserError, files.DamagedError) as error:
        raise ValueError(f"the checkpoint in {folder} cannot be read: {error}") from None
    with standard_streams.held_back():
        import tensorflow as tf

    return tf.train.load_checkpoint(str(path / files.TENSORS))


def _names(reader: Any) -> dict[str, str]:
    """Returns the name of each variable of the model, by its place in it, which is the same in all runs."""
    matches = filter(None, (_NAME.fullmatch(name) for name in reader.get_variable_to_shape_map()))
    return {f"{m[1]}/model/{m[2]}": m[3] for m in sorted(matches, key=lambda m: (m[1] != "shared", m[2]))}


def _values(reader: Any, place: str, name: str) -> np.ndarray:
    """Returns a variable in float64; the mean of one that each replica has for itself, as a saved model has it."""
    value = np.asarray(reader.get_tensor(f"{place}/{name}")).astype(np.float64)
    return value.mean(0) if place.startswith("replicas") else value


def _shown(names: Mapping[str, str]) -> dict[str, str]:
    """Returns names by place for a person: without the model's own, with which all begin, and no two alike."""
    first = {name.partition("/")[0] for name in names.values()}
    shown: dict[str, str] = {}
    for place, name in names.items():
        short = name.partition("/")[2] if len(first) == 1 and "/" in name else name
        shown[place] = f"{short} ({place})" if short in shown.values() else short
    return shown
