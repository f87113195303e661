"""The compiled functions of a model: which there are, each made once, and what must be there before."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence

import keras
import tensorflow as tf

from tfdist.data.batch_layout import Layout, unpack
from tfdist.data.structures import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError, one_line
from tfdist.keras_bridge import freezing, keras_internals, layer_state, loss_kinds, metrics, own_steps, preconditions
from tfdist.step import own_step_call
from tfdist.step.batch_loop import batch_loop
from tfdist.step.prediction_call import NO_BATCH as NO_BATCH  # those who run the functions look for it
from tfdist.step.prediction_call import prediction_call
from tfdist.step.replica import Replica, Taken
from tfdist.step.results import CallResult, LastLogs, LogNames, Totals
from tfdist.step.shards.shard_loop import ShardLoop
from tfdist.step.training_call import TrainingOptions, training_call


def evaluation_call(replica: Replica, layout: Layout, losses: int) -> Callable[..., CallResult]:
    """Makes `call(feed, first, last, sums=None)`, which measures these global batches and changes nothing but metrics.

    Args:
      losses: loss values of a batch, the total included.
    """

    def one(batch: Taken, is_last: tf.Tensor) -> tf.Tensor:
        del is_last
        count = replica.count(layout, batch)
        if layout.shards:
            payload = ShardLoop(replica, layout).run(batch, count, False).payload
            return payload.losses(replica.objective.regularization())
        rows = replica.take(layout, batch, count)
        payload, outputs = replica.passes(rows, count, False)
        metrics.update(replica.model, replica.distribution, rows, outputs)
        payload = payload.with_tensors(replica.distribution.all_sum(payload.tensors()))
        return payload.losses(replica.objective.regularization())

    measured = batch_loop(replica, layout, losses, one)

    def call(feed: tuple, first: tf.Tensor, last: tf.Tensor, sums: tf.Tensor | None = None) -> CallResult:
        with replica.tracing():
            return measured(feed, first, last, sums)

    return tf.function(call, autograph=False, reduce_retracing=True)


class Step:
    """Compiled functions for one compiled model under one distribution.

    The functions take many global batches at once: a call lasts long enough to
    hide Python. They are traced once per structure of the data.
    """

    def __init__(self, model: keras.Model, distribution: Distribution):
        self.distribution = distribution
        self.part_names: list[str] = []
        """Names under which Keras logs the single losses; empty for fewer than two."""
        self.output_shape: tuple[int | None, ...] = ()
        """Of the first output, for one example."""
        self.warm: set[int] = set()
        """Ids of the functions that have been called, and so compiled."""
        self._replica = Replica(model, distribution, preconditions.use_xla(model, distribution))
        self._compiled: dict[tuple, Callable] = {}
        self._sample: tuple[Structure, Structure] | None = None
        """Targets and outputs of a few rows, until losses and metrics have been tried on them."""
        self.sample_rows: tuple[Structure, ...] | None = None
        """A few rows of the data, until the model has been checked with them."""
        self.outputs = 0
        """How many the model has."""
        self.agreed: set[tuple] = set()
        """What replicas, or shards, have been found to agree on, see `equivalence_check`."""
        self._adding: list[str] = []
        """The layers that call `add_loss`."""
        self._log_names: dict[str, LogNames] = {}
        self._reset: Callable | None = None
        self._reset_variables: tuple[int, ...] = ()

    @property
    def model(self) -> keras.Model:
        """The model, which the caller keeps alive: a step that did would itself be kept by `step_calls`, for good."""
        return self._replica.model

    @property
    def replica(self) -> Replica:
        """What a replica does in the compiled functions."""
        return self._replica

    @property
    def timed(self) -> bool:
        """Whether the compiled functions can tell what they wait for."""
        return self._replica.timed

    def compiled(
        self,
        kind: str,
        layout: Layout,
        full: bool = False,
        reduce_dtype: str = "float32",
        norm: bool = False,
        factors: tuple[float, ...] = (),
        count: int | None = None,
    ) -> Callable:
        """Returns a compiled function for a layout, made once.

        Args:
          kind: `train`, `test`, `predict` or `predict beside targets`.
          full, reduce_dtype, norm, factors: see `TrainingOptions`.
          count: examples of each global batch, where shapes are static; None for those of the layout.
        """
        if count is not None:
            layout = dataclasses.replace(layout, batch=count)
        # With shards one function computes batches of any length: whether a call has full ones alone depends on time.
        options = TrainingOptions(full and not layout.shards, reduce_dtype, norm, factors)
        key = (kind, layout, options, self._replica.bare)
        if key not in self._compiled:
            if not kind.startswith("predict"):
                self._check(layout, kind)
            losses = 1 + len(self.part_names)
            match kind:
                case "train" | "test" if self.own_step(kind):
                    names = self._log_names.setdefault(kind, LogNames())
                    self._compiled[key] = own_step_call.own_step_call(self._replica, layout, f"{kind}_step", names)
                case "train":
                    self._compiled[key] = training_call(self._replica, layout, losses, options)
                case "test":
                    self._compiled[key] = evaluation_call(self._replica, layout, losses)
                case "predict":
                    self._compiled[key] = prediction_call(self._replica, layout)
                case "predict beside targets":
                    self._compiled[key] = prediction_call(self._replica, layout, beside_targets=True)
        return self._compiled[key]

    def data_is(self, bare: bool) -> None:
        """Says in which form a step of the model's own wants its data, see `Replica.bare`."""
        self._replica.bare = bare

    def own_step(self, kind: str) -> str:
        """Returns the method by which the model replaces Keras' step of a kind, `train` or `test`; empty for none."""
        return own_steps.replaced(self.model, own_steps.TRAINING if kind == "train" else own_steps.EVALUATION)

    def totals(
        self, kind: str, sums: Sequence[float] = (), examples: float = 0.0, handed_on: bool = False
    ) -> Totals | LastLogs:
        """Returns what turns the results of calls into logs.

        Args:
          kind: `train` or `test`.
          sums, examples: what an interrupted epoch has come to.
          handed_on: see `Totals`.
        """
        if self.own_step(kind):
            return LastLogs(self._log_names.setdefault(kind, LogNames()), examples)
        return Totals(self.part_names, sums, examples, handed_on)

    def prepare_training(self) -> None:
        """Creates what only an update of the model's own creates: the variables of its optimizers."""
        if self.own_step("train") and self.sample_rows is not None:
            with self.distribution.peers.during("call"):
                own_step_call.prepare(self._replica, self.sample_rows)

    def check_batches(self, kind: str, layout: Layout, counts: Iterable[int]) -> None:
        """Refuses what cannot be computed of batches of these sizes, before the first of them is compiled.

        Raises:
          UserError: naming the loss, metric or layer.
        """
        for count in counts if layout.static or layout.taken_apart else ():
            self._check(dataclasses.replace(layout, batch=count), kind)

    def _check(self, layout: Layout, kind: str) -> None:
        """Refuses losses and metrics that cannot be computed from the parts in which a batch is laid out."""
        own = self.own_step(kind)
        if own and (layout.accumulate > 1 or layout.shards):
            parts, given = "virtual replicas", f"virtual_replicas={layout.replicas}"
            if layout.accumulate > 1:
                parts, given = "micro-batches", layout.taken_apart
            raise UserError(
                f"{type(self.model).__name__} has its own {own}, whose sums over {parts} tfdist cannot know: "
                f"leave out {given}"
            )
        if layout.replicas * layout.accumulate == 1:
            return
        filled = layout.static and not layout.even and layout.batch > layout.replicas * layout.accumulate
        if own and filled:
            raise UserError(
                f"{type(self.model).__name__} has its own {own}, which would see rows that are filled up: make the "
                f"batch size and the examples of an epoch divisible by {layout.replicas}, the number of replicas"
            )
        if self._sample is not None:
            y, y_pred = self._sample
            self._sample = None
            self._replica.objective.look(y, y_pred)
            metrics.look(self.model, y, y_pred)
        if own:
            metrics.check_summed(self.model, own)
            return
        self._replica.objective.check(layout.taken_apart)
        metrics.check(self.model, layout.taken_apart)
        if filled and self._replica.exchanges(layout.accumulate):
            preconditions.filled(self.model, self._adding)

    def reset(self) -> None:
        """Resets all metrics; anew for each set of variables, since a metric may create its own at its first update."""
        variables = tuple(id(v) for metric in self.model.metrics for v in metric.variables)
        if self._reset is None or variables != self._reset_variables:

            def reset() -> None:  # by name: TPUs give the name of a function to what is computed in it
                metrics.reset(self.model, self.distribution)

            self._reset = tf.function(reset, autograph=False)
            self._reset_variables = variables
        with self.distribution.peers.during("call"):  # it may sum over workers what it resets
            self._reset()

    def build(self, data: tuple[Structure, ...], bare: bool, outputs_only: bool = False) -> None:
        """Creates what Keras creates lazily (weights, metric and optimizer variables), under the scope.

        Args:
          data: (x, y, weight) of at least one row; losses and metrics are tried on `loss_kinds.ROWS`, if there are.
          bare: see `Replica.bare`.
          outputs_only: the model need not be compiled, nor `data` have targets.

        Raises:
          UserError: targets, losses or metrics that do not fit the outputs.
        """
        model = self.model
        if not outputs_only:
            preconditions.created_in_scope(model, self.distribution)
        x, y, _ = unpack(_rows(data, keras_internals.fixed_batch(model) or 1))
        with self.distribution.scope():
            outputs = self._outputs(x)
            if outputs_only:
                self._replica.bare, self.sample_rows = bare, _rows(data, loss_kinds.ROWS)
                return
            if outputs is not None:
                self._create(y, outputs)
        # Anew: which variables have a regulariser is known only now.
        self._replica = Replica(model, self.distribution, self._replica.jit)
        self._replica.bare = bare
        self.sample_rows = _rows(data, loss_kinds.ROWS)
        if y is not None and outputs is not None:
            self._sample = unpack(self.sample_rows)[1], _rows(_rows(outputs, 1), loss_kinds.ROWS)
        if self.distribution.replicas > 1 and self._sample is not None:
            self._check(Layout(loss_kinds.ROWS, self.distribution.replicas, 1), "test")  # before a state is restored

    def _outputs(self, x: Structure) -> Structure:
        """Returns the model's outputs; None of a model that is only trained, by a step of its own."""
        model = self.model
        frozen = {id(v) for v in freezing.fixed(model)}  # which no call changes, and which may be gigabytes
        kept = {id(v): v for v in [*model.non_trainable_variables, *model.metrics_variables] if id(v) not in frozen}
        counted = layer_state.attribute_variables(keras_internals.flat_layers(model), tf.Variable)
        static = self.distribution.static_shapes
        try:
            # This call is none of the user's. A TPU would compile each of its operations by itself.
            with (
                layer_state.unchanged([*kept.values(), *counted]),
                tf.device("CPU:0") if static else contextlib.nullcontext(),
            ):
                outputs = self._replica.forward(x, training=False)
                if static:
                    preconditions.static(model, lambda rows: self._replica.forward(rows, training=False), x)
        except Exception as error:
            # Its own step may call something else, where there is no `call`, or give it all that fit was given.
            if isinstance(error, UserError) or not self.own_step("train"):
                raise
            return None
        self._adding = keras_internals.adding_losses(model)
        for layer in keras_internals.flat_layers(self.model):
            if getattr(layer, "stateful", False):
                layer.reset_state()  # nor what its state was created with
        leaves = keras.tree.flatten(outputs)
        self.outputs, self.output_shape = len(leaves), tuple(leaves[0].shape)
        return outputs

    def _create(self, y: Structure, outputs: Structure) -> None:
        """Creates the variables of metrics and optimizer for these targets and outputs of a row."""
        model = self.model
        own = self.own_step("train")
        try:
            if not own:
                losses = keras.tree.flatten(getattr(model, "loss", None))
                counted = layer_state.attribute_variables(losses, keras.Variable, tf.Variable)
                with layer_state.unchanged(counted):  # keras_internals.matched_losses calls them once
                    self.part_names = self._replica.objective.names(y, outputs)
            metrics.create_variables(model, y, outputs)
        except ValueError as error:
            raise UserError(f"metrics do not fit the outputs: {one_line(error)}") from error
        optimizer = model.optimizer
        if optimizer is not None and not optimizer.built and not own:
            optimizer.build(model.trainable_variables)


def _rows(values: Structure, number: int) -> Structure:
    """Returns so many rows of tensors, again and again the first ones where there are fewer."""
    return keras.tree.map_structure(lambda t: tf.gather(t, tf.range(number) % tf.shape(t)[0]), values)
