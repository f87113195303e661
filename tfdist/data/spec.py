"""What a model knows of a table's columns."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: what a model, and new rows, must know of it. All of it is of the training split."""

    name: str
    kind: str
    """`number`, standardised to (value - mean) / std, or `category`, the place of its text in `vocabulary` plus one."""
    mean: float = 0.0
    """Of the values present; a missing one becomes the mean, which is 0 when standardised."""
    std: float = 1.0
    vocabulary: tuple[str, ...] = ()
    """Texts of a category, sorted; `""` among them where values are missing. Number 0 is for any other text."""
