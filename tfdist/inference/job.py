"""Shared by `tfdist.evaluate` and `tfdist.predict`: their flags, and a trained model with data."""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from absl import flags

from tfdist import config
from tfdist.config import buckets, field_syntax, runtime_options
from tfdist.config.commands import command_line
from tfdist.config.messages import logger
from tfdist.data import spec_file
from tfdist.errors import Interrupted, UserError
from tfdist.inference import trained_model
from tfdist.inference.prediction_rows import STDOUT, OutputFile
from tfdist.inference.trained_model import ModelRequest

if TYPE_CHECKING:
    import keras

    from tfdist.data.loaded import Loaded
    from tfdist.data.spec import Spec
    from tfdist.distributed.distribution import Distribution

MODEL_FLAGS = ("workdir", "model", "checkpoint", "trust_code")


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """A model under a strategy, and data for it."""

    model: "keras.Model"  # not compiled, unless its file has a loss
    from_file: bool  # it comes from `--model`, and was not built by the experiment
    experiment: config.Experiment
    data: "Loaded"  # with the description that the model was trained for
    distribution: "Distribution"
    source: str  # file or checkpoint with the weights


def define_flags(output: str = "") -> None:
    """Registers the flags that both commands have; `output` is the help of --output."""
    # Others would change nothing here, and so are refused.
    runtime_options.define_flags((*runtime_options.names(runtime_options.PlacementOptions), "check_agreement"))
    define_model_flags()
    flags.DEFINE_string("output", "", output)
    flags.DEFINE_bool("overwrite", False, "Replace a file that --output names.")


def define_model_flags() -> None:
    """Registers the flags that say which model."""
    flags.DEFINE_string("workdir", "", "Folder of the run whose model it is, such as runs/digits.")
    flags.DEFINE_string("model", "", "A .keras file, instead of --workdir.")
    flags.DEFINE_string("checkpoint", "", "Of --workdir, instead of its model.keras: latest, best or an update.")
    flags.DEFINE_bool("trust_code", False, "Call functions that --workdir names, though it is not your own work.")


def main(run: Callable[[flags.FlagValues], int], own: Sequence[str]) -> None:
    """Runs the body of a command that uses a trained model; `own` are the flags that only this one has."""
    strategy = [name for name in command_line.OF_THE_ENVIRONMENT if name in flags.FLAGS]
    parse = functools.partial(command_line.parse, own=tuple(dict.fromkeys([*MODEL_FLAGS, *own, *strategy])))
    command_line.main(lambda argv: run(flags.FLAGS), parse, "interrupted, nothing was written")


def with_model(
    values: flags.FlagValues,
    output: OutputFile,
    work: Callable[[Ready, Callable[[], str]], None],
    rows_alone: bool = False,
) -> int:
    """Starts the strategy, loads model and data, and does the work on all workers; returns the exit code.

    `work` is called with the model, and with a function that returns why the work must stop, or an empty string. With
    `rows_alone`, another table than that of the training needs no targets, and examples keep their names.
    """
    names = [name for name in values if name.startswith("config.") and values[name].present]
    changes = {name: functools.reduce(getattr, name.split(".")[1:], values.config) for name in names}
    model, from_file = (values.workdir, values.model, values.checkpoint), bool(values["config"].present)
    requested = ModelRequest(*model, values.config, changes, values.trust_code)
    trained_model.check(requested, from_file)
    field_syntax.check_local("--output", values.output)
    if values.overwrite and values.output in ("", STDOUT):
        raise UserError("--overwrite without a file in --output has nothing to replace", "leave it out")
    from tfdist.distributed import connect
    from tfdist.trainer import worker_session

    placement = connect.locate(runtime_options.from_flags(values))
    chief = placement.cluster.is_chief
    if chief:
        output.check()
        requested = requested.here()
    experiment = trained_model.read_experiment(requested) if chief else None
    facts = {"--checkpoint": requested.checkpoint, "--model": os.path.basename(requested.model)}
    facts |= config.flat(values.config)

    def do() -> None:
        with distribution.peers.seeing_signals(), worker_session.Signals() as signals:
            # Their handlers come after the strategy, which swallows SIGTERM.
            reason = lambda: signals.received and f"stopped by {signals.received}"
            work(_ready(requested, experiment, distribution, rows_alone), reason)

    # Standard output may be for the result alone; log messages, and those of TFDS, go to standard error then.
    aside = contextlib.redirect_stdout(sys.stderr) if values.output == STDOUT else contextlib.nullcontext()
    with aside:
        distribution = connect.create(placement, facts)
        try:
            worker_session.reporting_failures(distribution.peers, do)
        except Interrupted as stopped:
            logger.info(f"{stopped}: nothing was written")
            return 143
    return 0


def _ready(
    requested: ModelRequest, recorded: config.Experiment | None, distribution: "Distribution", rows_alone: bool
) -> Ready:
    """Loads data, model and weights on all workers; the run's experiment is `recorded` only on the chief."""
    from tfdist.checkpoints import training_state
    from tfdist.data.datasets import registry
    from tfdist.inference import compatibility
    from tfdist.models import build as models
    from tfdist.monitoring import recorder

    experiment, trained_for, other_data = _agreed(requested, recorded, distribution)
    logger.info(f"strategy {distribution.name}, because {distribution.reason}")
    models.set_precision(experiment.train.precision)
    if rows_alone and experiment.data.cache == "auto" and experiment.data.name.startswith("image_folder:"):
        experiment.data.cache = "stream"  # in memory, images would have lost the names of their files
    if trained_for and trained_for.columns and other_data:
        data = new_rows(experiment, trained_for, requested, rows_alone)
    else:
        # No part of another folder was held out of a training.
        data = registry.load_together(
            distribution.peers, experiment.data, lambda: registry.load(experiment, hold_out=not other_data)
        )
    if trained_for:
        compatibility.check_data(experiment, data.spec, trained_for, *data.eval.specs[1:2])
        data = dataclasses.replace(data, spec=trained_for)
    if requested.model:
        if data.spec.columns:  # which were scaled and numbered by this table alone
            what = f"--model={requested.path} does not tell how the columns of its training's table were encoded"
            raise UserError(what, "give --workdir with the folder of its run")
        with distribution.scope():
            model = trained_model.load(requested.path)
        digests = distribution.peers.gather("the model's weights", recorder.fingerprint(model)[0])
        if len(set(digests)) > 1:
            raise UserError(f"--model={requested.path} is another file on some workers", "copy the same to all of them")
        compatibility.check_inputs(model, experiment, data.spec)
        return Ready(model, True, experiment, data, distribution, str(requested.path))
    build = functools.partial(built, experiment, data.spec)
    # First the model that is compared with that of the training: classes of the user's may count their objects.
    weights = trained_model.read_weights(requested, experiment, build) if distribution.is_chief else None
    with distribution.scope():
        model = build()
    source = distribution.peers.gather("the weights", weights and weights[0])[0]
    training_state.assign(model, distribution, weights[1] if weights else [])
    return Ready(model, False, experiment, data, distribution, source)


def _agreed(
    requested: ModelRequest, recorded: config.Experiment | None, distribution: "Distribution"
) -> "tuple[config.Experiment, Spec | None, bool]":
    """Broadcasts the run's experiment, its data's description if known, and whether the request names others."""
    fields = spec = other = None
    if recorded is not None:
        fields = dataclasses.asdict(recorded)
        spec = None if requested.model else spec_file.read(requested.path)
        other = trained_model.other_data(requested)
    values = [fields, spec and dataclasses.asdict(spec), other]
    fields, plain_spec, other = distribution.peers.gather("the run to look at", values)[0]
    experiment = trained_model.experiment_from(fields)
    return experiment, spec_file.made(plain_spec) if plain_spec else None, other


def new_rows(experiment: config.Experiment, spec: "Spec", requested: ModelRequest, rows_alone: bool) -> "Loaded":
    """Loads all rows of another table, encoded by the training's statistics; `rows_alone` leaves out targets."""
    from tfdist.data.datasets import tables
    from tfdist.data.loaded import Loaded
    from tfdist.data.sources import Arrays

    kind, _, path = experiment.data.name.partition(":")
    if kind not in ("csv", "parquet"):
        what = f"data.name={experiment.data.name!r} is not a table, and the model was trained on one"
        raise UserError(what, "give csv:PATH or parquet:PATH")
    if "config.data.eval_split" in requested.changes:
        raise UserError("all rows of another table are taken", "leave out --config.data.eval_split")
    experiment.data.eval_split = "train"  # the name of a lone file, for messages
    path = buckets.local_copy(path, f"data.name={experiment.data.name}")
    options = field_syntax.options("data.options", experiment.data.options)
    if rows_alone and requested.changes.get("config.data.on_error") == "skip":
        fix = "correct bad ones, and leave out data.on_error=skip"
        raise UserError("every row of a table gets a prediction", fix)
    target, skip = (None, None) if rows_alone else (spec.target, experiment.data.on_error == "skip")
    rows = Arrays(tables.read_rows(path, spec.columns, target, options, skip, kind))
    return Loaded(rows, rows, rows.size, spec)


def built(experiment: config.Experiment, spec: "Spec") -> "keras.Model":
    """Returns the model of an experiment with all its variables, to which weights can be assigned."""
    import tensorflow as tf

    from tfdist.models import build as models

    model = models.build(experiment, spec, quiet=True)
    if not model.built:  # a subclassed model creates its variables when it is first called
        model(tf.zeros((1, *spec.shape), spec.dtype))
    return model
