"""Floating-point operations of a model per example, and the peak of its devices.

Model FLOPs (Chowdhery et al., *PaLM*, 2022, appendix B) are the multiplications and additions of matrix products and
convolutions in the forward pass, three times: the backward pass makes one such product for the inputs and one for the
weights. Element-wise operations do not count.
"""

import json
import math
import pathlib
from typing import Any

import keras
import tensorflow as tf

from tfdist.data.sources import Source
from tfdist.data.spec import Structure

PEAKS: dict[str, list[float]] = json.loads(pathlib.Path(__file__).with_name("gpu_peaks.json").read_text())
"""By the name in nvidia-smi, dense FLOP/s in half precision and in float32 (TF32 from A100 on, as TensorFlow multiplies
it), from NVIDIA's data sheets, without sparsity."""


def peak(device: str, precision: str) -> float | None:
    """Returns the peak FLOP/s of a GPU by its name in nvidia-smi, `NVIDIA A100-SXM4-80GB`; None if it is not known."""
    words = device.replace("-", " ").split()
    for name, (half, single) in PEAKS.items():
        if all(word in words for word in name.split()):
            return {"float32": single, "float64": None}.get(precision, half)
    return None


class FlopsModel:
    """The model FLOPs of a run, and the peak of its devices: `gpus` are names of this worker's, none for a CPU."""

    def __init__(self, model: keras.Model, source: Source, gpus: list[str], workers: int, precision: str):
        self._model, self._source = model, source
        peaks = [peak(name, precision) for name in gpus]
        # FLOP/s of all devices, or None if not known: all workers have the same GPUs.
        self.peak = None if not peaks or None in peaks else workers * sum(p for p in peaks if p)
        self.per_example: int | None = None  # once `count` has been called

    def count(self) -> None:
        """Traces the model; on the main thread, between two calls."""
        self.per_example = per_example(self._model, self._source.specs[0])

    def rates(self, examples_per_second: float | None) -> dict[str, Any]:
        """Returns `flops_per_example`, `flops_per_second` and `flops_share` of the peak."""
        per = self.per_example
        rate = per * examples_per_second if per and examples_per_second else None
        share = rate / self.peak if rate and self.peak else None
        return {"flops_per_example": per, "flops_per_second": rate, "flops_share": share}


def per_example(model: keras.Model, inputs: Structure) -> int | None:
    """Returns the model FLOPs of one example, forward and backward, of a built model; `inputs` are [examples, ...].

    None for a model whose FLOPs the graph of one forward pass does not show, such as one with a loop.
    """
    specs = keras.tree.map_structure(lambda c: tf.TensorSpec((1, *c.shape[1:]), c.dtype), inputs)
    try:
        graph = tf.function(lambda x: model(x, training=False), autograph=False).get_concrete_function(specs).graph
        forward = _of_graph(graph)
    except Exception:  # not every model can be traced like this
        return None
    return None if forward is None else 3 * forward


_OPAQUE = ("While", "StatelessWhile", "If", "StatelessIf", "CudnnRNN", "CudnnRNNV3", "XlaCallModule")


def _of_graph(graph: tf.Graph) -> int | None:
    counts = [_of(op) for op in graph.get_operations()]
    return None if None in counts else sum(f for f in counts if f)


def _of(op: tf.Operation) -> int | None:
    """Returns the FLOPs of one operation; None if it hides others."""
    kind = op.type
    if kind in _OPAQUE:
        return None
    if kind in ("PartitionedCall", "StatefulPartitionedCall"):
        return _of_graph(op.graph._get_function(op.get_attr("f").name).graph)
    if kind == "Einsum":
        return _einsum(op.get_attr("equation").decode(), [tuple(t.shape) for t in op.inputs])
    out = lambda: 2 * op.outputs[0].shape.num_elements()
    if kind == "MatMul":
        return out() * op.inputs[0].shape[0 if op.get_attr("transpose_a") else 1]
    if kind in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        return out() * op.inputs[0].shape[-2 if op.get_attr("adj_x") else -1]
    if kind in ("Conv2D", "Conv3D"):  # [..., in channels of a group, out channels]
        return out() * math.prod(op.inputs[1].shape[:-1])
    if kind == "DepthwiseConv2dNative":  # [height, width, channels, multiplier]
        return out() * math.prod(op.inputs[1].shape[:2])
    if kind in ("Conv2DBackpropInput", "Conv3DBackpropInputV2"):  # a transposed convolution
        return 2 * op.inputs[2].shape.num_elements() * math.prod(op.inputs[1].shape[:-1])
    return 0


def _einsum(equation: str, shapes: list[tuple]) -> int:
    """Returns 2 x the product over all indices, for a product of two."""
    if len(shapes) != 2:
        return 0
    sizes: dict[str, int] = {}
    for labels, shape in zip(equation.split("->")[0].split(","), shapes):
        head, dots, tail = labels.partition("...")
        middle = shape[len(head) : len(shape) - len(tail)] if dots else ()
        names = [*head, *(f"...{i - len(middle)}" for i in range(len(middle))), *tail]
        for name, size in zip(names, shape):
            sizes[name] = max(size, sizes.get(name, 1))
    return 2 * math.prod(sizes.values())
