"""What one of two workers of this machine runs to measure the experiment's updates, with the other one or beside it.

`pair.sum_seconds` starts it by `tfdist.launch`.
"""

from __future__ import annotations

import os

from tfdist import config
from tfdist.distributed.job import env_vars


def seconds(
    experiment: config.Experiment, threads: int, communication: str | None, examples: int, limit: float
) -> float:
    """Returns the seconds of an update.

    Args:
      threads: of this worker.
      communication: how two that train together sum; None for two that know nothing of each other.
      examples: of an update, over all workers that train together.
      limit: about how many seconds to measure.
    """
    import tfdist

    if communication is None:
        for name in os.environ.keys() - env_vars.without(os.environ, env_vars.CLUSTER).keys():
            del os.environ[name]
        distribution = tfdist.connect("default", devices="none", threads=threads)
    else:
        distribution = tfdist.connect("multi_worker", devices="none", threads=threads, communication=communication)
    from tfdist.plan.workload import Workload  # which imports TensorFlow, started by now

    workload = Workload(experiment, distribution)
    return workload.measure(examples, experiment.train.accumulate, limit).seconds
