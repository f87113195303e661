"""Models that replace parts of Keras' training step: which parts these are, and what their steps work with."""

from __future__ import annotations

import keras

TRAINING = ("train_step", "compute_loss", "compute_metrics", "get_metrics_result")
"""Methods that decide what an update does."""
EVALUATION = ("test_step", "compute_loss", "compute_metrics", "get_metrics_result")
"""Methods that decide what is measured."""
PREDICTION = ("predict_step",)
"""The method that decides what is predicted."""
UNUSED = ("make_train_function", "make_test_function", "make_predict_function", "reset_metrics")
"""Methods in whose place tfdist does something else."""


def replaced(model: keras.Model, methods: tuple[str, ...]) -> str:
    """Returns the first of these methods of Keras that the model's class has of its own, or an empty string."""
    for name in methods:
        if getattr(type(model), name) is not getattr(keras.Model, name):
            return name
    return ""


def optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers of a model: that of `compile`, then those that are its attributes, as a GAN has them."""
    found = [getattr(model, "optimizer", None)]
    for value in vars(model).values():
        found += (
            list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        )
    unique = {id(o): o for o in found if isinstance(o, keras.optimizers.Optimizer)}
    return list(unique.values())
