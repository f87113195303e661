"""Rematerialization: activations are computed again in the backward pass, with the same random numbers.

It saves the memory of what lies within a function, for the time of another forward pass (Chen et al., 2016,
arXiv:1604.06174). `tf.recompute_grad`, and with it `keras.remat` and `keras.RematScope`, draws other dropout masks in
the backward pass, averages the statistics of BatchNormalization twice, and fails in a graph for functions with keyword
arguments. While a step is traced, `recompute` takes its place, also for what was wrapped before.
"""

import collections
import contextlib
import itertools
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals, layer_state


def remat(layer: keras.Layer) -> None:
    """Lets a layer, or each block of a model, compute its activations again in the backward pass, for less memory.

    Gradients, random numbers and the state of layers are what they are without; a step takes up to a third longer. A
    Sequential or Functional model of N layers is divided into about sqrt(N) blocks, at the fewest tensors; of any other
    model, each layer that holds layers is a block. It counts in the next `fit`, and is not saved with the model.

    Args:
      layer: a layer or model that is part of the trained model, or is that model.

    Raises:
      UserError: if it is no layer, or a model in which no layer holds others.
    """
    if not isinstance(layer, keras.Layer):
        raise UserError(f"tfdist.remat got {type(layer).__name__}", "give a layer or a model")
    inner_layers = lambda of: keras_internals.flat_layers(of, include_self=False)
    is_graph = lambda model: isinstance(model, keras.Sequential) or keras_internals.graph_of(model) is not None
    blocks = [layer]
    if isinstance(layer, keras.Model) and not is_graph(layer):
        blocks = [inner for inner in keras_internals.flat_layers(layer, False, False) if inner_layers(inner)]
        if not blocks:
            what = f"no layer of {type(layer).__name__} {layer.name!r} holds other layers"
            raise UserError(f"tfdist.remat found no block: {what}", "give it single layers")
    for block in [*blocks, *filter(is_graph, inner_layers(layer))]:
        keras_internals.set_remat(block)


class _Pass(keras.StatelessScope):
    """Holds back what a function writes, and lets each pass of it read what the first one has read."""

    def __init__(self, before: dict[int, tf.Tensor], twice: list[str]):
        super().__init__(collect_losses=True)
        self.before, self.twice = before, twice  # variables by their ids; weights, seeds of random layers, averages
        self.read: set[int] = set()  # TensorFlow's variables behind them, by their ids
        self.written: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self.graph = tf.compat.v1.get_default_graph()

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        value = super().get_current_value(variable)
        if value is None:
            value = self.before.get(id(variable))
        if value is None and self.original_scope is not None:
            value = self.original_scope.get_current_value(variable)
        if value is None and (held := keras_internals.uncast(variable)) is not None:
            with self.graph.as_default():  # and not in the branch or loop that reads it first
                value = self.before[id(variable)] = tf.convert_to_tensor(held)
            self.read.update(map(id, (held, *keras_internals.copies(held))))
        return value

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        if value.graph is not self.graph:
            self.twice.append(f"writes {variable.path} within a branch or a loop")
        value = tf.stop_gradient(value)  # as what is read from a variable tells nothing of how that was computed
        if variable.trainable:  # whose gradient is that of all its reads
            before = self.get_current_value(variable)
            value += before - tf.stop_gradient(before)
        super().add_update((variable, value))
        self.written[id(variable)] = variable, value


class _Tracing(threading.local):
    """What is being traced for one replica, each in a thread of its own."""

    inside = False  # something that is computed again, within which all else is, too
    graph: keras.Model | None = None  # a Functional model, of which each block is computed again, and not the whole


_tracing = _Tracing()
_Step = collections.namedtuple("_Step", ("model", "xla", "twice"))
"""A step that is being traced: its model, whether XLA compiles it, and what would wrongly happen twice."""
_step: _Step | None = None


@contextlib.contextmanager
def supported(model: keras.Model, xla: bool) -> Iterator[None]:
    """Lets `tf.recompute_grad` be `recompute`, within it; a step of a model is traced, which XLA compiles or not.

    Raises:
      UserError: after it, for random operations of TensorFlow, and writes that would happen twice.
    """
    twice: list[str] = []
    try:
        with keras_internals.patched((sys.modules[__name__], "_step", lambda _: _Step(model, xla, twice))):
            yield
    except Exception as error:
        if twice and "is out of scope and cannot be used here" in str(error):
            twice.append("reads weights in a tf.function")
        if not any(twice):  # which lets TensorFlow fail with something else
            raise
    drawing = layer_state.drawing(layer_state.kinds_of(tf.compat.v1.get_default_graph())) if twice else []
    if found := [*(f"draws by TensorFlow's {kind}" for kind in drawing), *filter(None, twice)]:
        raise UserError(
            f"the model {found[0]}, and computes parts of itself again in the backward pass, where that would recur",
            "draw by keras.random with a SeedGenerator, write weights outside of branches, or leave remat out there",
        )


def _call(f: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    owner = getattr(f, "__self__", None)
    if _step is None and not isinstance(owner, keras.Layer) and not kwargs:
        return NotImplemented
    # Where Keras builds, exports or predicts by itself, TensorFlow would draw other masks, and fails for keywords.
    if _step is None or _tracing.inside or tf.executing_eagerly():
        return f(*args, **kwargs)
    graph = keras_internals.graph_of(owner)
    if graph is None:
        return recompute(_step, f, args, kwargs)
    with keras_internals.replaced("graph", [(_tracing, graph)]):
        return f(*args, **kwargs)


def _run(nodes: list[Any], known: dict[int, Any], kept: set[int], run_node: Callable[..., None]) -> None:
    for block, sources, results in _blocks(nodes, kept):

        def computed(*tensors: Any, block: list = block, sources: list = sources, results: list = results) -> list:
            inner = dict(zip(sources, tensors))
            for node in block:
                run_node(node, inner)
            return [inner[key] for key in results]

        inputs = tuple(known[key] for key in sources)
        step = None if any(_in_blocks(node) for node in block) else _step
        known.update(zip(results, recompute(step, computed, inputs, {}) if step else computed(*inputs)))


keras_internals.answer_rematerialization(_call, _run, lambda graph: _tracing.graph is graph)


def _in_blocks(node: Any) -> bool:
    """Returns whether a node of a Functional model is such a model, whose own blocks are computed again."""
    return keras_internals.graph_of(node.operation) is not None and bool(keras_internals.remat_mode(node.operation))


def _blocks(nodes: list[Any], kept: set[int]) -> list[tuple[list[Any], list[int], list[int]]]:
    """Divides the nodes of a Functional model, in their order, into about as many blocks as each has nodes.

    Returns:
      For each block its nodes, and the ids of the tensors that it takes from before, and leaves to what follows or are
      `kept`, as the model returns them.
    """
    count, size = len(nodes), max(1, round(math.sqrt(len(nodes))))
    made = {id(tensor): i for i, node in enumerate(nodes) for tensor in node.outputs}
    last = {id(tensor): i for i, node in enumerate(nodes) for tensor in node.input_tensors}
    crossing = [[key for key, use in last.items() if made.get(key, -1) < end <= use] for end in range(count + 1)]
    alone = {end for i, node in enumerate(nodes) if _in_blocks(node) for end in (i, i + 1)}
    ends = [0]
    while (begin := ends[-1]) < count:
        end = count
        if count - begin > size:  # elsewhere than after `size` nodes if fewer tensors are kept there
            possible = range(begin + max(1, size // 2), min(begin + size + size // 2, count - 1) + 1)
            end = min(possible, key=lambda end: (len(crossing[end]), abs(end - begin - size)))
        ends.append(min([end, *(other for other in alone if other > begin)]))
    blocks = []
    for begin, end in itertools.pairwise(ends):
        taken = {id(tensor) for node in nodes[begin:end] for tensor in node.input_tensors}
        within = [id(tensor) for node in nodes[begin:end] for tensor in node.outputs]
        results = [key for key in within if last.get(key, count) >= end or key in kept]
        blocks.append((nodes[begin:end], [key for key in crossing[begin] if key in taken], results))
    return blocks


def recompute(step: _Step, f: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Returns `f(*args, **kwargs)`, of which the backward pass keeps arguments and variables, in a step."""
    step.twice.append("")  # something is computed again
    given = keras.tree.flatten((args, kwargs))
    if any(isinstance(leaf, tf.RaggedTensor | tf.SparseTensor | tf.IndexedSlices) for leaf in given):
        return f(*args, **kwargs)
    places = [i for i, leaf in enumerate(given) if tf.is_tensor(leaf)]
    masks = [getattr(given[i], keras_internals.MASK, None) for i in places]
    states = [keras_internals.call_state(), (layer_state.traced, dict(vars(layer_state.traced)))]

    def run(tensors: Sequence[tf.Tensor], before: dict[int, tf.Tensor]) -> tuple[Any, list[tf.Tensor], _Pass]:
        leaves = list(given)
        for place, tensor, mask in zip(places, tensors, masks):
            leaves[place] = tensor
            if mask is not None:
                setattr(tensor, keras_internals.MASK, mask)
        own_args, own_kwargs = keras.tree.pack_sequence_as((args, kwargs), leaves)
        with keras_internals.replaced("inside", [(_tracing, True)]), _Pass(before, step.twice) as done:
            outputs = f(*own_args, **own_kwargs)
            leaves = [leaf for leaf in keras.tree.flatten(outputs) if tf.is_tensor(leaf)]
            leaves += filter(tf.is_tensor, map(keras_internals.logits, leaves))
            leaves = [*map(tf.identity, leaves)]  # also of a weight, or a constant that was made before
        return outputs, leaves, done

    inputs, before = [tf.identity(given[i]) for i in places], dict[int, tf.Tensor]()
    begin = len(tf.compat.v1.get_default_graph().get_operations())
    with tf.GradientTape() as watching:
        outputs, leaves, done = run(inputs, before)
    once = _made_since(begin, inputs)
    if any(op.type.startswith(("Assign", "ResourceScatter")) or op.type in ("If", "While", "Case") for op in once):
        step.twice.append("writes a variable of TensorFlow that is none of Keras")
    if any(id(variable) not in done.read for variable in watching.watched_variables()):
        step.twice.append("trains variables of TensorFlow that are none of Keras, or that a tf.function reads")
    results = [*leaves, *done.losses]
    is_differentiable = lambda tensor: tensor.dtype.is_floating or tensor.dtype.is_complex
    # Numbers from before, besides those given: a function may close over some.
    sources = [*inputs, *before.values()]
    made = {op.name for op in once if op.type != "Placeholder"} | {tensor.op.name for tensor in sources}
    others = {tensor.name: tensor for op in once for tensor in op.inputs if tensor.op.name not in made}
    captured = [*filter(is_differentiable, others.values())]
    differentiable = [i for i, result in enumerate(results) if is_differentiable(result)]

    @tf.custom_gradient
    def linked(*_: tf.Tensor) -> tuple[list[tf.Tensor], Callable]:
        def backward(*gradients: tf.Tensor) -> list[tf.Tensor | None]:
            upstream = [gradients[i] for i in differentiable]
            again = _once_there(upstream, sources, step.xla)
            with tf.GradientTape() as tape, contextlib.ExitStack() as calling:
                for owner, values in states:
                    for name, value in values.items():
                        calling.enter_context(keras_internals.replaced(name, [(owner, value)]))
                tape.watch([*filter(is_differentiable, again), *captured])
                begin = len(tf.compat.v1.get_default_graph().get_operations())
                _, leaves, done = run(again[: len(inputs)], dict(zip(before, again[len(inputs) :])))
                new = _made_since(begin, again)
                if {tensor.name for op in new for tensor in op.inputs} & {tensor.name for tensor in sources}:
                    step.twice.append("reads weights in a tf.function")
                kinds = lambda ops: [op.type for op in ops if not _NOT_COMPARED.fullmatch(op.type)]
                if kinds(once) != kinds(new):
                    step.twice.append("computes something else when it is called again, by a flag or an unseeded draw")
                targets = [[*leaves, *done.losses][i] for i in differentiable]
            found = tape.gradient(targets, [*again, *captured], upstream)
            return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in found]

        return [tf.identity(result) for result in results], backward

    with keras_internals.unregistered_gradients():
        results = linked(*sources, *captured)
    for variable, value in done.written.values():
        variable.assign(value)
    for loss, result in zip(done.losses, results[len(leaves) :]):
        keras_internals.loss_owner(step.model, loss).add_loss(result)
    returned = [leaf for leaf in keras.tree.flatten(outputs) if tf.is_tensor(leaf)]
    of_logits = iter(results[len(returned) :])
    for i, leaf in enumerate(returned):
        if hasattr(leaf, keras_internals.LOGITS):
            setattr(results[i], keras_internals.LOGITS, next(of_logits))
        elif keras_internals.logits(leaf) is not None:  # of which a loss looks at the kind of its operation
            results[i] = getattr(tf.nn, leaf.op.type.lower())(next(of_logits))
        if (mask := getattr(leaf, keras_internals.MASK, None)) is not None:
            setattr(results[i], keras_internals.MASK, mask)
    remaining = iter(results)
    return keras.tree.map_structure(lambda leaf: next(remaining) if tf.is_tensor(leaf) else leaf, outputs)


def _made_since(number: int, of_replica: list[tf.Tensor]) -> list[tf.Operation]:
    """Returns the operations of the graph, but for so many, on a replica's device: replicas are traced by turns."""
    device = lambda thing: thing.device.rpartition("/")[2]
    devices = {*map(device, of_replica)} or {""}
    made = tf.compat.v1.get_default_graph().get_operations()[number:]
    return made if "" in devices else [op for op in made if device(op) in devices]


_NOT_COMPARED = re.compile(
    "Const|Identity|NoOp|Placeholder|ReadVariableOp"  # of variables, and tensors made before, which are read once alone
    "|(Stateless)?(If|While|Case)|.*PartitionedCall|ZerosLike|.*TensorList.*"  # which a gradient rewrites
)


def _once_there(gradients: list[tf.Tensor], tensors: list[tf.Tensor], xla: bool) -> list[tf.Tensor]:
    """Returns tensors with the same values, which are there no sooner than gradients.

    Else a compiler would compute nothing again, and keep what the forward pass has computed of these tensors.
    """
    with tf.control_dependencies(gradients):
        same = [tf.identity(tensor) for tensor in tensors]
    if not xla or not gradients:
        return same
    # XLA knows no control dependencies, but of no number that it equals itself. A gradient of NaN stays one.
    first = tf.reduce_max(tf.reshape(gradients[0], [-1])[:1])
    return [tf.where(tf.equal(first, first), tensor, tf.zeros_like(tensor)) for tensor in same]
