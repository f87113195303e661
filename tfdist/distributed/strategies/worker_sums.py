"""How one replica of each worker sums tensors over all of them: through gRPC, or through the memory of their host.

Both do without the layers of `tf.distribute` above. What is summed by a compiled function is paired up by the order in
which all workers trace the same functions.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tfdist.distributed.shared_memory_sum import SharedMemorySum

if TYPE_CHECKING:
    import tensorflow as tf


class Ring:
    """All-reduces over TensorFlow's ring on gRPC.

    Args:
      replicas: of all workers, one each.
      device: TensorFlow's name of this one's.
    """

    GROUP_KEY = 1 << 20
    """Beyond those that TensorFlow counts up from 1."""

    IN_FLIGHT = 8
    """Sums that may be under way at a time: gRPC holds copies of each meanwhile."""

    def __init__(self, replicas: int, device: str):
        import tensorflow as tf

        self._replicas = replicas
        self._used = 0
        # A tf.function runs stateful operations one after the other as they were traced, a clock that waits for the
        # last gradient among them. Those with resources wait for their input, and for others with the same resource
        # alone; nobody reads or writes these. One sum that travels by itself has nothing to overtake.
        with tf.device(f"/device:{device}"):
            self._orders = [
                tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=f"tfdist.order.{i}")
                for i in range(self.IN_FLIGHT)
            ]

    def reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums each tensor over all replicas."""
        import tensorflow as tf

        if self._replicas == 1:
            return tensors
        sums = []
        for tensor in tensors:
            self._used += 1
            order = [self._orders[self._used % self.IN_FLIGHT]] if len(tensors) > 1 else []
            sums.append(
                tf.raw_ops.CollectiveReduceV2(
                    input=tensor,
                    group_size=self._replicas,
                    group_key=self.GROUP_KEY,
                    instance_key=self._used,
                    ordering_token=order,
                    merge_op="Add",
                    final_op="Id",
                    communication_hint="ring",
                )
            )
        return sums


class SharedMemory:
    """All-reduces through the memory of the host; a tf.function makes these sums in the order in which it was traced.

    Args:
      through: sums arrays.
    """

    def __init__(self, through: SharedMemorySum):
        self._through = through
        self._used = 0

    def reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums each tensor over all replicas; those of half precision in float32."""
        import tensorflow as tf

        sums = []
        for tensor in tensors:
            self._used += 1
            # NumPy adds float16 one by one, and does not know bfloat16.
            given = tf.cast(tensor, tf.float32) if tensor.dtype in (tf.float16, tf.bfloat16) else tensor
            total = tf.numpy_function(functools.partial(self._through.sum, self._used), [given], given.dtype)
            total.set_shape(tensor.shape)
            sums.append(tf.cast(total, tensor.dtype))
        return sums
