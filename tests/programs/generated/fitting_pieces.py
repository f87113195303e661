"""Optimizers and callbacks as text. {o} stands for options that each optimizer takes."""


def lines(text: str) -> list[str]:
    return text.strip().split("\n")


OPTIMIZERS = lines("""
optimizers.SGD(0.1, {o})
optimizers.SGD(0.1, momentum=0.9, {o})
optimizers.SGD(0.1, momentum=0.9, nesterov=True, {o})
optimizers.Adam(0.01, {o})
optimizers.Adam(0.01, amsgrad=True, {o})
optimizers.AdamW(0.01, weight_decay=0.1)
optimizers.Adadelta(1.0, {o})
optimizers.Adafactor(0.01, {o})
optimizers.Adagrad(0.05, {o})
optimizers.Adamax(0.01, {o})
optimizers.Ftrl(0.1, l1_regularization_strength=0.001, {o})
optimizers.Lamb(0.01, {o})
optimizers.Lion(0.001, {o})
optimizers.Muon(0.01, exclude_layers=["head"], {o})
optimizers.Nadam(0.01, {o})
optimizers.RMSprop(0.01, {o})
optimizers.RMSprop(0.01, centered=True, momentum=0.9, {o})
optimizers.ScheduleFreeAdamW(0.01, warmup_steps=2)
optimizers.LossScaleOptimizer(optimizers.Adam(0.01, {o}), initial_scale=64.0, dynamic_growth_steps=2)
optimizers.LossScaleOptimizer(optimizers.Nadam(0.01, {o}), initial_scale=64.0)
optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.Adam(0.01), {".*bias": optimizers.SGD(0.1)}))
undecayed(optimizers.AdamW(0.01, weight_decay=0.1))
undecayed(optimizers.Nadam(0.01, weight_decay=0.1))
Doubles(0.05, momentum=0.5, {o})
Centres(0.01, {o})
Remembers(0.05, {o})
"sgd"
"adam"
"rmsprop"
""")

OPTIONS = [
    "clipnorm=0.05", "clipvalue=0.01", "global_clipnorm=0.1", "weight_decay=0.05", "use_ema=True, ema_momentum=0.8",
    "use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2", "loss_scale_factor=32.0",
    "clipnorm=0.1, use_ema=True, weight_decay=0.01", "gradient_accumulation_steps=2",
]  # fmt: skip

SCHEDULES = [
    "schedules.ExponentialDecay(0.1, 2, 0.5)", "schedules.PiecewiseConstantDecay([2, 4], [0.1, 0.05, 0.01])",
    "schedules.PolynomialDecay(0.1, 5, power=2.0)", "schedules.InverseTimeDecay(0.1, 2, 0.5)",
    "schedules.CosineDecay(0.0, 4, warmup_target=0.1, warmup_steps=2)", "schedules.CosineDecayRestarts(0.1, 2)",
]  # fmt: skip

CALLBACKS = lines("""
callbacks.LearningRateScheduler(lambda epoch, rate: 0.05 / (1 + epoch))
callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate)
callbacks.ReduceLROnPlateau(monitor="loss", patience=0, factor=0.5, min_delta=10.0)
callbacks.ReduceLROnPlateau(monitor="val_loss", patience=0, factor=0.5, min_delta=10.0, cooldown=1)
callbacks.EarlyStopping(monitor="loss", patience=0, restore_best_weights=True, min_delta=10.0)
callbacks.EarlyStopping(monitor="val_loss", patience=1, restore_best_weights=True, start_from_epoch=1)
callbacks.TerminateOnNaN()
callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: notes.append(("lambda", dict(logs))))
callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: notes.append(("lambda", dict(logs))))
callbacks.SwapEMAWeights(swap_on_epoch=True)
callbacks.SwapEMAWeights()
callbacks.ModelCheckpoint(str(folder / "{epoch}.weights.h5"), save_weights_only=True)
callbacks.ModelCheckpoint(str(folder / "best.keras"), monitor="loss", save_best_only=True)
callbacks.BackupAndRestore(str(folder / "backup"))
callbacks.BackupAndRestore(str(folder / "backup"), save_freq=2)
callbacks.CSVLogger(str(folder / "log.csv"))
callbacks.History()
callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: api.evaluate(model, x, y, batch_size=5))
callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: api.predict(model, x, batch_size=5))
callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: api.evaluate(model, rows(data).batch(7)))
callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: api.predict(model, x))
callbacks.LambdaCallback(on_test_end=lambda logs: shrink(model))
Rates()
Stops()
Notes(notes)
BatchNotes(notes)
""")
