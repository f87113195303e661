"""Sums whose last bit does not depend on timing."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def sum_in_order(tensors: list) -> Any:
    """The sum of tensors of one shape and type, always added up from first to last.

    `tf.add_n` begins with whichever tensor's memory it may reuse, so which
    comes first depends on who else still reads them at that moment: three
    replicas gave another last bit now and then, and a bias that only rounding
    moves became another number. Of two the order makes no difference.
    """
    if len(tensors) < 3:
        return tf.add_n(tensors)
    return tf.reduce_sum(tf.stack(tensors), 0)
