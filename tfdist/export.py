"""Exports a model: `python -m tfdist.export --workdir=runs/digits --output=out`.

`out/` gets `saved_model/` (for TensorFlow Serving; it takes raw inputs,
pictures also as JPEG or PNG bytes), and with
`--formats=saved_model,onnx,litert` also `model.onnx` and `model.tflite`, which
take what the model takes and are float32. Each is loaded by its own runtime in
a process without tfdist, and compared with the model; what differs is not kept.
`export.json` tells inputs, outputs, class names and the differences.

Exit codes: 0 done; 1 the model cannot be written so, or the result differs;
2 the input is wrong; 130, 143 a signal.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

from absl import flags

from tfdist import after, command, config, environment, fields, finished
from tfdist.errors import TrainingError, UserError

FORMATS = ("saved_model", "onnx", "litert")
NEEDED = {"saved_model": (), "onnx": ("tf2onnx", "onnx", "onnxruntime"), "litert": ("ai_edge_litert",)}
"""What writes each format or, to check it, reads it."""
FILES = {"saved_model": "saved_model", "onnx": "model.onnx", "litert": "model.tflite"}
EXAMPLES = 8
TOLERANCES = {"saved_model": 1e-5, "onnx": 1e-4, "litert": 1e-4}
"""Largest difference that is put down to rounding, relative to the largest output if that is above 1."""
HALF = 2e-2
"""Likewise for models that compute in half precision, which round differently in another graph."""
_CLASSIFYING = ("categoricalcrossentropy", "sparsecategoricalcrossentropy", "categoricalfocalcrossentropy")
_TIME_LIMIT_S = 600.0


def export(asked: finished.Wanted, formats: list[str], output: pathlib.Path, overwrite: bool) -> None:
    """Writes a model in these formats.

    Raises:
      UserError: the model or the output cannot be used, or a library is missing.
      TrainingError: a format cannot hold the model, or gives something else.
    """
    _check_libraries(formats)
    experiment = finished.experiment(asked)
    from tfdist import provenance, strategy

    strategy.create(strategy.locate(environment.Environment(strategy="default", devices="none")))
    made = _make(asked, experiment)
    temporary = output.parent / f".{output.name}.{os.getpid()}"
    try:
        temporary.mkdir()
        content: dict[str, Any] = {"model": made.source, "examples": made.examples_from, "formats": {}}
        for name in formats:
            path = temporary / FILES[name]
            content["formats"][name] = told = _write(made, name, path)
            _say(f"{output / path.name}: {_described(told)}")
        if made.spec.names:
            content["classes"] = list(made.spec.names)
        content["versions"] = provenance.versions()
        (temporary / "export.json").write_text(json.dumps(content, indent=2) + "\n")
        _put(temporary, output, overwrite)
    except OSError as error:
        raise TrainingError(f"--output={output} cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@dataclasses.dataclass(slots=True)
class _Made:
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


def _make(asked: finished.Wanted, experiment: config.Experiment) -> _Made:
    """Builds or loads the model and gives it its weights."""
    import keras

    from tfdist import described, models, state
    from tfdist.datasets import catalog

    if asked.model:
        model = finished.load(asked.path)
        if not model.inputs:
            raise UserError(f"--model={asked.path} does not tell what it takes: give the --workdir of its run")
        tensor = keras.tree.flatten(model.inputs)[0]
        classes = model.output_shape[-1] if _classifies(model) else None
        of_file = catalog.Spec(tuple(tensor.shape[1:]), tensor.dtype, classes, 255.0)
        examples = _invented(model, of_file)
        try:
            model(examples, training=False)
        except Exception as error:  # whatever a layer raises that takes some values alone
            raise UserError(
                f"--model={asked.path} cannot be checked on made examples ({finished.line(error)}): "
                "give the --workdir of its run"
            ) from error
        return _Made(model, experiment, of_file, str(asked.path), examples, "made", None)
    spec: Any = described.read(asked.path)
    loaded: Any = None
    try:
        loaded = catalog.load(experiment, False, _say)
        after.check_data(experiment, loaded.spec, spec or loaded.spec)
    except UserError as error:
        if spec is None:
            raise
        _say(f"checked on made examples, since the data cannot be had: {error}")
        loaded = None
    spec = spec or loaded.spec
    models.set_precision(experiment.train.precision)
    build = lambda: after.built(experiment, spec)
    found = finished.weights(asked, experiment, build, _say)
    model = build()
    model.set_weights(found.arrays)
    state.refresh(model)
    examples, origin = _invented(model, spec), "made"
    if loaded is not None:
        examples, origin = _first(loaded.eval), f"{experiment.data.name}, {experiment.data.eval_split}"
    return _Made(model, experiment, spec, str(found.source), examples, origin, found.arrays)


def _classifies(model: Any) -> bool:
    return after.loss_name(model) in _CLASSIFYING and isinstance(model.output_shape, tuple)


def _first(source: Any) -> Any:
    """The first examples' inputs."""
    import keras
    import numpy as np

    from tfdist import data as data_lib

    if isinstance(source, data_lib.Arrays):
        return keras.tree.map_structure(lambda a: np.asarray(a)[:EXAMPLES], source.columns[0])
    batch = next(_batches(source))
    return keras.tree.map_structure(lambda a: np.asarray(a)[:EXAMPLES], batch[0])


def _batches(source: Any) -> Any:
    from tfdist import calls, strategy

    layout = calls.layout_of(source, EXAMPLES, strategy.default(""), 1, least=False)
    feed, _ = calls.read_once(source, layout)
    yield from feed.next(0, 1).feed[0]


def _invented(model: Any, spec: Any) -> Any:
    """Inputs that are like none in particular."""
    import keras
    import numpy as np

    draw = np.random.default_rng(0)
    # Numbers that all embeddings know, of however many things.
    known = [layer.input_dim for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding)]
    end = min([max(1, int(min(spec.maximum, 255))) + 1, *known])

    def one(tensor: Any) -> Any:
        shape = [EXAMPLES, *(side or 4 for side in tensor.shape[1:])]
        kind = np.dtype(tensor.dtype.as_numpy_dtype)
        if np.issubdtype(kind, np.integer):
            return draw.integers(0, end, shape).astype(kind)
        return draw.normal(size=shape).astype(kind)

    from tfdist import serving

    return keras.tree.map_structure(one, serving.inputs(model, spec))


def _check_libraries(formats: list[str]) -> None:
    for name in formats:
        missing = [module for module in NEEDED[name] if importlib.util.find_spec(module) is None]
        if missing:
            raise UserError(f"--formats={name} needs {', '.join(missing)}: pip install 'tfdist[export]'")


# -- one format -------------------------------------------------------------


def _write(made: _Made, name: str, path: pathlib.Path) -> dict[str, Any]:
    """Writes one format and makes sure of it; returns what `export.json` tells of it."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tfdist import converting, serving

    model, note = (made.model, "") if name == "saved_model" else _in_float32(made, name)
    inputs = serving.inputs(model, made.spec)
    trials: dict[str, Any] = {}
    told: dict[str, Any]
    if name == "saved_model":
        logits = after.from_logits(model, made.arrays is None)
        if logits is None:
            from tfdist import quality

            outputs = model(made.examples, training=False)
            logits = not (hasattr(outputs, "numpy") and quality.look_like_probabilities(outputs.numpy()))
        data = made.experiment.data
        servable = serving.Servable(model, made.spec, logits, data.resize, data.name.startswith("image_folder:"))
        functions = serving.save(servable, str(path))
        for number, (signature, given) in enumerate(serving.trials(servable, made.examples).items()):
            function = functions[signature]
            found = function.python_function(*(tf.constant(given[s.name], s.dtype) for s in function.input_signature))
            trials |= _named(f"{number}/{signature}", given, {k: v.numpy() for k, v in found.items()})
        told = {"signatures": {key: serving.signature(function) for key, function in functions.items()}}
        half = any(layer.compute_dtype in ("float16", "bfloat16") for layer in model._flatten_layers())
    else:
        flat, half = keras.tree.flatten(inputs), False
        given = {spec.name: np.asarray(a) for spec, a in zip(flat, keras.tree.flatten(made.examples))}
        expected = keras.tree.flatten(model(made.examples, training=False))
        trials = _named("0/model", given, {str(i): a.numpy() for i, a in enumerate(expected)})
        if name == "onnx":
            converting.onnx(model, inputs, str(path))
        else:
            converting.litert(model, inputs, str(path))
        told = {"inputs": {s.name: [s.dtype.name, list(s.shape)] for s in flat}, "outputs": len(expected)}
    tolerance = HALF if half else TOLERANCES[name]
    difference = _difference(name, path, trials)
    if not difference <= tolerance:
        raise TrainingError(
            f"{name} gives other results than the model: they differ by {difference:.2g}, more than {tolerance:g}: "
            f"nothing was kept; leave {name} out of --formats"
        )
    return told | {"difference": difference, "tolerance": tolerance} | ({"note": note} if note else {})


def _in_float32(made: _Made, name: str) -> tuple[Any, str]:
    """The model in float32, which is what ONNX and LiteRT runtimes compute in on any device."""
    from tfdist import models, state

    plain = all(layer.compute_dtype in (None, "float32") for layer in made.model._flatten_layers())
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
    model = after.built(experiment, made.spec)
    model.set_weights([array.astype("float32") if array.dtype.kind == "f" else array for array in made.arrays])
    state.refresh(model)
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
        script = shutil.copy(pathlib.Path(__file__).with_name("export_check.py"), folder)
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


def _described(told: dict[str, Any]) -> str:
    signatures = ", ".join(told["signatures"]) + ": " if "signatures" in told else ""
    note = f"; {told['note']}" if "note" in told else ""
    return f"{signatures}checked, largest difference {told['difference']:.1e}{note}"


def _put(temporary: pathlib.Path, output: pathlib.Path, overwrite: bool) -> None:
    """Gives the folder its name."""
    if output.exists() and overwrite:
        names = (output.with_name(f".{output.name}.{os.getpid()}.{i}") for i in itertools.count())
        before = next(name for name in names if not name.exists())
        output.rename(before)
        temporary.rename(output)
        shutil.rmtree(before, ignore_errors=True)
    else:
        temporary.rename(output)


# -- the command ------------------------------------------------------------


def _run(argv: list[str]) -> int:
    del argv
    values = flags.FLAGS
    for name in values.formats:
        if name not in FORMATS:
            raise UserError(f"unknown format {name!r} in --formats{fields.suggest(name, FORMATS)}")
    if not values.formats:
        raise UserError("--formats names none: give some of " + ",".join(FORMATS))
    if not values.output:
        raise UserError("--output is missing: give the folder to write, such as --output=exported")
    asked = finished.wanted(values.workdir, values.model, values.checkpoint, config.Experiment(), {}, False)
    output = pathlib.Path(values.output).expanduser()
    if output.exists() and not (values.overwrite and (output / "export.json").is_file()):
        hint = "choose another name" if values.overwrite else "give --overwrite, or choose another name"
        raise UserError(f"--output={output} is there already{' and no export' * values.overwrite}: {hint}")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise UserError(
            f"--output={output}: {output.parent} cannot be written in: choose another one, or make it first"
        )

    def end(number: int, frame: object) -> None:
        del frame
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    export(asked, list(dict.fromkeys(values.formats)), output, values.overwrite)
    return 0


def _say(line: str) -> None:
    print(f"tfdist: {line}", flush=True)


def main() -> None:
    """Entry point of `python -m tfdist.export`."""
    after.define_model_flags()
    flags.DEFINE_string("output", "", "Folder to write.")
    flags.DEFINE_bool("overwrite", False, "Replace an earlier export that --output names.")
    flags.DEFINE_list("formats", [FORMATS[0]], f"What to write, of {', '.join(FORMATS)}.")
    for name in after.OF_A_MODEL:  # absl's --help lists the flags of the main module, and these are defined elsewhere
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
    command.main(_run, command.parse_own, "interrupted, nothing was written")


if __name__ == "__main__":
    main()
