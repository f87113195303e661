"""The formats of an export: each is written, loaded by its own runtime in another process, and compared.

What it is compared with is the original: built from its run folder or loaded from a file, with examples for it.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import config
from tfdist.checkpoints import training_state
from tfdist.config.commands import standard_streams
from tfdist.config.messages import logger
from tfdist.data import spec_file
from tfdist.data.datasets import registry
from tfdist.data.spec import Spec, Structure
from tfdist.distributed import child_process
from tfdist.errors import TrainingError, UserError, one_line
from tfdist.export import saved_model
from tfdist.inference import compatibility, job, prediction_rows, trained_model
from tfdist.keras_bridge import keras_internals
from tfdist.models import build as models

if TYPE_CHECKING:
    import tf2onnx

FILES = {"saved_model": "saved_model", "onnx": "model.onnx", "litert": "model.tflite"}
TOLERANCES = {"saved_model": 1e-5, "onnx": 1e-4, "litert": 1e-4}
"""Largest difference that is put down to rounding, relative to the largest output if that is above 1."""
HALF = 2e-2  # the same bound for models that compute in half precision, which round differently in another graph
DISK_ERRORS = OSError, tf.errors.OutOfRangeError, tf.errors.ResourceExhaustedError  # of a full or broken disk
_TIME_LIMIT_S = 600.0
_Trials = dict[str, np.ndarray]  # inputs and expected outputs, named as `verify` wants them

COUNT = 8  # how many examples a comparison takes


def made_examples(model: keras.Model, spec: Spec) -> Structure:
    """Returns inputs that are like none in particular, arrays [COUNT, ...] in the model's structure."""
    draw = np.random.default_rng(0)
    # Numbers that all embeddings know, of however many things.
    layers = keras_internals.flat_layers(model)
    known = [layer.input_dim for layer in layers if isinstance(layer, keras.layers.Embedding)]
    end = min([max(1, int(min(spec.maximum, 255))) + 1, *known])

    def one(tensor: tf.TensorSpec) -> np.ndarray:
        shape = [COUNT, *(side or 4 for side in tensor.shape[1:])]
        kind = np.dtype(tensor.dtype.as_numpy_dtype)
        if np.issubdtype(kind, np.integer):
            return draw.integers(0, end, shape).astype(kind)
        return draw.normal(size=shape).astype(kind)

    return keras.tree.map_structure(one, saved_model.inputs(model, spec))


_CLASSIFYING = ("categoricalcrossentropy", "sparsecategoricalcrossentropy", "categoricalfocalcrossentropy")


@dataclasses.dataclass(frozen=True, slots=True)
class Original:
    """A model, and examples on which what is exported must agree with it."""

    model: keras.Model
    experiment: config.Experiment
    spec: Spec
    source: str  # where its weights are from
    examples: Structure  # inputs [COUNT, ...]
    examples_from: str  # the data set, or `made`
    arrays: list[np.ndarray] | None  # weights, where the model can be built again in another precision


def from_file(asked: trained_model.ModelRequest, experiment: config.Experiment) -> Original:
    """Loads the model of a file, which has a default experiment."""
    model = trained_model.load(asked.path)
    if not model.inputs:
        raise UserError(f"--model={asked.path} does not tell what it takes", "give the --workdir of its run")
    tensor = keras.tree.flatten(model.inputs)[0]
    classifies = compatibility.loss_name(model) in _CLASSIFYING and isinstance(model.output_shape, tuple)
    classes = model.output_shape[-1] if classifies else None
    spec = Spec(tuple(tensor.shape[1:]), tensor.dtype, classes, 255.0)
    inputs = made_examples(model, spec)
    try:
        model(inputs, training=False)
    except Exception as error:  # whatever a layer raises that takes some values alone
        what = f"--model={asked.path} cannot be checked on made examples ({one_line(error, 200)})"
        raise UserError(what, "give the --workdir of its run") from error
    return Original(model, experiment, spec, str(asked.path), inputs, "made", None)


def from_run(asked: trained_model.ModelRequest, experiment: config.Experiment) -> Original:
    """Builds the model of a run, and gives it its weights."""
    recorded, loaded = spec_file.read(asked.path), None
    models.set_precision(experiment.train.precision)
    try:
        loaded = registry.load(experiment, False)
        spec = recorded or loaded.spec
        compatibility.check_data(experiment, loaded.spec, spec)
    except UserError as error:
        if recorded is None:
            raise
        logger.info(f"checked on made examples, since the data cannot be had: {error}")
        loaded, spec = None, recorded
    build = lambda: job.built(experiment, spec)
    source, arrays = trained_model.read_weights(asked, experiment, build)
    model = build()
    model.set_weights(arrays)
    training_state.refresh(model)
    inputs, origin = made_examples(model, spec), "made"
    if loaded is not None:
        first = loaded.eval.first_rows(COUNT)[0]
        inputs = keras.tree.map_structure(lambda array: np.asarray(array)[:COUNT], first)
        origin = f"{experiment.data.name}, {experiment.data.eval_split}"
    return Original(model, experiment, spec, source, inputs, origin, arrays)


def write(original: Original, name: str, path: pathlib.Path) -> dict[str, Any]:
    """Writes one format, makes sure that it gives what the model gives, and returns what `export.json` tells of it."""
    note, half = "", False
    if name == "saved_model":
        description, trials, half = _write_saved_model(original, path)
    else:
        model, note = _in_float32(original, name)
        description, trials = _write_tensors(original, model, name, path)
    tolerance = HALF if half else TOLERANCES[name]
    difference = _difference(name, path, trials)
    if not difference <= tolerance:
        what = f"{name} gives other results than the model: they differ by {difference:.2g}, more than {tolerance:g}"
        raise TrainingError(f"{what}: nothing was kept; leave {name} out of --formats")
    checked = {"difference": difference, "tolerance": tolerance}
    return description | checked | ({"note": note} if note else {})


def _write_saved_model(original: Original, path: pathlib.Path) -> tuple[dict[str, Any], _Trials, bool]:
    """Writes a SavedModel; returns its description, a trial for each signature, and whether it is of half precision."""
    model = original.model
    logits = compatibility.from_logits(model, None if original.arrays is None else original.experiment.train)
    if logits is None:
        outputs = model(original.examples, training=False)
        scores = tf.is_tensor(outputs) and outputs.shape.rank == 2
        logits = not (scores and prediction_rows.look_like_probabilities(outputs.numpy()))
    data = original.experiment.data
    servable = saved_model.Servable(model, original.spec, logits, data.resize, data.name.startswith("image_folder:"))
    functions = saved_model.save(servable, str(path))
    trials: _Trials = {}
    for number, (signature, given) in enumerate(saved_model.trials(servable, original.examples).items()):
        function = functions[signature]
        outputs = function.python_function(*(tf.constant(given[s.name], s.dtype) for s in function.input_signature))
        trials |= _named(f"{number}/{signature}", given, {k: v.numpy() for k, v in outputs.items()})
    signatures = {key: saved_model.signature(function) for key, function in functions.items()}
    half = any(layer.compute_dtype in ("float16", "bfloat16") for layer in keras_internals.flat_layers(model))
    return {"signatures": signatures}, trials, half


def _write_tensors(
    original: Original, model: keras.Model, name: str, path: pathlib.Path
) -> tuple[dict[str, Any], _Trials]:
    """Writes ONNX or LiteRT of the model in float32, which take what it takes."""
    inputs = saved_model.inputs(model, original.spec)
    specs, flat = keras.tree.flatten(inputs), [np.array(a) for a in keras.tree.flatten(original.examples)]
    for array in flat:
        if array.dtype.kind == "f":  # LiteRT divides by a norm without the epsilon that keeps 0 / 0 from being NaN
            array[-1] = 0
    given = {spec.name: np.asarray(a, spec.dtype.as_numpy_dtype) for spec, a in zip(specs, flat)}
    outputs = model(keras.tree.pack_sequence_as(original.examples, flat), training=False)
    expected = keras.tree.flatten(outputs)
    named = sorted(outputs) if isinstance(outputs, dict) else len(expected)  # in the order in which the file has them
    with _quiet(name):
        (_onnx if name == "onnx" else _litert)(model, inputs, str(path))
    description = {"inputs": {s.name: [s.dtype.name, list(s.shape)] for s in specs}, "outputs": named}
    return description, _named("0/model", given, {str(i): a.numpy() for i, a in enumerate(expected)})


def _in_float32(original: Original, name: str) -> tuple[keras.Model, str]:
    """Returns the model in float32, which ONNX and LiteRT compute in on any device, and a note where it was not."""
    plain = all(layer.compute_dtype in (None, "float32") for layer in keras_internals.flat_layers(original.model))
    if plain and all(v.dtype != "float64" for v in original.model.weights):
        return original.model, ""
    if original.arrays is None:
        fix = "give the --workdir of its run, from which it can be built anew, or leave that format out"
        raise UserError(f"--model={original.source} does not compute in float32, as {name} does", fix)
    models.set_precision("float32")
    train = dataclasses.replace(original.experiment.train, precision="float32")
    model = job.built(dataclasses.replace(original.experiment, train=train), original.spec)
    model.set_weights([array.astype("float32") if array.dtype.kind == "f" else array for array in original.arrays])
    training_state.refresh(model)
    models.set_precision(original.experiment.train.precision)
    return model, f"float32, and trained in {original.experiment.train.precision}"


def _onnx(model: keras.Model, inputs: Structure, path: str) -> None:
    import tf2onnx

    flat = keras.tree.flatten(inputs)
    call = lambda *x: keras.tree.flatten(model(keras.tree.pack_sequence_as(inputs, x), training=False))
    # tf2onnx does not know this one, which GELU is made of, and would write a file that nothing reads.
    handlers: dict[str, Any] = {"Erfc": (_erfc, [])}
    function = tf.function(call, input_signature=flat)
    tf2onnx.convert.from_function(
        function, input_signature=flat, opset=17, output_path=path, custom_op_handlers=handlers
    )


def _erfc(context: "tf2onnx.graph.Graph", node: "tf2onnx.graph.Node", name: str, arguments: list) -> None:
    """Replaces erfc(x) by 1 - erf(x); to be added to 1 or multiplied, it needs no more digits than that leaves."""
    kind = context.get_dtype(node.output[0])
    one = context.make_const(f"{node.name}_one", np.array(1, "float32"))
    shape = context.get_shape(node.output[0])
    (source,), (output,) = node.input, node.output
    context.remove_node(node.name)
    erf = context.make_node("Erf", [source], name=f"{node.name}_erf", shapes=[shape], dtypes=[kind])
    context.make_node(
        "Sub", [one.output[0], erf.output[0]], name=node.name, outputs=[output], shapes=[shape], dtypes=[kind]
    )


def _litert(model: keras.Model, inputs: Structure, path: str) -> None:
    """Writes LiteRT with its own operations alone. The outputs are called `output_0` and so on."""
    module = tf.Module()
    module.kept = [v.value for v in model.variables]

    def call(*x):
        outputs = keras.tree.flatten(model(keras.tree.pack_sequence_as(inputs, x), training=False))
        return {f"output_{i}": output for i, output in enumerate(outputs)}

    module.call = tf.function(call, input_signature=keras.tree.flatten(inputs))
    with tempfile.TemporaryDirectory() as folder:
        # A SavedModel keeps the names on the way; Keras' own exporter gives inputs names that it counts up.
        tf.saved_model.save(module, folder, signatures=module.call.get_concrete_function())
        written = tf.lite.TFLiteConverter.from_saved_model(folder).convert()
    pathlib.Path(path).write_bytes(written)


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silences converters, which tell much on the way; the check says what is wrong with the result."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with standard_streams.held_back(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except DISK_ERRORS:
        raise
    except Exception as error:  # each converter has its own
        line = one_line(error, 300)
        raise TrainingError(f"the model cannot be written as {name} ({line}): leave {name} out of --formats") from error
    finally:
        logging.disable(before)


def _named(prefix: str, inputs: dict, outputs: dict) -> _Trials:
    """Returns the arrays of one trial by the names that `verify` expects."""
    arrays = {f"{prefix}/in/{k}": v for k, v in inputs.items()} | {f"{prefix}/out/{k}": v for k, v in outputs.items()}
    # NumPy writes no objects, which is how TensorFlow gives texts.
    encoded = lambda array: np.array([tf.compat.as_bytes(text) for text in array.flat]).reshape(array.shape)
    return {name: encoded(array) if array.dtype == object else array for name, array in arrays.items()}


def _difference(name: str, path: pathlib.Path, trials: _Trials) -> float:
    """Returns how far the exported model, run by its own runtime in another process, is from what is expected."""
    with tempfile.TemporaryDirectory() as folder:
        # A copy elsewhere, as Python would find the modules beside a script that it runs.
        script = shutil.copy(pathlib.Path(__file__).with_name("verify.py"), folder)
        np.savez(pathlib.Path(folder, "trials.npz"), **trials)  # type: ignore[arg-type]  # mypy takes one of them for `allow_pickle`
        words = [sys.executable, script, name, str(path.absolute()), os.path.join(folder, "trials.npz")]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = child_process.answer(words, _TIME_LIMIT_S, env=env, cwd=folder)
    if done is None:
        raise TrainingError(f"{name} gave no result within {_TIME_LIMIT_S:g} s when it was checked")
    if done.returncode:
        why = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"code {done.returncode}")
        raise TrainingError(f"{name} was written and cannot be used ({why[:300]}): leave {name} out of --formats")
    return float(json.loads(done.stdout.splitlines()[-1])["difference"])
