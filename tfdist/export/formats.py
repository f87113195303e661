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
from typing import TYPE_CHECKING, Any, NamedTuple

from tfdist.errors import TrainingError, UserError
from tfdist.inference import compatibility, job

if TYPE_CHECKING:
    import keras
    import numpy as np

    from tfdist.export.original import Original

FORMATS = ("saved_model", "onnx", "litert")
NEEDED = {"saved_model": (), "onnx": ("tf2onnx", "onnx", "onnxruntime"), "litert": ("ai_edge_litert",)}
"""The packages that write each format or, to check it, read it."""
FILES = {"saved_model": "saved_model", "onnx": "model.onnx", "litert": "model.tflite"}
TOLERANCES = {"saved_model": 1e-5, "onnx": 1e-4, "litert": 1e-4}
"""Largest difference that is put down to rounding, relative to the largest output if that is above 1."""
HALF = 2e-2
"""The same bound for models that compute in half precision, which round differently in another graph."""
_TIME_LIMIT_S = 600.0


class _Written(NamedTuple):
    """A format that has been written and is not checked yet."""

    description: dict[str, Any]
    """Its inputs and outputs, for `export.json`."""
    trials: dict[str, np.ndarray]
    """Inputs and expected outputs, named as `verify` wants them."""
    half: bool
    """Whether it computes in half precision."""


def check_libraries(formats: list[str]) -> None:
    """Raises UserError where a package is missing that one of the formats needs."""
    for name in formats:
        missing = [module for module in NEEDED[name] if importlib.util.find_spec(module) is None]
        if missing:
            raise UserError(f"--formats={name} needs {', '.join(missing)}", "pip install 'tfdist[export]'")


def write(original: Original, name: str, path: pathlib.Path) -> dict[str, object]:
    """Writes one format and makes sure that it gives what the model gives.

    Returns:
      What `export.json` tells of it.

    Raises:
      UserError: the format needs a precision in which this model cannot be built.
      TrainingError: the format cannot hold the model, or gives something else.
    """
    model, note = (original.model, "") if name == "saved_model" else _in_float32(original, name)
    if name == "saved_model":
        written = _write_saved_model(original, path)
    else:
        written = _write_tensors(original, model, name, path)
    tolerance = HALF if written.half else TOLERANCES[name]
    difference = _difference(name, path, written.trials)
    if not difference <= tolerance:
        raise TrainingError(
            f"{name} gives other results than the model: they differ by {difference:.2g}, more than {tolerance:g}: "
            f"nothing was kept; leave {name} out of --formats"
        )
    checked = {"difference": difference, "tolerance": tolerance}
    return written.description | checked | ({"note": note} if note else {})


def _write_saved_model(original: Original, path: pathlib.Path) -> _Written:
    """Writes a SavedModel, with a trial for each of its signatures."""
    import tensorflow as tf

    from tfdist.export import saved_model
    from tfdist.keras_bridge import keras_internals

    model = original.model
    logits = compatibility.from_logits(model, original.arrays is None)
    if logits is None:
        from tfdist.monitoring import confusion

        outputs = model(original.examples, training=False)
        logits = not (hasattr(outputs, "numpy") and confusion.look_like_probabilities(outputs.numpy()))
    data = original.experiment.data
    servable = saved_model.Servable(model, original.spec, logits, data.resize, data.name.startswith("image_folder:"))
    functions = saved_model.save(servable, str(path))
    trials: dict[str, np.ndarray] = {}
    for number, (signature, given) in enumerate(saved_model.trials(servable, original.examples).items()):
        function = functions[signature]
        outputs = function.python_function(*(tf.constant(given[s.name], s.dtype) for s in function.input_signature))
        trials |= _named(f"{number}/{signature}", given, {k: v.numpy() for k, v in outputs.items()})
    signatures = {key: saved_model.signature(function) for key, function in functions.items()}
    half = any(layer.compute_dtype in ("float16", "bfloat16") for layer in keras_internals.flat_layers(model))
    return _Written({"signatures": signatures}, trials, half)


def _write_tensors(original: Original, model: keras.Model, name: str, path: pathlib.Path) -> _Written:
    """Writes ONNX or LiteRT, which take what the model takes.

    Args:
      model: the original in float32.
    """
    import keras
    import numpy as np

    from tfdist.export import onnx_litert, saved_model

    inputs = saved_model.inputs(model, original.spec)
    specs = keras.tree.flatten(inputs)
    given = {spec.name: np.asarray(a) for spec, a in zip(specs, keras.tree.flatten(original.examples))}
    expected = keras.tree.flatten(model(original.examples, training=False))
    trials = _named("0/model", given, {str(i): a.numpy() for i, a in enumerate(expected)})
    if name == "onnx":
        onnx_litert.onnx(model, inputs, str(path))
    else:
        onnx_litert.litert(model, inputs, str(path))
    description = {"inputs": {s.name: [s.dtype.name, list(s.shape)] for s in specs}, "outputs": len(expected)}
    return _Written(description, trials, half=False)


def _in_float32(original: Original, name: str) -> tuple[keras.Model, str]:
    """Returns the model in float32, which ONNX and LiteRT compute in on any device, and a note where it was not."""
    from tfdist.checkpoints import training_state
    from tfdist.keras_bridge import keras_internals
    from tfdist.models import build as models

    plain = all(layer.compute_dtype in (None, "float32") for layer in keras_internals.flat_layers(original.model))
    if plain and all(v.dtype != "float64" for v in original.model.weights):
        return original.model, ""
    if original.arrays is None:
        raise UserError(
            f"--model={original.source} does not compute in float32, as {name} does",
            "give the --workdir of its run, from which it can be built anew, or leave that format out",
        )
    models.set_precision("float32")
    experiment = dataclasses.replace(
        original.experiment, train=dataclasses.replace(original.experiment.train, precision="float32")
    )
    model = job.built(experiment, original.spec)
    model.set_weights([array.astype("float32") if array.dtype.kind == "f" else array for array in original.arrays])
    training_state.refresh(model)
    models.set_precision(original.experiment.train.precision)
    return model, f"float32, and trained in {original.experiment.train.precision}"


def _named(prefix: str, inputs: dict, outputs: dict) -> dict[str, np.ndarray]:
    """Returns the arrays of one trial by the names that `verify` expects."""
    arrays = {f"{prefix}/in/{k}": v for k, v in inputs.items()} | {f"{prefix}/out/{k}": v for k, v in outputs.items()}
    # NumPy writes no objects, which is how TensorFlow gives texts.
    return {name: array.astype("S") if array.dtype == object else array for name, array in arrays.items()}


def _difference(name: str, path: pathlib.Path, trials: dict[str, np.ndarray]) -> float:
    """Returns how far the exported model, run by its own runtime in another process, is from what is expected."""
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        # A copy elsewhere, as Python would find the modules beside a script that it runs.
        script = shutil.copy(pathlib.Path(__file__).with_name("verify.py"), folder)
        np.savez(pathlib.Path(folder, "trials.npz"), **trials)  # type: ignore[arg-type]  # mypy takes one of them for `allow_pickle`
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
