"""What it costs to watch a run: progress, timeline, TensorBoard and history, against the same run without.

    make bench-watching                        (or: python benchmarks/bench_watching.py --rounds=7 --workloads=mlp,cnn)

Ways run in turn within one process, on one replica of one thread; ratios are medians over rounds. `bare` is `fit` with
no callback at all, `quiet` what `--progress=none --notensorboard` leaves, `watched` the default.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time

import tfdist

DISTRIBUTION = tfdist.connect("default", threads=1)

import workloads  # noqa: E402

from tfdist.checkpoints.run_folder import RunFolder  # noqa: E402
from tfdist.config import Experiment  # noqa: E402
from tfdist.config import schedule as schedule_lib  # noqa: E402
from tfdist.config.runtime_options import Environment  # noqa: E402
from tfdist.data.sources import as_source  # noqa: E402
from tfdist.monitoring import flops, monitors  # noqa: E402
from tfdist.monitoring.recorder import Recorder  # noqa: E402

EPOCHS = {"mlp": 30, "cnn": 2}
WAYS = {
    "bare": None,
    "quiet": Environment(progress="none", tensorboard=False),
    "watched": Environment(progress="plain"),
}


class Clock(tfdist.Callback):
    """Seconds from the end of the first epoch, in which things are compiled, to the end of the last."""

    takes_many_updates = True
    wants_gradient_norm = True  # so that all ways run one and the same compiled function

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.start = time.perf_counter()
        self.seconds = time.perf_counter() - self.start


def prepared(name):
    """A function that trains in a way, and returns its seconds."""
    work = workloads.WORKLOADS[name]
    x, y = work.data(1)
    experiment = Experiment()
    experiment.train.batch_size, experiment.train.epochs = work.batch, 1 + EPOCHS[name]
    schedule = schedule_lib.make(experiment, len(x), 1)
    with DISTRIBUTION.scope():
        model = workloads.compiled(work.model())

    def run(where):
        clock = Clock()
        with contextlib.ExitStack() as stack:
            path = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            called = []
            if where:
                folder = RunFolder(path)
                counted = flops.FlopsModel(model, as_source(x, y), [], 1, "float32")
                recorder = Recorder(folder, schedule)
                called = monitors.create(where, folder, experiment, schedule, counted, recorder)
            tfdist.fit(
                model, x, y, distribution=DISTRIBUTION, batch_size=work.batch, epochs=1 + EPOCHS[name],
                callbacks=[*called, clock], verbose=0,
            )  # fmt: skip
            for callback in called:
                getattr(callback, "stop", lambda: None)()
        return clock.seconds

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workloads", default="mlp,cnn")
    options = parser.parse_args()
    print(f"{'workload':9}{'bare, s':>9}{'quiet/bare':>12}{'watched/bare':>14}{'watched/quiet':>15}   (target 1.01)")
    for name in options.workloads.split(","):
        run = prepared(name)
        rounds = []
        for number in range(options.rounds + 1):
            order = list(WAYS) if number % 2 else list(reversed(WAYS))
            seconds = {way: run(WAYS[way]) for way in order}
            if number:  # the first round compiles
                rounds.append(seconds)
        bare = statistics.median(r["bare"] for r in rounds)
        pairs = (("quiet", "bare"), ("watched", "bare"), ("watched", "quiet"))
        ratios = [statistics.median([r[a] / r[b] for r in rounds]) for a, b in pairs]
        print(f"{name:9}{bare:9.2f}{ratios[0]:12.3f}{ratios[1]:14.3f}{ratios[2]:15.3f}", flush=True)


if __name__ == "__main__":
    main()
