"""The command `python -m tfdist.evaluate`: loss and metrics of a trained model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from absl import flags

from tfdist.errors import UserError
from tfdist.inference import job
from tfdist.inference.output_file import STDOUT, OutputFile


def _run(values: flags.FlagValues) -> int:
    output = values.output
    say = job.to_stderr if output == STDOUT else job.to_stdout

    def work(ready: job.Ready, should_stop: Callable[[], str]) -> None:
        from tfdist.checkpoints import run_folder
        from tfdist.monitoring import recorder, run_environment
        from tfdist.monitoring.progress import numbers

        found, examples = _evaluated(ready, should_stop)
        data, distribution = ready.experiment.data, ready.distribution
        if not distribution.is_chief:
            return
        say(f"{ready.source} on {data.name}, {data.eval_split}, {examples} examples: {numbers(found)}")
        if not output:
            return
        content = {
            "evaluation": found,
            "examples": examples,
            "model": ready.source,
            "weights_sha256": recorder.fingerprint(ready.model)[0],
            "data": dataclasses.asdict(data),
            "strategy": distribution.name,
            "replicas": distribution.replicas,
            "versions": run_environment.versions(),
        }
        with OutputFile(output, values.overwrite) as file:
            file.write(json.dumps(run_folder.strict(content), indent=2) + "\n")

    return job.with_model(values, OutputFile(output, values.overwrite, writes=bool(output)), say, work)


def _evaluated(ready: job.Ready, should_stop: Callable[[], str]) -> tuple[dict[str, Any], int]:
    """Metrics by name, and over how many examples."""
    import keras

    from tfdist.engine import evaluation, preconditions
    from tfdist.models import build as models

    model, data, distribution = ready.model, ready.data, ready.distribution
    if ready.from_file:
        data = for_own_loss(model, data, ready.source)
    else:
        with distribution.scope():  # with the loss of the training; nothing is going to be updated
            data = models.compiled(model, keras.optimizers.SGD(), ready.experiment, data)
    preconditions.model_fits(model, distribution, 1)
    measure = evaluation.Evaluation(model, data.eval, distribution, ready.experiment.eval.batch_size, None)
    return measure.run(None, should_stop), measure.examples


def for_own_loss(model: Any, data: Any, source: str) -> Any:
    """The data as the loss that a file brings with its model wants them.

    Raises:
      UserError: it brings none.
    """
    from tfdist.data.sources import one_hot, targets_of

    if not model.compiled or model.loss is None:
        raise UserError(
            f"--model={source} was saved without a loss and metrics: compile the model before it is saved, "
            "or give the --workdir of its run"
        )
    name = job.loss_name(model)
    shape: Any = getattr(model, "output_shape", None)
    # All of Keras' losses but the sparse ones compare rows with rows; some would do so with numbers, and mean nothing.
    rows = bool(name) and "sparse" not in name and isinstance(shape, tuple) and len(shape) == 2 and shape[1] != 1
    if rows and data.spec.classes is not None and getattr(targets_of(data.eval), "ndim", 1) == 1:
        classes = shape[1]
        if data.spec.classes > classes:
            raise UserError(
                f"the data has {data.spec.classes} classes, --model={source} knows {classes}: choose others"
            )
        data = dataclasses.replace(data, eval=one_hot(data.eval, classes))
    return data


def main() -> None:
    """Entry point of `python -m tfdist.evaluate`."""
    job.define_flags()
    flags.DEFINE_string("output", "", "Write the result to this JSON file, too; - for standard output.")
    flags.DEFINE_bool("overwrite", False, "Replace a file that --output names.")
    job.main(_run, ("output", "overwrite"))
