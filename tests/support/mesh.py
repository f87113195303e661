"""Whole trainings on an emulated mesh: the very program that a TPU's compiler is given, run by XLA on the CPU.

The programs of an update, one for each size of a batch, are executed as N replicas with real all-reduces, what they
return of the variables is what the next update gets, and the rows are those that a feed would give to each replica.
"""

import dataclasses
import json
import pathlib
import subprocess
import tempfile

import keras
import numpy as np

import tfdist
from support import training_cases
from tfdist import config
from tfdist.config import field_syntax, schedule
from tfdist.data import sources
from tfdist.data.batch_layout import Layout, fetch, host_slices
from tfdist.data.datasets import registry
from tfdist.distributed import connect
from tfdist.models import build as models
from tfdist.models import optimizers
from tfdist.topology import compiler, program


def built(experiment, distribution):
    """The compiled model, its data and the number of epochs, as `tfdist.train` prepares them."""
    models.set_precision(experiment.train.precision)
    data = registry.load(experiment, True)
    plan = schedule.make(experiment, data.examples, distribution.replicas)
    with distribution.scope():
        model = models.build(experiment, data.spec, quiet=True)
        data = models.compiled(model, optimizers.build(experiment, plan), experiment, data)
        optimizers.exclude(model, experiment.optimizer)
    return model, data.train, plan.epochs


def on_one_device(experiment):
    """Weights after a training with `--strategy=default`."""
    distribution = connect.default("one device")
    model, source, epochs = built(experiment, distribution)
    tfdist.fit(
        model,
        source,
        distribution=distribution,
        batch_size=experiment.train.batch_size,
        epochs=epochs,
        accumulate=experiment.train.accumulate,
        seed=experiment.seed,
        lr_multipliers=field_syntax.layer_rates(experiment.optimizer),
        layer_decay=experiment.optimizer.layer_decay,
        verbose=0,
    )
    return training_cases.weights(model)


def on_mesh(experiment, replicas):
    """Weights after the same training on an emulated mesh, [replicas, weights], and what it was made of."""
    distribution = program.distribution(replicas, "CPU", "a test")
    model, source, epochs = built(experiment, distribution)
    train = experiment.train
    factors = optimizers.layer_factors(
        model, field_syntax.layer_rates(experiment.optimizer), experiment.optimizer.layer_decay
    )
    layout = Layout(train.batch_size, replicas, train.accumulate, static=True)
    feed = sources.read(source, layout, True, experiment.seed)
    programs, values, updates = {}, {}, []
    for update in range(epochs * feed.batches):
        part = feed.next(update, 1)
        if part.count not in programs:
            programs[part.count] = program.export(
                model, source, distribution, part.count, train.accumulate, factors=tuple(factors)
            )
        updates.append(list(programs).index(part.count))
        _, take = fetch(part.feed, part.first, layout)
        of_replicas = host_slices(take(), Layout(part.count, replicas, train.accumulate, static=True))
        flat = [[*keras.tree.flatten(own.data), own.sizes] for own in of_replicas]
        for k, columns in enumerate(zip(*flat)):
            values[f"rows{update}_{k}"] = np.stack([np.asarray(column) for column in columns])
    return _executed(model, list(programs.values()), values, updates, replicas), len(programs), len(updates)


def _executed(model, programs, values, updates, replicas):
    names = {}
    for one in programs:
        for value in one.variables:
            kind = "variable" if isinstance(value, keras.Variable) else "constant"
            name = names.setdefault(id(value), f"{kind}{len(names)}")
            values[name] = np.asarray(value)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        for i, one in enumerate(programs):
            (folder / f"{i}.mlir").write_text(one.text)
        np.savez(folder / "values.npz", **values)
        work = {
            "replicas": replicas,
            "updates": updates,
            "programs": [
                {
                    "path": f"{i}.mlir",
                    "rows": len(one.specs),
                    "arguments": [names[id(value)] for value in one.variables],
                    "aliases": one.aliases,
                }
                for i, one in enumerate(programs)
            ],
        }
        (folder / "work.json").write_text(json.dumps(work))
        kind = next(kind for kind in compiler.KINDS if compiler.is_there(kind))
        child = [compiler.python(kind, "the emulated mesh"), pathlib.Path(__file__).with_name("mesh_child.py")]
        done = subprocess.run([*map(str, child), temporary], capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-2000:]
        ends = dict(np.load(folder / "ends.npz"))
    assert np.isfinite(ends["losses"]).all()
    weights = [ends[names[id(v)]] if id(v) in names else np.stack([np.asarray(v)] * replicas) for v in model.weights]
    return np.concatenate([w.reshape(replicas, -1).astype("float64") for w in weights], axis=1)


def experiment_of(path, **train):
    """An experiment of `configs/`, for three epochs.

    In float64 its learning rate is constant: Keras computes schedules in float32, where XLA's cosine has another last
    bit.
    """
    scope = {}
    exec(compile(pathlib.Path(path).read_text(), path, "exec"), scope)
    made = scope["get_config"]()
    for name, value in {"epochs": 3, **train}.items():
        setattr(made.train, name, value)
    if made.train.precision == "float64":
        made.optimizer = dataclasses.replace(made.optimizer, schedule="constant", schedule_options="", warmup="0%")
    return made


def gpt(**train):
    made = experiment_of("configs/stdlib_gpt.py", **train)
    made.data = config.Data(name="stdlib_text", options="length=24, examples=330")
    made.model = config.Model(name="gpt", options="width=32, heads=4, depth=2")
    return made
