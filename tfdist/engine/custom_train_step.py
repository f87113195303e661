"""Models with a train_step of their own: Keras' own fit, on the data that tfdist reads."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.data import sources
from tfdist.data.batch_layout import Layout, unpack
from tfdist.data.record_feed import RecordFeed, in_order
from tfdist.engine import preconditions
from tfdist.errors import UserError


def fit(model: keras.Model, source: sources.Source, given: dict) -> keras.callbacks.History:
    """Trains on one device, as the model's author meant.

    Args:
      given: all arguments of `tfdist.fit`, by name.

    Raises:
      UserError: one of them means nothing to such a model.
    """
    plainly: dict[str, Any] = {"steps": None, "steps_per_call": "auto", "checkpoints": None, "on_nonfinite": "stop"}
    plainly |= {"measure_average": False, "learning_rates": None, "layer_decay": 1.0}
    for name, plain in plainly.items():
        if given[name] != plain:
            raise UserError(
                f"{name} cannot be used with a model that has its own {preconditions.own_step(model)}: leave it out"
            )
    names: tuple[str, ...] = ("epochs", "callbacks", "verbose", "initial_epoch", "steps_per_epoch")
    names += ("validation_data", "validation_freq", "validation_batch_size", "validation_steps")
    options = {name: given[name] for name in names}
    match given["validation_data"]:
        case sources.Batches() as measured:
            options["validation_data"] = measured.decoded
        case sources.Records() as measured:
            options["validation_data"] = in_order(measured, given["validation_batch_size"] or 32)
            options["validation_batch_size"] = None
        case sources.Arrays() as measured:
            options["validation_data"] = measured.columns
    if isinstance(source, sources.Batches):
        return model.fit(source.decoded, **options)
    if isinstance(source, sources.Records):
        layout = Layout(given["batch_size"] or 32, 1, 1)
        feed = RecordFeed(source, layout, given["seed"] if given["shuffle"] else None, given["seed"])
        options["steps_per_epoch"] = options["steps_per_epoch"] or feed.batches
        return model.fit(feed.dataset(options["initial_epoch"] * options["steps_per_epoch"]), **options)
    x, y, weight = unpack(source.columns)
    return model.fit(x, y, sample_weight=weight, batch_size=given["batch_size"], shuffle=given["shuffle"], **options)
