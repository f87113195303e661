"""`--dry_run`: what a run would do, in words and numbers, without doing it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import keras
import numpy as np
import psutil

from tfdist import config
from tfdist.config import field_syntax
from tfdist.config.schedule import Plan
from tfdist.data.batch_layout import Layout
from tfdist.data.loaded import Loaded
from tfdist.distributed.gpus import DriverGPU
from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals
from tfdist.models import layerwise_rates


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one replica keeps through a run; the activations of a batch come on top."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def memory(model: keras.Model, available: Mapping[str, float]) -> Memory:
    """Returns the bytes that a replica needs, and makes sure that its device has them.

    Args:
      model: built, with its optimizer.
      available: bytes for one replica, by the name of what has them.

    Raises:
      UserError: the devices do not have as much.
    """
    optimizer = keras_internals.inner_optimizer(model.optimizer)
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    needed = Memory(_bytes(model.variables), _bytes(model.trainable_variables), _bytes(optimizer.variables))
    for name, size in available.items():
        if needed.total > size:
            raise UserError(
                f"a replica needs {_size(needed.total)} for weights, gradients and optimizer, "
                f"{name} has {_size(size)} for it: use a smaller model or fewer replicas"
            )
    return needed


def available(replicas: int, gpus: tuple[DriverGPU, ...]) -> dict[str, float]:
    """Returns the bytes for one replica on this worker, by the name of what has them.

    Args:
      replicas: on this worker.
      gpus: this worker's GPUs; none for a CPU, whose memory the replicas share.
    """
    if not gpus:
        return {"this machine": psutil.virtual_memory().total / replicas}
    return {f"GPU {g.number} ({g.name})": g.memory_total * 2**20 for g in gpus if g.memory_total > 0}


def lines(
    experiment: config.Experiment, plan: Plan, model: keras.Model, data: Loaded, needs: Memory, folder: str
) -> list[str]:
    """Returns the plan as lines for a terminal of 80 columns.

    Args:
      needs: bytes of one replica.
      folder: what will be done with the run folder, in words.
    """
    layout = Layout(plan.global_batch, plan.replicas, plan.accumulate)
    tail = plan.examples % plan.global_batch
    asked = {name: getattr(experiment.train, name) for name in ("loss", "metrics", "callbacks")}
    shards = experiment.train.virtual_replicas
    shared = f"in {shards} virtual replicas over" if shards else f"{layout.share} examples per replica,"
    micro = f" in {plan.accumulate} micro-batches of {layout.micro}" if plan.accumulate > 1 else ""
    rows = [
        ("data", f"{experiment.data.name}, {plan.examples:,} examples, {list(data.spec.shape)} {data.spec.dtype}"),
        (
            "batches",
            f"{plan.updates_per_epoch:,} per epoch of {plan.global_batch}" + (f", the last of {tail}" if tail else ""),
        ),
        ("", f"{shared} {plan.replicas} {'replicas' if shards else 'of them'}{micro}"),
        ("updates", f"{plan.updates:,} in {plan.epochs:,} epochs, evaluated {_every(plan.eval_every)}"),
        ("checkpoints", f"every {experiment.checkpoint.every}, {experiment.checkpoint.keep} kept"),
        ("optimizer", f"{experiment.optimizer.name}, {experiment.optimizer.schedule}"),
        ("rate", _rates(keras_internals.rate_setting(keras_internals.inner_optimizer(model.optimizer)), plan)),
        ("model", f"{experiment.model.name}, {model.count_params():,} parameters, {experiment.train.precision}"),
        (
            "memory",
            f"{_size(needs.total)} per replica: weights {_size(needs.weights)}, gradients {_size(needs.gradients)},",
        ),
        ("", f"optimizer {_size(needs.optimizer)}; activations come on top"),
        *((name, text) for name, text in asked.items() if text),
        ("folder", folder),
    ]
    factors = layerwise_rates.factors(
        model, field_syntax.layer_rates(experiment.optimizer), experiment.optimizer.layer_decay
    )
    if factors:
        rows.insert(7, ("", layerwise_rates.describe(model, factors)))
    if experiment.checkpoint.every == "off":
        rows[4] = ("checkpoints", "none")
    return [f"  {name:<12} {text}" for name, text in rows]


def _every(epochs: int) -> str:
    return "every epoch" if epochs == 1 else f"every {epochs} epochs"


def _rates(rate: float | keras.Variable | keras.optimizers.schedules.LearningRateSchedule, plan: Plan) -> str:
    """Describes the learning rate along the run."""
    if not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return f"{float(rate):g} throughout"
    wanted = {1, plan.warmup + 1, max(1, plan.updates // 2), *(b + 1 for b in plan.decay.boundaries), plan.updates}
    points = sorted(p for p in wanted if p <= plan.updates)
    return "update " + ", ".join(f"{p:,}: {float(np.asarray(rate(p - 1))):.3g}" for p in points)


def _bytes(variables: list[keras.Variable]) -> int:
    """Returns what variables take in memory."""
    return sum(int(np.prod(v.shape)) * np.dtype(_stored(v.dtype)).itemsize for v in variables)


def _stored(dtype: str) -> str:
    """Returns a type of NumPy that is as wide."""
    return "float16" if dtype == "bfloat16" else dtype


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"
