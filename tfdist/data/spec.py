"""The description of data that a model is built for, and of what travels through a pipeline and a step."""

import dataclasses
from typing import Any, TypeAlias

Structure: TypeAlias = Any
"""A tensor, a NumPy array or a Keras variable, or tuples, lists and dicts of them to any depth."""


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: what a model, and new rows, must know of it. All of it is of the training split."""

    name: str
    kind: str  # `number`: (value - mean) / std; or `category`: the place of its text in `vocabulary` plus one
    mean: float = 0.0  # mean of the values present. A missing one becomes the mean, which is 0 when standardized.
    std: float = 1.0  # their standard deviation
    vocabulary: tuple[str, ...] = ()  # of a category, sorted, with "" where values are missing; 0 is for any other text


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """The description of data that a model is built for."""

    shape: tuple[int, ...]  # shape of one example's input
    dtype: str
    classes: int | None  # number of classes, or None where the targets are not classes
    maximum: float  # largest input value, for scaling to [0, 1]
    names: tuple[str, ...] = ()  # names of the classes, where the data set has some
    columns: tuple[Column, ...] = ()  # inputs of a table, in the order of x["numbers"] and of x["categories"]
    target: Column | None = None  # the predicted column of a table; a number is not standardized
