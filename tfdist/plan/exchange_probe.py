"""One of two local workers that sum tensors, and measure what that costs this machine.

`exchange` starts it by `tfdist.launch`. Over TensorFlow's ring, the loopback is no network: what is measured is the
work of the processors with a message, which any link adds to.
"""

from __future__ import annotations

import time
from typing import NamedTuple

SIZES = {256: 100, 1 << 20: 20, 4 << 20: 8, 16 << 20: 3}
"""How many sums of so many bytes a call makes, one after the other. Of a single number the ring of two would send
nothing one way."""
CALLS = 5
"""Calls of each size, of which the quickest counts, as others may use the machine; a first one, which traces, is not
among them."""


class Samples(NamedTuple):
    """What was measured."""

    communication: str
    """How the workers have summed, as `Distribution.communication`."""
    sums: list[dict[str, str | float]]
    """Of each type and size the seconds of a sum."""


def samples(communication: str, threads: int, dtypes: tuple[str, ...]) -> Samples:
    """Measures each type and size in one of the workers.

    Args:
      communication: what is asked for.
      threads: of this worker.
      dtypes: types in which tensors travel; the casts to a smaller one and back belong to the cost.
    """
    import tfdist

    distribution = tfdist.connect("multi_worker", devices="none", threads=threads, communication=communication)
    import tensorflow as tf  # after the strategy has chosen its kernels

    def timed(size: int, repeats: int, dtype: str) -> float:
        # As many elements as travel in `size` bytes of this type; the model has them in float32.
        elements = size // tf.dtypes.as_dtype(dtype).size

        def sums() -> tf.Tensor:
            def body(i: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                (total,) = distribution.all_sum([tf.cast(x, dtype)])
                return i + 1, tf.cast(total, tf.float32)

            x = tf.zeros([elements])
            return tf.while_loop(lambda i, _: i < repeats, body, (0, x), parallel_iterations=1)[1][0]

        call = tf.function(lambda: distribution.run(sums, ()), autograph=False)
        call()
        seconds = []
        for _ in range(CALLS):
            begun = time.perf_counter()
            float(distribution.local(call())[0])
            seconds.append((time.perf_counter() - begun) / repeats)
        return min(seconds)

    return Samples(
        distribution.communication,
        [
            {"dtype": dtype, "bytes": size, "seconds": timed(size, repeats, dtype)}
            for dtype in dtypes
            for size, repeats in SIZES.items()
        ],
    )
