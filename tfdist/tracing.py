"""Tracing an all-reduce in a forward pass (synchronized BatchNorm) without TensorFlow's search for variables.

A replica's all-reduce is a `tf.custom_gradient`, which walks back through the graph to find the variables that the
function has read. An all-reduce reads none, and the walk leads through the whole model of the other replicas, anew for
each layer and direction: of MobileNet's first epoch on two replicas it was three quarters.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tensorflow.python.distribute.distribute_lib import ReplicaContextBase
from tensorflow.python.ops import custom_gradient

_inside = threading.local()  # replicas are traced in threads that take turns within an all-reduce


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """While something is traced, no all-reduce of a replica looks for variables.

    It goes through private names (tests/test_keras_hooks.py notices when that changes).
    """
    all_reduce, search = ReplicaContextBase.all_reduce, custom_gradient._get_dependent_variables

    def reduce(self: Any, *arguments: Any, **options: Any) -> Any:
        before = getattr(_inside, "reduce", False)
        _inside.reduce = True
        try:
            return all_reduce(self, *arguments, **options)
        finally:
            _inside.reduce = before

    def found(input_ops: Any, output_ops: Any) -> list:
        return [] if getattr(_inside, "reduce", False) else search(input_ops, output_ops)

    ReplicaContextBase.all_reduce, custom_gradient._get_dependent_variables = reduce, found
    try:
        yield
    finally:
        ReplicaContextBase.all_reduce, custom_gradient._get_dependent_variables = all_reduce, search
