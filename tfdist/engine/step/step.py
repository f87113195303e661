"""The compiled functions of a model: which there are, each made once, and what must be there before."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from tfdist.data.batch_layout import Layout, unpack
from tfdist.data.structures import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.engine import preconditions
from tfdist.engine.step import metrics
from tfdist.engine.step.evaluation_call import evaluation_call
from tfdist.engine.step.prediction_call import NO_BATCH as NO_BATCH  # those who run the functions look for it
from tfdist.engine.step.prediction_call import prediction_call
from tfdist.engine.step.replica import Replica
from tfdist.engine.step.training_call import TrainingOptions, training_call
from tfdist.errors import UserError, one_line


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
        self._reset: Callable | None = None
        self._reset_variables: tuple[int, ...] = ()

    @property
    def model(self) -> keras.Model:
        """The model, which the caller keeps alive: a step that did would itself be kept by `step_calls`, for good."""
        return self._replica.model

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
    ) -> Callable:
        """Returns a compiled function for a layout, made once.

        Args:
          kind: `train`, `test`, `predict` or `predict beside targets`.
          full, reduce_dtype, norm, factors: see `TrainingOptions`.
        """
        options = TrainingOptions(full, reduce_dtype, norm, factors)
        key = (kind, layout, options)
        if key not in self._compiled:
            losses = 1 + len(self.part_names)
            match kind:
                case "train":
                    self._compiled[key] = training_call(self._replica, layout, losses, options)
                case "test":
                    self._compiled[key] = evaluation_call(self._replica, layout, losses)
                case "predict":
                    self._compiled[key] = prediction_call(self._replica, layout)
                case "predict beside targets":
                    self._compiled[key] = prediction_call(self._replica, layout, beside_targets=True)
        return self._compiled[key]

    def reset(self) -> None:
        """Resets all metrics; anew for each set of variables, since a metric may create its own at its first update."""
        variables = tuple(id(v) for metric in self.model.metrics for v in metric.variables)
        if self._reset is None or variables != self._reset_variables:
            self._reset = tf.function(lambda: [m.reset_state() for m in self.model.metrics] and None, autograph=False)
            self._reset_variables = variables
        with self.distribution.peers.during("call"):  # it may sum over workers what it resets
            self._reset()

    def build(self, data: tuple[Structure, ...], outputs_only: bool = False) -> None:
        """Creates what Keras creates lazily (weights, metric and optimizer variables), under the scope.

        Args:
          data: (x, y, weight) with at least one row.
          outputs_only: the model need not be compiled, nor `data` have targets.

        Raises:
          UserError: targets, losses or metrics that do not fit the outputs.
        """
        x, y, _ = unpack(keras.tree.map_structure(lambda t: t[:1], data))
        model = self.model
        with self.distribution.scope():
            outputs = self._replica.forward(x, training=False)
            self.output_shape = tuple(keras.tree.flatten(outputs)[0].shape)
            if outputs_only:
                return
            self.part_names = self._replica.objective.names(y, outputs)
            try:
                metrics.create_variables(model, y, outputs)
            except ValueError as error:
                raise UserError(f"metrics do not fit the outputs: {one_line(error)}") from error
            optimizer = model.optimizer
            if optimizer is not None and not optimizer.built:
                optimizer.build(model.trainable_variables)
        # Anew: which variables have a regulariser is known only now.
        self._replica = Replica(model, self.distribution, self._replica.jit)
