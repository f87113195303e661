"""A plan from its measurements to its files. It imports TensorFlow when the device is started, not before."""

from __future__ import annotations

import dataclasses
import os

from tfdist import config
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.config.messages import logger
from tfdist.distributed import connect
from tfdist.distributed.shared_memory_sum import MOST
from tfdist.plan import exchange, pair, picture, report
from tfdist.plan.cost import HostSums, Machines
from tfdist.plan.report import Request
from tfdist.plan.scaling import Variant


def plan(experiment: config.Experiment, wanted: Request, folder: RunFolder) -> int:
    """Measures, predicts, shows and writes; returns the exit code.

    Raises:
      UserError: the experiment cannot be used.
      TrainingError: what was measured has failed.
    """
    environment = wanted.environment
    distribution = connect.connect(
        "default", devices="none", threads=environment.threads, cpu_kernels=environment.cpu_kernels
    )
    from tfdist.distributed import collectives  # which imports TensorFlow, started by now
    from tfdist.plan.workload import LARGER, Workload, measured_compute

    bucket = collectives.BUCKET_BYTES if environment.bucket_bytes is None else environment.bucket_bytes
    own = experiment.optimizer.reduce_dtype
    workload = Workload(experiment, distribution)
    logger.info(f"measuring updates of {experiment.name} on this machine, --threads={environment.threads} ...")
    compute, measured = measured_compute(workload, experiment, wanted.seconds)
    small = own if own != "float32" else "float16"
    logger.info("measuring what a sum over two workers costs this machine ...")
    work = exchange.measure(environment.threads or 1, ("float32", small))
    machines = Machines(wanted.link, work, compute, wanted.nproc_per_node)
    # The type that the experiment asks for comes first, then the other one.
    dtypes = (own, "float16" if own == "float32" else "float32")
    variants = [Variant(dtype, workload.job(dtype, bucket)) for dtype in dtypes]
    logger.info("measuring what two workers on this machine wait for each other ...")
    threads = max(1, min(environment.threads or 1, len(os.sched_getaffinity(0)) // 2))
    asked = variants[0].job, threads, wanted.seconds
    machines = dataclasses.replace(machines, sum_seconds=pair.sum_seconds(experiment, machines, *asked, "ring"))
    if 1 < wanted.nproc_per_node <= MOST:
        logger.info("measuring what sums in the memory of this machine cost ...")
        in_memory = exchange.measure_in_memory(environment.threads or 1, ("float32", small))
        if in_memory:
            machines = dataclasses.replace(machines, host=HostSums(in_memory))
            waiting = pair.sum_seconds(experiment, machines, *asked, "auto")
            machines = dataclasses.replace(machines, host=HostSums(in_memory, waiting))
    if measured[-1].accumulate > experiment.train.accumulate:
        job = variants[0].job
        larger = dataclasses.replace(job, batch=LARGER * job.batch, accumulate=LARGER * job.accumulate)
        variants.append(Variant(f"{LARGER}x batch", larger, other_training=True))
    made = report.make(experiment, wanted, machines, variants, measured)
    folder.write(report.RECORD, made.record())
    folder.write_text("plan.md", made.markdown())
    picture.draw(folder.path / "plan.png", made)
    made.show()
    logger.info(f"results are in {folder.path}/: {report.RECORD}, plan.md, plan.png")
    return 0
