"""The formats of an export: each is written, loaded by its own runtime in another process, and compared."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from tfdist import config
from tfdist.errors import TrainingError, UserError
from tfdist.inference import job

FORMATS = ("saved_model", "onnx", "litert")
NEEDED = {"saved_model": (), "onnx": ("tf2onnx", "onnx", "onnxruntime"), "litert": ("ai_edge_litert",)}
"""What writes each format or, to check it, reads it."""
FILES = {"saved_model": "saved_model", "onnx": "model.onnx", "litert": "model.tflite"}
TOLERANCES = {"saved_model": 1e-5, "onnx": 1e-4, "litert": 1e-4}
"""Largest difference that is put down to rounding, relative to the largest output if that is above 1."""
HALF = 2e-2
"""Likewise for models that compute in half precision, which round differently in another graph."""
_TIME_LIMIT_S = 600.0


@dataclasses.dataclass(slots=True)
class Made:
    """A model, and examples for it."""

    model: Any
    experiment: config.Experiment
    spec: Any
    source: str
    examples: Any
    """Inputs [EXAMPLES, ...]."""
    examples_from: str
    arrays: list | None
    """Weights, where the model can be built again in another precision."""


def check_libraries(formats: list[str]) -> None:
    for name in formats:
        missing = [module for module in NEEDED[name] if importlib.util.find_spec(module) is None]
        if missing:
            raise UserError(f"--formats={name} needs {', '.join(missing)}: pip install 'tfdist[export]'")


def write(made: Made, name: str, path: pathlib.Path) -> dict[str, Any]:
    """Writes one format and makes sure of it; returns what `export.json` tells of it."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tfdist.export import onnx_litert, saved_model
    from tfdist.models import keras_internals

    model, note = (made.model, "") if name == "saved_model" else _in_float32(made, name)
    inputs = saved_model.inputs(model, made.spec)
    trials: dict[str, Any] = {}
    told: dict[str, Any]
    if name == "saved_model":
        logits = job.from_logits(model, made.arrays is None)
        if logits is None:
            from tfdist.monitoring import confusion

            outputs = model(made.examples, training=False)
            logits = not (hasattr(outputs, "numpy") and confusion.look_like_probabilities(outputs.numpy()))
        data = made.experiment.data
        servable = saved_model.Servable(model, made.spec, logits, data.resize, data.name.startswith("image_folder:"))
        functions = saved_model.save(servable, str(path))
        for number, (signature, given) in enumerate(saved_model.trials(servable, made.examples).items()):
            function = functions[signature]
            found = function.python_function(*(tf.constant(given[s.name], s.dtype) for s in function.input_signature))
            trials |= _named(f"{number}/{signature}", given, {k: v.numpy() for k, v in found.items()})
        told = {"signatures": {key: saved_model.signature(function) for key, function in functions.items()}}
        half = any(layer.compute_dtype in ("float16", "bfloat16") for layer in keras_internals.flat_layers(model))
    else:
        flat, half = keras.tree.flatten(inputs), False
        given = {spec.name: np.asarray(a) for spec, a in zip(flat, keras.tree.flatten(made.examples))}
        expected = keras.tree.flatten(model(made.examples, training=False))
        trials = _named("0/model", given, {str(i): a.numpy() for i, a in enumerate(expected)})
        if name == "onnx":
            onnx_litert.onnx(model, inputs, str(path))
        else:
            onnx_litert.litert(model, inputs, str(path))
        told = {"inputs": {s.name: [s.dtype.name, list(s.shape)] for s in flat}, "outputs": len(expected)}
    tolerance = HALF if half else TOLERANCES[name]
    difference = _difference(name, path, trials)
    if not difference <= tolerance:
        raise TrainingError(
            f"{name} gives other results than the model: they differ by {difference:.2g}, more than {tolerance:g}: "
            f"nothing was kept; leave {name} out of --formats"
        )
    return told | {"difference": difference, "tolerance": tolerance} | ({"note": note} if note else {})


def _in_float32(made: Made, name: str) -> tuple[Any, str]:
    """The model in float32, which is what ONNX and LiteRT runtimes compute in on any device."""
    from tfdist.checkpoints import training_state
    from tfdist.models import build as models
    from tfdist.models import keras_internals

    plain = all(layer.compute_dtype in (None, "float32") for layer in keras_internals.flat_layers(made.model))
    if plain and all(v.dtype != "float64" for v in made.model.weights):
        return made.model, ""
    if made.arrays is None:
        raise UserError(
            f"--model={made.source} does not compute in float32, as {name} does: give the --workdir of its run, from "
            "which it can be built anew, or leave that format out"
        )
    models.set_precision("float32")
    experiment = dataclasses.replace(
        made.experiment, train=dataclasses.replace(made.experiment.train, precision="float32")
    )
    model = job.built(experiment, made.spec)
    model.set_weights([array.astype("float32") if array.dtype.kind == "f" else array for array in made.arrays])
    training_state.refresh(model)
    models.set_precision(made.experiment.train.precision)
    return model, f"float32, and trained in {made.experiment.train.precision}"


def _named(prefix: str, inputs: dict, outputs: dict) -> dict[str, Any]:
    arrays = {f"{prefix}/in/{k}": v for k, v in inputs.items()} | {f"{prefix}/out/{k}": v for k, v in outputs.items()}
    # Texts, which TensorFlow gives as objects, as NumPy can write them.
    return {name: array.astype("S") if array.dtype == object else array for name, array in arrays.items()}


def _difference(name: str, path: pathlib.Path, trials: dict[str, Any]) -> float:
    """Between what was exported, as its own runtime computes it in another process, and what is expected."""
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        # A copy elsewhere, as Python would find the modules beside a script that it runs.
        script = shutil.copy(pathlib.Path(__file__).with_name("verify.py"), folder)
        np.savez(pathlib.Path(folder, "trials.npz"), **trials)
        words = [sys.executable, script, name, str(path.absolute()), os.path.join(folder, "trials.npz")]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        try:
            done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=_TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise TrainingError(f"{name} gave no result within {_TIME_LIMIT_S:g} s when it was checked") from None
    if done.returncode:
        why = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"code {done.returncode}")
        raise TrainingError(f"{name} was written and cannot be used ({why[:300]}): leave {name} out of --formats")
    return float(json.loads(done.stdout.splitlines()[-1])["difference"])
