"""The child of `batch_size_search`: updates of the real model with growing batches.

It reads a request from stdin and answers with lines of JSON: `trying`, `fits` with its peak memory, `too_many`,
`error`, `ended`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

from tfdist import config
from tfdist.config import field_syntax, schedule
from tfdist.errors import TrainingError, UserError, one_line

ROWS = 32  # examples that are read of data that is not in memory, to be repeated


def main() -> None:
    """Tries the sizes in their order until one is too large."""
    work = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not be parsed as an answer

    def answer(**fields: str | int | bool) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # the kernel shall end this process before any other
    try:
        _try(work, answer)
    except (UserError, TrainingError) as error:
        answer(error=str(error))
    except Exception as error:  # of the user's code, for example: another batch would not help
        why = f"{type(error).__name__}: {one_line(error, 200)}"
        answer(error=f"train.batch_size=auto: trying it ended with {why}: give a number, and the run shows where")


def _try(work: dict[str, Any], answer: Callable[..., None]) -> None:
    """Makes updates with each size, and sends the results."""
    most, update = _real_model(_experiment(work["experiment"]), work)
    import tensorflow as tf  # after the model has started it with the experiment's options

    base = _peak()
    for size in dict.fromkeys(min(size, most) for size in work["sizes"]):
        answer(trying=size)
        try:
            update(size)
        except (TrainingError, MemoryError, tf.errors.ResourceExhaustedError) as error:
            if isinstance(error, TrainingError) and "out of memory" not in str(error):
                raise
            answer(too_many=size)
            return
        peak = base + (_peak() - base) * work["replicas"]
        if work["budget"] is not None and peak > work["budget"]:
            answer(too_many=size)
            return
        answer(fits=size, peak=peak)
    answer(ended=True)


def _real_model(experiment: config.Experiment, work: dict[str, Any]) -> tuple[int, Callable[[int], None]]:
    """Returns how many examples there are per replica, and what makes updates of the model with so many of them."""
    import keras
    import numpy as np

    import tfdist
    from tfdist.data import sources
    from tfdist.data.datasets import registry
    from tfdist.models import build as models
    from tfdist.models import optimizers

    distribution = tfdist.connect("default", devices=work["devices"], threads=work["threads"], jit=work["jit"])
    models.set_precision(experiment.train.precision)
    data = registry.load(experiment, prepare=work["prepare"])
    with distribution.scope():
        model = models.build(experiment, data.spec, quiet=True)
        optimizer = optimizers.build(experiment, schedule.make(experiment, data.examples, 1))
        data = models.compiled(model, optimizer, experiment, data)
        optimizers.exclude(model, experiment.optimizer)
    columns = keras.tree.map_structure(np.asarray, data.train.first_rows(ROWS))

    def update(size: int) -> None:
        rows = np.arange(size)
        tfdist.fit(
            model,
            sources.Arrays(keras.tree.map_structure(lambda c: np.take(c, rows, 0, mode="wrap"), columns)),
            distribution=distribution,
            batch_size=size,
            epochs=2,  # the second update has the optimizer's state and the first one's garbage
            accumulate=experiment.train.accumulate,
            steps_per_call=1,
            shuffle=False,
            callbacks=[keras.callbacks.TerminateOnNaN()],  # whose presence makes NaN no error
            lr_multipliers=field_syntax.layer_rates(experiment.optimizer),
            layer_decay=experiment.optimizer.layer_decay,
            check_agreement="off",
            verbose=0,
        )

    return max(1, data.examples // work["world"]), update


def _experiment(fields: dict[str, Any]) -> config.Experiment:
    """Returns the requested experiment with a constant rate: schedules count updates, whose number is unknown."""
    groups = {f.name: f.default_factory for f in dataclasses.fields(config.Experiment) if callable(f.default_factory)}
    values = {name: groups[name](**value) if name in groups else value for name, value in fields.items()}
    experiment: config.Experiment = config.Experiment(**values)
    plain: dict[str, Any] = {"schedule": "constant", "schedule_options": "", "warmup": "0%", "learning_rate": 1e-9}
    experiment.optimizer = dataclasses.replace(experiment.optimizer, scale_learning_rate="none", base_batch=0, **plain)
    experiment.train.batch_size = max(32, experiment.train.accumulate)
    experiment.train.epochs, experiment.train.steps, experiment.eval.every = 1, 0, "1 epoch"
    return experiment


def _peak() -> int:
    """Returns the peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
