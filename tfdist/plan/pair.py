"""What a sum costs a training beyond the sum itself, measured with two workers and no network between them.

The workers of a training reach a sum at different moments, and the one that is there first waits; `exchange` measures
sums of workers that do nothing else. No TensorFlow.
"""

from __future__ import annotations

import statistics

from tfdist import config
from tfdist.launch.notebook import launch
from tfdist.plan import pair_probe
from tfdist.plan.cost import Job, Machines


def sum_seconds(
    experiment: config.Experiment, machines: Machines, job: Job, threads: int, limit: float, communication: str
) -> float:
    """Trains with two local workers, and returns the seconds that each sum takes beyond what `machines` predicts.

    Args:
      experiment: what is trained.
      machines: as measured so far.
      job: the experiment's sums.
      threads: of each worker.
      limit: about how many seconds to measure.
      communication: how the workers sum.

    Raises:
      TrainingError: the workers have failed.
    """
    batch, accumulate = experiment.train.batch_size, experiment.train.accumulate
    if batch < 2 * accumulate:
        return 0.0
    arguments = experiment, threads
    together = launch(pair_probe.seconds, *arguments, communication, batch, limit, nproc=2, show=False)
    # At the same time, since two that compute may take more of a machine than there is.
    beside = launch(pair_probe.seconds, *arguments, None, batch // 2, limit, nproc=2, show=False)
    return beyond(statistics.mean(together) - statistics.mean(beside), machines, job)


def beyond(seconds: float, machines: Machines, job: Job) -> float:
    """Returns what each sum of two local workers takes beyond the prediction.

    Args:
      seconds: by which an update of both takes longer than the halves of it do beside each other.
    """
    return max(0.0, seconds - machines.local_exchange(job, 2)) / job.sums
