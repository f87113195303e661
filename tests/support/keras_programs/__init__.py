"""Programs as users of Keras write them, by what they try. Add one, and every strategy must agree on it."""

from support.keras_programs import callbacks, inputs, layers, losses, metrics, optimizers, train_steps

PROGRAMS = [
    program
    for module in (losses, metrics, layers, optimizers, inputs, callbacks, train_steps)
    for program in module.PROGRAMS
]
