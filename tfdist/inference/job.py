"""What `tfdist.evaluate` and `tfdist.predict` share: their flags, and a trained model beside data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from tfdist import config
from tfdist.config import command_line, field_syntax, runtime_options
from tfdist.errors import Interrupted, UserError
from tfdist.inference import trained_model
from tfdist.inference.output_file import STDOUT, OutputFile
from tfdist.inference.trained_model import Wanted

OF_A_MODEL = ("workdir", "model", "checkpoint")
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """A model under a strategy, and data for it."""

    model: Any
    """Not compiled, unless it brings its own loss."""
    from_file: bool
    """It is of `--model`, and not built by the experiment."""
    experiment: config.Experiment
    data: Any
    """`registry.Loaded`, with the description that the model was trained for."""
    distribution: Any
    source: str
    """Where the weights are from."""


def define_flags() -> None:
    """Registers the flags that both commands have."""
    runtime_options.define_flags()
    values: Any = flags.FLAGS
    for name in runtime_options.OF_A_RUN:  # what would change nothing here is refused
        delattr(values, name)
    define_model_flags()


def define_model_flags() -> None:
    """Registers the flags that say which model."""
    flags.DEFINE_string("workdir", "", "Folder of the run whose model it is, such as runs/digits.")
    flags.DEFINE_string("model", "", "A .keras file, instead of --workdir.")
    flags.DEFINE_string("checkpoint", "", "Of --workdir, instead of its model.keras: latest, best or an update.")


def main(run: Callable[[flags.FlagValues], int], own: Sequence[str], with_strategy: bool = True) -> None:
    """Runs such a command.

    Args:
      run: its body, given the parsed flags.
      own: names of the flags that it has besides.
      with_strategy: it has those of the environment too.
    """
    strategy = [name for name in command_line.OF_THE_ENVIRONMENT if name in flags.FLAGS] if with_strategy else []
    names = tuple(dict.fromkeys([*OF_A_MODEL, *own, *strategy]))
    parse = functools.partial(command_line.parse, own=names)
    command_line.main(lambda argv: run(flags.FLAGS), parse, "interrupted, nothing was written")


def wanted(values: flags.FlagValues) -> Wanted:
    """Which model the flags ask for.

    Raises:
      UserError: the flags do not go together.
    """
    given = {name: _field(values, name) for name in values if name.startswith("config.") and values[name].present}
    return trained_model.wanted(
        values.workdir, values.model, values.checkpoint, values.config, given, bool(values["config"].present)
    )


def _field(values: flags.FlagValues, name: str) -> Any:
    return functools.reduce(getattr, name.split(".")[1:], values.config)


def with_model(
    values: flags.FlagValues,
    output: OutputFile,
    say: Say,
    work: Callable[[Ready, Callable[[], str]], None],
    rows_alone: bool = False,
) -> int:
    """Starts the strategy, puts the model under it, loads the data and does the work on all workers.

    Args:
      output: what the chief is going to write.
      say: shows a line to a person; the chief's alone.
      work: given the model, and what tells that it shall stop.
      rows_alone: another table than that of the training does without targets, and examples keep their names.

    Returns:
      The exit code: 143 when a signal has ended it.
    """
    asked = wanted(values)
    if values.overwrite and values.output in ("", STDOUT):
        raise UserError("--overwrite without a file in --output has nothing to replace: leave it out")
    from tfdist.distributed import connect
    from tfdist.engine import worker_session

    where = runtime_options.from_flags(values)
    site = connect.locate(where)
    chief = site.cluster.is_chief
    if chief:
        output.check()
    found = trained_model.experiment(asked) if chief else None
    facts = {**config.flat(values.config), "--checkpoint": asked.checkpoint, "--model": os.path.basename(asked.model)}
    distribution = connect.create(site, facts)
    told = say if distribution.is_chief else lambda line: None

    def do() -> None:
        from tfdist.engine.worker_session import Signals

        with distribution.peers.seeing_signals(), Signals() as signals:
            # Their handlers come after the strategy, which swallows SIGTERM.
            reason = lambda: signals.received and f"stopped by {signals.received}"
            work(_ready(asked, found, distribution, told, rows_alone), reason)

    # Standard output may be for the result alone, and TFDS says there what it prepares.
    aside = contextlib.redirect_stdout(sys.stderr) if values.output == STDOUT else contextlib.nullcontext()
    try:
        with aside:
            worker_session.in_touch(distribution.peers, do)
    except Interrupted as stopped:
        told(f"{stopped}: nothing was written")
        return 143
    return 0


def _ready(asked: Wanted, found: config.Experiment | None, distribution: Any, say: Say, rows_alone: bool) -> Ready:
    from tfdist.data import spec_file
    from tfdist.data.datasets import registry
    from tfdist.models import build as models

    peers = distribution.peers
    # Only the chief needs the run folder; the others may be machines that do not have it.
    told = None if found is None else dataclasses.asdict(found)
    own = None if found is None or asked.model else spec_file.read(asked.path)
    other = found is not None and trained_model.other_data(asked)
    told, spec_there, other = peers.gather("the run to look at", [told, own and spec_file.plain(own), other])[0]
    experiment = trained_model.same(told)
    trained_for = spec_file.made(spec_there) if spec_there else None
    say(f"strategy {distribution.name}, because {distribution.reason}")
    models.set_precision(experiment.train.precision)
    if rows_alone and experiment.data.cache == "auto" and experiment.data.name.startswith("image_folder:"):
        experiment.data.cache = "stream"  # in memory, images would have lost the names of their files
    if trained_for and trained_for.columns and other:
        data = new_rows(experiment, trained_for, asked, rows_alone, say)
    else:
        data = peers.once(lambda: registry.load(experiment, say=say))
    if trained_for:
        check_data(experiment, data.spec, trained_for)
        data = dataclasses.replace(data, spec=trained_for)
    if asked.model:
        model = load(asked, distribution)
        check_inputs(model, experiment, data.spec)
        return Ready(model, True, experiment, data, distribution, str(asked.path))
    build = functools.partial(built, experiment, data.spec)
    with distribution.scope():
        model = build()
    weights = trained_model.weights(asked, experiment, build, say) if distribution.is_chief else None
    return Ready(model, False, experiment, data, distribution, share(model, distribution, weights))


def new_rows(experiment: config.Experiment, spec: Any, asked: Wanted, rows_alone: bool, say: Say) -> Any:
    """Another table than that of the training: all its rows, by the statistics of the training.

    Args:
      rows_alone: without targets.

    Raises:
      UserError: it is no table, or lacks columns.
    """
    from tfdist.data.datasets import registry, table_inference
    from tfdist.data.sources import Arrays

    kind, _, path = experiment.data.name.partition(":")
    if kind != "csv":
        raise UserError(
            f"data.name={experiment.data.name!r} is no table, and the model was trained on one: give csv:PATH"
        )
    if "config.data.eval_split" in asked.changes:
        raise UserError("all rows of another table are taken: leave out --config.data.eval_split")
    experiment.data.eval_split = "train"  # as a lone file is called; it is told to people
    options = field_syntax.options("data.options", experiment.data.options)
    if rows_alone:
        if asked.changes.get("config.data.broken") == "skip":
            raise UserError("every row of a table gets a prediction: correct bad ones, and leave out data.broken=skip")
        rows = Arrays((table_inference.read_inputs(path, spec.columns, options),))
    else:
        skip = experiment.data.broken == "skip"
        rows = Arrays(table_inference.read_rows(path, spec.columns, spec.target, options, skip, say))
    return registry.Loaded(rows, rows, rows.size, spec)


def built(experiment: config.Experiment, spec: Any) -> Any:
    """The model of an experiment with all its variables, for weights to be put into."""
    import tensorflow as tf

    from tfdist.models import build as models

    model = models.build(experiment, spec, quiet=True)
    if not model.built:  # a class of one's own makes its variables when it is first called
        model(tf.zeros((1, *spec.shape), spec.dtype))
    return model


def share(model: Any, distribution: Any, weights: trained_model.Weights | None) -> str:
    """Gives the chief's weights to the model on all workers; returns where they are from."""
    from tfdist.checkpoints import training_state

    path = distribution.peers.gather("the weights", weights and str(weights.source))[0]
    training_state.assign(model, distribution, weights.arrays if weights else [])
    return path


def load(asked: Wanted, distribution: Any) -> Any:
    """The model of a `.keras` file, which every worker must have."""
    from tfdist.monitoring import recorder

    with distribution.scope():
        model = trained_model.load(asked.path)
    digests = distribution.peers.gather("the model's weights", recorder.fingerprint(model)[0])
    if len(set(digests)) > 1:
        raise UserError(f"--model={asked.path} is another file on some workers: copy the same to all of them")
    return model


def check_data(experiment: config.Experiment, here: Any, there: Any) -> None:
    """Refuses data that the model was not trained for.

    Args:
      here: description of the data.
      there: what the model was trained for.
    """
    what = f"data.name={experiment.data.name!r}"
    for name, mine, its in (("shape", list(here.shape), list(there.shape)), ("type", here.dtype, there.dtype)):
        if mine != its:
            raise UserError(f"{what} has inputs of {name} {mine}, the model was trained on {its}: choose such data")
    if here.names and there.names and here.names != there.names:
        odd = sorted(set(here.names) ^ set(there.names))
        why = f"{odd[0]!r} is a class of only one of them" if odd else "they are in another order"
        raise UserError(f"{what} has other classes than the model was trained on ({why}): choose data of those classes")
    if there.classes is not None and (here.classes or 0) > there.classes:
        raise UserError(
            f"{what} has {here.classes} classes, the model was trained on {there.classes}: choose other data"
        )
    if here.columns != there.columns:
        pairs = zip(here.columns, there.columns)
        odd_one = next((mine.name for mine, its in pairs if mine != its), f"there are {len(here.columns)}")
        raise UserError(
            f"{what} has other columns than the model was trained on, or other statistics of them ({odd_one}): "
            "choose data of the same table"
        )


def check_inputs(model: Any, experiment: config.Experiment, spec: Any) -> None:
    """Refuses data of a shape that a model without a description does not take."""
    takes = getattr(model, "input_shape", None)
    if not isinstance(takes, tuple) or any(isinstance(side, (tuple, list)) for side in takes):
        return
    if len(takes[1:]) != len(spec.shape) or any(a not in (None, b) for a, b in zip(takes[1:], spec.shape)):
        raise UserError(
            f"data.name={experiment.data.name!r} has inputs of shape {list(spec.shape)}, the model takes "
            f"{list(takes[1:])}: choose its data with --config, or --config.data.name"
        )


def from_logits(model: Any, from_file: bool) -> bool | None:
    """Whether scores of classes are logits, as the model's own loss says; tfdist's, for the others, takes logits.

    Returns:
      None where nothing tells.
    """
    if not model.compiled:
        return None if from_file else True
    return getattr(model.loss, "from_logits", None)


def loss_name(model: Any) -> str:
    """Of the one loss of Keras that a model brings, in whatever way: `categoricalcrossentropy`, say; else nothing."""
    import keras

    if not model.compiled or model.loss is None or isinstance(model.loss, (dict, list, tuple)):
        return ""
    loss = keras.losses.get(model.loss)
    loss = type(loss) if isinstance(loss, keras.losses.Loss) else loss
    return loss.__name__.replace("_", "").lower() if loss.__module__.startswith("keras.") else ""


def to_stdout(line: str) -> None:
    """Shows a line to a person."""
    print(f"tfdist: {line}", flush=True)


def to_stderr(line: str) -> None:
    """Shows a line to a person where standard output is for results."""
    print(f"tfdist: {line}", file=sys.stderr, flush=True)
