"""An update of a real training as a program of its own: StableHLO for one of N replicas, of static shapes.

It is the update of `tfdist.step.functions` under a `Distribution` whose sum is XLA's all-reduce. Its arguments are a
replica's rows of a global batch and the variables that the update reads; its results are the losses and what it writes.
"""

import contextlib
import dataclasses
import math
import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.framework import auto_control_deps_utils

from tfdist.data.batch_layout import HostSlice, Layout
from tfdist.data.sources import Source
from tfdist.data.spec import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError, one_line
from tfdist.keras_bridge import keras_internals
from tfdist.step import functions, step_calls


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """An update of one replica, as StableHLO."""

    text: str
    rows: int  # of a global batch that a replica is given
    specs: list[tf.TensorSpec]  # of the first arguments, a flat `HostSlice`
    variables: list[keras.Variable | tf.Tensor]  # the other arguments; a tensor is a constant of the model
    results: int  # before the variables' new values
    aliases: list[tuple[int, int]]
    """The argument and the result that are one variable before and after, for each that is written."""


def distribution(replicas: int, device: str, reason: str) -> Distribution:
    """Builds the strategy of a program for devices (`TPU`, `GPU` or `CPU`) that are not here; nothing runs under it."""
    return Distribution(
        name="tpu" if device == "TPU" else "default" if replicas == 1 else "mirrored",
        reason=reason,
        strategy=tf.distribute.get_strategy(),
        replicas=replicas,
        devices=tuple(f"{device}:{i}" for i in range(replicas)),
        jit="off",  # all of the update is compiled, with what it exchanges
        replica_id=lambda: gen_xla_ops.xla_replica_id() if replicas > 1 else 0,
        all_sum=lambda tensors: [_all_sum(t, replicas) for t in tensors],
        static_shapes=True,
        lacks=("float16", "float64") if device == "TPU" else (),
    )


def _all_sum(tensor: tf.Tensor, replicas: int) -> tf.Tensor:
    """Sums a tensor over the replicas of a program; the gradient of that is the sum of the gradients."""
    if replicas == 1:
        return tensor
    if tensor.dtype.size > 4:
        return _sum_of_wide(tensor, replicas)
    groups = [list(range(replicas))]
    return gen_xla_ops.xla_all_reduce(input=tensor, group_assignment=groups, reduce_op="Add", mode="CrossReplica")


@tf.RegisterGradient("XlaAllReduce")  # TensorFlow has one for its other operations of this kind
def _gradient_of_all_sum(op: tf.Operation, gradient: tf.Tensor) -> tuple[tf.Tensor, None]:
    return _all_sum(gradient, op.inputs[1].shape[1]), None


def _sum_of_wide(tensor: tf.Tensor, replicas: int) -> tf.Tensor:
    """Sums a tensor of 64 bits, which TensorFlow's operation for XLA's all-reduce does not take.

    Its bits travel as two words, each replica's in a place of their own, where the others add zeros.
    """

    @tf.custom_gradient
    def total(tensor: tf.Tensor) -> tuple:
        bits = tf.bitcast(tensor, tf.uint32)[None]
        mine = tf.equal(tf.range(replicas), gen_xla_ops.xla_replica_id())
        own = tf.where(tf.reshape(mine, [replicas, *[1] * (bits.shape.rank - 1)]), bits, tf.zeros_like(bits))
        every = tf.bitcast(_all_sum(own, replicas), tensor.dtype)
        return tf.reduce_sum(every, 0), lambda gradient: _sum_of_wide(gradient, replicas)

    return total(tensor)


def _reducing_in_layers(replicas: int) -> contextlib.AbstractContextManager[None]:
    """Lets layers reduce over the program's replicas: they do so through the context, which knows one."""

    def all_reduce(reduce_op: tf.distribute.ReduceOp, value: Structure, options: Any = None) -> Structure:
        if reduce_op is not tf.distribute.ReduceOp.SUM:
            raise UserError(f"a layer asks for {reduce_op} over the replicas, which --topology cannot compile")
        return tf.nest.map_structure(lambda t: _all_sum(t, replicas), value)

    return keras_internals.replaced("all_reduce", [(tf.distribute.get_replica_context(), all_reduce)])


def export(
    model: keras.Model,
    source: Source,
    given: Distribution,
    batch: int,
    accumulate: int = 1,
    reduce_dtype: str = "float32",
    factors: tuple[float, ...] = (),
) -> Program:
    """Makes the program of an update of a compiled model, created under `distribution` of this module.

    Args:
      source: the examples; of them, only the shapes count.
      batch: examples of a global batch. Where they do not divide evenly, each replica gets as many rows as the first:
        shapes are static, and some are filler.
      reduce_dtype, factors: see `functions.TrainingOptions`.
    """
    layout = Layout(batch, given.replicas, accumulate, static=True)
    step = step_calls.step_of(model, given, source)
    if own := step.own_steps["train"]:
        why = "only tfdist's own step is a program for devices that are not here"
        raise UserError(f"--topology cannot compile {type(model).__name__}, which has its own {own}: {why}")
    options = functions.TrainingOptions(reduce_dtype=reduce_dtype, factors=factors)
    step.compiled("train", layout, options)  # refuses what cannot be computed from parts of a batch
    specs, structure = _specs(source, layout)

    def update(*rows: tf.Tensor) -> tf.Tensor:
        *columns, numbers = rows
        own = HostSlice(keras.tree.pack_sequence_as(structure, columns), numbers)
        with _reducing_in_layers(given.replicas), functions.train_step(step.replica, layout, options) as train_step:
            return train_step(own, tf.constant(False)).losses

    function = tf.function(update, autograph=False, jit_compile=True)
    try:
        traced = function.get_concrete_function(*specs)
        text = function.experimental_get_compiler_ir(*specs)(stage="stablehlo")
    except (tf.errors.OpError, ValueError, TypeError, NotImplementedError) as error:
        what = f"XLA cannot compile the update, all of which --topology compiles ({one_line(error, 500)})"
        raise UserError(what, "leave the layer with that operation out of the model") from error
    # The dialect of TensorFlow's bridge, which other compilers do not read; a copy is there to keep apart two results.
    text = re.sub(r"\bmhlo\.copy\b", "stablehlo.optimization_barrier", text)
    return _program(_PACKED.sub(_unpacked, text), traced, specs, layout, model)


_PACKED = re.compile(r'dense<"0x([0-9A-Fa-f]+)"> : tensor<([0-9x]+)xi1>')
"""A large constant of booleans, such as a causal mask, as TensorFlow's MLIR writes it."""


def _unpacked(constant: re.Match[str]) -> str:
    """Returns a constant of booleans with a byte for each, as newer versions of MLIR read it, and not a bit."""
    number, packed = math.prod(map(int, constant[2].split("x"))), bytes.fromhex(constant[1])
    if len(packed) != -(-number // 8):
        return constant[0]
    each = np.unpackbits(np.frombuffer(packed, np.uint8), count=number, bitorder="little")
    return f'dense<"0x{each.tobytes().hex()}"> : tensor<{constant[2]}xi1>'


def _specs(source: Source, layout: Layout) -> tuple[list[tf.TensorSpec], Structure]:
    """Returns what a replica is given of a batch, a flat `HostSlice`, and the structure of its data."""
    specs = []
    for column in keras.tree.flatten(source.specs):
        if None in tuple(column.shape[1:]):
            what = f"--topology compiles for examples of one shape, and the data has {tuple(column.shape[1:])}"
            raise UserError(what, "crop or pad them to one size")
        specs.append(tf.TensorSpec((layout.accumulate, layout.max_micro_rows, *column.shape[1:]), column.dtype))
    return [*specs, tf.TensorSpec((layout.accumulate,), tf.int32)], source.specs


def _program(text: str, traced: Any, specs: list[tf.TensorSpec], layout: Layout, model: keras.Model) -> Program:
    """Finds out which argument and which result is which variable; XLA keeps to the order of the function's inputs."""
    owners = [*model.variables, *model.metrics_variables, *keras_internals.state(model.optimizer)]
    handles = {id(v.value.handle): v for v in owners}
    variables = [handles.get(id(tensor), tensor) for tensor in traced.captured_inputs]
    written = set()
    for op in traced.graph.get_operations():
        written |= {tensor.name for tensor in auto_control_deps_utils.get_read_write_resource_inputs(op)[1]}
    inputs = [tensor.name for tensor in traced.inputs]
    changed = [i for i in range(len(specs), len(inputs)) if inputs[i] in written]
    results = len(traced.outputs)
    signature = next(line for line in text.splitlines() if re.search(r"func\.func (public )?@main\(", line))
    known = signature.partition(" -> ")[2].count("tensor<")
    if known != results + len(changed):
        raise RuntimeError(f"the program has {known} results, and not {results} and {len(changed)} variables")
    aliases = [(i, results + n) for n, i in enumerate(changed)]
    return Program(text, layout.max_micro_rows * layout.accumulate, specs, variables, results, aliases)
