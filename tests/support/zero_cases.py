"""Trainings by an optimizer whose state is whole on each replica, or in slices; in worlds of one process or several."""

import keras
import numpy as np

import tfdist

O = keras.optimizers  # noqa: E741

OPTIMIZERS = {
    "AdamW, clipped, averaged": lambda: O.AdamW(1e-2, weight_decay=0.1, global_clipnorm=0.05, use_ema=True),
    "Adam": lambda: O.Adam(1e-2),
    "SGD": lambda: O.SGD(0.05, momentum=0.9, nesterov=True),
    "Lion": lambda: O.Lion(1e-3),
}


def data(n=64):
    random = np.random.default_rng(0)
    return random.normal(size=(n, 7)).astype("float32"), random.integers(0, 5, n)


def model(optimizer, distribution, depth=2):
    """Weights of 301, 43, 1849, 43, 215 and 5 elements: smaller and larger than slices, and divided by none."""
    keras.utils.set_random_seed(3)
    with distribution.scope():
        limit = keras.constraints.MaxNorm(0.9)
        hidden = keras.layers.Dense(43, "tanh", kernel_constraint=limit), keras.layers.Dense(43, "tanh")
        built = keras.Sequential([keras.Input((7,)), *hidden[:depth], keras.layers.Dense(5)])
        built.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return built


def trained(optimizer, distribution, stage, depth=2, n=64, **options):
    """A model after three epochs of four updates."""
    built = model(optimizer, distribution, depth)
    options = {"check_agreement": "off", "verbose": 0, "epochs": 3, **options}
    tfdist.fit(built, *data(n), distribution=distribution, batch_size=16, zero_stage=stage, **options)
    return built


def bits(built):
    """Every number of weights and optimizer."""
    return [v.numpy().tobytes() for v in [*built.variables, *built.optimizer.variables]]


def slices_of(built):
    """Bytes of the optimizer's state on this process, asked within `fit` at the end of each epoch."""
    sizes = []

    def measure(epoch, logs):
        copies = [copy for v in built.optimizer.variables for copy in getattr(v.value, "values", (v.value,))]
        sizes.append(sum(copy.read_value().numpy().nbytes for copy in copies if copy.shape.rank))

    return keras.callbacks.LambdaCallback(on_epoch_end=measure), sizes


def both(name, distribution):
    """What a training ends with that keeps the state whole, and one that slices it."""
    return [bits(trained(OPTIMIZERS[name], distribution, stage, n=61)) for stage in (0, 1)]  # the last batch is short


REFUSAL = (
    "ModelCheckpoint writes the optimizer, of which each worker has slices with zero_stage=1: save the model after "
    "fit, or give fit checkpoints of tfdist"
)


def refusal(distribution, folder):
    """The error of a callback that writes the optimizer within fit."""
    try:
        trained(O.Adam, distribution, 1, callbacks=[keras.callbacks.ModelCheckpoint(folder / "model.keras")])
    except tfdist.UserError as error:
        return str(error)


def resume(distribution, folder):
    """What a training ends with, and one that was stopped after an epoch and resumed in another stage."""
    checkpoints = lambda: tfdist.Checkpoints(folder / "run", every="3 steps")
    trained(O.Adam, distribution, 1, epochs=1, checkpoints=checkpoints())
    resumed = trained(O.Adam, distribution, 0, checkpoints=checkpoints())
    return [bits(trained(O.Adam, distribution, 0)), bits(resumed)]
