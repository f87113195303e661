"""`--find_learning_rate`, against Keras' own train_on_batch on one device."""

import csv
import dataclasses
import math
import types

import keras
import numpy as np
import pytest
from PIL import Image

from tfdist import config
from tfdist.config import default_experiment, runtime_options, schedule
from tfdist.data.datasets import registry
from tfdist.errors import TrainingError, UserError
from tfdist.models import build as models
from tfdist.train import preparation, rate_search

FIELDS = {
    "data.name": "synthetic",
    "data.options": "examples=80, shape=(6, 6, 1), classes=3",
    "model.name": "mlp",
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_norm": 1.0,
    "train.batch_size": 32,
}


def by_keras():
    """Rates and losses of the same updates, one by one: batches of 32, 32 and 16 in the order of each epoch."""
    experiment = config.Experiment()
    for name, value in FIELDS.items():
        group, _, field = name.partition(".")
        setattr(getattr(experiment, group), field, value)
    data = registry.load(experiment)
    model = models.build(experiment, data.spec)
    optimizer = keras.optimizers.SGD(0.0, momentum=0.9, nesterov=True, global_clipnorm=1.0)
    model.compile(optimizer, keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1))
    x, y = data.train.columns[0], keras.utils.to_categorical(data.train.columns[1], 3)
    for update in range(200):
        epoch, batch = divmod(update, 3)
        order = np.random.Generator(np.random.Philox(key=np.array([0, epoch], np.uint64))).permutation(80)
        rows = order[32 * batch : 32 * (batch + 1)]
        rate = 1e-6 * (10 / 1e-6) ** (update / 199)
        optimizer.learning_rate.assign(rate)
        model.reset_metrics()
        yield rate, float(model.train_on_batch(x[rows], y[rows]))


def test_the_losses_are_those_of_keras_on_one_device(run, tmp_path):
    flags = [f"--config.{name}={value}" for name, value in FIELDS.items()]
    where = ["--workdir=out", "--virtual_devices=2", "--check_agreement=off"]
    done = run("tfdist.train", "--find_learning_rate", *where, *flags)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "out/learning_rates.csv") as file:
        rows = [(float(row["learning_rate"]), float(row["loss"])) for row in csv.DictReader(file)]
    assert 120 < len(rows) <= 200
    expected = list(by_keras())[: len(rows)]
    np.testing.assert_allclose([rate for rate, _ in rows], [rate for rate, _ in expected], rtol=1e-9)
    useful = [i for i, (rate, _) in enumerate(expected) if rate < 0.05]  # rounding grows at rates beyond all use
    np.testing.assert_allclose([rows[i][1] for i in useful], [expected[i][1] for i in useful], rtol=1e-5)
    suggested = done.stdout.split("--config.optimizer.learning_rate=")[1].split()[0]
    assert 1e-3 < float(suggested) < 1
    assert Image.open(tmp_path / "out/learning_rates.png").size[0] > 500
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"learning_rates.csv", "learning_rates.png"}


def made(losses):
    return [p._replace(smoothed=p.loss) for p in rate_search.points(losses)]


def test_a_tenth_of_the_rate_of_the_lowest_loss():
    falling = [*([2.0] * 100), *np.linspace(2, 1, 50), *np.linspace(1, 7, 50)]
    found = made(falling)
    assert found[149].loss == 1.0 and rate_search.suggested(found) == float(f"{found[149].rate / 10:.1e}")
    assert (found[0].rate, found[-1].rate) == (1e-6, pytest.approx(10, rel=1e-9))


@pytest.mark.parametrize("losses", [[2.0] * 200, [-2.0] * 200, np.linspace(2, 7, 200), [1.0] * 10])
def test_no_rate_is_suggested_where_the_loss_has_not_fallen(losses):
    assert rate_search.suggested(made(losses)) is None


def test_smoothing_and_the_end():
    assert rate_search.smoothed([3.0] * 30) == pytest.approx([3.0] * 30)
    weights = 0.1 * 0.9 ** np.arange(2, -1, -1)
    assert rate_search.smoothed([1.0, 2.0, 4.0])[2] == pytest.approx(np.average([1, 2, 4], weights=weights))
    assert [p.loss for p in rate_search.points([2.0, 1.0, math.nan, 1.0])] == [2.0, 1.0]
    assert not rate_search.diverged([1.0] * 5 + [9.0]), "nothing is judged by the first updates"
    assert rate_search.diverged([1.0] * 15 + [4.1]) and not rate_search.diverged([1.0] * 15 + [3.9])
    assert rate_search.diverged([-1.0] * 15 + [2.1]), "losses may be negative"


def test_the_plan_is_that_of_the_run_with_other_rates():
    before = schedule.make(default_experiment.get_config(), 1437, 2)
    plan = rate_search.plan(before)
    assert (plan.updates, plan.warmup, plan.rate) == (200, 0, 1e-6)
    assert (plan.global_batch, plan.replicas, plan.updates_per_epoch) == (48, 2, 30)


@pytest.mark.parametrize(
    "other", [dict(dry_run=True), dict(resume="require"), dict(profile="1:2"), dict(resume_changed=True)]
)
def test_what_says_nothing_beside_it_is_refused(other):
    with pytest.raises(UserError, match=f"--find_learning_rate does not train, so --{next(iter(other))} has no"):
        runtime_options.Environment(find_learning_rate=True, **other)


def test_shards_are_those_of_the_experiment(monkeypatch):
    """Else dropout's masks, and so the losses, would depend on the number of devices."""
    experiment, given = config.Experiment(), {}
    experiment.train.virtual_replicas, experiment.train.accumulate = 8, 2
    experiment.model.sync_batch_norm = False
    unused = {field.name: None for field in dataclasses.fields(preparation.Preparation)}
    data = types.SimpleNamespace(train=None)
    prepared = preparation.Preparation(**unused | {"experiment": experiment, "data": data})
    monkeypatch.setattr(rate_search.fit, "fit", lambda *arguments, **options: given.update(options))
    with pytest.raises(TrainingError):  # no update was made
        rate_search.run(prepared, "auto", None, None)
    assert (given["virtual_replicas"], given["accumulate"], given["check_agreement"]) == (8, 2, "auto")


def test_losses_that_were_never_finite(run, tmp_path):
    (tmp_path / "bad.py").write_text(
        "import numpy as np\n\n\ndef data():\n    return np.full((40, 4, 4, 1), np.nan, 'float32'), np.arange(40) % 2\n"
    )
    flags = ["--config.data.name=bad:data", "--config.model.name=mlp", "--find_learning_rate"]
    done = run("tfdist.train", *flags, path=str(tmp_path))
    assert done.returncode == 1 and done.stderr.startswith("tfdist: failed: the loss is not finite after 0 updates")
