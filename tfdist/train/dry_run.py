"""`--dry_run`: prints what a run would do, without doing it."""

from collections.abc import Mapping
from typing import NamedTuple

import keras
import numpy as np
import psutil

from tfdist import config
from tfdist.checkpoints import resume, training_run
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.config import field_syntax
from tfdist.config.messages import sized
from tfdist.config.runtime_options import Environment
from tfdist.config.schedule import Plan
from tfdist.data.batch_layout import Layout
from tfdist.data.loaded import Loaded
from tfdist.distributed.connect import Placement
from tfdist.distributed.distribution import Distribution
from tfdist.distributed.gpus import DriverGPU
from tfdist.errors import UserError, shown
from tfdist.keras_bridge import keras_internals, zero
from tfdist.models import optimizers
from tfdist.step import step_calls
from tfdist.topology import known
from tfdist.train import ahead_of_time, early_stopping
from tfdist.train.preparation import Preparation


def rehearse(
    prepared: Preparation, environment: Environment, placement: Placement, folder: RunFolder, distribution: Distribution
) -> None:
    """Prints the plan of a prepared run."""
    experiment, model, topology = prepared.experiment, prepared.model, environment.topology
    limits = available(len(distribution.devices), placement.selection.gpus)
    if topology:
        spec = known.find(topology)
        limits = {f"a {spec.device} of --topology={topology}": spec.memory}
    with distribution.scope():
        needs = memory(model, limits, distribution, experiment.train.zero_stage)
    if metrics := early_stopping.monitored(experiment, model):
        # Builds the metrics, as a training does.
        step_calls.step_of(model, distribution, prepared.data.train).prepare_training()
        early_stopping.check_measured(metrics, model)
    if distribution.is_chief:
        if prepared.resumes and not prepared.checkpoints.off:
            # Reads the checkpoint that the run would resume from.
            schedule, source, identity = prepared.schedule, prepared.data.train, {}
            if source.size is not None:  # else only the feed knows its batches
                epoch = schedule.global_batch, schedule.updates_per_epoch
                identity = training_run.identity(*epoch, experiment.seed, source.size)
            run = folder.checkpoints, identity, config.flat(experiment), environment.resume_changed, folder.storage
            resume.choose(*run, required=environment.resume == "require", read_only=True)
        intent = resume.intent(folder, prepared.resumes)
        rows = lines(experiment, prepared.schedule, model, prepared.data, needs, intent)
        print("\n".join(map(shown, rows)), flush=True)
    if topology:
        print("\n".join(ahead_of_time.rehearse(prepared, distribution, topology)), flush=True)


class Memory(NamedTuple):
    """Bytes of one replica throughout a run; the activations of a batch are additional."""

    weights: int
    gradients: int
    optimizer: int
    sliced: int  # of the optimizer, with train.zero_stage=1

    @property
    def total(self) -> int:
        """All of them, with the optimizer as it is now."""
        return self.weights + self.gradients + self.optimizer


def memory(model: keras.Model, available: Mapping[str, float], distribution: Distribution, zero_stage: int) -> Memory:
    """Returns the bytes that a replica of a built model needs; UserError if less is `available`, by device."""
    optimizer = keras_internals.inner_optimizer(model.optimizer)
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    zero.ready(model, distribution, zero_stage)
    whole = _bytes(optimizer.variables)
    sliced = whole - zero.saved_bytes(optimizer, distribution)
    state = sliced if zero_stage else whole
    needed = Memory(_bytes(model.variables), _bytes(model.trainable_variables), state, sliced)
    for name, size in available.items():
        if needed.total > size:
            raise UserError(
                f"a replica needs {sized(needed.total)} for weights, gradients and optimizer, "
                f"{name} has {sized(size)} for it",
                "use a smaller model or fewer replicas",
            )
    return needed


def available(replicas: int, gpus: tuple[DriverGPU, ...]) -> dict[str, float]:
    """Returns the bytes for one replica on this worker, by device; replicas on a CPU share its memory."""
    if not gpus:
        return {"this machine": psutil.virtual_memory().total / replicas}
    return {f"GPU {g.number} ({g.name})": g.memory_total * 2**20 for g in gpus if g.memory_total > 0}


def lines(
    experiment: config.Experiment, plan: Plan, model: keras.Model, data: Loaded, needs: Memory, folder: str
) -> list[str]:
    """Returns the plan as lines for 80 columns; `folder` describes what will be done with the run folder."""
    train, optimizer, checkpoint = experiment.train, experiment.optimizer, experiment.checkpoint
    layout = Layout(plan.global_batch, plan.replicas, plan.accumulate)
    tail = plan.examples % plan.global_batch
    batches = f"{plan.updates_per_epoch:,} per epoch of {plan.global_batch}"
    exact = train.virtual_replicas
    shared = f"in {exact} virtual replicas over" if exact else f"{layout.max_rows} examples per replica,"
    micro = f" in {plan.accumulate} micro-batches of {layout.max_micro_rows}" if plan.accumulate > 1 else ""
    every = "every epoch" if plan.eval_every == 1 else f"every {plan.eval_every} epochs"
    size = f"{sized(needs.total)} per replica: weights {sized(needs.weights)}, gradients {sized(needs.gradients)},"
    factors = optimizers.layer_factors(model, field_syntax.layer_rates(optimizer), optimizer.layer_decay)
    rows = [
        ("data", f"{experiment.data.name}, {plan.examples:,} examples, {list(data.spec.shape)} {data.spec.dtype}"),
        ("batches", batches + (f", the last of {tail}" if tail else "")),
        ("", f"{shared} {plan.replicas} {'replicas' if exact else 'of them'}{micro}"),
        ("updates", f"{plan.updates:,} in {plan.epochs:,} epochs, evaluated {every}"),
        ("checkpoints", "none" if checkpoint.every == "off" else f"every {checkpoint.every}, {checkpoint.keep} kept"),
        ("optimizer", f"{optimizer.name}, {optimizer.schedule}"),
        ("rate", _rates(keras_internals.rate_setting(keras_internals.inner_optimizer(model.optimizer)), plan)),
        *([("", f"x{min(factors):.3g} to x{max(factors):.3g} by layer")] if factors else []),
        ("model", f"{experiment.model.name}, {model.count_params():,} parameters, {train.precision}"),
        ("memory", size),
        ("", f"optimizer {sized(needs.optimizer)}; activations come on top"),
        *([("", f"with train.zero_stage=1 optimizer {sized(needs.sliced)}")] if needs.sliced < needs.optimizer else []),
        *((name, text) for name in ("loss", "metrics", "callbacks") if (text := getattr(train, name))),
        ("folder", folder),
    ]
    return [f"  {name:<12} {text}" for name, text in rows]


def _rates(rate: float | keras.Variable | keras.optimizers.schedules.LearningRateSchedule, plan: Plan) -> str:
    if not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return f"{float(np.asarray(rate)):g} throughout"
    updates = {1, plan.warmup + 1, max(1, plan.updates // 2), *(b + 1 for b in plan.decay.boundaries), plan.updates}
    points = sorted(p for p in updates if p <= plan.updates)
    return "update " + ", ".join(f"{p:,}: {float(np.asarray(rate(p - 1))):.3g}" for p in points)


def _bytes(variables: list[keras.Variable]) -> int:
    width = lambda dtype: np.dtype("float16" if dtype == "bfloat16" else dtype).itemsize
    return sum(int(np.prod(v.shape)) * width(v.dtype) for v in variables)
