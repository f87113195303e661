"""Measures a trained model: `python -m tfdist.evaluate --workdir=runs/digits`.

Loss and metrics over the evaluation split, every example once, under any
strategy; the run folder is only read. Other data:
`--config.data.eval_split=train`, `--config.data.name=...`. A run that has not
ended: `--checkpoint=latest`.

Exit codes: 0 done; 1 a failure on the way; 2 the input or the environment is
wrong; 143 stopped by a signal.
"""

import dataclasses
import functools
import json
from collections.abc import Callable

from absl import flags

from tfdist.config.messages import logger
from tfdist.inference import job
from tfdist.inference.prediction_rows import OutputFile


def _run(values: flags.FlagValues) -> int:
    output = OutputFile(values.output, values.overwrite, writes=bool(values.output))
    return job.with_model(values, output, functools.partial(_evaluate, values))


def _evaluate(values: flags.FlagValues, ready: job.Ready, should_stop: Callable[[], str]) -> None:
    """Measures the model, and tells or writes what it has found."""
    import keras

    from tfdist.checkpoints import run_folder
    from tfdist.inference import compatibility
    from tfdist.keras_bridge import preconditions
    from tfdist.models import build as models
    from tfdist.monitoring import recorder
    from tfdist.monitoring.progress import numbers
    from tfdist.trainer.evaluation import Evaluation

    model, data, distribution = ready.model, ready.data, ready.distribution
    if ready.from_file:
        data = compatibility.for_own_loss(model, data, ready.source)
    else:
        with distribution.scope():  # with the loss of the training; nothing is going to be updated
            data = models.compiled(model, keras.optimizers.SGD(), ready.experiment, data)
    batch, virtual_replicas = ready.experiment.eval.batch_size, ready.experiment.train.virtual_replicas
    preconditions.model_fits(model, distribution, 1, virtual_replicas)
    measure = Evaluation(model, data.eval, distribution, batch, None, virtual_replicas)
    measure.check(values.check_agreement)
    metrics, named = measure.run(None, should_stop), ready.experiment.data
    if not distribution.is_chief:
        return
    logger.info(f"{ready.source} on {named.name}, {named.eval_split}, {measure.examples} examples: {numbers(metrics)}")
    if values.output:
        content = {
            "evaluation": metrics,
            "examples": measure.examples,
            "model": ready.source,
            "weights_sha256": recorder.fingerprint(model)[0],
            "data": dataclasses.asdict(named),
            "strategy": distribution.name,
            "replicas": distribution.replicas,
            "versions": recorder.versions(),
        }
        with OutputFile(values.output, values.overwrite) as file:
            file.write(json.dumps(run_folder.strict(content), indent=2) + "\n")


def main() -> None:
    job.define_flags("Write the result to this JSON file, too; - for standard output.")
    job.main(_run, ("output", "overwrite"))


if __name__ == "__main__":
    main()
