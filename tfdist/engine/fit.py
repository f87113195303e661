"""The public `fit`. What happens when is in `fit_loop`, and what one update computes in `step/`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import keras
import tensorflow as tf

from tfdist.checkpoints.manager import Checkpoints
from tfdist.data import sources
from tfdist.data.structures import Structure
from tfdist.distributed import connect
from tfdist.distributed.distribution import Distribution
from tfdist.engine import agreement, preconditions
from tfdist.engine.fit_loop import FitLoop
from tfdist.engine.fit_options import FitOptions


def fit(
    model: keras.Model,
    dataset: Structure | tf.data.Dataset | sources.Source,
    y: Structure = None,
    *,
    distribution: Distribution | None = None,
    batch_size: int | None = None,
    epochs: int = 1,
    steps: int | None = None,
    callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.CallbackList | None = None,
    verbose: int | str = "auto",
    validation_data: Structure | tf.data.Dataset | sources.Source = None,
    validation_freq: int | Collection[int] = 1,
    validation_batch_size: int | None = None,
    validation_steps: int | None = None,
    sample_weight: Structure = None,
    class_weight: Mapping[int, float] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    accumulate: int = 1,
    steps_per_call: int | str = "auto",
    reduce_dtype: str = "float32",
    checkpoints: Checkpoints | None = None,
    on_nonfinite: str = "stop",
    max_rollbacks: int = 3,
    measure_average: bool = False,
    learning_rates: Mapping[str, float] | None = None,
    layer_decay: float = 1.0,
    check_agreement: str = "auto",
    should_stop: Callable[[], str] = agreement.never,
) -> keras.callbacks.History:
    """Trains a compiled model as `model.fit` does, with the same result under every strategy.

    Whether XLA compiles is the distribution's choice (`jit`), not that of `compile`.

    Args:
      model: a compiled Keras model, created in `distribution.scope()`.
      dataset: arrays, a tuple (x, y[, weight]), a `tf.data.Dataset` of global
        batches, or a source of `tfdist.data.sources`.
      y: targets, when `dataset` is arrays.
      distribution: of `tfdist.connect`; without it, one device.
      batch_size: global batch of arrays or records, over all replicas and
        micro-batches; 32 if not given. A data set brings its own.
      epochs: number of the last epoch, as in Keras.
      steps: stop after this many updates, even within an epoch.
      validation_freq: epochs between validations, or a list of epochs.
      validation_batch_size: as `batch_size`, and the same if not given.
      class_weight: weight of the examples of each class.
      shuffle: a new order of arrays each epoch, depending on seed and epoch.
      steps_per_epoch: updates that count as an epoch; needed for endless data.
      accumulate: micro-batches per update; less memory, the same result.
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
      measure_average: with an optimizer that has `use_ema`, validate the averaged weights, which the training will end
        with; callbacks' `on_epoch_end` sees them, too. Keras' fit validates the weights as they are.
      learning_rates: factors on the optimizer's learning rate and weight decay, by pattern for names of layers:
        `{"head*": 10.0}`.
      layer_decay: factor on both from each layer to the one below it; see `layerwise_rates.factors`.
      check_agreement: with several replicas, compute a few rows on one replica and on all before the first update, and
        stop if losses, metrics or gradient differ: `on`, `off`, or `auto` to leave out models that have passed before.
      should_stop: asked after every call; a reason, on any worker, ends the
        training on all of them after the same update.

    Returns:
      The Keras `History`, with what was there before a resume.

    Raises:
      UserError: the model, data or arguments do not fit together.
      TrainingError: the loss is no longer finite, a worker is lost, or the
        replicas have come apart.
      Interrupted: `should_stop` gave a reason.
    """
    options = FitOptions(
        distribution=distribution or connect.default("no distribution given"),
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        callbacks=callbacks,
        verbose=verbose,
        validation_data=validation_data,
        validation_freq=validation_freq,
        validation_batch_size=validation_batch_size,
        validation_steps=validation_steps,
        shuffle=shuffle,
        seed=seed,
        initial_epoch=initial_epoch,
        steps_per_epoch=steps_per_epoch,
        accumulate=accumulate,
        steps_per_call=steps_per_call,
        reduce_dtype=reduce_dtype,
        checkpoints=checkpoints,
        on_nonfinite=on_nonfinite,
        max_rollbacks=max_rollbacks,
        measure_average=measure_average,
        learning_rates=learning_rates,
        layer_decay=layer_decay,
        check_agreement=check_agreement,
        should_stop=should_stop,
    )
    source = sources.as_source(dataset, y, sample_weight)
    if class_weight:
        source = sources.weigh_classes(source, class_weight)
    preconditions.model_fits(model, options.distribution, accumulate)
    preconditions.own_train_step(model, options.given(preconditions.OF_OUR_STEP))
    return FitLoop(model, source, options).run()
