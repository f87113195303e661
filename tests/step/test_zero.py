"""Optimizer state in slices, one per replica (ZeRO stage 1): the bits of whole state, in less memory."""

import inspect

import keras
import numpy as np
import pytest
from support import training_cases, worlds, zero_cases
from support.covering import first
from support.refusals import refused
from support.zero_cases import O, data, trained

import tfdist
from tfdist.keras_bridge import zero
from tfdist.trainer import on_batch

WORLDS = {
    "shared memory": ("multi_worker", ["AdamW, clipped, averaged"], {}),
    "all optimizers": ("multi_worker", [*zero_cases.OPTIMIZERS], {}),
    "ring": ("multi_worker", ["Adam"], {"communication": "ring"}),
    "horovod": ("horovod", ["AdamW, clipped, averaged"], {}),
}


@pytest.mark.parametrize("replicas", first(1, [3, 2]))
@pytest.mark.parametrize("name", first(1, zero_cases.OPTIMIZERS))
def test_slices_give_the_bits_of_whole_state(connect, name, replicas):
    whole, sliced = zero_cases.both(name, connect(replicas))
    assert whole == sliced


@pytest.mark.parametrize("world", first(0, WORLDS))
def test_slices_on_several_workers_give_the_bits_of_whole_state(tmp_path, world):
    strategy, names, options = WORLDS[world]
    outcomes = worlds.outcomes(tmp_path, strategy, 2, "zero", [*names, "refusal", "resume"], **options)
    for name in names:
        assert [worker[name][0] == worker[name][1] == outcomes[0][name][0] for worker in outcomes] == [True, True]
    assert [worker["resume"][0] == worker["resume"][1] for worker in outcomes] == [True, True]
    assert [worker["refusal"] for worker in outcomes] == [zero_cases.REFUSAL] * 2


def kinds():
    """Every optimizer of Keras, and each supported one as it may be wrapped and configured."""
    options = {"RMSprop": {"momentum": 0.9, "centered": True}, "Adam": {"amsgrad": True}, "SGD": {"momentum": 0.9}}
    classes = {name: kind for name, kind in vars(O).items() if inspect.isclass(kind) and issubclass(kind, O.Optimizer)}
    for name in sorted(classes.keys() - {"Optimizer", "OptimizerMap"}):
        yield name, lambda kind=classes[name], name=name: kind(0.01, **options.get(name, {}))
    scaled = lambda inner: O.LossScaleOptimizer(inner, initial_scale=2.0**120)  # which overflows at first
    yield "scaled Adam", lambda: scaled(O.Adam(0.01, clipnorm=0.1))
    yield "scaled RMSprop", lambda: scaled(O.RMSprop(0.01, global_clipnorm=0.1))
    averaging = dict(gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.8, weight_decay=0.1)
    yield "accumulating AdamW", lambda: O.AdamW(0.01, clipvalue=0.01, **averaging)
    yield "accumulating Lion", lambda: O.Lion(0.01, ema_overwrite_frequency=2, **averaging)


KINDS = dict(kinds())
REFUSED = {"Adafactor", "Lamb", "Muon", "MultiOptimizer", "ScheduleFreeAdamW"}


@pytest.mark.parametrize("kind", first(len(REFUSED), sorted(KINDS, key=lambda kind: kind not in REFUSED)))
def test_every_optimizer_of_keras_has_the_same_bits_or_is_refused(connect, kind):
    make, distribution = KINDS[kind], connect(2)
    if kind == "LossScaleOptimizer":
        make = lambda: O.LossScaleOptimizer(O.Ftrl(0.01))
    if kind in REFUSED:
        assert kind not in zero.ELEMENTWISE
        with refused(f"zero_stage=1 cannot slice the state of {kind}"):
            zero.check(object.__new__(getattr(O, kind)), distribution)
        return
    by_layer = {"epochs": 2, "depth": 1, "lr_multipliers": {"dense*": 0.5}}
    whole, sliced = (zero_cases.bits(trained(make, distribution, stage, **by_layer)) for stage in (0, 1))
    assert whole == sliced


def test_an_optimizer_of_ones_own_is_refused(connect):
    class Own(O.Adam):
        pass

    with refused("zero_stage=1 cannot slice the state of Own, which may look across a weight: use one of SGD, Adam"):
        trained(Own, connect(2), 1)
    with refused("zero_stage must be 0 or 1, got 3"):
        trained(O.Adam, connect(2), 3)


def test_one_device_saves_nothing_and_says_so(connect, caplog):
    with caplog.at_level("INFO", "tfdist"):
        built = trained(O.Adam, connect(1), 1)
    assert "zero_stage=1 saves nothing on one device" in caplog.text
    assert zero_cases.bits(built) == zero_cases.bits(trained(O.Adam, connect(1), 0))


@pytest.mark.parametrize("replicas", first(0, [2, 3]))
def test_slices_have_the_bytes_that_the_documentation_says(connect, replicas):
    distribution = connect(replicas)
    built = zero_cases.model(O.Adam, distribution)
    measured, sizes = zero_cases.slices_of(built)
    shapes = [int(np.prod(v.shape)) for v in built.trainable_variables]
    slices = [n // (64 * replicas) * 64 for n in shapes]
    options = {"distribution": distribution, "verbose": 0, "check_agreement": "off", "zero_stage": 1}
    tfdist.fit(built, *data(), epochs=1, callbacks=[measured], **options)
    of_one = 8 * sum(n - (replicas - 1) * size for n, size in zip(shapes, slices))
    assert sizes == [replicas * of_one]
    whole = sum(8 * n for n in shapes)
    assert whole - zero.saved_bytes(built.optimizer, distribution) == of_one
    assert all(v.numpy().shape == v.shape for v in built.optimizer.variables), "whole again after fit"


@pytest.mark.whole
def test_a_resume_on_other_replicas_and_in_another_stage(connect, tmp_path):
    """Virtual replicas make the bits of weights and state comparable: 2 -> 1 -> 3 replicas, stages 1, 0, 1."""
    options = {"virtual_replicas": 6, "shuffle": True}
    expected = zero_cases.bits(trained(O.Adam, connect(1), 0, epochs=6, **options))
    for number, (replicas, stage) in enumerate([(2, 1), (1, 0), (3, 1)]):
        options["checkpoints"] = tfdist.Checkpoints(tmp_path / "run", every="3 steps")
        built = trained(O.Adam, connect(replicas), stage, epochs=2 * number + 2, **options)
    assert zero_cases.bits(built) == expected


@pytest.mark.whole
def test_a_file_that_keras_writes_within_fit_has_the_whole_state(connect, tmp_path):
    """Also a second fit, a step of Keras' own between, and a reading of state within fit."""
    seen = []

    def run(stage):
        distribution = connect(2)
        built = zero_cases.model(O.Adam, distribution)
        file = tmp_path / f"{stage}.keras"
        read = lambda epoch, logs: seen.append([v.numpy().tobytes() for v in built.optimizer.variables])
        callbacks = [keras.callbacks.ModelCheckpoint(file), keras.callbacks.LambdaCallback(on_epoch_end=read)]
        options = {"distribution": distribution, "verbose": 0, "check_agreement": "off", "zero_stage": stage}
        tfdist.fit(built, *data(), epochs=2, callbacks=callbacks, **options)
        x, y = data()
        on_batch.train_on_batch(built, x[:16], y[:16], distribution=distribution, check_agreement="off")
        tfdist.fit(built, *data(), **options)
        loaded = keras.models.load_model(file)
        return zero_cases.bits(built), zero_cases.bits(loaded)

    assert run(0) == run(1)
    assert seen[:2] == seen[2:]


@pytest.mark.whole
def test_a_slice_is_not_taken_for_whole_state_after_an_error(connect):
    """The state is whole again, or else says that it is not; training goes on from it."""
    distribution = connect(2)
    built = zero_cases.model(O.Adam, distribution)

    def fail(epoch, logs):
        raise ZeroDivisionError

    options = {"distribution": distribution, "verbose": 0, "check_agreement": "off", "zero_stage": 1}
    with pytest.raises(ZeroDivisionError):
        tfdist.fit(built, *data(), callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=fail)], **options)
    assert all(v.numpy().shape == v.shape for v in built.optimizer.variables)
    assert not zero.slots([built.optimizer])
    tfdist.fit(built, *data(), **options)


@pytest.mark.whole
def test_products_with_a_factor_on_the_rate_are_rounded_alike_on_all_replicas(connect):
    """Else `fit` ends with an error: what is left of a weight behind the slices is updated by all of them."""
    with connect(2).scope():
        built = keras.Sequential([keras.Input((7,)), keras.layers.Dense(43), keras.layers.Dense(5)])
        scaled = O.LossScaleOptimizer(O.RMSprop(0.01, use_ema=True), initial_scale=2.0**10)
        built.compile(scaled, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    options = {"distribution": connect(2), "verbose": 0, "check_agreement": "off", "zero_stage": 1}
    tfdist.fit(built, *data(), lr_multipliers={"dense*": 0.5}, **options)


@pytest.mark.whole
def test_an_embedding_whose_gradient_has_no_shape(connect):
    def run(stage):
        keras.utils.set_random_seed(3)
        with connect(2).scope():
            built = training_cases.tagger()
        options = {"distribution": connect(2), "verbose": 0, "check_agreement": "off", "zero_stage": stage}
        tfdist.fit(built, *training_cases.sequences(24), batch_size=8, **options)
        return zero_cases.bits(built)

    assert run(0) == run(1)
