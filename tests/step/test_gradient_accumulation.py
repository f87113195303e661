"""An optimizer's own `gradient_accumulation_steps` does what it does with Keras on one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import training_cases
from support.covering import first

import tfdist
from tfdist.errors import Interrupted
from tfdist.monitoring.recorder import fingerprint

O = keras.optimizers  # noqa: E741
AVERAGED = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2}
OPTIMIZERS = {
    "fused": lambda: O.AdamW(
        O.schedules.ExponentialDecay(0.05, 2, 0.8), global_clipnorm=0.05, gradient_accumulation_steps=3, **AVERAGED
    ),
    "of Keras": lambda: O.RMSprop(1e-2, clipnorm=0.05, gradient_accumulation_steps=3, **AVERAGED),
    "fused, scaled": lambda: O.LossScaleOptimizer(O.SGD(0.1, gradient_accumulation_steps=3), dynamic_growth_steps=2),
    "of Keras, scaled": lambda: O.LossScaleOptimizer(O.Lion(1e-2, weight_decay=0.1, gradient_accumulation_steps=3)),
}


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def model(distribution, optimizer, kind=keras.Model):
    keras.utils.set_random_seed(1)
    with distribution.scope():
        plain = training_cases.dense(kernel_constraint=keras.constraints.MaxNorm(0.9))
        return training_cases.compiled(kind(plain.inputs, plain.outputs), OPTIMIZERS[optimizer](), metrics=None)


def train(by, made, **options):
    """Makes eight updates of one batch each, two of them of the weights."""
    by(made, *training_cases.images(93), batch_size=24, epochs=2, shuffle=False, verbose=0, **options)
    return made


@pytest.mark.parametrize("kind", first(1, [keras.Model, OwnStep]))
@pytest.mark.parametrize("replicas", first(1, [2, 1, 3]))
@pytest.mark.parametrize("optimizer", first(1, OPTIMIZERS))
def test_agrees_with_keras(optimizer, replicas, kind, connect):
    judge = model(connect(1), optimizer, kind)
    judge.run_eagerly = True
    expected = train(keras.Model.fit, judge)
    fit = functools.partial(tfdist.fit, distribution=connect(replicas), check_agreement="off")
    got = train(fit, model(connect(replicas), optimizer, kind))
    for a, b in zip([*got.weights, *got.optimizer.variables], [*expected.weights, *expected.optimizer.variables]):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6, err_msg=b.path)


@pytest.mark.parametrize("optimizer, virtual_replicas", first(0, [("of Keras, scaled", 0), ("fused", 4)]))
def test_resumes_within_an_accumulation(optimizer, virtual_replicas, connect, tmp_path):
    distribution = connect(2)
    options = {"distribution": distribution, "check_agreement": "off", "steps_per_call": 1}
    options |= {"virtual_replicas": virtual_replicas}
    fit = functools.partial(tfdist.fit, **options)
    whole = train(fit, model(distribution, optimizer))
    kept = lambda: tfdist.Checkpoints(tmp_path, every="1000 steps")
    with pytest.raises(Interrupted):
        train(fit, model(distribution, optimizer), checkpoints=kept(), should_stop=training_cases.StopAt(4))
    resumed = train(fit, model(distribution, optimizer), checkpoints=kept())
    assert fingerprint(resumed) == fingerprint(whole)
    for a, b in zip(resumed.optimizer.variables, whole.optimizer.variables):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=b.path)


def test_goes_on_within_an_accumulation_with_another_batch_size(connect, tmp_path):
    x, y = training_cases.images(93)
    kept = lambda: tfdist.Checkpoints(tmp_path, changed=True)
    tfdist.fit(model(connect(1), "fused"), x, y, 24, verbose=0, checkpoints=kept())  # one of three is left over
    made = model(connect(1), "fused")
    tfdist.fit(made, x, y, 31, 2, verbose=0, checkpoints=kept())
    assert int(made.optimizer._iterations.numpy()) == 3 + 1 + 3 and made.optimizer.iterations == 2
