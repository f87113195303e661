"""`train.batch_size=auto`: the largest batch that fits, tried in a child process before this one takes a device.

The child (`tfdist.train.batch_size_probe`) makes updates of the real model with more and more examples. What ends
it is the answer: an error of TensorFlow, the kernel's out-of-memory killer, this machine's budget, or the end of the
data. No TensorFlow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from tfdist import config
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.cluster import env_vars
from tfdist.config import field_syntax
from tfdist.config.messages import logger
from tfdist.config.runtime_options import Environment, ResumeOptions
from tfdist.distributed.child_process import end_with_the_parent
from tfdist.errors import UserError

if TYPE_CHECKING:
    from tfdist.distributed.connect import Placement
    from tfdist.distributed.distribution import Distribution

SHARE = 0.5
"""Share of the machine's available memory for a run on its CPU; other programs, checkpoints and data need some."""
LIMIT_S = 300.0
"""Seconds for all attempts of a process alone; those of several must be done before the others give up waiting."""
FIRST = 16
"""Examples of a micro-batch with which the search begins."""


@dataclasses.dataclass(frozen=True, slots=True)
class BatchProposal:
    """What one worker contributes to the choice of the batch."""

    recorded: int = 0
    """Global batch of the run that goes on, 0 for none."""
    share: int = 0
    """Examples per replica that fit here, 0 where another worker of this host has looked."""
    why: str = ""
    """How the share was found, in words."""


def is_auto(experiment: config.Experiment) -> bool:
    """Says whether the batch is to be looked for."""
    return experiment.train.batch_size == 0


def with_batch(experiment: config.Experiment, batch: int) -> config.Experiment:
    """Returns the experiment with this global batch."""
    return dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, batch_size=batch))


def recorded(experiment: config.Experiment, folder: RunFolder, options: ResumeOptions, attempt: int) -> int:
    """Returns the batch that the earlier run in this folder has found, 0 for none.

    A run that goes on, or is made again, keeps it.
    """
    if not is_auto(experiment) or (options.resume == "never" and attempt == 0) or not folder.holds_run:
        return 0
    try:
        found = int((folder.earlier() or {})["train"]["batch_size"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0
    return found if 0 < found <= field_syntax.LARGEST else 0


def find(experiment: config.Experiment, environment: Environment, placement: Placement) -> BatchProposal:
    """Looks how many examples per replica fit on this worker; before TensorFlow has been started here.

    Raises:
      UserError: not even one does, it took too long, or the experiment cannot run at all.
    """
    if placement.choice.name == "tpu":  # which this process and another one cannot hold at once
        raise UserError("train.batch_size=auto is measured in a process of its own, and a TPU has one: give a number")
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
        return _ask({**work, "sizes": list(sizes)}, environ, max(1.0, ends - time.monotonic()))

    return _search(attempt, experiment.train.accumulate, limit, budget)


def _search(
    attempt: Callable[[Sequence[int]], _Answer], least: int, limit: float, budget: float | None
) -> BatchProposal:
    """Doubles the batch until it does not fit, and bisects once between the last two.

    Args:
      attempt: has a child try these sizes in their order.
      least: the smallest batch, of which all others are multiples.
      limit: seconds for all attempts.
      budget: bytes that the replicas of this worker may take, None where their devices know.

    Raises:
      UserError: no batch fits.
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
        why = f"{least} do not" if too_many else first.end or f"nothing was known after {limit:.0f} s"
        raise UserError(f"train.batch_size=auto: no batch fits ({why}): give a number, or use a smaller model")
    middle = (fits + too_many) // 2 // least * least
    if too_many and middle > fits:
        answer = attempt([middle])
        fits, too_many, peak = (middle, too_many, answer.peak) if answer.fits else (fits, middle, peak)
    bound = f"{too_many} do not" if too_many else first.error or "all there are" if first.ended else "time was up"
    used = f" in {peak / 1e9:.1f} of {budget / 1e9:.1f} GB" if budget is not None else ""
    return BatchProposal(share=fits, why=f"{fits} examples per replica fit{used}, {bound}")


def agreed(experiment: config.Experiment, own: BatchProposal, distribution: Distribution) -> config.Experiment:
    """Returns the experiment with the batch that all workers take.

    It is the one that the chief's run folder tells, or one that fits on all of them.
    """
    if not is_auto(experiment):
        return experiment
    proposals = [
        BatchProposal(*fields)
        for fields in distribution.peers.gather("the batch that fits", [own.recorded, own.share, own.why])
    ]
    if proposals[0].recorded:
        logger.info(f"train.batch_size={proposals[0].recorded}, as the run before has found")
        return with_batch(experiment, proposals[0].recorded)
    smallest = min((proposal for proposal in proposals if proposal.share), key=lambda proposal: proposal.share)
    batch = smallest.share * distribution.replicas
    logger.info(f"train.batch_size={batch}: {smallest.why}")
    return with_batch(experiment, batch)


@dataclasses.dataclass(slots=True)
class _Answer:
    """What a child has found out."""

    fits: int = 0
    too_many: int = 0
    peak: int = 0
    """Bytes of all replicas of this worker with the batch that fits."""
    ended: bool = False
    """Whether it has come to the end of its sizes."""
    error: str = ""
    end: str = ""
    """How its process ended, where nothing else explains it."""


def _ask(work: dict, environ: dict[str, str], seconds: float) -> _Answer:
    """Starts a child, and ends it in time with all that it has started; returns what it has found out."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tfdist.train.batch_size_probe"],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_the_parent(),
    )
    late = False
    try:
        try:
            lines, _ = child.communicate(json.dumps(work).encode(), seconds)
        except subprocess.TimeoutExpired:
            late = True
            _kill(child)
            lines, _ = child.communicate()
    finally:
        _kill(child)
        child.wait()
    return _understood(lines.decode(errors="replace").splitlines(), child.returncode, late)


def _understood(lines: Sequence[str], code: int, late: bool) -> _Answer:
    """Reads the lines of a child that has ended with this exit code, or was ended because it was late."""
    answer, trying = _Answer(), 0
    for line in lines:
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            trying = said.get("trying", trying)
            answer.too_many = said.get("too_many", answer.too_many)
            answer.error = said.get("error", answer.error)
            answer.ended = said.get("ended", answer.ended)
            if "fits" in said:
                answer.fits, answer.peak, trying = said["fits"], said["peak"], 0
    if code and not late:
        if trying:  # killed, or it crashed: the kernel has found that it is too much
            answer.too_many = answer.too_many or trying
        elif not answer.fits:
            answer.end = f"its process ended with code {code} before it had tried one"
    return answer


def _kill(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
