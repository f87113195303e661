"""What stands before the first update: the experiment as it will run, its data, schedule, model and checkpoints."""

from __future__ import annotations

import dataclasses
import pathlib

import keras

from tfdist import config
from tfdist.checkpoints import files, manager, oom_note, resume
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.config import schedule as schedule_lib
from tfdist.config.messages import logger
from tfdist.config.runtime_options import Environment, ResumeOptions
from tfdist.data import class_weights, data_loading, spec_file
from tfdist.data.datasets import registry
from tfdist.data.loaded import Loaded
from tfdist.data.spec import Spec
from tfdist.distributed.connect import Placement
from tfdist.distributed.distribution import Distribution
from tfdist.keras_bridge import batch_norm
from tfdist.models import build as models
from tfdist.models import objective, optimizers
from tfdist.train import batch_size_search, rate_range


@dataclasses.dataclass(frozen=True, slots=True)
class Preparation:
    """Everything that a run needs on one worker, ready to train."""

    experiment: config.Experiment
    """As it will run: with the batch that was looked for, and the micro-batches that an earlier attempt needed."""
    learnt_accumulate: int
    """Micro-batches that an earlier attempt has found to be needed; 0 if none did."""
    data: Loaded
    schedule: schedule_lib.Plan
    class_weights: dict[int, float] | None
    model: keras.Model
    """Compiled, under the scope of the strategy."""
    callbacks: list[keras.callbacks.Callback]
    """Those of `train.callbacks`."""
    checkpoints: manager.Checkpoints
    profiled: tuple[int, int]
    """First and last update of the profile, (0, 0) for none."""
    resumes: bool
    """Whether the run goes on from what an earlier one has left in its folder."""

    def check_agreement(self, asked: str) -> str:
        """Returns the choice; `auto` leaves out a model of which it was said that replicas normalize by themselves."""
        accepted = (
            not self.experiment.model.sync_batch_norm and not self.experiment.train.virtual_replicas
        )  # which need it so
        return "off" if asked == "auto" and accepted else asked


def prepare(
    experiment: config.Experiment,
    environment: Environment,
    placement: Placement,
    folder: RunFolder,
    distribution: Distribution,
    proposal: batch_size_search.BatchProposal,
) -> Preparation:
    """Loads the data and builds the model. Every worker calls this with the same experiment.

    Args:
      experiment: what to train; its batch and its micro-batches may still change here.
      environment: where to run and what to show.
      placement: what was found there.
      folder: the run folder.
      distribution: the strategy, started.
      proposal: what this worker knows of `train.batch_size=auto`.

    Raises:
      UserError: experiment, data or model cannot be used.
    """
    _announce(distribution, placement, experiment.train.virtual_replicas)
    experiment = batch_size_search.agreed(experiment, proposal, distribution)
    experiment, learnt = _with_learnt_accumulate(experiment, environment, placement, folder, distribution)
    models.set_precision(experiment.train.precision)
    data = data_loading.loaded(
        distribution.peers, experiment.data, lambda: registry.load(experiment, not environment.dry_run)
    )
    distribution.peers.check_same(registry.facts(data), "the data set")
    schedule = schedule_lib.make(experiment, data.examples, distribution.replicas)
    if environment.find_learning_rate:
        schedule = rate_range.plan(schedule)
    logger.info(f"{experiment.name}: {schedule.describe()}")
    weights_of_classes = class_weights.told(experiment.train.class_weight, data)
    with distribution.scope():
        model = models.build(experiment, data.spec)
        optimizer = optimizers.build(experiment, schedule)
        data = models.compiled(model, optimizer, experiment, data)
        optimizers.exclude(model, experiment.optimizer)
    if distribution.replicas > 1 and not experiment.train.virtual_replicas and batch_norm.normalizing_alone(model):
        logger.info(
            "WARNING: model.sync_batch_norm=False: each replica normalizes with its own rows, so results depend on the "
            "number of replicas, and only --check_agreement=on compares them"
        )
    checkpoints = _checkpoints(experiment, environment, placement, folder, data.spec)
    return Preparation(
        experiment=experiment,
        learnt_accumulate=learnt,
        data=data,
        schedule=schedule,
        class_weights=weights_of_classes,
        model=model,
        callbacks=objective.callbacks(experiment),
        checkpoints=checkpoints,
        profiled=schedule_lib.profiled(environment.profile, schedule),
        resumes=resume.goes_on(folder, environment, placement.cluster.attempt, checkpoints.off),
    )


def _announce(distribution: Distribution, placement: Placement, shards: int) -> None:
    """Says which strategy runs on which devices, and what is wrong with the driver."""
    count = distribution.replicas
    xla = {"off": "", "on": ", compiled by XLA", "auto": ", compiled by XLA where it can"}[distribution.jit]
    replicas = f"{count} replica{'s' * (count > 1)} on {', '.join(distribution.devices)}{xla}"
    logger.info(f"strategy {distribution.name}, because {distribution.reason}: {replicas}")
    if shards:
        threads = placement.options.threads
        each = f"; --threads={threads} decides about the bits, too" if threads else ""
        logger.info(
            f"every batch in {shards} virtual replicas, with the same bits on any number of replicas up to that{each}"
        )
    if placement.selection.gpus:
        logger.info(f"devices: {placement.selection.describe()}")
    if placement.survey.problem:
        logger.info(f"WARNING: {placement.survey.problem}: python -m tfdist.doctor says more")


def _with_learnt_accumulate(
    experiment: config.Experiment,
    options: ResumeOptions,
    placement: Placement,
    folder: RunFolder,
    distribution: Distribution,
) -> tuple[config.Experiment, int]:
    """Returns the experiment with as many micro-batches as an earlier attempt has needed, and how many; 0 if none."""
    noted_here = oom_note.read(folder) if resume.unfinished(folder, options, placement.cluster.attempt) else 1
    most = experiment.train.batch_size // distribution.replicas
    noted = min(distribution.peers.gather("micro-batches of the run before", noted_here)[0], most)
    if noted <= experiment.train.accumulate or experiment.train.virtual_replicas:  # which promise the same bits
        return experiment, 0
    logger.info(f"train.accumulate={noted} instead of {experiment.train.accumulate}: the run before ran out of memory")
    train = dataclasses.replace(experiment.train, accumulate=noted)
    return dataclasses.replace(experiment, train=train), noted


def _checkpoints(
    experiment: config.Experiment, options: ResumeOptions, placement: Placement, folder: RunFolder, spec: Spec
) -> manager.Checkpoints:
    """Returns the checkpoints that the experiment asks for."""
    asked = experiment.checkpoint
    model_file = experiment.model.name if experiment.model.name.endswith(config.FILE) else ""
    return manager.Checkpoints(
        folder.checkpoints,
        every=asked.every,
        keep=asked.keep,
        best=asked.best,
        asynchronous=asked.asynchronous,
        resume="auto" if placement.cluster.attempt else options.resume,
        changed=options.resume_changed,
        experiment=config.flat(experiment),
        data_sha256=spec_file.digest(spec),
        model_sha256=files.checksum(pathlib.Path(model_file).expanduser())["sha256"] if model_file else "",
        storage=folder.storage,
    )
