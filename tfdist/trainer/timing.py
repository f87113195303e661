"""Where the time of a training goes. No TensorFlow."""

import dataclasses

INPUT_LIMIT = 0.2  # share of the time spent waiting for input from which on it is worth a person's attention


@dataclasses.dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one worker."""

    input: float = 0.0  # waiting for the next batch while nothing else could be done
    compute: float = 0.0
    """In calls of the compiled function, without the other entries. What synchronized BatchNorm exchanges in the middle
    of a forward or backward pass is in it."""
    all_reduce: float | None = 0.0
    """From the last gradient to the last sum, the wait for slower replicas included; None where it cannot be told, as
    on GPUs, whose `compute` then contains it."""
    python: float = 0.0  # between calls: callbacks, agreement with other workers, checkpoints

    @property
    def seconds(self) -> float:
        """Returns the seconds of all entries together."""
        return self.input + self.compute + (self.all_reduce or 0.0) + self.python

    def __add__(self, other: "Spent") -> "Spent":
        unknown = self.all_reduce is None or other.all_reduce is None
        return Spent(
            self.input + other.input,
            self.compute + other.compute,
            None if unknown else (self.all_reduce or 0.0) + (other.all_reduce or 0.0),
            self.python + other.python,
        )

    def share(self, name: str) -> float | None:
        """Returns the share of the time in the entry `name`, in [0, 1]; None if it is not known."""
        value = getattr(self, name)
        return None if value is None else value / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call of the compiled training function, as `tfdist.Callback.on_call` is told of it."""

    updates: int  # how many it made
    examples: int  # of these updates, over all replicas
    spent: Spent  # this worker's time since the last call of this epoch or its beginning
    steady: bool  # nothing was compiled in it
    gradient_norm: float | None
    """The norm in its last update, before clipping and without regularisers; None unless a callback has
    `wants_gradient_norm = True`."""
