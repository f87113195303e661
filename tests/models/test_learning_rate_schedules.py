"""Learning rates over a run, against their formulas; and that a model saved with one needs nothing of tfdist."""

import json
import math
import sys

import keras
import numpy as np
import pytest
from support import processes, shipped

from tfdist import config
from tfdist.config import schedule as schedule_lib
from tfdist.config import validation
from tfdist.models import optimizers
from tfdist.train import dry_run

PEAK, UPDATES, WARMUP = 0.4, 120, 20  # 6 epochs of 20 updates

AFTER = {  # rate as a share of the peak, u updates having been made
    ("constant", ""): lambda u: 1.0,
    ("cosine", ""): lambda u: 0.5 * (1 + math.cos(math.pi * (u - WARMUP) / 100)),
    ("cosine", "end=0.1"): lambda u: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (u - WARMUP) / 100)),
    ("linear", ""): lambda u: 1 - (u - WARMUP) / 100,
    ("linear", "end=0.05"): lambda u: 1 - 0.95 * (u - WARMUP) / 100,
    ("step", "boundaries=30% 3 epochs 100"): lambda u: 0.1 ** ((u >= 36) + (u >= 60) + (u >= 100)),
    ("step", "factor=0.5, boundaries=20"): lambda u: 1.0 if u < 20 else 0.5,
    ("exponential", ""): lambda u: 0.01 ** ((u - WARMUP) / 100),
    ("exponential", "end=0.2"): lambda u: 0.2 ** ((u - WARMUP) / 100),
    ("exponential", "factor=0.94, every=0.5 epochs"): lambda u: 0.94 ** ((u - WARMUP) / 10),
}


def experiment(kind, options, warmup=f"{WARMUP} steps", **more):
    wanted = config.Optimizer(
        schedule=kind, schedule_options=options, warmup=warmup, learning_rate=PEAK, name="adam", options="", **more
    )
    return validation.validate(config.Experiment(optimizer=wanted, train=config.Train(epochs=6, batch_size=10)))


def rates(wanted, updates):
    schedule = optimizers.rate(wanted, schedule_lib.make(wanted, 200, 1))
    return [float(np.asarray(schedule(u) if callable(schedule) else schedule)) for u in updates]


def test_the_default_warmup_of_a_short_run_is_a_tenth_of_it(said):
    short, long = shipped.digits(), shipped.digits()
    short.train.epochs, long.train.epochs = 2, 3
    assert schedule_lib.make(short, 1437, 1).warmup == 6
    assert said == ["the warm-up is 6 of 60 updates: optimizer.warmup='2 epochs' would leave none"]
    assert schedule_lib.make(long, 1437, 1).warmup == 60 and len(said) == 1


@pytest.mark.parametrize("kind, options", AFTER)
def test_against_the_formula(kind, options):
    share = AFTER[kind, options]
    updates = [0, 1, 7, 19, 20, 21, 35, 36, 37, 59, 60, 99, 100, 119, 120]
    expected = [PEAK * (u / WARMUP if u < WARMUP else share(u)) for u in updates]
    np.testing.assert_allclose(rates(experiment(kind, options), updates), expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("kind, options", [("linear", "end=0.1"), ("exponential", ""), ("step", "boundaries=30% 60%")])
def test_without_warmup_it_is_a_schedule_of_keras_alone(kind, options):
    wanted = experiment(kind, options, warmup="0%")
    schedule = optimizers.rate(wanted, schedule_lib.make(wanted, 200, 1))
    assert type(schedule).__module__.startswith("keras.")
    share = {
        "linear": lambda u: 1 - 0.9 * u / 120,
        "exponential": lambda u: 0.01 ** (u / 120),
        "step": lambda u: 0.1 ** ((u >= 36) + (u >= 72)),
    }[kind]
    updates = [0, 1, 35, 36, 37, 71, 72, 119]
    np.testing.assert_allclose(rates(wanted, updates), [PEAK * share(u) for u in updates], rtol=2e-5)


def test_a_rate_scaled_to_a_large_batch_climbs_from_the_small_one():
    wanted = experiment("linear", "", base_batch=5, scale_learning_rate="linear")
    np.testing.assert_allclose(rates(wanted, [0, 10, 20, 70]), [0.4, 0.6, 0.8, 0.4], rtol=1e-5)


def test_a_dry_run_tells_it():
    wanted = experiment("step", "boundaries=50 100", warmup="10")
    schedule = schedule_lib.make(wanted, 200, 1)
    line = dry_run._rates(optimizers.rate(wanted, schedule), schedule)
    assert line == "update 1: 0, 11: 0.4, 51: 0.04, 60: 0.04, 101: 0.004, 120: 0.004"


LOAD = """
import sys, keras, numpy as np
model = keras.saving.load_model(sys.argv[1])
assert not [name for name in sys.modules if name.startswith("tfdist")]
print(int(model.optimizer.iterations), float(model.optimizer.learning_rate), *np.ravel(model.get_weights()[0]))
"""


@pytest.mark.whole
@pytest.mark.parametrize(
    "kind, options",
    [
        ("step", "boundaries=30% 3 epochs 100"),
        *(pytest.param(kind, "", marks=pytest.mark.whole) for kind in ("linear", "exponential")),
    ],
)
def test_a_run_tells_the_rates_and_its_model_loads_without_tfdist(kind, options, run, tmp_path):
    flags = [
        f"--config.optimizer.schedule={kind}",
        f"--config.optimizer.schedule_options={options}",
        f"--config.optimizer.learning_rate={PEAK}",
        f"--config.optimizer.warmup={WARMUP}",
        "--config.model.name=mlp",
        "--config.train.epochs=6",
        "--config.train.batch_size=72",
        "--config.data.options=",
        "--workdir=out",
        "--config.optimizer.options=",
        "--notensorboard",
    ]  # fmt: skip  20 updates per epoch of 1437 digits
    done = run("tfdist.train", *flags)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out" / "history.jsonl").read_text().splitlines()]
    told = [line["learning_rate"] for line in lines if "epoch" in line]
    np.testing.assert_allclose(told, [PEAK * AFTER[kind, options](u) for u in range(20, 121, 20)], rtol=2e-5, atol=1e-7)
    (tmp_path / "load.py").write_text(LOAD)
    loaded = processes.run(
        [sys.executable, "load.py", "out/model.keras"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert loaded.returncode == 0, loaded.stderr
    updates, rate, *kernel = loaded.stdout.split()
    assert int(updates) == 120 and float(rate) == pytest.approx(told[-1], abs=1e-7)
    here = keras.saving.load_model(tmp_path / "out" / "model.keras").get_weights()[0]
    np.testing.assert_array_equal(np.array(kernel, "float32"), np.ravel(here))
