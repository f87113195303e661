"""Decides before the first update what a training does: `plan_training` returns a `TrainingPlan`."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import keras
import numpy as np

from tfdist.checkpoints import training_state
from tfdist.checkpoints.manager import Checkpoints
from tfdist.checkpoints.resume import Position
from tfdist.checkpoints.training_run import TrainingRun
from tfdist.config.messages import logger
from tfdist.data import sources
from tfdist.data.arrays import Arrays
from tfdist.data.batch_layout import Layout
from tfdist.data.protocol import Feed
from tfdist.data.records import Records
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import preconditions
from tfdist.models import optimizers
from tfdist.step import step_calls
from tfdist.step.step import Step
from tfdist.trainer import agreement
from tfdist.trainer.callbacks import Callbacks, any_needs_every_batch, on_this_worker
from tfdist.trainer.evaluation import Data, Evaluation, limited


@dataclasses.dataclass(frozen=True, slots=True)
class FitOptions:
    """The arguments of `tfdist.fit` but the model and its data; `fit` explains them and has the same defaults."""

    distribution: Distribution
    batch_size: int | None = None
    epochs: int = 1
    steps: int | None = None
    callbacks: Callbacks = None
    verbose: int | str = "auto"
    validation_data: Data = None
    validation_freq: int | Collection[int] = 1
    validation_batch_size: int | None = None
    validation_steps: int | None = None
    shuffle: bool = True
    seed: int = 0
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    accumulate: int = 1
    virtual_replicas: int = 0
    steps_per_call: int | str = "auto"
    reduce_dtype: str = "float32"
    checkpoints: Checkpoints | None = None
    on_nonfinite: str = "stop"
    max_rollbacks: int = 3
    evaluate_ema: bool = False
    lr_multipliers: Mapping[str, float] | None = None
    layer_decay: float = 1.0
    zero_stage: int = 0
    audit: int = 0
    check_agreement: str = "auto"
    should_stop: Callable[[], str] = agreement.never

    def facts(self, optimizer: keras.optimizers.Optimizer | None) -> dict[str, object]:
        """Returns what must be the same on all workers, and is not compared where it takes effect.

        Of an optimizer these are the numbers it was created with but the learning rate: that of the chief is taken.
        """
        others = "distribution", "batch_size", "callbacks", "verbose", "validation_data", "checkpoints", "should_stop"
        names = [field.name for field in dataclasses.fields(self) if field.name not in others]
        facts: dict[str, object] = {name: str(getattr(self, name)) for name in names}
        facts["validation_data"] = "none" if self.validation_data is None else "given"
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        settings: dict[str, object] = {}
        with contextlib.suppress(NotImplementedError):  # of a schedule of the user's own
            settings = {} if optimizer is None else {"optimizer": type(optimizer).__name__, **optimizer.get_config()}
        simple = {k: str(v) for k, v in settings.items() if isinstance(v, str | int | float | None)}
        return facts | {k: v for k, v in simple.items() if k not in ("name", "learning_rate")}

    def changed(self, names: Sequence[str]) -> list[str]:
        """Returns those of the options in `names` that do not have their default."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]

    def validates(self, epoch: int) -> bool:
        """Returns whether an epoch, counted from 0, ends with a validation, if there is data for it."""
        frequency = self.validation_freq
        return (epoch + 1) % frequency == 0 if isinstance(frequency, int) else epoch + 1 in frequency


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """Everything that is known of a training before its first update."""

    model: keras.Model
    source: sources.Source
    options: FitOptions
    step: Step  # the compiled functions
    layout: Layout  # of a global batch over replicas and micro-batches
    feed: Feed  # of the global batches
    callbacks: keras.callbacks.CallbackList  # those that are called on this worker
    validation: Evaluation | None
    lr_factors: tuple[float, ...]  # on the learning rate of each weight; empty for 1
    updates_per_epoch: int | None  # None if the data has an end that is not known
    updates_per_call: int | None  # None to choose by time
    last_update: float  # the update that ends the training, if its epochs do not end it before

    def start_of(self, epoch: int) -> Position:
        """Returns the position at the beginning of an epoch."""
        return Position(update=epoch * (self.updates_per_epoch or 0), epoch=epoch, first_epoch=epoch)

    def run(self) -> TrainingRun:
        """Returns the training as checkpoints see it."""
        options, batch = self.options, self.layout.batch
        validation = self.validation.source if self.validation else None
        own = {name: str(getattr(options, name)) for name in ("shuffle", "lr_multipliers", "layer_decay")}
        facts = data_facts(self.source, validation) | own if options.checkpoints else {}
        data = batch, self.updates_per_epoch, options.seed, self.source.size, options.virtual_replicas, facts
        return TrainingRun(self.model, options.distribution, self.callbacks, *data)


def data_facts(source: sources.Source, validation: sources.Source | None = None) -> dict[str, object]:
    """Returns what other data would change, but for its form, which the amount of memory decides about."""
    measured = _all_facts(validation) if validation else {}
    facts = _all_facts(source) | {f"{name} of the validation": fact for name, fact in measured.items()}
    form = ("kind", "examples", "elements", "batches")
    return {name: fact for name, fact in facts.items() if name.removesuffix(" of the validation") not in form}


def _all_facts(source: sources.Source) -> dict[str, object]:
    """Returns facts of the whole data; of what is larger than a gigabyte, or is read by number, of some rows."""
    size = sum(getattr(column, "nbytes", 0) for column in keras.tree.flatten(source.specs))
    contents = source.contents() if size <= 1 << 30 else {}
    if isinstance(source, Arrays | Records) and not contents.keys() - {"checksum of all labels"}:
        some, again = (Arrays(keras.tree.map_structure(np.asarray, source.spread_rows(32)), 0).contents() for _ in "12")
        some = some if some == again else {}  # code of the user's own may draw at random when it reads
        contents |= {f"{name} of some rows": fact for name, fact in some.items()}
    return source.facts() | contents


def plan_training(model: keras.Model, source: sources.Source, options: FitOptions) -> TrainingPlan:
    """Returns the plan of one training of a compiled model; raises UserError for what does not fit together."""
    distribution = options.distribution
    facts = options.facts(getattr(model, "optimizer", None))
    same = "give all workers the same; the seed of an order is one number for all, and each takes its own rows of it"
    distribution.peers.check_same(facts, "the arguments of fit", "arguments of fit or of the optimizer", same)
    if options.virtual_replicas:
        distribution.peers.check_same(distribution.arithmetic(), "what decides about the last bit")
    batch = source.requested_batch(options.batch_size, steps=options.steps_per_epoch)
    layout = sources.layout_of(
        source, batch, distribution, options.accumulate, virtual_replicas=options.virtual_replicas
    )
    feed = feed_of(source, layout, options)
    if options.steps_per_epoch is None and feed.batches == 0:
        raise UserError("the data set never ends", "give steps_per_epoch")
    step = step_calls.step_of(model, distribution, source, batch=layout.batch)
    step.check_batches("train", layout, source.sizes(layout.batch))
    step_calls.trains(model)
    step.prepare_training()
    preconditions.reduce_dtype(options.reduce_dtype, distribution)
    preconditions.targets(model, step.output_shape, source)
    validation = None
    if options.validation_data is not None:
        data = sources.as_source(options.validation_data)
        steps = limited(options.validation_steps, keras.config.max_steps_per_epoch(), "steps")
        rows = data.requested_batch(options.validation_batch_size or None, options.batch_size, steps)
        validation = Evaluation(model, data, distribution, rows, steps, options.virtual_replicas)
    factors: tuple[float, ...] = ()
    if options.lr_multipliers or options.layer_decay != 1:
        factors = optimizers.layer_factors(model, options.lr_multipliers or {}, options.layer_decay)
    training_state.separate_streams(model, distribution, apart=not options.virtual_replicas)
    updates_per_epoch = options.steps_per_epoch or feed.batches or None
    steps = options.steps_per_epoch
    if steps and feed.batches and options.epochs * steps > feed.batches and feed.batches % steps:
        told = f"each epoch has {steps} updates, and goes on from the beginning of the data where it ends"
        logger.info(f"WARNING: {told} after {feed.batches}; Keras cuts such an epoch short")
    callbacks = on_this_worker(
        options.callbacks, model, distribution, options.verbose, updates_per_epoch, options.epochs, fit=True
    )
    updates_per_call = 1 if any_needs_every_batch(callbacks, distribution, "train") else None
    if isinstance(options.steps_per_call, int):
        updates_per_call = options.steps_per_call
    elif model.steps_per_execution > 1:
        updates_per_call = model.steps_per_execution
    first_update = options.initial_epoch * (updates_per_epoch or 0)
    last_update = math.inf if options.steps is None else first_update + options.steps
    planned = step, layout, feed, callbacks, validation, factors, updates_per_epoch, updates_per_call, last_update
    return TrainingPlan(model, source, options, *planned)


def feed_of(source: sources.Source, layout: Layout, options: FitOptions) -> Feed:
    """Returns the feed of a training's global batches."""
    return sources.read(source, layout, options.shuffle, options.seed, options.steps_per_epoch is not None)
