"""Predicts: `python -m tfdist.predict --workdir=runs/digits --output=digits.csv`.

One line per example of the evaluation split, in its order, under any strategy:
number, predicted class, its name and probability, and the target; of a model
without classes, its outputs. `.csv` or `.jsonl`; `-` is CSV on standard output.
Other data: `--config.data.eval_split=train`, `--config.data.name=...`.
The lines are written as they are found, and the file is renamed at the end.

Exit codes: 0 done; 1 a failure on the way; 2 the input or the environment is
wrong; 143 stopped by a signal.
"""

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

    def work(ready: job.Ready, should_stop: Callable[[], str]) -> None:
        data, chief = ready.experiment.data, ready.distribution.is_chief
        with prediction_rows.OutputFile(name, values.overwrite, chief) as file:
            count = _write(ready, file, prediction_rows.Lines(kind), values, should_stop)
        if chief and name != prediction_rows.STDOUT:
            logger.info(f"{ready.source} on {data.name}, {data.eval_split}: {count} predictions in {name}")

    return job.with_model(values, prediction_rows.OutputFile(name, values.overwrite), work, rows_alone=True)


def _write(
    ready: job.Ready,
    file: prediction_rows.OutputFile,
    lines: prediction_rows.Lines,
    values: flags.FlagValues,
    should_stop: Callable[[], str],
) -> int:
    """Writes the predictions batch by batch; returns how many."""
    import keras

    from tfdist.inference import compatibility
    from tfdist.trainer import evaluation

    data, experiment = ready.data, ready.experiment
    if not data.eval.repeats_order():
        what = f"data.name={experiment.data.name!r} has another order each time that it is read"
        raise UserError(f"{what}, so no line would belong to an example", "do not shuffle data.eval_split")
    batch = data.eval.requested_batch(None, experiment.eval.batch_size)
    reader = prediction_rows.OutputReader(
        classes=data.spec.classes,
        names=data.spec.names,
        from_logits=compatibility.from_logits(ready.model, ready.from_file),
        scores=values.scores,
        example=data.eval.name,
        numbers=data.numbers,
    )
    count = 0
    shards, check = ready.experiment.train.virtual_replicas, values.check_agreement
    pieces = evaluation.predict_batches(ready.model, data.eval, ready.distribution, batch, should_stop, shards, check)
    for outputs, targets in pieces:
        reader = reader if count else reader.settled(outputs)
        rows = reader.rows(outputs, targets, count)
        count += len(keras.tree.flatten(outputs)[0])
        if ready.distribution.is_chief:
            file.write(lines.text(rows))
    return count


def main() -> None:
    job.define_flags("File to write: .csv or .jsonl; - for CSV on standard output.")
    flags.DEFINE_bool("scores", False, "Write the scores of all classes, too.")
    job.main(_run, ("output", "overwrite", "scores"))


if __name__ == "__main__":
    main()
