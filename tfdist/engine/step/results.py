"""What a call of a compiled function gives."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf


class CallResult(NamedTuple):
    """What a call that trains or measures gives of its global batches, as tensors."""

    sums: tf.Tensor
    """Loss values times examples, the total first and then each part, float64 [1 + parts]."""
    examples: tf.Tensor
    """How many examples there were, float64 []."""
    nonfinite: tf.Tensor
    """The number of the first batch with a loss that is not finite, counted as the arguments do; -1 for none."""
    done: tf.Tensor
    """How many batches there were, int32 []."""
    metrics: dict[str, tf.Tensor]
    """The metrics' results so far, by name."""
    measures: tf.Tensor
    """This worker's seconds of waiting for input and for the all-reduce, and the last gradient's norm, float64 [3]."""
