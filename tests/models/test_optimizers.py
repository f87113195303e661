"""Learning rates over a run, against their formulas, and by layer, against NumPy and against Keras.

A model that was saved with one needs nothing of tfdist.
"""

import inspect
import json
import math
import sys

import keras
import numpy as np
import pytest
from support import processes, shipped, training_cases

import tfdist
from tfdist import config
from tfdist.config import Optimizer, validation
from tfdist.config import schedule as schedule_lib
from tfdist.errors import UserError
from tfdist.models import optimizers
from tfdist.train import dry_run

L = keras.layers


def nested():
    """An embedding, two named blocks, a model within the model, a layer of layers, and a head."""
    tokens = keras.Input((7,), dtype="int32")
    x = L.Embedding(9, 8, name="tokens")(tokens)
    for block in range(2):
        x = L.Dense(8, name=f"block{block}_first")(x)
        x = L.Dense(8, name=f"block{block}_second")(x)
    body = keras.Sequential([keras.Input((7, 8)), L.Dense(8, name="wide"), L.Dense(8, name="narrow")], name="body")
    x = body(x)
    x = L.MultiHeadAttention(2, 4, name="look")(x, x)
    x = L.BatchNormalization(name="norm")(L.Flatten()(x))
    return keras.Model(tokens, L.Dense(3, name="head")(x))


def found(model, rates, decay=1.0):
    """Factor by the name of the innermost layer."""
    given = optimizers.layer_factors(model, rates, decay)
    return {chain[-2]: factor for chain, factor in zip(optimizers._chains(model), given, strict=True)}


def test_the_decay_goes_down_from_the_output_by_layers_and_blocks():
    by_layer = found(nested(), {}, 0.5)
    below_head = {"norm": 1, "look": 2, "narrow": 3, "wide": 4, "block1": 5, "block0": 6, "tokens": 7}
    depth = {"head": 0, **below_head}
    assert by_layer["query"] == by_layer["attention_output"] == 0.5**2
    for name in ("head", "norm", "narrow", "wide", "tokens"):
        assert by_layer[name] == 0.5 ** depth[name], name
    for block in ("block0", "block1"):
        assert by_layer[f"{block}_first"] == by_layer[f"{block}_second"] == 0.5 ** depth[block]


def test_patterns_are_for_layers_paths_and_variables_and_the_last_counts():
    model = nested()
    by_layer = found(model, {"*": 2.0, "head": 10.0, "block?_first": 0.1, "body/*": 3.0, "look": 4.0}, 0.5)
    assert by_layer["head"] == 10 and by_layer["block1_first"] == 0.1 * 0.5**5
    assert by_layer["wide"] == 3 * 0.5**4 and by_layer["value"] == 4 * 0.5**2 and by_layer["tokens"] == 2 * 0.5**7
    factors = optimizers.layer_factors(model, {"*": 1.0, "bias": 5.0})
    for variable, factor in zip(model.trainable_variables, factors, strict=True):
        assert factor == (5 if variable.name == "bias" else 1)
    assert optimizers.layer_factors(model, {"head": 1.0}) == ()


def test_weights_of_the_model_itself_are_the_lowest():
    model = training_cases.Subclassed()
    model(np.zeros((1, 4, 4, 1), "float32"))
    by_name = dict(zip([v.path for v in model.trainable_variables], optimizers.layer_factors(model, {}, 0.5)))
    assert sorted(by_name.values()) == [0.25, 0.5, 0.5, 1, 1]
    assert next(f for path, f in by_name.items() if path.endswith("unused")) == 0.25


@pytest.mark.parametrize("rates, decay, message", [
    ({"hed*": 2.0}, 1.0, r"learning rates: 'hed\*' matches nothing that is trained: did you mean 'head'\? Known are "),
    ({"head": -1.0}, 1.0, "the learning rate of 'head' is multiplied by -1: give a positive number"),
    ({}, 0.1, "a decay of 0.1 over 8 layers and blocks leaves the lowest 1e-07 of the learning rate, .* as 0.422"),
    ({}, 0.0, "the learning rate of 'layer_decay' is multiplied by 0: give a positive number"),
])  # fmt: skip
def test_what_cannot_be(rates, decay, message):
    with pytest.raises(UserError, match=message):
        optimizers.layer_factors(nested(), rates, decay)


RATES = {"dense*": 3.0, "last": 0.2}
HAS_MULTI = hasattr(keras.optimizers, "MultiOptimizer")
HAS_MUON = "adam_weight_decay" in inspect.signature(keras.optimizers.Muon).parameters
"""Keras 3.10 has a Muon that it cannot train with, and 3.12 one without this."""
MAKE = {
    "SGD": lambda rate: keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda rate: keras.optimizers.Adam(rate),
    "AdamW": lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.1),
    "AdamW, scheduled": lambda rate: keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(rate, 12), weight_decay=0.1
    ),
    "Lion": lambda rate: keras.optimizers.Lion(rate, weight_decay=0.1),
    **(
        {"Muon": lambda rate: keras.optimizers.Muon(rate, weight_decay=0.1, adam_weight_decay=0.05)} if HAS_MUON else {}
    ),
    "Nadam": lambda rate: keras.optimizers.Nadam(rate, weight_decay=0.1, use_ema=True, ema_momentum=0.8),
    **({"SGD within another": lambda rate: within_another(keras.optimizers.SGD(rate))} if HAS_MULTI else {}),
}


def within_another(optimizer):
    return keras.optimizers.MultiOptimizer(lambda variable: optimizer)


def model_of(connect, optimizer, replicas=1):
    keras.utils.set_random_seed(1)
    with connect(replicas).scope():
        layers = [
            keras.Input((4, 4, 1)),
            L.Flatten(),
            L.Dense(6, activation="tanh", name="dense_a"),
            L.Dense(5, name="last"),
        ]
        return training_cases.compiled(keras.Sequential(layers), optimizer(), training_cases.sparse())


def by_hand(model, make):
    """Keras' own training, with an optimizer for each of the two layers, each at its own rate."""
    groups = {}
    for name, factor in (("dense_a", 3.0), ("last", 0.2)):
        variables = model.get_layer(name).trainable_variables
        groups[name] = (make(0.01 * factor), variables)
        groups[name][0].build(variables)
    return groups


@pytest.mark.parametrize(
    "name, replicas",
    [
        *(pytest.param(name, 1, marks=[pytest.mark.whole] * (i % 6 > 0)) for i,
          name in enumerate(MAKE) if "within" not in name),
        *((name, 2) for name in MAKE if "within" in name),
        ("AdamW, scheduled", 3),
        pytest.param("Nadam", 3, marks=pytest.mark.whole),
    ],
)  # fmt: skip
def test_against_an_optimizer_per_layer(name, replicas, connect):
    import tensorflow as tf

    x, y = training_cases.images(72)
    options = dict(batch_size=24, epochs=4, shuffle=False, verbose=0, distribution=connect(replicas))
    ours = model_of(connect, lambda: MAKE[name](0.01), replicas)
    tfdist.fit(ours, x, y, lr_multipliers=RATES, check_agreement="off", **options)
    theirs = model_of(connect, lambda: MAKE[name](0.01))
    groups = by_hand(theirs, MAKE[name])
    for update in range(12):
        rows = slice(update % 3 * 24, update % 3 * 24 + 24)
        with tf.GradientTape() as tape:
            loss = theirs.loss(y[rows], theirs(x[rows]))
        grads = dict(
            zip(
                [id(v) for v in theirs.trainable_variables],
                tape.gradient(loss, [v.value for v in theirs.trainable_variables]),
            )
        )
        for optimizer, variables in groups.values():
            optimizer.apply([grads[id(v)] for v in variables], variables)
    for optimizer, variables in groups.values():
        optimizer.finalize_variable_values(variables)
    # Muon's own rounding: it multiplies matrices in powers.
    assert training_cases.distance(training_cases.weights(ours), training_cases.weights(theirs)) < (
        1e-4 if name == "Muon" else 2e-6
    )
    if name == "SGD":
        plain = model_of(connect, lambda: MAKE[name](0.01), replicas)
        tfdist.fit(plain, x, y, **options)
        assert training_cases.distance(training_cases.weights(plain), training_cases.weights(theirs)) > 1e-3


def test_sgd_against_numpy(connect):
    """One linear layer: w -= rate x factor x (gradient of the mean squared error + decay x w)."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)), rng.normal(size=(40, 1))
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    with connect(2).scope():
        model = keras.Sequential([keras.Input((3,)), L.Dense(1, name="only")])
        model.compile(keras.optimizers.SGD(0.125, weight_decay=0.25), "mse")  # exact in float32
    w, b = (a.copy() for a in model.get_weights())
    tfdist.fit(
        model,
        x,
        y,
        batch_size=40,
        epochs=5,
        verbose=0,
        distribution=connect(2),
        lr_multipliers={"kernel": 0.5, "bias": 2.0},
    )
    for _ in range(5):
        error = 2 * (x @ w + b - y) / len(x)
        grad_w, grad_b = x.T @ error, error.sum(0)
        w, b = w * (1 - 0.0625 * 0.25) - 0.0625 * grad_w, b * (1 - 0.25 * 0.25) - 0.25 * grad_b
    np.testing.assert_allclose(model.get_weights()[0], w, rtol=1e-12)
    np.testing.assert_allclose(model.get_weights()[1], b, rtol=1e-12)


def test_another_factor_is_another_function(connect):
    """The compiled function is kept with the model: it must not be used for other factors."""
    model = model_of(connect, lambda: keras.optimizers.SGD(0.1))
    x, y = training_cases.images(24)
    start, ends = model.get_weights(), []
    for rates in ({}, {"last": 9.0}, {}):
        model.set_weights(start)
        tfdist.fit(model, x, y, batch_size=24, verbose=0, lr_multipliers=rates)
        ends.append(training_cases.weights(model))
    np.testing.assert_array_equal(ends[0], ends[2])
    assert training_cases.distance(ends[0], ends[1]) > 1e-3


def test_weight_decay_leaves_out_what_it_is_told(connect):
    """Against Keras: with no gradient, only what decays moves."""
    with connect(2).scope():
        model = training_cases.dense()
        model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5), lambda y, p: 0 * keras.ops.sum(p, -1))
    optimizers.exclude(model, Optimizer(decay_exclude="bias, dense_*", weight_decay=0.5))
    for variable in model.trainable_variables:
        variable.assign(np.ones(variable.shape))
    names = [layer.name for layer in model.layers if layer.weights]
    excluded = [name.startswith("dense_") for name in names]
    tfdist.fit(model, *training_cases.images(24), batch_size=24, verbose=0, distribution=connect(2))
    for (kernel, bias), out in zip(np.reshape(np.array(model.get_weights(), object), [2, 2]), excluded):
        np.testing.assert_allclose(kernel, 1.0 if out else 0.95, rtol=1e-6)
        np.testing.assert_allclose(bias, 1.0, rtol=1e-6)


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
    schedule = optimizers.rate(schedule_lib.make(wanted, 200, 1))
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
    schedule = optimizers.rate(schedule_lib.make(wanted, 200, 1))
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
    line = dry_run._rates(optimizers.rate(schedule), schedule)
    assert line == "update 1: 0, 11: 0.4, 51: 0.04, 60: 0.04, 101: 0.004, 120: 0.004"


LOAD = """
import sys, keras, numpy as np
model = keras.saving.load_model(sys.argv[1])
assert not [name for name in sys.modules if name.startswith("tfdist")]
print(int(model.optimizer.iterations), float(model.optimizer.learning_rate), *np.ravel(model.get_weights()[0]))
"""


@pytest.mark.whole
@pytest.mark.parametrize("kind, options", [
    ("step", "boundaries=30% 3 epochs 100"),
    *(pytest.param(kind, "", marks=pytest.mark.whole) for kind in ("linear", "exponential")),
])  # fmt: skip
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
    of_updates = [0.95 * PEAK, *(PEAK * AFTER[kind, options](u) for u in range(39, 121, 20))]  # the warmup's last one
    np.testing.assert_allclose(told, of_updates, rtol=2e-5, atol=1e-7)
    (tmp_path / "load.py").write_text(LOAD)
    loaded = processes.run(
        [sys.executable, "load.py", "out/model.keras"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert loaded.returncode == 0, loaded.stderr
    updates, rate, *kernel = loaded.stdout.split()
    assert int(updates) == 120 and float(rate) == pytest.approx(PEAK * AFTER[kind, options](120), abs=1e-7)
    here = keras.saving.load_model(tmp_path / "out" / "model.keras").get_weights()[0]
    np.testing.assert_array_equal(np.array(kernel, "float32"), np.ravel(here))
