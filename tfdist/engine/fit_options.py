"""What a training is asked to do: the arguments of `tfdist.fit`, less the model and its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import keras
import tensorflow as tf

from tfdist.checkpoints.manager import Checkpoints
from tfdist.data import sources
from tfdist.data.structures import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.engine import agreement


@dataclasses.dataclass(frozen=True, slots=True)
class FitOptions:
    """The options of one training; `tfdist.fit` explains them and has the same defaults."""

    distribution: Distribution
    batch_size: int | None = None
    epochs: int = 1
    steps: int | None = None
    callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.CallbackList | None = None
    verbose: int | str = "auto"
    validation_data: Structure | tf.data.Dataset | sources.Source = None
    validation_freq: int | Collection[int] = 1
    validation_batch_size: int | None = None
    validation_steps: int | None = None
    shuffle: bool = True
    seed: int = 0
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    accumulate: int = 1
    steps_per_call: int | str = "auto"
    reduce_dtype: str = "float32"
    checkpoints: Checkpoints | None = None
    on_nonfinite: str = "stop"
    max_rollbacks: int = 3
    measure_average: bool = False
    learning_rates: Mapping[str, float] | None = None
    layer_decay: float = 1.0
    check_agreement: str = "auto"
    should_stop: Callable[[], str] = agreement.never

    def given(self, names: Sequence[str]) -> list[str]:
        """Returns those of the options in `names` that are not what they are by default."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]
