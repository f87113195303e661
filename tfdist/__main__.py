"""The program `tfdist`: runs a command by its name, such as `tfdist train`, or lists them. No TensorFlow."""

import importlib
import sys
from collections.abc import Sequence

from absl import flags

import tfdist
from tfdist.config import field_syntax
from tfdist.config.commands import command_line, help_page
from tfdist.errors import UserError

COMMANDS = {
    "run": "trains any Keras script, unmodified",
    "train": "trains an experiment",
    "launch": "starts the workers of a run on one machine or several",
    "doctor": "says what this machine has and what is wrong with it",
    "compare": "compares strategies by weights and speed",
    "sweep": "searches values of some fields with Optuna",
    "evaluate": "measures a trained model",
    "predict": "writes predictions as CSV or JSON lines",
    "export": "writes a SavedModel, ONNX or LiteRT",
    "horovod_build": "builds Horovod for the installed TensorFlow",
    "topology": "installs ahead-of-time compilers for TPUs and GPUs",
}
"""What each command does, as in docs/commands.md."""


def listing() -> str:
    """Returns the commands, with a line for each."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            f"tfdist {tfdist.__version__} trains Keras 3 models; strategies only change how fast.",
            "",
            "Commands:",
            *(f"  tfdist {name:{width}}  {what}" for name, what in COMMANDS.items()),
            "",
            "tfdist train, with nothing behind it, trains a small CNN on handwritten digits.",
            "Each command lists its flags with --help; python -m tfdist.train works as well.",
        ]
    )


def _parse(argv: list[str]) -> list[str]:
    """Returns the arguments without those that ask for help, which is all that this command gives."""
    flags.FLAGS(argv[:1])  # absl wants to have been asked
    return [argument for argument in argv if argument not in help_page.ASKED]


def _run(argv: Sequence[str]) -> int:
    """Prints the listing; raises UserError for a command that there is not."""
    if len(argv) > 1:
        raise UserError(f"unknown command {argv[1]!r}{field_syntax.suggest(argv[1], tuple(COMMANDS))}")
    print(listing())
    return 0


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in COMMANDS:
        # `runpy` would take a script's `__main__` away at the end, which its threads and exit handlers still need.
        name = f"tfdist.{sys.argv.pop(1)}.__main__"
        sys.argv[0], module = name, importlib.import_module(name)
        sys.modules["__main__"] = module
        module.main()
        return
    command_line.main(_run, _parse)


if __name__ == "__main__":
    main()
