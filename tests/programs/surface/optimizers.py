"""Optimizers with every option."""

import keras
from keras import optimizers
from keras.optimizers import schedules

from programs.surface.program import L, Program, classes, compiled, dense, tokens


def trained(name, make, build=None, data=classes, **kwargs):
    """A program around one optimizer; `make` is called in scope."""
    return Program(
        f"optimizer {name}", lambda: compiled(build() if build else dense(), optimizer=make()), data, **kwargs
    )


class Halving(schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.2 * 0.5 ** keras.ops.cast(step, "float32")


class Signed(optimizers.Optimizer):
    """An optimizer of one's own, by the documented interface."""

    def __init__(self, learning_rate=0.01, name="signed", **kwargs):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.previous = [self.add_variable_from_reference(v, "previous") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        previous = self.previous[self._get_variable_index(variable)]
        rate = keras.ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * (gradient + 0.5 * previous))
        self.assign(previous, gradient)


def undecayed():
    optimizer = optimizers.AdamW(1e-2, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def constrained():
    norm = {"kernel_constraint": keras.constraints.MaxNorm(0.5), "bias_constraint": "non_neg"}
    return keras.Sequential(
        [
            keras.Input((6,)),
            L.Dense(6, activation="tanh", **norm),
            L.Dense(6, kernel_constraint="unit_norm"),
            L.Dense(5, kernel_constraint=keras.constraints.MinMaxNorm(0.2, 0.7)),
        ]
    )


def frozen_below():
    model = dense()
    model.layers[0].trainable = False
    return model


def frozen_now(model):
    model.layers[0].trainable = False
    return compiled(model, optimizer=model.optimizer)


def embedded():
    return keras.Sequential([keras.Input((5,), dtype="int32"), L.Embedding(12, 4), L.Flatten(), L.Dense(5)])


def of_tokens(n):
    return tokens(n), classes(n)[1]


def by_layer():
    """Two optimizers for two layers."""
    optimizer_map = optimizers.OptimizerMap(optimizers.Adam(1e-2), {".*head/.*": optimizers.SGD(0.1)})
    return optimizers.MultiOptimizer(optimizer_map)


def by_kind():
    """Two optimizers for kernels and biases."""
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.Adam(1e-2), {".*bias": optimizers.SGD(0.1)}))


def headed():
    return keras.Sequential([keras.Input((6,)), L.Dense(6, activation="tanh"), L.Dense(5, name="head")])


def beside():
    """Has weights without a gradient."""
    x = keras.Input((6,))
    aside = keras.ops.stop_gradient(L.Dense(5, name="aside")(x))
    return keras.Model(x, L.Dense(5, name="head")(x) + aside)


AVERAGED = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2}

PROGRAMS = [
    trained("SGD", lambda: optimizers.SGD(0.1)),
    trained("SGD with momentum", lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True)),
    trained("RMSprop", lambda: optimizers.RMSprop(1e-2)),
    trained("RMSprop centered", lambda: optimizers.RMSprop(1e-2, centered=True, momentum=0.9)),
    trained("Adam", lambda: optimizers.Adam(1e-2)),
    trained("Adam amsgrad", lambda: optimizers.Adam(1e-2, amsgrad=True)),
    trained("AdamW in float64", lambda: optimizers.AdamW(1e-2, weight_decay=0.1, use_ema=True, ema_momentum=0.8),
            precision="float64", tolerance=1e-12),
    trained("AdamW", lambda: optimizers.AdamW(1e-2, weight_decay=0.1)),
    trained("AdamW without decay of biases", undecayed),
    trained("Adadelta", lambda: optimizers.Adadelta(1.0)),
    trained("Adagrad", lambda: optimizers.Adagrad(0.05)),
    trained("Adamax", lambda: optimizers.Adamax(1e-2)),
    trained("Adafactor", lambda: optimizers.Adafactor(1e-2)),
    trained("Nadam", lambda: optimizers.Nadam(1e-2)),
    trained("Ftrl", lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.001)),
    trained("Lion", lambda: optimizers.Lion(1e-3), precision="float64"),
    trained("Lamb", lambda: optimizers.Lamb(1e-2)),
    trained("Muon", lambda: optimizers.Muon(1e-2, exclude_layers=["dense_1"]), precision="float64"),
    trained("ScheduleFreeAdamW", lambda: optimizers.ScheduleFreeAdamW(1e-2),
            eagerly="in a graph its weights fall to nothing at once"),
    trained("MultiOptimizer", by_layer, headed),
    trained("MultiOptimizer and weights without a gradient", by_kind, beside),
    trained("LossScaleOptimizer", lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=1024.0)),
    trained("LossScaleOptimizer without an exact reciprocal",
            lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=1000.0), precision="float64",
            tolerance=1e-12),
    trained(
        "LossScaleOptimizer that grows",
        lambda: optimizers.LossScaleOptimizer(
            optimizers.Adam(1e-2, global_clipnorm=0.3), initial_scale=8.0, dynamic_growth_steps=2
        ),
    ),
    trained("mixed_float16", lambda: optimizers.Adam(1e-2), precision="mixed_float16", tolerance=1e-3),
    trained("mixed_bfloat16", lambda: optimizers.SGD(0.1), precision="mixed_bfloat16", tolerance=1e-2),
    trained("clipnorm", lambda: optimizers.SGD(0.5, clipnorm=0.05)),
    trained("clipvalue", lambda: optimizers.Adam(1e-2, clipvalue=0.01)),
    trained("global_clipnorm", lambda: optimizers.AdamW(1e-2, global_clipnorm=0.05)),
    trained("use_ema", lambda: optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.8)),
    trained("use_ema with overwrite", lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8,
                                                             ema_overwrite_frequency=2)),
    trained("use_ema of constrained weights", lambda: optimizers.RMSprop(1e-2, **AVERAGED), constrained),
    trained("use_ema of constrained weights, Adam", lambda: optimizers.Adam(1e-2, **AVERAGED), constrained),
    trained("weight_decay", lambda: optimizers.SGD(0.1, momentum=0.9, weight_decay=0.05)),
    trained("loss_scale_factor", lambda: optimizers.RMSprop(1e-2, loss_scale_factor=128.0)),
    trained("gradient_accumulation_steps", lambda: optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
            constrained),
    trained("gradient_accumulation_steps, averaged",
            lambda: optimizers.RMSprop(Halving(), clipnorm=0.05, gradient_accumulation_steps=3, **AVERAGED)),
    trained("gradient_accumulation_steps, scaled",
            lambda: optimizers.LossScaleOptimizer(optimizers.Lion(1e-3, gradient_accumulation_steps=2))),
    trained("ExponentialDecay", lambda: optimizers.SGD(schedules.ExponentialDecay(0.2, 2, 0.5, staircase=True))),
    trained("PiecewiseConstantDecay", lambda: optimizers.SGD(schedules.PiecewiseConstantDecay([2, 4], [0.2, 0.1,
                                                                                                       0.01]))),
    trained("PolynomialDecay", lambda: optimizers.SGD(schedules.PolynomialDecay(0.2, 5, power=2.0))),
    trained("InverseTimeDecay", lambda: optimizers.Adagrad(schedules.InverseTimeDecay(0.2, 2, 0.5))),
    trained("CosineDecay", lambda: optimizers.Adam(schedules.CosineDecay(0.0, 4, warmup_target=0.02, warmup_steps=2))),
    trained("CosineDecayRestarts", lambda: optimizers.SGD(schedules.CosineDecayRestarts(0.2, 2))),
    trained("own schedule", lambda: optimizers.SGD(Halving())),
    trained("rate from a function", lambda: optimizers.SGD(lambda: 0.07)),
    trained("of one's own", lambda: Signed(0.05, clipnorm=0.1)),
    trained("constraints", lambda: optimizers.SGD(0.2), constrained),
    trained("regularizers", lambda: optimizers.SGD(0.2), lambda: dense(kernel_regularizer=keras.regularizers.L1L2())),
    trained("OrthogonalRegularizer", lambda: optimizers.SGD(0.1),
            lambda: dense(kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.05))),
    trained("frozen layers", lambda: optimizers.AdamW(1e-2), frozen_below),
    trained("frozen layers, and the optimizer that trained them", lambda: optimizers.Adam(1e-2), then=(frozen_now,)),
    trained("sparse gradients", lambda: optimizers.Adam(1e-2), embedded, of_tokens),
    trained("sparse gradients, clipped", lambda: optimizers.SGD(0.5, global_clipnorm=0.05), embedded, of_tokens),
]  # fmt: skip
