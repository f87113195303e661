"""The public `fit`: its arguments and their checks. `plan` decides what is done, `loop` does it."""

import dataclasses
import itertools
import numbers
import types
from collections.abc import Callable, Collection, Mapping

import keras

from tfdist import config
from tfdist.checkpoints.manager import Checkpoints
from tfdist.config.runtime_options import checked_keywords
from tfdist.data import sources
from tfdist.data.spec import Structure
from tfdist.distributed import connect
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import preconditions, zero
from tfdist.step import step_calls
from tfdist.trainer import agreement
from tfdist.trainer.callbacks import Callbacks
from tfdist.trainer.evaluation import Data, limited
from tfdist.trainer.loop import FitLoop
from tfdist.trainer.plan import FitOptions, plan_training
from tfdist.verification import equivalence_check


@checked_keywords
def fit(
    model: keras.Model,
    x: Data = None,
    y: Structure = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: int | str = "auto",
    callbacks: Callbacks = None,
    validation_split: float = 0.0,
    validation_data: Data = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Structure = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Collection[int] = 1,
    *,
    distribution: Distribution | None = None,
    steps: int | None = None,
    seed: int = 0,
    accumulate: int = 1,
    virtual_replicas: int = 0,
    steps_per_call: int | str = "auto",
    reduce_dtype: str = "float32",
    checkpoints: Checkpoints | None = None,
    on_nonfinite: str = "stop",
    max_rollbacks: int = 3,
    evaluate_ema: bool = False,
    lr_multipliers: Mapping[str, float] | None = None,
    layer_decay: float = 1.0,
    zero_stage: int = 0,
    audit: int = 0,
    check_agreement: str = "auto",
    should_stop: Callable[[], str] = agreement.never,
) -> keras.callbacks.History:
    """Trains a compiled model as `model.fit` does, with the same result under every strategy.

    The arguments before the asterisk are those of Keras, in its order; those after it are tfdist's own. Whether XLA
    compiles is the distribution's choice (`jit`), not that of `compile`.

    Args:
      model: a compiled Keras model, created in `distribution.scope()`.
      x: arrays or frames, a tuple (x, y[, weight]), a `tf.data.Dataset` of global batches, a `keras.utils.PyDataset`,
        a generator, a loader of Grain or torch, or a source of `tfdist.data.sources`.
      y: targets, when `x` is arrays.
      batch_size: global batch of arrays or records, over all replicas and
        micro-batches; 32 if not given. A data set brings its own.
      epochs: number of the last epoch, as in Keras.
      validation_split: part of the examples, the last ones before any shuffling, to validate with.
      validation_data: as `x`, with its targets in it.
      shuffle: a new order each epoch of arrays, or of the batches of a `PyDataset`, depending on seed and epoch.
      class_weight: weight of the examples of each class.
      sample_weight: weights of the examples, when `x` is arrays.
      steps_per_epoch: updates that count as an epoch; needed for endless data, and for a generator and several epochs.
      validation_batch_size: as `batch_size`, and the same if not given.
      validation_freq: epochs between validations, or a list of epochs.
      distribution: of `tfdist.connect`; if not given, the connected one of the model, or one device.
      steps: stop after this many updates, even within an epoch.
      seed: decides the order of the examples, together with the epoch.
      accumulate: micro-batches per update; less memory, the same result.
      virtual_replicas: slices into which every batch is cut, also on one device; then weights, history and predictions
        are the same bits on any number of replicas up to this one. 0 for off.
      steps_per_call: updates per call of the compiled function, `auto` to
        choose by time. A callback that looks at batches makes it 1.
      reduce_dtype: type in which gradients travel between replicas: `float32`
        (as they are), `bfloat16` or `float16` (half the bytes, less precision).
      checkpoints: where the state is kept and resumed from, at the very update; the last one is taken at the end, and
        when `should_stop` ends the training. None for none. With them, one process that runs out of memory goes on from
        the last one with micro-batches of half the size, and so with the same result.
      on_nonfinite: `stop` with an error when the loss is NaN or infinite, or `rollback` to the last checkpoint and
        leave out the update at which it was, and the one before.
      max_rollbacks: how often; then stop.
      evaluate_ema: with an optimizer that has `use_ema`, validate the averaged weights, which the training will end
        with; callbacks' `on_epoch_end` sees them, too. Keras' fit validates the weights as they are.
      lr_multipliers: factors on learning rate and weight decay, by pattern for names of layers: `{"head*": 10.0}`.
      layer_decay: factor on both from each layer to the one below it; see `optimizers.layer_factors`.
      zero_stage: 1 to keep a slice of the optimizer's state on each replica, with the same result; for optimizers of
        Keras that update each element by itself. Outside of `fit` the state is whole. 0 for all of it on each.
      audit: updates between two recomputations of a batch on every device, which must have the same bits; needs
        `virtual_replicas`. 0 for never.
      check_agreement: with several replicas, compute a few rows on one replica and on all before the first update, and
        stop if losses, metrics or gradient differ: `on`, `off`, or `auto` to leave out models that have passed before.
      should_stop: asked after every call; a reason, on any worker, ends the
        training on all of them after the same update.

    Returns:
      The Keras `History`, with what was there before a resume.

    Raises:
      UserError: the model, data or arguments do not fit together.
      TrainingError: the loss is no longer finite, a worker is lost, or the replicas have come apart.
      Interrupted: `should_stop` gave a reason.
    """
    arguments = dict(locals())
    for name in ("batch_size", "epochs", "initial_epoch", "steps_per_epoch", "steps", "accumulate", "audit"):
        if not isinstance(arguments[name], numbers.Integral | None):
            raise UserError(f"{name} must be an integer, got {arguments[name]!r}")
    source = sources.as_source(x, y, sample_weight)
    if validation_split:
        if validation_data is not None:
            raise UserError("validation_split and validation_data both say what to validate with", "give one of them")
        source, validation_data = source.split(validation_split)
    options = dataclasses.replace(
        FitOptions(**{field.name: arguments[field.name] for field in dataclasses.fields(FitOptions)}),
        distribution=distribution or connect.current(model.distribute_strategy),
        epochs=limited(epochs, keras.config.max_epochs(), "epochs") or 0,
        validation_data=tuple(validation_data) if isinstance(validation_data, list) else validation_data,
        steps_per_epoch=limited(steps_per_epoch, keras.config.max_steps_per_epoch(), "steps"),
    )
    _check(source, options)
    if class_weight is not None and len(class_weight):
        source = sources.weigh_classes(source, class_weight, model.loss)
    preconditions.model_fits(model, options.distribution, accumulate, virtual_replicas)
    own, asked = preconditions.replaced(model, preconditions.TRAINING), options.changed(preconditions.OF_OUR_STEP)
    if own and asked:
        raise UserError(f"{asked[0]} cannot be used with a model that has its own {own}", "leave it out")
    zero.ready(model, options.distribution, options.zero_stage)
    try:
        with options.distribution.one_thread():
            return FitLoop(plan_training(model, source, options)).run()
    except Exception as error:
        if known := step_calls.complaint(error):
            raise known from error
        raise


def _check(source: sources.Source, options: FitOptions) -> None:
    """Refuses options that do not fit together, and a generator where it would have to be read again."""
    first, epochs = options.initial_epoch, options.epochs
    advice = "or a keras.utils.PyDataset, which has an index"
    if source.reader.once:
        if epochs - first > 1 and options.steps_per_epoch is None:
            what = f"a generator can be read once, and there are {epochs - first} epochs"
            raise UserError(what, f"give steps_per_epoch, {advice}")
        if options.on_nonfinite == "rollback":
            raise UserError("on_nonfinite='rollback' goes back, and a generator cannot", f"give arrays {advice}")
    if isinstance(options.validation_data, types.GeneratorType):
        due = (epoch for epoch in range(first, epochs) if options.validates(epoch))
        if len(list(itertools.islice(due, 2))) > 1:
            what = "a generator can be read once, and several epochs validate with it"
            raise UserError(what, f"give arrays, {advice}")
    idle = options.changed(("validation_steps", "validation_batch_size", "validation_freq"))
    if options.validation_data is None and idle:
        raise UserError(f"{idle[0]} says how to validate, without data", "give validation_data or validation_split")
    if options.virtual_replicas and options.reduce_dtype != "float32":
        what = "reduce_dtype cannot be used with virtual_replicas, whose sums are exact"
        raise UserError(what, "leave out one of them")
    if options.audit < 0 or (options.audit and not options.virtual_replicas):
        what = f"audit={options.audit} compares the bits of virtual replicas, after each so many updates"
        raise UserError(what, "give virtual_replicas, or leave it out")
    preconditions.among("check_agreement", options.check_agreement, equivalence_check.CHOICES)
    preconditions.among("on_nonfinite", options.on_nonfinite, config.CHOICES["train.on_nonfinite"])
    if options.on_nonfinite == "rollback" and options.checkpoints is None:
        raise UserError("on_nonfinite='rollback' goes back to a checkpoint", "give fit checkpoints")
    updates = options.steps_per_call
    if updates != "auto" and (not isinstance(updates, int) or updates < 1):
        raise UserError(f"steps_per_call must be 'auto' or an integer of at least 1, got {updates!r}")
