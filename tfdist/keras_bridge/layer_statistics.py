"""What the layers of each replica have gathered by themselves, made one before anybody looks at it."""

from __future__ import annotations

import keras

from tfdist.distributed.distribution import Distribution
from tfdist.keras_bridge import ema, freezing, keras_internals


def average(model: keras.Model, distribution: Distribution, shards: int = 0) -> None:
    """Averages what each replica has gathered by itself (BatchNorm), before anybody looks at it.

    With shards every replica has the same, and a mean over three of them would round it.
    """
    if shards:
        return
    with distribution.peers.during("call"):
        # Rounding would let go of what is frozen, bit by bit.
        kept = {id(v) for v in freezing.fixed(model)}
        gathered = [v for v in model.non_trainable_variables if id(v) not in kept]
        distribution.average([v for v in gathered if v.dtype.startswith(("float", "bfloat"))])


def settle(model: keras.Model, distribution: Distribution, shards: int = 0) -> None:
    """Makes of a model whose training was interrupted what it would be had it ended there."""
    average(model, distribution, shards)
    ema.finalize(keras_internals.inner_optimizer(model.optimizer), model.trainable_variables)
