"""Prepares a run: the experiment as it will run, its data, schedule, model and checkpoints."""

import dataclasses
import pathlib

import keras

from tfdist import config
from tfdist.checkpoints import files, manager, own_work, resume
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.config import schedule as schedule_lib
from tfdist.config import user_functions, validation
from tfdist.config.messages import logger
from tfdist.config.runtime_options import Environment
from tfdist.data import spec_file
from tfdist.data.datasets import registry
from tfdist.data.loaded import Loaded
from tfdist.distributed.connect import Placement
from tfdist.distributed.distribution import Distribution
from tfdist.keras_bridge import batch_norm, setups
from tfdist.models import build as models
from tfdist.models import objective, optimizers


@dataclasses.dataclass(frozen=True, slots=True)
class Preparation:
    """A run on one worker, ready to train."""

    experiment: config.Experiment  # as it will run: with the batch and micro-batches that were found
    recovered_accumulate: int  # micro-batches that an earlier attempt, out of memory, has recorded; 0 if none did
    data: Loaded
    schedule: schedule_lib.Plan
    class_weights: dict[int, float] | None
    model: keras.Model  # compiled, under the scope of the strategy
    callbacks: list[keras.callbacks.Callback]  # those of `train.callbacks`
    code: dict[str, str]  # digests of the user's code and of what it has made of the model's layers
    checkpoints: manager.Checkpoints
    profiled: tuple[int, int]  # first and last update of the profile, (0, 0) for none
    resumes: bool  # the run resumes the earlier one in its folder


def prepare(
    experiment: config.Experiment,
    environment: Environment,
    placement: Placement,
    folder: RunFolder,
    distribution: Distribution,
) -> Preparation:
    """Loads the data and builds the model. Every worker calls this with the same experiment."""
    _announce(distribution, placement, experiment.train.virtual_replicas)
    train = experiment.train
    again = placement.cluster.attempt > 0 or not (environment.resume == "never" or folder.completed)
    told = distribution.peers.gather("micro-batches of the run before", resume.read_accumulate(folder) if again else 1)
    accumulate = min(told[0], train.batch_size // distribution.replicas)
    recovers = accumulate > train.accumulate and not train.virtual_replicas  # which guarantee the same bits
    if recovers:
        logger.info(f"train.accumulate={accumulate} instead of {train.accumulate}: the run before ran out of memory")
        experiment = dataclasses.replace(experiment, train=dataclasses.replace(train, accumulate=accumulate))
    models.set_precision(experiment.train.precision)
    data = registry.load_together(
        distribution.peers, experiment.data, lambda: registry.load(experiment, not environment.dry_run)
    )
    distribution.peers.check_same(registry.facts(data), "the data set")
    schedule = schedule_lib.make(experiment, data.examples, distribution.replicas)
    logger.info(f"{experiment.name}: {schedule.describe()}")
    for line in validation.without_effect(experiment):
        logger.info(line)
    weights = objective.class_weights(experiment.train.class_weight, data)
    with distribution.scope():
        model = models.build(experiment, data.spec)
        optimizer = optimizers.build(experiment, schedule)
        data = models.compiled(model, optimizer, experiment, data)
        optimizers.exclude(model, experiment.optimizer)
        models.check_can_be_saved(model, experiment.model.name)
    if distribution.replicas > 1 and not experiment.train.virtual_replicas and batch_norm.normalizing_alone(model):
        logger.info(
            "WARNING: model.sync_batch_norm=False: each replica normalizes with its own rows, so results depend on the "
            "number of replicas, and only --check_agreement=on compares them"
        )
    model_file = experiment.model.name if experiment.model.name.endswith(config.FILE) else ""
    facts = spec_file.facts(data.spec)
    if model_file:
        facts[resume.MODEL_FILE] = files.checksum(pathlib.Path(model_file).expanduser())["sha256"]
    code = user_functions.code_digests(own_work.functions(experiment).values()) | setups.of_model(model)
    checkpoints = manager.Checkpoints(
        folder.checkpoints,
        **dataclasses.asdict(experiment.checkpoint),
        resume="auto" if placement.cluster.attempt else environment.resume,
        changed=environment.resume_changed,
        experiment=config.flat(experiment),
        data_sha256=spec_file.digest(data.spec),
        facts=facts | code | setups.of_losses(model),
        storage=folder.storage,
    )
    return Preparation(
        experiment=experiment,
        recovered_accumulate=accumulate if recovers else 0,
        data=data,
        schedule=schedule,
        class_weights=weights,
        model=model,
        callbacks=objective.callbacks(experiment, optimizer),
        code=code,
        checkpoints=checkpoints,
        profiled=schedule_lib.profiled(environment.profile, schedule),
        resumes=resume.continues(folder, environment, placement.cluster.attempt, checkpoints.off),
    )


def _announce(distribution: Distribution, placement: Placement, virtual_replicas: int) -> None:
    """Logs the strategy with its devices, and problems of the driver."""
    logger.info(distribution.announcement())
    if virtual_replicas:
        same = (
            f"every batch in {virtual_replicas} virtual replicas, with the same bits on any number of replicas up to "
        )
        threads = placement.options.threads
        logger.info(f"{same}that" + (f"; --threads={threads} decides about the bits, too" if threads else ""))
    if placement.selection.gpus:
        logger.info(f"devices: {placement.selection.describe()}")
    if placement.survey.problem:
        logger.info(f"WARNING: {placement.survey.problem}: python -m tfdist.doctor says more")
