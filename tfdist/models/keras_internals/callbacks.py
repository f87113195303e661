"""Private names of Keras' callbacks."""

from __future__ import annotations

import keras

BATCHES_SEEN = "_batches_seen_since_last_saving"
"""ModelCheckpoint counts in this attribute the batches since its last file, and nothing public tells the number."""


def profiles_batches(callback: keras.callbacks.TensorBoard) -> bool:
    """Returns whether the callback profiles; what it has read from `profile_batch` is kept privately."""
    return bool(callback._should_trace)
