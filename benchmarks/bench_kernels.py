"""Measures TensorFlow's two sets of CPU kernels, Eigen's and oneDNN's, on the models that ship; prints a table.

    python benchmarks/bench_kernels.py --rounds=3 --threads=1,2

Each round is one process per setting, in turn; each process trains all models for some seconds after a first epoch, in
which things are compiled. A ratio is the median over rounds of oneDNN's examples per second over Eigen's.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np

SETTINGS = {"eigen": "0", "onednn": "1"}
SECONDS = 1.5


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of the zoo, `workload` for one of the three workloads; sizes as people train them on a CPU."""

    model: str
    options: str = ""
    side: int = 0
    channels: int = 3
    tokens: int = 0
    batch: int = 32
    updates: int = 4
    """Per epoch; the clock is read at its end."""


CASES = [
    Case("workload mlp", updates=500, batch=64),
    Case("workload cnn", batch=64, updates=3),
    Case("workload wide", updates=8),
    Case("mlp", "units=128", side=8, channels=1, batch=64, updates=500),
    Case("cnn", side=28, channels=1),
    Case("conv_bn", side=8, channels=1, updates=50),
    Case("alexnet", side=64, batch=16, updates=2),
    Case("resnet_cifar", side=32, updates=2),
    Case("vit", side=32, updates=2),
    Case("gpt", "width=128, heads=4, depth=2", tokens=64, batch=16),
    Case("table_mlp", batch=64, updates=200),
    Case("ResNet50", side=64, batch=8, updates=1),
    Case("MobileNetV2", side=64, batch=8, updates=1),
    Case("EfficientNetB0", side=64, batch=8, updates=1),
    Case("ConvNeXtTiny", side=64, batch=8, updates=1),
]


def measure(threads: int) -> None:
    """Prints a JSON line of examples per second for each case, with the kernels of this process."""
    import tfdist

    distribution = tfdist.connect("default", threads=threads)
    import keras

    class Clock(tfdist.Callback):
        takes_many_updates = True
        updates = 0

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                self.start = time.perf_counter()
            self.seconds = time.perf_counter() - self.start
            self.epochs = epoch
            self.model.stop_training = self.seconds > SECONDS

    for case in CASES:
        keras.backend.clear_session()
        with distribution.scope():
            model, x, y = made(case)
            model.compile(
                keras.optimizers.Adam(1e-3),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        clock = Clock()
        tfdist.fit(
            model, x, y, distribution=distribution, batch_size=case.batch, epochs=10_000, callbacks=[clock], verbose=0,
            check_agreement="off",
        )  # fmt: skip
        rate = clock.epochs * case.updates * case.batch / clock.seconds
        print(json.dumps({"model": case.model, "examples_per_second": rate}), flush=True)


def made(case: Case):
    """The model of a case and an epoch of made data for it."""
    from tfdist.config import Experiment, Model
    from tfdist.data.spec import Column, Spec
    from tfdist.models import build

    r, n = np.random.default_rng(0), case.batch * case.updates
    kind, _, workload = case.model.partition(" ")
    if kind == "workload":
        from workloads import WORKLOADS

        work = WORKLOADS[workload]
        return work.model(), r.normal(size=(n, *work.shape)).astype("float32"), r.integers(0, work.classes, n)
    if case.model == "table_mlp":
        columns = tuple(Column(f"number {i}", "number", 0.0, 1.0) for i in range(10))
        columns += tuple(Column(f"category {i}", "category", vocabulary=tuple("abcdefgh")) for i in range(4))
        spec = Spec((10,), "float32", 2, 1.0, (), columns)
        x = {
            "numbers": r.normal(size=(n, 10)).astype("float32"),
            "categories": r.integers(0, 8, (n, 4)).astype("int32"),
        }
    elif case.tokens:
        spec = Spec((case.tokens,), "int32", 96, 95.0)
        x = r.integers(0, 96, (n, case.tokens)).astype("int32")
    else:
        shape = (case.side, case.side, case.channels)
        spec, x = Spec(shape, "uint8", 10, 255.0), r.integers(0, 256, (n, *shape)).astype("uint8")
    model = build.build(Experiment(model=Model(name=case.model, options=case.options)), spec)
    classes = model.output_shape[-1]
    return model, x, r.integers(0, classes, (n, *model.output_shape[1:-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure(options.measure)
    rates = {}
    for threads in map(int, options.threads.split(",")):
        for _ in range(options.rounds):
            for name, value in SETTINGS.items():
                environment = os.environ | {"TF_ENABLE_ONEDNN_OPTS": value, "TF_CPP_MIN_LOG_LEVEL": "2"}
                command = [sys.executable, __file__, f"--measure={threads}"]
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                for line in map(json.loads, filter(lambda s: s.startswith("{"), done.stdout.splitlines())):
                    rates.setdefault((threads, line["model"]), {}).setdefault(name, []).append(
                        line["examples_per_second"]
                    )
    print("| model | threads | Eigen, examples/s | oneDNN, examples/s | ratio |\n|---|---|---|---|---|")
    for (threads, model), found in rates.items():
        ratio = statistics.median(a / b for a, b in zip(found["onednn"], found["eigen"], strict=True))
        middle = {name: statistics.median(values) for name, values in found.items()}
        print(f"| {model} | {threads} | {middle['eigen']:,.0f} | {middle['onednn']:,.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
