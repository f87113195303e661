"""`train.batch_size=auto`: the largest batch that fits, tried in a child process before this one takes a device.

The child runs this module: updates of the real model with growing batches, until an error of TensorFlow, the kernel's
out-of-memory killer, this machine's budget, or the end of the data. Only the child loads TensorFlow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from tfdist import config
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.cluster import env_vars
from tfdist.config import field_syntax
from tfdist.config.messages import logger
from tfdist.config.runtime_options import Environment, ResumeOptions
from tfdist.distributed.child_process import end_with_the_parent
from tfdist.errors import TrainingError, UserError, one_line

if TYPE_CHECKING:
    from tfdist.distributed.connect import Placement
    from tfdist.distributed.distribution import Distribution

SHARE = 0.5  # of the machine's available memory; other programs, checkpoints and data need some, too
LIMIT_S = 300.0  # seconds for all attempts of a single process; with several, the others must not time out waiting
FIRST = 16  # examples of a micro-batch with which the search begins
ROWS = 32  # examples that are read of data that is not in memory, to be repeated


@dataclasses.dataclass(frozen=True, slots=True)
class BatchProposal:
    """One worker's proposal for the batch."""

    recorded: int = 0  # global batch of the run that is resumed, 0 for none
    share: int = 0  # examples per replica that fit here, 0 where another worker of this host has searched
    why: str = ""  # explanation of the share


def with_batch(experiment: config.Experiment, batch: int) -> config.Experiment:
    """Returns the experiment with this global batch."""
    return dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, batch_size=batch))


def recorded(experiment: config.Experiment, folder: RunFolder, options: ResumeOptions, attempt: int) -> int:
    """Returns the batch that the earlier run in this folder has found and a resumed run keeps, 0 for none."""
    if experiment.train.batch_size or (options.resume == "never" and attempt == 0) or not folder.holds_run:
        return 0
    try:
        batch = int((folder.earlier() or {})["train"]["batch_size"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0
    return batch if 0 < batch <= field_syntax.LARGEST else 0


def find(experiment: config.Experiment, environment: Environment, placement: Placement) -> BatchProposal:
    """Searches the examples per replica that fit on this worker; before TensorFlow has been started here."""
    if placement.choice.name == "tpu":  # which two processes cannot hold at once
        raise UserError("train.batch_size=auto is measured in a process of its own, and a TPU has one", "give a number")
    cluster, on_cpu = placement.cluster, not placement.selection.gpus and not placement.selection.opaque
    if on_cpu and cluster.local_rank > 0:  # they would measure each other
        return BatchProposal()
    budget = SHARE * psutil.virtual_memory().available / cluster.local_size if on_cpu else None
    work: dict[str, Any] = {
        "experiment": dataclasses.asdict(experiment),
        "devices": "none" if on_cpu else "all",
        "threads": environment.threads,
        "jit": environment.jit,
        "prepare": not environment.dry_run,
        "world": placement.replicas,
        "replicas": placement.choice.replicas,
        "budget": budget,
    }
    environ = env_vars.without(os.environ, env_vars.CLUSTER)
    if placement.selection.visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = placement.selection.visible.split(",")[0]
    limit = LIMIT_S if cluster.size == 1 else 0.75 * environment.start_timeout
    ends = time.monotonic() + limit

    def attempt(sizes: Sequence[int]) -> _Answer:
        return _probe({**work, "sizes": list(sizes)}, environ, max(1.0, ends - time.monotonic()))

    return _search(attempt, experiment.train.accumulate, limit, budget)


def _search(
    attempt: Callable[[Sequence[int]], _Answer], least: int, limit: float, budget: float | None
) -> BatchProposal:
    """Doubles the batch until it does not fit, and bisects once between the last two.

    `attempt` tries sizes in a child, in their order; all are multiples of `least`. All attempts together have `limit`
    seconds; `budget` is the bytes for the replicas of this worker, None where their devices have a limit.
    """
    first = attempt([FIRST * least * 2**i for i in range(24)])
    fits, too_many, peak = first.fits, first.too_many, first.peak
    if not fits and too_many:  # smaller than the first
        small = FIRST * least
        while not fits and small > least:
            small = max(least, small // 4)
            answer = attempt([small])
            fits, too_many, peak = answer.fits, answer.too_many or too_many, answer.peak
    if not fits:
        if first.error:
            raise UserError(first.error)
        few = "1 example fits" if least == 1 else f"{least} examples fit"
        why = f"not even {few}" if too_many else first.end or f"no result after {limit:.0f} s"
        raise UserError(f"train.batch_size=auto: no batch fits ({why})", "give a number, or use a smaller model")
    middle = (fits + too_many) // 2 // least * least
    if too_many and middle > fits:
        answer = attempt([middle])
        fits, too_many, peak = (middle, too_many, answer.peak) if answer.fits else (fits, middle, peak)
    bound = f"{too_many} do not" if too_many else first.error or "all there are" if first.ended else "time was up"
    used = f" in {peak / 1e9:.1f} of {budget / 1e9:.1f} GB" if budget is not None else ""
    return BatchProposal(share=fits, why=f"{fits} examples per replica fit{used}, {bound}")


def agreed(experiment: config.Experiment, own: BatchProposal, distribution: Distribution) -> config.Experiment:
    """Returns the experiment with the batch for all workers: that in the chief's run folder, or one that fits all."""
    if experiment.train.batch_size:
        return experiment
    gathered = distribution.peers.gather("the batch that fits", [own.recorded, own.share, own.why])
    proposals = [BatchProposal(*fields) for fields in gathered]
    if proposals[0].recorded:
        logger.info(f"train.batch_size={proposals[0].recorded}, as found by the previous run")
        return with_batch(experiment, proposals[0].recorded)
    smallest = min((proposal for proposal in proposals if proposal.share), key=lambda proposal: proposal.share)
    batch = smallest.share * distribution.replicas
    logger.info(f"train.batch_size={batch}: {smallest.why}")
    return with_batch(experiment, batch)


@dataclasses.dataclass(slots=True)
class _Answer:
    """Result of a child."""

    fits: int = 0
    too_many: int = 0
    peak: int = 0  # bytes of all replicas of this worker with the batch that fits
    ended: bool = False  # it has tried all sizes
    error: str = ""
    end: str = ""  # how its process ended, where nothing else explains it


def _probe(work: dict, environ: dict[str, str], seconds: float) -> _Answer:
    """Runs a child within a time limit, and kills it with all its children."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tfdist.train.batch_size_search"],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_the_parent(),
    )

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)

    late = False
    try:
        try:
            lines, _ = child.communicate(json.dumps(work).encode(), seconds)
        except subprocess.TimeoutExpired:
            late = True
            kill()
            lines, _ = child.communicate()
    finally:
        kill()
        child.wait()
    return _parsed(lines.decode(errors="replace").splitlines(), child.returncode, late)


def _parsed(lines: Sequence[str], code: int, late: bool) -> _Answer:
    """Parses the output of a child that has ended with this exit code, or was killed because it was late."""
    answer, trying = _Answer(), 0
    for line in lines:
        with contextlib.suppress(ValueError):
            fields = json.loads(line)
            trying = 0 if "fits" in fields else fields.pop("trying", trying)
            answer = dataclasses.replace(answer, **fields)
    if code and not late:
        if trying:  # it was killed, or it crashed: out of memory
            answer.too_many = answer.too_many or trying
        elif not answer.fits:
            answer.end = f"its process ended with code {code} before it had tried one"
    return answer


# -- the child ------------------------------------------------------------------


def main() -> None:
    """Tries sizes, in order, until one is too large, as a request on stdin says; answers in lines of JSON."""
    work = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not be parsed as an answer
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # the kernel shall end this process before any other
    try:
        for answer in _tried(work):
            print(json.dumps(answer), file=answers, flush=True)
        return
    except (UserError, TrainingError) as error:
        text = str(error)
    except Exception as error:  # of the user's code, for example: another batch would not help
        why = f"{type(error).__name__}: {one_line(error, 200)}"
        text = f"train.batch_size=auto: trying it ended with {why}: give a number, and the run shows where"
    print(json.dumps({"error": text}), file=answers, flush=True)


def _tried(work: dict[str, Any]) -> Iterator[dict[str, int | bool]]:
    """Makes updates with each size, and yields the answers."""
    most, update = _trial(_experiment(work["experiment"]), work)
    import tensorflow as tf  # after the trial has started it with the experiment's options

    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    base = peak()
    for size in work["sizes"]:
        last, size = size >= most, min(size, most)
        yield {"trying": size}
        try:
            update(size)
        except (TrainingError, MemoryError, tf.errors.ResourceExhaustedError) as error:
            if isinstance(error, TrainingError) and "out of memory" not in str(error):
                raise
            yield {"too_many": size}
            return
        used = base + (peak() - base) * work["replicas"]
        if work["budget"] is not None and used > work["budget"]:
            yield {"too_many": size}
            return
        yield {"fits": size, "peak": used}
        if last:
            break
    yield {"ended": True}


def _trial(experiment: config.Experiment, work: dict[str, Any]) -> tuple[int, Callable[[int], object]]:
    """Builds the real model, with a few of its real examples.

    Returns the examples per replica that there are, and a function that makes two updates of so many: the second has
    the optimizer's state and the first one's garbage.
    """
    import keras
    import numpy as np

    import tfdist
    from tfdist.config import schedule
    from tfdist.data import sources
    from tfdist.data.datasets import registry
    from tfdist.models import build as models
    from tfdist.models import optimizers

    distribution = tfdist.connect("default", devices=work["devices"], threads=work["threads"], jit=work["jit"])
    models.set_precision(experiment.train.precision)
    data = registry.load(experiment, prepare=work["prepare"])
    with distribution.scope():
        model = models.build(experiment, data.spec, quiet=True)
        optimizer = optimizers.build(experiment, schedule.make(experiment, data.examples, 1))
        most = max(1, data.examples // work["world"])
        data = models.compiled(model, optimizer, experiment, data)
        optimizers.exclude(model, experiment.optimizer)
    columns = keras.tree.map_structure(np.asarray, data.train.first_rows(ROWS))

    def update(size: int) -> None:
        rows = np.arange(size)
        tfdist.fit(
            model,
            sources.Arrays(keras.tree.map_structure(lambda c: np.take(c, rows, 0, mode="wrap"), columns)),
            distribution=distribution,
            batch_size=size,
            epochs=2,
            accumulate=experiment.train.accumulate,
            steps_per_call=1,
            shuffle=False,
            callbacks=[keras.callbacks.TerminateOnNaN()],  # whose presence makes NaN no error
            lr_multipliers=field_syntax.layer_rates(experiment.optimizer),
            layer_decay=experiment.optimizer.layer_decay,
            check_agreement="off",
            verbose=0,
        )

    return most, update


def _experiment(fields: dict[str, Any]) -> config.Experiment:
    """Returns the requested experiment with a constant rate: schedules count updates, whose number is unknown."""
    groups = {f.name: f.default_factory for f in dataclasses.fields(config.Experiment) if callable(f.default_factory)}
    values = {name: groups[name](**value) if name in groups else value for name, value in fields.items()}
    experiment: config.Experiment = config.Experiment(**values)
    plain: dict[str, Any] = {"schedule": "constant", "schedule_options": "", "warmup": "0%", "learning_rate": 1e-9}
    experiment.optimizer = dataclasses.replace(experiment.optimizer, scale_learning_rate="none", base_batch=0, **plain)
    experiment.train.batch_size = max(32, experiment.train.accumulate)
    experiment.train.epochs, experiment.train.steps, experiment.eval.every = 1, 0, "1 epoch"
    return experiment


if __name__ == "__main__":
    main()
