"""The compiled functions of models with a step of their own: `train_step`, `test_step`, `compute_loss` and the like.

The model's own step runs on each replica's rows. What it gives to an optimizer, logs, or adds to a mean as one number
is taken as a mean over its examples: it is weighed by the replica's share of the global batch, and summed over the
replicas, gradients before they are clipped.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist.data.batch_layout import Layout, MicroBatch, ReplicaBatch
from tfdist.data.spec import Structure
from tfdist.errors import UserError, one_line
from tfdist.keras_bridge import ema, keras_internals, layer_state, metrics, optimizer_update, preconditions
from tfdist.keras_bridge.keras_internals import inner_optimizer
from tfdist.keras_bridge.loss import divisor
from tfdist.step.batch_loop import CallResult, LogNames, StepOutput, batch_loop, computed_from
from tfdist.step.replica import Replica

_tracing = threading.local()  # replicas are traced in threads


class _Part(NamedTuple):
    """What a replica is of a global batch, while its step is traced."""

    replica: Replica
    share: tf.Tensor  # its part of the examples, a scalar
    rows: MicroBatch
    inside: list[keras.optimizers.Optimizer]  # the optimizer that is applying a sum
    gradients: list[tf.Tensor]  # sums over all replicas that were not applied
    results: dict[int, tuple[Structure, str | list[str]]]  # what metrics returned, and its name, by id
    graph: tf.Graph  # in which the step is traced
    complaints: list[UserError]  # why the step cannot be traced

    def weighed(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a mean over this replica's examples as its part of the mean over all."""
        part = tensor * tf.cast(self.share, tensor.dtype)
        return part if self.rows.present is None else tf.where(self.rows.present, part, tf.zeros_like(part))


def own_step_call(replica: Replica, layout: Layout, method: str, names: LogNames) -> Callable[..., CallResult]:
    """Makes `call(feed, first, last)`, which runs the model's own step on each of these global batches.

    `method`: `train_step` or `test_step`; `names`: is filled in when the function is traced.

    Returns:
      The function. In its results, `sums` are the values of the last batch, the first of which is finite only if the
      loss is, and `metrics` the results of all metrics.
    """

    optimizer = getattr(replica.model, "optimizer", None)
    if method == "train_step" and optimizer is not None:
        optimizer_update.check_methods(optimizer, ("finalize_variable_values",))

    def one(batch: ReplicaBatch, is_last: tf.Tensor) -> StepOutput:
        count = replica.count(layout, batch)
        return StepOutput(run_step(replica, method, replica.micro_batch(layout, batch, count), count, names))

    def call(feed: tuple, first: tf.Tensor, last: tf.Tensor) -> CallResult:
        with replica.tracing(), _over_replicas(replica.model, _apply):
            return batch_loop(replica, layout, None, one)(feed, first, last)

    return tf.function(call, autograph=False, reduce_retracing=True)


def run_step(replica: Replica, method: str, rows: MicroBatch, count: tf.Tensor | int, names: LogNames) -> tf.Tensor:
    """Runs the model's own step on one replica's rows; in replica context, while it is traced.

    Returns [1 + logs]: a number that is finite if the loss is, then the logs that are not results of metrics.
    """
    dtype = tf.float64 if keras.config.floatx() == "float64" else tf.float32
    share = tf.cast(rows.size, dtype) / divisor(count, dtype)
    part = _tracing.part = _Part(replica, share, rows, [], [], {}, tf.compat.v1.get_default_graph(), [])
    try:
        model, replicas = replica.model, replica.distribution.replicas
        with layer_state.restored_without_rows(model, replicas, rows.present, compiled_metrics=True, share=share):
            logs = _logged(part, method, replica.as_keras_gives(rows.data))
        if method == "train_step":
            layer_state.share(model, replica.distribution, rows.present)
        return _combined(part, method, logs, names)
    finally:
        _tracing.part, _tracing.last = None, part


def _logged(part: _Part, method: str, data: Structure) -> object:
    """Returns what a step of the model's own returns.

    One that is a tf.function is traced as the Python function that it was made of. Else it would be a graph by itself,
    kept with tensors of the first trace, in which replicas cannot exchange anything.
    """
    model = part.replica.model
    step = inspect.getattr_static(model, method)
    decorated = isinstance(step, tf.types.experimental.PolymorphicFunction) and method not in vars(model)
    call = functools.partial(step.python_function, model) if decorated else getattr(model, method)
    name = f"{method} of {type(model).__name__}"
    try:
        return call(data)
    except tf.errors.OperatorNotAllowedInGraphError as error:
        if not decorated:
            raise
        what = f"{name} is a tf.function in which Python branches or loops by tensors"
        raise UserError(what, f"use tf.cond and tf.while_loop there ({one_line(error, 100)})") from error
    except Exception as error:
        if part.complaints:  # which TensorFlow may have put into many lines
            raise part.complaints[0] from None
        if isinstance(error, RuntimeError) and "merge_call" in str(error):
            raise UserError(
                f"{name} applies gradients, or synchronizes replicas, inside of tf.cond, tf.while_loop or a "
                "tf.function, where replicas cannot exchange anything",
                "do it outside of these",
            ) from error
        raise


def create_variables(replica: Replica, data: tuple[Structure, ...]) -> bool:
    """Lets layers, compiled metrics and optimizers create their variables as the step calls them; see `prepare`.

    Replicas could not, while they are traced. Its forward passes, which may be unlike `call`, are traced for any number
    of rows. Returns whether all of the step was.
    """

    def measure(*values: tf.Tensor, **_: object) -> None:
        with tf.init_scope():
            measured[:] = [keras.tree.map_structure(lambda t: tf.zeros([n or 1 for n in t.shape], t.dtype), values[:2])]

    def update(_: Callable, optimizer: keras.Optimizer, grads: Structure, variables: Structure = None) -> None:
        is_whole = variables is not None and any(gradient is None for gradient in grads)
        asked.setdefault(id(optimizer), (optimizer, [*variables] if is_whole else [], unbuilt()))

    def gradient(tape: tf.GradientTape, target: tf.Tensor, sources: Structure, *_: object, **__: object) -> Structure:
        """Returns zeros, and None of the last: a step may leave out weights of which there is no gradient."""
        zeros = [tf.zeros_like(tf.convert_to_tensor(v)) for v in keras.tree.flatten(sources)]
        return keras.tree.pack_sequence_as(sources, [*zeros[:-1], None if attempts == 1 and zeros[1:] else zeros[-1]])

    measured = list[tuple[Structure, Structure]]()
    asked = dict[int, tuple[keras.Optimizer, list[keras.Variable], int]]()
    compiled = list(filter(None, [keras_internals.compiled_metrics(replica.model)]))
    spec = lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype)
    unbuilt = lambda: sum(not layer.built for layer in keras_internals.flat_layers(replica.model, False))
    attempts, left, whole = 0, 0, False
    while not whole and unbuilt() and (attempts < 2 or unbuilt() != left):
        attempts, left = attempts + 1, unbuilt()
        asked.clear()
        with (
            replica.distribution.scope(),
            keras.StatelessScope(),  # at whose end the weights are created
            keras_internals.optimizer_updates(update),
            keras_internals.patched((tf.GradientTape, "gradient", lambda theirs: gradient)),
            keras_internals.replaced("update_state", [(metric, measure) for metric in compiled]),
            keras_internals.replaced("result", [(metric, dict) for metric in compiled]),
            contextlib.suppress(Exception),  # of what follows a layer that creates its weights
        ):
            # Then for the rows that there are, of code that asks a shape for their number.
            given = keras.tree.map_structure(spec if attempts == 1 else lambda t: t, replica.as_keras_gives(data))
            tf.function(replica.model.train_step, autograph=False).get_concrete_function(given)
            whole = True
    for targets, outputs in measured:
        with replica.distribution.scope(), contextlib.suppress(ValueError):  # which is told where they are used
            metrics.create_variables(replica.model, targets, outputs)
    for optimizer, variables, missing in asked.values():
        if variables and missing == unbuilt() and not optimizer.built:  # else more of them were created after it
            with replica.distribution.scope():
                optimizer.build(variables)
    return whole and all(optimizer.built for optimizer, *_ in asked.values())


def prepare(replica: Replica, data: tuple[Structure, ...]) -> None:
    """Lets the optimizers create their variables: which ones each updates is known only while the step is traced."""
    distribution, leaves = replica.distribution, keras.tree.flatten(data)
    number = int(leaves[0].shape[0])

    def one(leaves: list[tf.Tensor]) -> tf.Tensor:
        data_of_one = keras.tree.pack_sequence_as(data, leaves)
        rows = MicroBatch(data_of_one, number, number * distribution.replicas, 1, number, None)
        return run_step(replica, "train_step", rows, number * distribution.replicas, LogNames())

    with replica.tracing(), _over_replicas(replica.model, _build):
        traced = lambda leaves: distribution.local(distribution.run(one, (leaves,)))[0]
        # How many rows there are is left open: the step may need others, such as a multiple of three.
        rows = number if distribution.static_shapes else None
        specs = lambda rows: [tf.TensorSpec([rows, *leaf.shape[1:]], leaf.dtype) for leaf in leaves]
        # One that looks at values cannot be traced, and creates the variables when it is run.
        with contextlib.suppress(*([Exception] if replica.model.run_eagerly else [])):
            try:
                tf.function(traced, autograph=False).get_concrete_function(specs(rows))
            except (TypeError, ValueError):  # as of code that asks a shape for their number
                tf.function(traced, autograph=False).get_concrete_function(specs(number))


def recording(model: keras.Model) -> contextlib.AbstractContextManager:
    """Keeps the gradients that the model's own step gives to optimizers, instead of applying them; see `recorded`."""

    def keep(update: "_AskedUpdate") -> None:
        update.part.gradients.extend(g for g in update.summed() if g is not None)

    return _over_replicas(model, keep)


def recorded() -> list[tf.Tensor]:
    """Returns the sums of the gradients of the last step that was run in this replica within `recording`."""
    return _tracing.last.gradients


def _combined(part: _Part, method: str, logs: object, names: LogNames) -> tf.Tensor:
    dtype, model = part.replica.totals, type(part.replica.model).__name__
    if not isinstance(logs, dict):
        raise UserError(f"{method} of {model} must return a dict, got {type(logs).__name__}")
    plain: dict[str, tf.Tensor] = {}
    names.of_metrics = {}
    # As of compiled models, the loss alone must be finite; under another name every log may be it.
    guarded = keras.tree.flatten(logs.get("loss", logs))
    finite = [tf.reduce_sum(tf.cast(tf.convert_to_tensor(leaf), dtype)) for leaf in guarded]
    for name, value in logs.items():
        _, known = part.results.get(id(value), (None, None))
        if known is not None:
            names.of_metrics[name] = known
            continue
        tensor = tf.convert_to_tensor(value)
        if tensor.shape.rank != 0:
            raise UserError(f"{method} logs {name!r} of shape {tensor.shape}", "log one number, or a metric's result")
        results = [value for value, _ in part.results.values()]
        if part.replica.distribution.replicas > 1 and computed_from(tensor, results):
            raise UserError(
                f"{method} of {model} logs {name!r}, which it computes from the result of a metric, of which a replica "
                "has its own",
                "log the metric itself, or use --strategy=default",
            )
        plain[name] = tf.cast(tensor, dtype)
    names.plain = list(plain)
    guard = tf.add_n([part.weighed(v) for v in finite]) if finite else tf.zeros([], dtype)
    values = tf.stack([guard, *(part.weighed(value) for value in plain.values())])
    return part.replica.distribution.all_sum([values])[0]


@contextlib.contextmanager
def _over_replicas(model: keras.Model, handle: Callable) -> Iterator[None]:
    """Lets the step's optimizers see all replicas, while it is traced, and its means count a batch once.

    `handle`: `handle(update)` does something with an `_AskedUpdate` that an optimizer is asked for.
    """
    known = preconditions.optimizers(model)
    averaging = {id(inner_optimizer(o)): inner_optimizer(o).use_ema for o in known}
    constraints: ema.Constraints = {}

    def update(
        theirs: Callable, optimizer: keras.optimizers.Optimizer, grads: Structure, variables: Structure = None
    ) -> None:
        part: _Part | None = getattr(_tracing, "part", None)
        if part is None or part.inside:
            theirs(optimizer, grads, variables)
            return
        if not any(optimizer is o for o in known):
            raise UserError(
                f"train_step uses an optimizer ({optimizer.name!r}) that is not an attribute of the model and would be "
                "missing from its checkpoints",
                "set it in compile()",
            )
        if keras_internals.another_function(part.graph):
            complaint = UserError(
                f"train_step calls optimizer {optimizer.name!r} in a tf.function of its own, in which replicas cannot "
                "exchange gradients",
                "leave tf.function out, since the whole step is compiled",
            )
            part.complaints.append(complaint)
            raise complaint
        variables = None if variables is None else list(variables)
        averages = averaging[id(inner_optimizer(optimizer))]
        handle(_AskedUpdate(part, theirs, optimizer, list(grads), variables, averages, constraints))

    def mean(theirs: Callable, metric: keras.metrics.Mean, values: Structure, sample_weight: Structure = None) -> None:
        part: _Part | None = getattr(_tracing, "part", None)
        if part is not None and part.replica.distribution.replicas > 1 and sample_weight is None:
            values = tf.convert_to_tensor(values)
            if values.shape.rank == 0:  # the batch's mean: with all replicas' parts, it counts once
                sample_weight = part.share
        theirs(metric, values, sample_weight)

    def assign_rate(theirs: Callable, value: tf.Tensor) -> object:
        part: _Part | None = getattr(_tracing, "part", None)
        if part is not None and part.replica.distribution.replicas > 1:
            own = [part.rows.data, *(result for result, _ in part.results.values())]
            if computed_from(tf.convert_to_tensor(value), own):  # of which all replicas would take the first one's
                complaint = UserError(
                    f"train_step of {type(model).__name__} computes the learning rate from the batch, of which each of "
                    f"{part.replica.distribution.replicas} replicas has other rows",
                    "compute it from optimizer.iterations, set it in a callback, or use --strategy=default",
                )
                part.complaints.append(complaint)
                raise complaint
        return theirs(value)

    with contextlib.ExitStack() as changes:
        changes.enter_context(keras_internals.without_reduction())
        rates = keras_internals.rate_variables(known).values()
        watched = [(rate, functools.partial(assign_rate, rate.assign)) for rate in rates]
        changes.enter_context(keras_internals.replaced("assign", watched))
        for optimizer in known:
            base = inner_optimizer(optimizer)
            changes.enter_context(keras_internals.replaced("use_ema", [(base, False)]))
            if averaging[id(base)] and optimizer.built:
                averaged = keras_internals.optimized_variables(base)
                constraints.update(changes.enter_context(ema.unconstrained(averaged)))
        changes.enter_context(keras_internals.optimizer_updates(update))
        changes.enter_context(keras_internals.mean_updates(mean))
        noted = [(metric, _noted(metric)) for metric in model.metrics]
        changes.enter_context(keras_internals.replaced("result", noted))
        yield


def _noted(metric: keras.Metric) -> Callable[[], Structure]:
    """Returns the `result` of a metric, which notes what it returns: that is no mean over a replica's examples."""
    theirs = metric.result

    def result() -> Structure:
        value = theirs()
        part: _Part | None = getattr(_tracing, "part", None)
        if part is not None:
            part.results[id(value)] = value, list(value) if isinstance(value, dict) else metric.name
            if isinstance(value, dict):
                part.results.update({id(entry): (entry, name) for name, entry in value.items()})
        return value

    return result


class _AskedUpdate(NamedTuple):
    """An update that a step asks an optimizer for."""

    part: _Part
    theirs: Callable  # what Keras does, given the next three
    optimizer: keras.optimizers.Optimizer
    gradients: list[tf.Tensor | None]
    variables: list[keras.Variable] | None
    averages: bool  # whether the optimizer keeps averages of the weights
    constraints: ema.Constraints  # those that Keras is kept from

    def summed(self) -> list[tf.Tensor | None]:
        """Returns the gradients of the global batch."""
        dense = [None if g is None else self.part.weighed(tf.convert_to_tensor(g)) for g in self.gradients]
        given = [g for g in dense if g is not None]
        sums = iter(self.part.replica.distribution.all_sum(given) if given else ())  # TensorFlow reduces no empty list
        return [None if g is None else next(sums) for g in dense]


def _apply(update: _AskedUpdate) -> None:
    """Updates with the sum over all replicas."""
    base = inner_optimizer(update.optimizer)
    _build(update)
    counter = keras_internals.counter(base).value
    before = tf.identity(counter)
    gradients = update.summed()
    update.part.inside.append(update.optimizer)
    update.theirs(update.optimizer, gradients, update.variables)
    update.part.inside.clear()
    if update.averages:
        updated = tf.not_equal(before, tf.identity(counter))
        variables = keras_internals.optimized_variables(base)
        ema.add(base, variables, before, updated)
        given = zip(update.gradients, update.variables or variables)
        ema.constrain(update.constraints, [v for g, v in given if g is not None], updated)


def _build(update: _AskedUpdate) -> None:
    """Creates the optimizer's variables, once for all replicas; with averages of the weights if it has them."""
    optimizer, base = update.optimizer, inner_optimizer(update.optimizer)

    def once(strategy: tf.distribute.Strategy) -> None:
        if optimizer.built:
            return
        with keras_internals.replaced("use_ema", [(base, update.averages)]), tf.init_scope(), strategy.scope():
            optimizer.build(update.variables)

    if not optimizer.built:
        tf.distribute.get_replica_context().merge_call(once)
