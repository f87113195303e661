"""Tracing the all-reduces of a step without what `tf.custom_gradient` does beside each of them.

It walks back through the graph to find the variables that the function has read. An all-reduce reads none, and the
walk leads through the whole model of the other replicas, anew for each synchronized BatchNorm and direction: of
MobileNet's first epoch on two replicas it was three quarters. And it enters the gradient into TensorFlow's registry
for good, with the tensors it closes over: the graph of each `fit` stayed in memory, 130 MB of MobileNet's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tensorflow.python.distribute.distribute_lib import ReplicaContextBase
from tensorflow.python.framework import ops
from tensorflow.python.ops import custom_gradient

_inside = threading.local()  # replicas are traced in threads that take turns within an all-reduce


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """While a step is traced with its gradients, all-reduces look for no variables; afterwards nothing keeps them.

    It goes through private names (tests/models/test_keras_internals.py notices when that changes).
    """
    all_reduce = ReplicaContextBase.all_reduce
    search, new_name = custom_gradient._get_dependent_variables, custom_gradient.generate_name
    entered: list[str] = []

    def reduce(self: Any, *arguments: Any, **options: Any) -> Any:
        before = getattr(_inside, "reduce", False)
        _inside.reduce = True
        try:
            return all_reduce(self, *arguments, **options)
        finally:
            _inside.reduce = before

    def found(input_ops: Any, output_ops: Any) -> list:
        return [] if getattr(_inside, "reduce", False) else search(input_ops, output_ops)

    def noted() -> str:
        name = new_name()
        if getattr(_inside, "reduce", False):
            entered.append(name)
        return name

    ReplicaContextBase.all_reduce = reduce
    custom_gradient._get_dependent_variables, custom_gradient.generate_name = found, noted
    try:
        yield
    finally:
        ReplicaContextBase.all_reduce = all_reduce
        custom_gradient._get_dependent_variables, custom_gradient.generate_name = search, new_name
        for name in entered:
            ops.gradient_registry._registry.pop(name, None)
