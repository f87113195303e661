"""Predicts: `python -m tfdist.predict --workdir=runs/digits --output=digits.csv`.

One line per example of the evaluation split, in its order, under any strategy:
number, predicted class, its name and probability, and the target; of a model
without classes, its outputs. `.csv` or `.jsonl`; `-` is CSV on standard output.
Other data: `--config.data.eval_split=train`, `--config.data.name=...`.
The lines are written as they are found, and the file is renamed at the end.

Exit codes: 0 done; 1 a failure on the way; 2 the input or the environment is
wrong; 143 stopped by a signal.
"""

import functools
from collections.abc import Callable

from absl import flags

from tfdist.config.messages import logger
from tfdist.errors import UserError
from tfdist.inference import job, prediction_rows


def _run(values: flags.FlagValues) -> int:
    name = values.output
    kind = prediction_rows.CSV if name == prediction_rows.STDOUT else name[name.rfind(".") :] if "." in name else ""
    if kind not in (prediction_rows.CSV, prediction_rows.JSON_LINES):
        what = f"--output={name} is of no kind that is known" if name else "--output is missing"
        raise UserError(what, "give a name that ends in .csv or .jsonl, or - for standard output")

    work = functools.partial(_write, values, kind)
    return job.with_model(values, prediction_rows.OutputFile(name, values.overwrite), work, rows_alone=True)


def _write(values: flags.FlagValues, kind: str, ready: job.Ready, should_stop: Callable[[], str]) -> None:
    """Writes the predictions batch by batch, in memory that does not grow."""
    import keras
    import numpy as np

    from tfdist.inference import compatibility
    from tfdist.trainer import evaluation

    name, data, experiment, chief = values.output, ready.data, ready.experiment, ready.distribution.is_chief
    if not data.eval.repeats_order():
        what = f"data.name={experiment.data.name!r} has another order each time that it is read"
        raise UserError(f"{what}, so no line would belong to an example", "do not shuffle data.eval_split")
    batch = data.eval.requested_batch(None, experiment.eval.batch_size)
    reader = prediction_rows.OutputReader(
        classes=data.spec.classes,
        names=data.spec.names,
        from_logits=compatibility.from_logits(ready.model, None if ready.from_file else experiment.train),
        scores=values.scores,
        example=data.eval.name,
        numbers=data.numbers,
    )
    lines, count = prediction_rows.Lines(kind), 0
    sizes = batch, experiment.train.virtual_replicas
    given = ready.model, data.eval, ready.distribution, *sizes, values.check_agreement, should_stop
    with prediction_rows.OutputFile(name, values.overwrite, chief) as file:
        for (outputs, targets), number in evaluation.predictions("predict beside targets", *given):
            for output in keras.tree.flatten(outputs):
                if tuple(output.shape[:1]) != (number,):
                    what = f"the model gives {tuple(output.shape)} for {number} examples"
                    raise UserError(what, "give one row for each")
            outputs, targets = keras.tree.map_structure(np.asarray, (outputs, targets))
            reader = reader if count else reader.settled(outputs)
            rows = reader.rows(outputs, targets, count)
            count += number
            if chief:
                file.write(lines.text(rows))
    if chief and name != prediction_rows.STDOUT:
        data_set = f"{experiment.data.name}, {experiment.data.eval_split}"
        logger.info(f"{ready.source} on {data_set}: {count} predictions in {name}")


def main() -> None:
    job.define_flags("File to write: .csv or .jsonl; - for CSV on standard output.")
    flags.DEFINE_bool("scores", False, "Write the scores of all classes, too.")
    job.main(_run, ("output", "overwrite", "scores"))


if __name__ == "__main__":
    main()
