"""Puts a Slurm job that was pre-empted back into the queue. No TensorFlow."""

import shutil
import subprocess
from collections.abc import Mapping

from tfdist.errors import UserError

LIMIT_S = 30.0  # seconds to wait for an answer of Slurm's controller: the job's time is nearly over


def check(requeue: bool, environ: Mapping[str, str]) -> None:
    """Raises UserError when a job cannot be put back."""
    if requeue and not environ.get("SLURM_JOB_ID"):
        what = "--requeue is for Slurm's jobs, and SLURM_JOB_ID is not set"
        raise UserError(what, "use it under sbatch, or leave it out")
    if requeue and not shutil.which("scontrol"):
        raise UserError("--requeue needs Slurm's scontrol, which is not on PATH", "install it there, or leave it out")


def again(environ: Mapping[str, str]) -> str:
    """Requeues this job; returns the line to show a person."""
    job = environ["SLURM_JOB_ID"]
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=LIMIT_S)
        why = "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    return f"WARNING: job {job} is not requeued: {why}" if why else f"job {job} is in the queue again"
