"""What a run leaves at its end: the report, `result.json`, and the lines that tell a person of them."""

from __future__ import annotations

import contextlib
import dataclasses

from tfdist.checkpoints import integrity
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.config.messages import logger
from tfdist.distributed.peers import Peers
from tfdist.errors import TrainingError
from tfdist.monitoring import flops
from tfdist.monitoring.confusion import Findings
from tfdist.monitoring.progress import numbers
from tfdist.monitoring.recorder import Result
from tfdist.monitoring.report import page


def write(folder: RunFolder, result: Result, mistakes: Findings | None, silent: bool = False) -> None:
    """Writes the report, and last of all `result.json`.

    Args:
      mistakes: what a classifier gets wrong, for the report.
      silent: whether to keep from a person what is wrong with the report.

    Raises:
      TrainingError: the disk has no room even for the result alone, or the bucket cannot be written.
    """
    content = integrity.sealed(dataclasses.asdict(result))
    problem = page.write(folder, content, mistakes)
    if problem and not silent:
        logger.info(problem)
    try:
        folder.write(integrity.RESULT, content)
    except TrainingError:  # the report may have taken the last of the disk, and this matters more
        with contextlib.suppress(TrainingError):  # read-only by now, say
            folder.remove(page.NAME)
        folder.write(integrity.RESULT, content)
    folder.push(patient=not silent)


def check_same_weights(peers: Peers, weights_sha256: str) -> None:
    """Looks for the last time whether every worker has ended with the same weights.

    Raises:
      TrainingError: one has not; the message names it.
    """
    checksums = peers.gather("the weights at the end", weights_sha256)
    different = [f"{rank} ({peers.hosts[rank]})" for rank, sha256 in enumerate(checksums) if sha256 != checksums[0]]
    if different:
        raise TrainingError(
            f"worker {', '.join(different)} has ended with other weights than worker 0: do not use them, "
            "and look for a callback that changes weights on some workers only"
        )


def summary(result: Result, folder: RunFolder) -> str:
    """Returns what to tell a person at the end, in two or three lines; names the files that are really there."""
    done = f"{result.status}: {result.updates} updates in {result.seconds:.1f} s"
    speed = f", {result.examples_per_second:,.0f} examples/s" if result.examples_per_second else ""
    if result.flops_per_second:
        speed += f", {flops.words(result.flops_per_second, result.flops_share)}"
    why = f" ({result.reason})" if result.reason else ""
    quality = f"\ntfdist: evaluation: {numbers(result.evaluation)}" if result.evaluation else ""
    files = [name for name in (page.NAME, "result.json", "model.keras") if (folder.path / name).exists()]
    return f"{done}{speed}{why}{quality}\ntfdist: results are in {folder.name}/: {', '.join(files)}"
