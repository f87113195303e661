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

import itertools
import json
import os
import pathlib
import shutil
import signal
import sys
from typing import Any

from absl import flags

from tfdist import config
from tfdist.config import command_line, field_syntax, runtime_options
from tfdist.data import spec as spec_lib
from tfdist.engine import batching
from tfdist.errors import TrainingError, UserError
from tfdist.export import formats as formats_lib
from tfdist.inference import job, trained_model

EXAMPLES = 8
_CLASSIFYING = ("categoricalcrossentropy", "sparsecategoricalcrossentropy", "categoricalfocalcrossentropy")


def export(asked: trained_model.Wanted, formats: list[str], output: pathlib.Path, overwrite: bool) -> None:
    """Writes a model in these formats.

    Raises:
      UserError: the model or the output cannot be used, or a library is missing.
      TrainingError: a format cannot hold the model, or gives something else.
    """
    formats_lib.check_libraries(formats)
    experiment = trained_model.experiment(asked)
    from tfdist.distributed import connect
    from tfdist.monitoring import run_environment

    connect.create(connect.locate(runtime_options.Environment(strategy="default", devices="none")))
    made = _make(asked, experiment)
    temporary = output.parent / f".{output.name}.{os.getpid()}"
    try:
        temporary.mkdir()
        content: dict[str, Any] = {"model": made.source, "examples": made.examples_from, "formats": {}}
        for name in formats:
            path = temporary / formats_lib.FILES[name]
            content["formats"][name] = told = formats_lib.write(made, name, path)
            _say(f"{output / path.name}: {_described(told)}")
        if made.spec.names:
            content["classes"] = list(made.spec.names)
        content["versions"] = run_environment.versions()
        (temporary / "export.json").write_text(json.dumps(content, indent=2) + "\n")
        _put(temporary, output, overwrite)
    except OSError as error:
        raise TrainingError(f"--output={output} cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _make(asked: trained_model.Wanted, experiment: config.Experiment) -> formats_lib.Made:
    """Builds or loads the model and gives it its weights."""
    import keras

    from tfdist.checkpoints import training_state
    from tfdist.data import spec_file
    from tfdist.data.datasets import registry
    from tfdist.models import build as models

    if asked.model:
        model = trained_model.load(asked.path)
        if not model.inputs:
            raise UserError(f"--model={asked.path} does not tell what it takes: give the --workdir of its run")
        tensor = keras.tree.flatten(model.inputs)[0]
        classes = model.output_shape[-1] if _classifies(model) else None
        of_file = spec_lib.Spec(tuple(tensor.shape[1:]), tensor.dtype, classes, 255.0)
        examples = _invented(model, of_file)
        try:
            model(examples, training=False)
        except Exception as error:  # whatever a layer raises that takes some values alone
            raise UserError(
                f"--model={asked.path} cannot be checked on made examples ({trained_model.line(error)}): "
                "give the --workdir of its run"
            ) from error
        return formats_lib.Made(model, experiment, of_file, str(asked.path), examples, "made", None)
    spec: Any = spec_file.read(asked.path)
    loaded: Any = None
    try:
        loaded = registry.load(experiment, False, _say)
        job.check_data(experiment, loaded.spec, spec or loaded.spec)
    except UserError as error:
        if spec is None:
            raise
        _say(f"checked on made examples, since the data cannot be had: {error}")
        loaded = None
    spec = spec or loaded.spec
    models.set_precision(experiment.train.precision)
    build = lambda: job.built(experiment, spec)
    found = trained_model.weights(asked, experiment, build, _say)
    model = build()
    model.set_weights(found.arrays)
    training_state.refresh(model)
    examples, origin = _invented(model, spec), "made"
    if loaded is not None:
        examples, origin = _first(loaded.eval), f"{experiment.data.name}, {experiment.data.eval_split}"
    return formats_lib.Made(model, experiment, spec, str(found.source), examples, origin, found.arrays)


def _classifies(model: Any) -> bool:
    return job.loss_name(model) in _CLASSIFYING and isinstance(model.output_shape, tuple)


def _first(source: Any) -> Any:
    """The first examples' inputs."""
    import keras
    import numpy as np

    from tfdist.data import sources

    if isinstance(source, sources.Arrays):
        return keras.tree.map_structure(lambda a: np.asarray(a)[:EXAMPLES], source.columns[0])
    batch = next(_batches(source))
    return keras.tree.map_structure(lambda a: np.asarray(a)[:EXAMPLES], batch[0])


def _batches(source: Any) -> Any:
    from tfdist.distributed import connect

    layout = batching.layout_of(source, EXAMPLES, connect.default(""), 1, least=False)
    feed, _ = batching.read_once(source, layout)
    yield from feed.next(0, 1).feed[0]


def _invented(model: Any, spec: Any) -> Any:
    """Inputs that are like none in particular."""
    import keras
    import numpy as np

    from tfdist.models import keras_internals

    draw = np.random.default_rng(0)
    # Numbers that all embeddings know, of however many things.
    known = [
        layer.input_dim for layer in keras_internals.flat_layers(model) if isinstance(layer, keras.layers.Embedding)
    ]
    end = min([max(1, int(min(spec.maximum, 255))) + 1, *known])

    def one(tensor: Any) -> Any:
        shape = [EXAMPLES, *(side or 4 for side in tensor.shape[1:])]
        kind = np.dtype(tensor.dtype.as_numpy_dtype)
        if np.issubdtype(kind, np.integer):
            return draw.integers(0, end, shape).astype(kind)
        return draw.normal(size=shape).astype(kind)

    from tfdist.export import saved_model

    return keras.tree.map_structure(one, saved_model.inputs(model, spec))


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
        if name not in formats_lib.FORMATS:
            raise UserError(f"unknown format {name!r} in --formats{field_syntax.suggest(name, formats_lib.FORMATS)}")
    if not values.formats:
        raise UserError("--formats names none: give some of " + ",".join(formats_lib.FORMATS))
    if not values.output:
        raise UserError("--output is missing: give the folder to write, such as --output=exported")
    asked = trained_model.wanted(values.workdir, values.model, values.checkpoint, config.Experiment(), {}, False)
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
    job.define_model_flags()
    flags.DEFINE_string("output", "", "Folder to write.")
    flags.DEFINE_bool("overwrite", False, "Replace an earlier export that --output names.")
    flags.DEFINE_list("formats", [formats_lib.FORMATS[0]], f"What to write, of {', '.join(formats_lib.FORMATS)}.")
    for name in job.OF_A_MODEL:  # absl's --help lists the flags of the main module, and these are defined elsewhere
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
    command_line.main(_run, command_line.parse_own, "interrupted, nothing was written")


if __name__ == "__main__":
    main()
