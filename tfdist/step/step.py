"""The compiled functions of a model, each made once, and what must exist before the first is compiled."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.config.messages import logger
from tfdist.data.batch_layout import Layout, unpack
from tfdist.data.sources import Source
from tfdist.data.spec import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError, one_line
from tfdist.keras_bridge import keras_internals, layer_state, metrics, preconditions, setups
from tfdist.keras_bridge.loss import SAMPLE_ROWS
from tfdist.step import own_step
from tfdist.step.batch_loop import LastLogs, LogNames, Totals
from tfdist.step.functions import TrainingOptions, evaluation_call, prediction_call, training_call
from tfdist.step.replica import Replica


class Step:
    """The compiled functions of a compiled model under one distribution, each traced once per structure of data.

    They take many global batches at once: a call lasts long enough to hide Python.
    """

    def __init__(self, model: keras.Model, distribution: Distribution):
        # The method by which the model replaces Keras' step of a kind; empty for none.
        self.own_steps = {
            "train": preconditions.replaced(model, preconditions.TRAINING),
            "test": preconditions.replaced(model, preconditions.EVALUATION),
        }
        self.distribution = distribution
        # Whether its own step creates variables as it goes; it may count in Python how often it is run.
        self._eagerly = bool(self.own_steps["train"]) and model.run_eagerly and distribution.replicas == 1
        self._prepared = False  # whether the optimizers of its own step have their variables
        self.part_names: list[str] = []  # names under which Keras logs the single losses; empty for fewer than two
        self.output_shape: tuple[int | None, ...] = ()  # of the first output, for one example
        self.by_rows = False  # whether an output of an example, or its shape, depends on the number of examples
        self.outputs = 0  # number of outputs of the model
        self.warm: set[int] = set()  # ids of the functions that have been called, and so compiled
        self.replica = Replica(model, distribution, preconditions.use_xla(model, distribution))
        self.sample_rows: tuple[Structure, ...] | None = None  # a few rows of the data
        self.checked: dict[tuple, Any] = {}
        """By comparison and entries of rows: what has been passed of `equivalence_check`, and what repeats that."""
        self.repeats: dict[str, tuple[int, int, int, int]] = {}
        """By kind, of repeated checks: calls, batches in them, and how many when last checked, and with all rows."""
        self.more_rows = SAMPLE_ROWS  # of code of the user's own
        self.most_rows = 2**31 - 1  # for which there is memory, as far as known
        self._first: tuple[Structure, ...] = ()  # the first batch of a stream
        # Targets and outputs of a few rows, until losses and metrics have been classified by them.
        self._sample: tuple[Structure, Structure] | None = None
        self._adding: list[str] = []  # the layers that call `add_loss`
        self._compiled: dict[tuple, Callable] = {}
        kinds = ("predict", *("train", "test") * bool(model.compiled))
        self.runs_own = {kind: setups.runs_own(model, kind) for kind in kinds}  # whether some of the code is the user's
        self._log_names: dict[str, LogNames] = {}
        self._reset: tuple[tuple[int, ...], Callable, Callable] = ((), lambda: None, dict)

    model = property(lambda self: self.replica.model)
    """The model, which the caller keeps alive: a strong reference here would keep it in `step_calls` forever."""

    def compiled(
        self, kind: str, layout: Layout, options: TrainingOptions | None = None, count: int | None = None
    ) -> Callable:
        """Returns a compiled function for a layout, made once.

        Args:
          kind: `train`, `test`, `predict` or `predict beside targets`.
          options: of a training, None for those that are the default.
          count: examples of each global batch, where shapes are static; None for those of the layout.
        """
        if count is not None:
            layout = dataclasses.replace(layout, batch=count)
        # Of virtual replicas one function computes batches of any length: the end of a call depends on time.
        # Code of the user's own may ask a shape how many rows there are, as `EquivalenceProbe` notes.
        own = kind == "train" or self.runs_own[kind.split()[0]]
        layout = dataclasses.replace(layout, full=layout.full and own and not layout.virtual)
        if options is None or self.own_steps.get(kind):  # which no option changes
            options = TrainingOptions()
        key = (kind, layout, options, self.replica.bare)
        if key not in self._compiled:
            if not kind.startswith("predict"):
                self._check(layout, kind)
            losses = 1 + len(self.part_names)
            call: Callable
            match kind:
                case "train" | "test" if self.own_steps[kind]:
                    names = self._log_names.setdefault(kind, LogNames())
                    call = own_step.own_step_call(self.replica, layout, f"{kind}_step", names)
                case "train":
                    call = training_call(self.replica, layout, losses, options)
                case "test":
                    call = evaluation_call(self.replica, layout, losses)
                case _:
                    call = prediction_call(self.replica, layout, with_targets=kind != "predict")
            self._compiled[key] = call
        return self._compiled[key]

    def totals(self, kind: str, sums: Sequence[float] = (), examples: float = 0.0) -> Totals:
        """Returns what turns the results of calls into logs; `sums` and `examples` are of an interrupted epoch."""
        if self.own_steps[kind]:
            return LastLogs(self.model, self._log_names.setdefault(kind, LogNames()), examples)
        return Totals(self.model, self.distribution, self.part_names, sums, examples)

    def prepare_training(self) -> None:
        """Creates what only an update of the model's own creates: the variables of its optimizers."""
        if self._eagerly:
            if self.model.trainable_variables and self.model.optimizer and not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)
        elif self.own_steps["train"] and self.sample_rows is not None and not self._prepared:
            with self.distribution.peers.during("call"):
                own_step.prepare(self.replica, self.sample_rows)
            self._prepared = True
        if not self.model.trainable_variables and self.model.built:  # Keras goes on there, too
            logger.info("WARNING: the model has no trainable weights: no update changes it")

    def check_batches(self, kind: str, layout: Layout, counts: Iterable[int]) -> None:
        """Refuses what cannot be computed of batches of these sizes, before the first of them is compiled."""
        for count in counts if layout.static or layout.split_by else ():
            self._check(dataclasses.replace(layout, batch=count), kind)

    def _check(self, layout: Layout, kind: str) -> None:
        """Refuses losses and metrics that cannot be computed from the slices of a batch."""
        model, own, split_by = self.model, self.own_steps[kind], layout.split_by
        if own and (layout.accumulate > 1 or layout.virtual):
            parts = "micro-batches" if layout.accumulate > 1 else "virtual replicas"
            what = f"{type(model).__name__} has its own {own}, whose sums over {parts} tfdist cannot know"
            raise UserError(what, f"leave out {split_by or f'virtual_replicas={layout.replicas}'}")
        if layout.replicas * layout.accumulate == 1:
            return
        padded = layout.static and not layout.even and layout.batch > layout.replicas * layout.accumulate
        if own and padded:
            raise UserError(
                f"{type(model).__name__} has its own {own}, which would see rows that are filled up",
                "make the batch size and the examples of an epoch divisible by "
                f"{layout.replicas}, the number of replicas",
            )
        if self._sample is not None:
            y, y_pred = self._sample
            self._sample = None
            # A step of its own may give the loss some of the outputs only.
            with contextlib.suppress(*([UserError] if self.own_steps["train"] else [])):
                self.replica.objective.classify(y, y_pred)
            metrics.classify(model, y, y_pred)
        if own:
            for metric in metrics.whole_metrics(model):
                whose = f"{own} of {type(model).__name__} shows it those of the replicas"
                what = f"metric {metric.name!r} does not add up over parts of a batch, and {whose}"
                raise UserError(what, "use --strategy=default, or leave the metric out")
            return
        self.replica.objective.check(split_by)
        metrics.check(model, split_by)
        if padded and self.replica.exchanges(layout.accumulate):
            preconditions.padded(model, self._adding)

    def reset(self) -> None:
        """Resets all metrics; anew for each set of variables, since a metric may create its own at its first update."""
        variables = tuple(id(v) for metric in self.model.metrics for v in metric.variables)
        if variables != self._reset[0]:

            def reset() -> None:  # by name: TPUs give the name of a function to what is computed in it
                metrics.reset(self.model, self.distribution)

            results = lambda own: metrics.results(self.model, self.distribution, own)
            self._reset = variables, *(tf.function(function, autograph=False) for function in (reset, results))
        metrics.count_reset(self.model)
        with self.distribution.peers.during("call"):  # it may sum over workers what it resets
            self._reset[1]()

    def results(self, kind: str) -> dict[str, tf.Tensor]:
        """Returns the results of all metrics since they were reset, as in `CallResult`."""
        with self.distribution.peers.during("call"):
            return self._reset[2](bool(self.own_steps[kind]))

    def build(
        self, data: tuple[Structure, ...], bare: bool | None, outputs_only: bool, whole: Callable[[], tuple]
    ) -> None:
        """Creates what Keras creates lazily (weights, metric and optimizer variables), under the scope.

        Args:
          data: (x, y, weight) of at least one row; losses and metrics are tried on `SAMPLE_ROWS`, if there are.
          bare: see `Replica.bare`.
          outputs_only: the model need not be compiled, nor `data` have targets.
          whole: returns the rows of a batch.
        """
        model = self.model
        if not outputs_only:
            preconditions.created_in_scope(model, self.distribution)
        if not outputs_only and self.own_steps["train"] and not self._eagerly:
            self.replica.bare = bare
            rows = _rows(data, keras_internals.fixed_batch(model) or SAMPLE_ROWS)
            self._prepared = own_step.create_variables(self.replica, rows)
        x, y, _ = unpack(_rows(data, keras_internals.fixed_batch(model) or 1))
        with self.distribution.scope():
            try:
                outputs = self._outputs(x)
                self.by_rows = outputs is not None and self._depends_on_rows(x, outputs)
            except tf.errors.InvalidArgumentError:  # which a single row may cause, where rows make pairs
                self.by_rows = True
            if self.by_rows:
                x, y, _ = unpack(whole())
                outputs = self._outputs(x)
                self.output_shape = (None,)
            if outputs_only:
                self.replica.bare, self.sample_rows = bare, _rows(data, SAMPLE_ROWS)
                return
            if outputs is not None:
                self._create(y, outputs)
        # Anew: which variables have a regularizer is known only now.
        self.replica = Replica(model, self.distribution, self.replica.jit)
        self.replica.bare = bare
        self.sample_rows, self._first = _rows(data, SAMPLE_ROWS), data
        if y is not None and outputs is not None and not self.by_rows:
            self._sample = unpack(self.sample_rows)[1], _rows(_rows(outputs, 1), SAMPLE_ROWS)
        if self.distribution.replicas > 1 and self._sample is not None:
            self._check(Layout(SAMPLE_ROWS, self.distribution.replicas, 1), "test")  # before a state is restored

    def rows_of(self, source: Source, number: int = SAMPLE_ROWS) -> tuple[Structure, ...]:
        """Returns the sample rows, as far as the source has such; or its own, if it has weights or targets besides.

        `number`: more than `SAMPLE_ROWS` are of the source, or of the first batch of a stream, which is read once.
        """
        known = self.sample_rows or ()
        if source.entries <= len(known):
            if number == SAMPLE_ROWS:
                return known[: source.entries]
            if source.size is None and self._first:
                return spread_over(self._first[: source.entries], number)
        return spread_over(source.spread_rows(number), number)

    def _depends_on_rows(self, x: Structure, outputs: Structure) -> bool:
        """Returns whether other numbers of rows give outputs of other shapes, as a matrix of their similarities."""
        symbolic = getattr(self.model, "outputs", None)  # of a graph of layers
        known = symbolic and None not in [size for tensor in symbolic for size in tensor.shape[1:]]
        if known or keras_internals.stateful_layers(self.model) or keras_internals.fixed_batch(self.model):
            return False
        pairs = zip(keras.tree.flatten(outputs), keras.tree.flatten(self._outputs(_rows(x, 2))))
        return any(one.shape[1:] != two.shape[1:] for one, two in pairs)

    def _outputs(self, x: Structure) -> Structure:
        """Returns the model's outputs; None of a model that is only trained, by a step of its own."""
        model = self.model
        frozen = set(map(id, keras_internals.fixed_variables(model)))  # may be gigabytes
        kept = {id(v): v for v in [*model.non_trainable_variables, *model.metrics_variables] if id(v) not in frozen}
        static = self.distribution.static_shapes
        try:
            # This call is none of the user's. A TPU would compile each of its operations by itself.
            with layer_state.unchanged([*kept.values()]), tf.device("CPU:0") if static else contextlib.nullcontext():
                outputs = self.replica.forward(x, training=False)
                if static:
                    preconditions.static(model, lambda rows: self.replica.forward(rows, training=False), x)
        except Exception as error:
            # Its own step may call something else, where there is no `call`, or give it all that fit was given.
            if isinstance(error, UserError) or not self.own_steps["train"]:
                if misfit := preconditions.input_misfit(error):
                    raise misfit from error
                raise
            return None
        self._adding = keras_internals.adding_losses(model)
        leaves = keras.tree.flatten(outputs)
        self.outputs, self.output_shape = len(leaves), tuple(leaves[0].shape)
        return outputs

    def _create(self, y: Structure, outputs: Structure) -> None:
        """Creates the variables of metrics and optimizer for these targets and outputs of a row."""
        model, own = self.model, self.own_steps["train"]
        if y is None and not own and getattr(model, "loss", None) is not None:
            raise UserError("the model is compiled with a loss, and there are no targets", "give fit or evaluate y")
        try:
            if not (own and self.own_steps["test"]):
                # keras_internals.matched_losses calls losses, which may count that, or not fit what a step gives them.
                with layer_state.unchanged([]), contextlib.suppress(*([Exception] if own else [])):
                    self.part_names = self.replica.objective.names(y, outputs)
            metrics.create_variables(model, y, outputs)
        except ValueError as error:
            raise UserError(f"metrics do not fit the outputs: {one_line(error)}") from error
        optimizer = model.optimizer
        if optimizer is not None and not optimizer.built and not own:
            optimizer.build(model.trainable_variables)


def spread_over(values: Structure, number: int) -> Structure:
    """Returns so many rows from all over tensors, each several times in a row where there are fewer."""
    rows = lambda t: tf.range(number, dtype=tf.int64) * tf.shape(t, tf.int64)[0] // number
    return keras.tree.map_structure(lambda t: tf.gather(t, rows(t)), values)


def _rows(values: Structure, number: int) -> Structure:
    """Returns so many rows of tensors, again and again the first ones where there are fewer."""
    return keras.tree.map_structure(lambda t: tf.gather(t, tf.range(number) % tf.shape(t)[0]), values)
