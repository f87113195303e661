"""Programs as users of Keras write them, by what they try. Add one, and every strategy must agree on it."""

import dataclasses

from programs.surface import callbacks, inputs, layers, losses, metrics, optimizers, train_steps

IN_BOTH = [p for module in (losses, metrics, layers, train_steps) for p in module.PROGRAMS]
"""What an uneven batch and an even one may find different mistakes in."""
IN_TURN = [p for module in (optimizers, inputs, callbacks) for p in module.PROGRAMS]

PROGRAMS = [*IN_BOTH, *(dataclasses.replace(p, rows=(p.rows[i % len(p.rows)],)) for i, p in enumerate(IN_TURN))]
