"""What a training is asked to do: the arguments of `tfdist.fit`, less the model and its data."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable, Collection, Mapping, Sequence

from tfdist.checkpoints.manager import Checkpoints
from tfdist.data import sources
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.trainer import agreement
from tfdist.trainer.arguments import Callbacks, Data


@dataclasses.dataclass(frozen=True, slots=True)
class FitOptions:
    """The options of one training; `tfdist.fit` explains them and has the same defaults."""

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
    measure_average: bool = False
    learning_rates: Mapping[str, float] | None = None
    layer_decay: float = 1.0
    check_agreement: str = "auto"
    should_stop: Callable[[], str] = agreement.never

    def given(self, names: Sequence[str]) -> list[str]:
        """Returns those of the options in `names` that are not what they are by default."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]


def check_validation(options: FitOptions) -> None:
    """Refuses what says how to validate, where there is nothing to validate with."""
    idle = options.given(("validation_steps", "validation_batch_size", "validation_freq"))
    if options.validation_data is None and idle:
        raise UserError(f"{idle[0]} says how to validate, without data: give validation_data or validation_split")


def check_reading(source: sources.Source, options: FitOptions) -> None:
    """Refuses a generator where it would have to be read again."""
    first, epochs = options.initial_epoch, options.epochs
    advice = "or a keras.utils.PyDataset, which has an index"
    if source.reader.once:
        if epochs - first > 1 and options.steps_per_epoch is None:
            raise UserError(
                f"a generator can be read once, and there are {epochs - first} epochs: give steps_per_epoch, {advice}"
            )
        if options.on_nonfinite == "rollback":
            raise UserError(f"on_nonfinite='rollback' goes back, and a generator cannot: give arrays {advice}")
    if isinstance(options.validation_data, types.GeneratorType):
        due = (epoch for epoch in range(first, epochs) if is_due(options.validation_freq, epoch))
        if len(list(itertools.islice(due, 2))) > 1:
            raise UserError(f"a generator can be read once, and several epochs validate with it: give arrays, {advice}")


def is_due(frequency: int | Collection[int], epoch: int) -> bool:
    """Tells whether an epoch, counted from 0, ends with a validation."""
    if isinstance(frequency, int):
        return (epoch + 1) % frequency == 0
    return epoch + 1 in frequency
