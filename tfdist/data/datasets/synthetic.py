"""Made images for trying things out: they need no download, and a model can learn them."""

from __future__ import annotations

import numpy as np

from tfdist.config import field_syntax
from tfdist.errors import UserError


def synthetic(examples: int = 4096, shape: tuple = (32, 32, 3), classes: int = 10, noise: float = 0.5) -> dict:
    """Makes images of one random pattern per class, under noise.

    Args:
      examples: number of training images.
      shape: height, width and channels of an image, or any other shape.
      noise: standard deviation of what is added to a pattern, whose own is 1.

    Returns:
      Arrays by split: `train` of `examples`, and a quarter as many to `test`.

    Raises:
      UserError: an argument of another kind or range.
    """
    field_syntax.check_whole("data.options: examples", examples)
    field_syntax.check_whole("data.options: classes", classes)
    if not isinstance(shape, (tuple, list)) or not shape:
        raise UserError(f"data.options: shape must be that of an example, such as (8, 8, 3), got {shape!r}")
    for side in shape:
        field_syntax.check_whole("data.options: each side of shape", side)
    if not isinstance(noise, (int, float)):
        raise UserError(f"data.options: noise must be a number, got {noise!r}")
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(classes, *shape)).astype("float32")

    def make(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(0, classes, count).astype("int32")
        return patterns[y] + noise * rng.normal(size=(count, *shape)).astype("float32"), y

    return {"train": make(examples), "test": make(max(1, examples // 4))}
