"""Models with a train_step of their own: Keras' own fit, on the data that tfdist reads."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.data import sources
from tfdist.data.batch_layout import Layout, unpack
from tfdist.data.python_batches import SequenceReader
from tfdist.data.record_feed import RecordFeed, in_order
from tfdist.engine import preconditions
from tfdist.engine.fit_options import FitOptions
from tfdist.errors import UserError

_MEANINGLESS = (
    "steps",
    "steps_per_call",
    "checkpoints",
    "on_nonfinite",
    "measure_average",
    "learning_rates",
    "layer_decay",
)
"""Options that ask for something that only tfdist's own step and loop can do."""


def fit(model: keras.Model, source: sources.Source, options: FitOptions) -> keras.callbacks.History:
    """Trains on one device, as the model's author meant.

    Args:
      model: compiled; what its step does is its own affair.
      source: the examples, weighed.
      options: of `tfdist.fit`.

    Raises:
      UserError: one of the options means nothing to such a model.
    """
    meaningless = options.given(_MEANINGLESS)
    if meaningless:
        own = preconditions.own_step(model)
        raise UserError(f"{meaningless[0]} cannot be used with a model that has its own {own}: leave it out")
    given: dict[str, Any] = {
        "epochs": options.epochs,
        "callbacks": options.callbacks,
        "verbose": options.verbose,
        "initial_epoch": options.initial_epoch,
        "steps_per_epoch": options.steps_per_epoch,
        "validation_freq": options.validation_freq,
        "validation_steps": options.validation_steps,
        **_validation(options),
    }
    if isinstance(source, sources.Batches):
        shuffle = options.shuffle and isinstance(source.reader, SequenceReader)
        return model.fit(_origin(source), shuffle=shuffle, **given)
    if isinstance(source, sources.Records):
        layout = Layout(options.batch_size or 32, 1, 1)
        feed = RecordFeed(source, layout, options.seed if options.shuffle else None, options.seed)
        given["steps_per_epoch"] = given["steps_per_epoch"] or feed.batches
        return model.fit(feed.dataset(given["initial_epoch"] * given["steps_per_epoch"]), **given)
    x, y, weight = unpack(source.columns)
    return model.fit(x, y, sample_weight=weight, batch_size=options.batch_size, shuffle=options.shuffle, **given)


def _origin(source: sources.Batches) -> Any:
    """Returns a data set as Keras takes it: where Python makes the batches, what makes them."""
    if source.reader.origin is None:
        return source.decoded
    if source.decode:
        raise UserError("class_weight cannot be used here with a model that has its own step: yield sample weights")
    return source.reader.origin


def _validation(options: FitOptions) -> dict[str, Any]:
    """Returns the validation data as Keras takes it, and its batch size where that is not in the data."""
    batch = options.validation_batch_size
    match options.validation_data:
        case sources.Batches() as measured:
            return {"validation_data": measured.decoded, "validation_batch_size": batch}
        case sources.Records() as measured:
            return {"validation_data": in_order(measured, batch or 32), "validation_batch_size": None}
        case sources.Arrays() as measured:
            return {"validation_data": measured.columns, "validation_batch_size": batch}
    return {"validation_data": options.validation_data, "validation_batch_size": batch}
