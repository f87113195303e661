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

import functools
import importlib.util
import json
import os
import pathlib
import shutil
from typing import Any

from absl import flags

from tfdist import config
from tfdist.checkpoints import run_folder
from tfdist.config import field_syntax, runtime_options
from tfdist.config.commands import command_line
from tfdist.config.messages import logger
from tfdist.errors import TrainingError, UserError, one_line
from tfdist.inference import job, trained_model

NEEDED = {"saved_model": (), "onnx": ("tf2onnx", "onnx", "onnxruntime"), "litert": ("ai_edge_litert",)}
"""The formats, with the packages that write each or, to check it, read it."""


def export(asked: trained_model.ModelRequest, formats: list[str], output: pathlib.Path, overwrite: bool) -> None:
    """Writes a model in these formats to a folder; `overwrite` replaces an earlier export there."""
    for name in formats:
        if missing := [module for module in NEEDED[name] if importlib.util.find_spec(module) is None]:
            raise UserError(f"--formats={name} needs {', '.join(missing)}", "pip install 'tfdist[export]'")
    asked = asked.here()
    experiment = trained_model.read_experiment(asked)
    # TensorFlow is imported once it is known that there is something to do, and first here, which keeps back its noise.
    from tfdist.distributed import connect

    connect.create(connect.locate(runtime_options.PlacementOptions(strategy="default", devices="none")))
    from tfdist.export import formats as formats_lib
    from tfdist.monitoring import recorder

    original = (formats_lib.from_file if asked.model else formats_lib.from_run)(asked, experiment)
    temporary = output.parent / f".{output.name}.{os.getpid()}"
    try:
        temporary.mkdir()
        content: dict[str, Any] = {"model": original.source, "examples": original.examples_from, "formats": {}}
        for name in formats:
            path = temporary / formats_lib.FILES[name]
            content["formats"][name] = description = formats_lib.write(original, name, path)
            signatures = ", ".join(description["signatures"]) + ": " if "signatures" in description else ""
            note = f"; {description['note']}" if "note" in description else ""
            text = f"{signatures}checked, largest difference {description['difference']:.1e}{note}"
            logger.info(f"{output / path.name}: {text}")
        if original.spec.names:
            content["classes"] = list(original.spec.names)
        content["versions"] = recorder.versions()
        (temporary / "export.json").write_text(json.dumps(content, indent=2) + "\n")
        before = None
        if output.exists() and overwrite:  # it goes only when the new one is complete
            before = output.rename(run_folder.unused(temporary))
        temporary.rename(output)
        if before:
            shutil.rmtree(before, ignore_errors=True)
    except formats_lib.DISK_ERRORS as error:
        why = getattr(error, "strerror", None) or one_line(error).rpartition("; ")[2]  # after the path, of TensorFlow
        raise TrainingError(f"--output={output} cannot be written ({why})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _run(argv: list[str]) -> int:
    values = flags.FLAGS
    for name in values.formats:
        if name not in NEEDED:
            raise UserError(f"unknown format {name!r} in --formats{field_syntax.suggest(name, tuple(NEEDED))}")
    if not values.formats:
        raise UserError("--formats names none: give some of " + ",".join(NEEDED))
    if not values.output:
        raise UserError("--output is missing", "give the folder to write, such as --output=exported")
    field_syntax.check_local("--output", values.output)
    model = values.workdir, values.model, values.checkpoint
    asked = trained_model.ModelRequest(*model, config.Experiment(), {}, values.trust_code)
    trained_model.check(asked)
    output = pathlib.Path(values.output).expanduser()
    if output.exists() and not (values.overwrite and (output / "export.json").is_file()):
        hint = "choose another name" if values.overwrite else "give --overwrite, or choose another name"
        raise UserError(f"--output={output} is there already{' and no export' * values.overwrite}", hint)
    if not os.access(output.parent, os.W_OK | os.X_OK):
        why = f"{output.parent} cannot be written in"
        raise UserError(f"--output={output}: {why}", "choose another one, or make it first")
    command_line.clean_up_when_ended()
    export(asked, list(dict.fromkeys(values.formats)), output, values.overwrite)
    return 0


def main() -> None:
    job.define_model_flags()
    flags.DEFINE_string("output", "", "Folder to write.")
    flags.DEFINE_bool("overwrite", False, "Replace an earlier export that --output names.")
    flags.DEFINE_list("formats", ["saved_model"], f"What to write, of {', '.join(NEEDED)}.")
    parse = functools.partial(command_line.parse_own, shared=job.MODEL_FLAGS)
    command_line.main(_run, parse, "interrupted, nothing was written")


if __name__ == "__main__":
    main()
