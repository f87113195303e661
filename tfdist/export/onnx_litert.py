"""A model as ONNX and LiteRT: tensors in, tensors out, in float32."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import tempfile
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdist.data.structures import Structure
from tfdist.errors import TrainingError, one_line

if TYPE_CHECKING:
    import tf2onnx


def onnx(model: keras.Model, inputs: Structure, path: str) -> None:
    """Writes ONNX.

    Args:
      inputs: `tf.TensorSpec`s of what the model takes, in its structure.

    Raises:
      TrainingError: it cannot be written.
    """
    import tf2onnx

    flat = keras.tree.flatten(inputs)
    call = lambda *x: keras.tree.flatten(model(keras.tree.pack_sequence_as(inputs, x), training=False))
    with _quiet("onnx"):
        # tf2onnx does not know this one, which GELU is made of, and would write a file that nothing reads.
        handlers: dict[str, Any] = {"Erfc": (_erfc, [])}
        function = tf.function(call, input_signature=flat)
        tf2onnx.convert.from_function(
            function, input_signature=flat, opset=17, output_path=path, custom_op_handlers=handlers
        )


def _erfc(context: tf2onnx.graph.Graph, node: tf2onnx.graph.Node, name: str, arguments: list) -> None:
    """Replaces erfc(x) by 1 - erf(x); to be added to 1 or multiplied, it needs no more digits than that leaves."""
    import numpy as np

    del name, arguments
    kind = context.get_dtype(node.output[0])
    one = context.make_const(f"{node.name}_one", np.array(1, "float32"))
    shape = context.get_shape(node.output[0])
    (source,), (output,) = node.input, node.output
    context.remove_node(node.name)
    erf = context.make_node("Erf", [source], name=f"{node.name}_erf", shapes=[shape], dtypes=[kind])
    context.make_node(
        "Sub", [one.output[0], erf.output[0]], name=node.name, outputs=[output], shapes=[shape], dtypes=[kind]
    )


def litert(model: keras.Model, inputs: Structure, path: str) -> None:
    """Writes LiteRT with its own operations alone. The outputs are called `output_0` and so on.

    Args:
      inputs: the same as for `onnx`.

    Raises:
      TrainingError: it cannot be written.
    """
    module = tf.Module()
    module.kept = [v.value for v in model.variables]

    def call(*x):
        outputs = keras.tree.flatten(model(keras.tree.pack_sequence_as(inputs, x), training=False))
        return {f"output_{i}": output for i, output in enumerate(outputs)}

    module.call = tf.function(call, input_signature=keras.tree.flatten(inputs))
    with _quiet("litert"), tempfile.TemporaryDirectory() as folder:
        # A SavedModel keeps the names on the way; Keras' own exporter gives inputs names that it counts up.
        tf.saved_model.save(module, folder, signatures=module.call.get_concrete_function())
        written = tf.lite.TFLiteConverter.from_saved_model(folder).convert()
    pathlib.Path(path).write_bytes(written)


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silences converters, which tell much on the way; the check says what is wrong with the result."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # each converter has its own
        line = one_line(error, 300) or type(error).__name__
        raise TrainingError(f"the model cannot be written as {name} ({line}): leave {name} out of --formats") from error
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
        logging.disable(before)
