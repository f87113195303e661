"""The command `python -m tfdist.evaluate`: loss and metrics of a trained model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from absl import flags

from tfdist import after
from tfdist.errors import UserError
from tfdist.output_file import STDOUT, OutputFile


def _run(values: flags.FlagValues) -> int:
    output = values.output
    say = after.to_stderr if output == STDOUT else after.to_stdout

    def work(ready: after.Ready, should_stop: Callable[[], str]) -> None:
        from tfdist import history, provenance, run_folder
        from tfdist.progress import numbers

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
            "weights_sha256": history.fingerprint(ready.model)[0],
            "data": dataclasses.asdict(data),
            "strategy": distribution.name,
            "replicas": distribution.replicas,
            "versions": provenance.versions(),
        }
        with OutputFile(output, values.overwrite) as file:
            file.write(json.dumps(run_folder.strict(content), indent=2) + "\n")

    return after.with_model(values, OutputFile(output, values.overwrite, writes=bool(output)), say, work)


def _evaluated(ready: after.Ready, should_stop: Callable[[], str]) -> tuple[dict[str, Any], int]:
    """Metrics by name, and over how many examples."""
    import keras

    from tfdist import checks, evaluation, models

    model, data, distribution = ready.model, ready.data, ready.distribution
    if ready.from_file:
        data = for_own_loss(model, data, ready.source)
    else:
        with distribution.scope():  # with the loss of the training; nothing is going to be updated
            data = models.compiled(model, keras.optimizers.SGD(), ready.experiment, data)
    checks.model_fits(model, distribution, 1)
    measure = evaluation.Evaluation(model, data.eval, distribution, ready.experiment.eval.batch_size, None)
    return measure.run(None, should_stop), measure.examples


def for_own_loss(model: Any, data: Any, source: str) -> Any:
    """The data as the loss that a file brings with its model wants them.

    Raises:
      UserError: it brings none.
    """
    from tfdist.data import one_hot, targets_of

    if not model.compiled or model.loss is None:
        raise UserError(
            f"--model={source} was saved without a loss and metrics: compile the model before it is saved, "
            "or give the --workdir of its run"
        )
    name = after.loss_name(model)
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
    after.define_flags()
    flags.DEFINE_string("output", "", "Write the result to this JSON file, too; - for standard output.")
    flags.DEFINE_bool("overwrite", False, "Replace a file that --output names.")
    after.main(_run, ("output", "overwrite"))
