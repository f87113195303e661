"""Measures what checkpoints cost, and how long a resume takes; prints a table and writes JSON.

    make bench-checkpoints              (or: python benchmarks/bench_checkpoints.py --rounds=5)

In each round the same workload trains with checkpoints and without, in turn, in one process.
"""

import argparse
import json
import pathlib
import runpy
import shutil
import statistics
import tempfile
import time

import keras
import numpy as np
import workloads

import tfdist
from tfdist.checkpoints import files

HERE = pathlib.Path(__file__).parent
EVERY_S = 10
TARGETS = {"digits": 0.01, "cnn": 0.01, "wide": 0.03}


def digits():
    from tfdist.config import schedule
    from tfdist.config.commands import command_line
    from tfdist.data.datasets import registry
    from tfdist.models import build as models

    experiment = runpy.run_path(command_line.DEFAULT_CONFIG)["get_config"]()
    data = registry.load(experiment)
    model = models.build(experiment, data.spec)
    schedule.make(experiment, data.examples, 1)
    return workloads.compiled(model), data.train.columns, experiment.train.batch_size


def made(name):
    work = workloads.WORKLOADS[name]
    return workloads.compiled(work.model()), work.data(1), work.batch


class Until(tfdist.Callback):
    """Counts updates from the end of the first call, which compiles, to the call that ends after some seconds."""

    takes_many_updates = True

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.start = seconds, None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        now, done = time.perf_counter(), (self.epoch, batch)
        if self.start is None:
            self.start, self.first = now, done
        self.last, self.end = done, now
        if now - self.start >= self.seconds:
            self.model.stop_training = True


def rate(model, columns, batch, seconds, folder):
    """Updates per second over `seconds`, and the checkpoints that were taken."""
    until = Until(seconds)
    kept = tfdist.Checkpoints(folder, every=f"{EVERY_S} seconds", keep=2, resume="never") if folder else None
    per_epoch = -(-len(columns[0]) // batch)
    tfdist.fit(model, *columns, batch_size=batch, epochs=10**6, callbacks=[until], verbose=0, checkpoints=kept)
    if kept:
        kept.finish()
    updates = (until.last[0] - until.first[0]) * per_epoch + until.last[1] - until.first[1]
    return updates / (until.end - until.start), kept


def cost(name, rounds, seconds):
    model, columns, batch = digits() if name == "digits" else made(name)
    rounds_measured = []
    with tempfile.TemporaryDirectory(dir=HERE / "out") as folder:
        rate(model, columns, batch, 2, None)
        for number in range(rounds):
            ways = [None, pathlib.Path(folder) / "checkpoints"]
            speeds = {}
            for way in ways if number % 2 else ways[::-1]:
                speeds[way is not None], kept = rate(model, columns, batch, seconds, way)
                if kept:
                    pauses = (kept.saved, kept.paused, kept.seconds)
                    size = files.verify(files.newest_first(way)[0])
                    shutil.rmtree(way)
            rounds_measured.append({"with": speeds[True], "without": speeds[False], "pauses": pauses, "bytes": size})
    return rounds_measured


def resume(update, examples=10_000_000, batch=8):
    """Seconds from `fit` to the end of the first update after a resume in an epoch of so many examples."""
    x, y = np.zeros((examples, 1), np.float32), np.zeros(examples, np.int32)
    with tempfile.TemporaryDirectory(dir=HERE / "out") as folder:

        def fit(**options):
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2)])
            workloads.compiled(model)
            clock = Until(0)
            begin = time.perf_counter()
            kept = tfdist.Checkpoints(folder, every="1000000 steps")
            tfdist.fit(model, x, y, batch_size=batch, verbose=0, callbacks=[clock], checkpoints=kept, **options)
            return clock.start - begin, kept.resumed_from

        fit(steps=1, steps_per_call=1)
        path = files.newest_first(pathlib.Path(folder))[0]
        state = files.read_state(path)
        # Moved there by hand: what was trained on the way plays no part in finding the place again.
        state["position"] |= {
            "update": update,
            "begun": update,
            "epoch": 0,
            "stopped": False,
            "sums": [0.0],
            "examples": 1.0,
        }
        from tfdist.checkpoints import training_state

        values = training_state.read(str(path / files.TENSORS))
        shutil.rmtree(path)
        files.write(pathlib.Path(folder), update, state, lambda prefix: training_state.write(prefix, values))
        seconds, resumed = fit(steps=update + 1, steps_per_call=1)
        assert resumed == update, resumed
        return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=25, help="of each training")
    parser.add_argument("--workloads", default="digits,cnn,wide")
    options = parser.parse_args()
    (HERE / "out").mkdir(exist_ok=True)
    report = {}
    for name in filter(None, options.workloads.split(",")):
        rounds = report[name] = cost(name, options.rounds, options.seconds)
        more = statistics.median(r["without"] / r["with"] - 1 for r in rounds)
        saved, paused, writing = (sum(r["pauses"][i] for r in rounds) for i in range(3))
        print(
            f"{name:7}{rounds[0]['bytes'] / 1e6:7.1f} MB every {EVERY_S} s: {more:+.1%} of the time "
            f"(target {TARGETS[name]:.0%}); {saved} saved, training waited {paused:.2f} s of {writing:.2f} s, "
            f"{paused / writing:.0%} (target 10%)",
            flush=True,
        )
    resumes = report["resume"] = {str(u): [resume(u) for _ in range(options.rounds)] for u in (10, 1_000_000)}
    early, late = (statistics.median(v) for v in resumes.values())
    print(f"resume of 10 million examples after update 10: {early:.2f} s, after update 1,000,000: {late:.2f} s")
    (HERE / "out" / "bench_checkpoints.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
