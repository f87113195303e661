"""Lists the commands of tfdist: `python -m tfdist`. No TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

import tfdist
from tfdist.config import field_syntax
from tfdist.config.commands import command_line, help_page
from tfdist.errors import UserError

COMMANDS = {
    "train": "trains an experiment",
    "launch": "starts the workers of a run on one machine or several",
    "doctor": "says what this machine has and what is wrong with it",
    "compare": "trains under several strategies and compares weights and speed",
    "sweep": "searches values of some fields with Optuna",
    "evaluate": "measures a trained model",
    "predict": "writes predictions as CSV or JSON lines",
    "export": "writes a SavedModel, ONNX or LiteRT",
    "horovod_build": "builds Horovod for the installed TensorFlow",
    "topology": "installs what compiles for TPUs and GPUs that are not here",
}
"""What each command does, as in README.md."""


def listing() -> str:
    """Returns the commands, with a line for each."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            f"tfdist {tfdist.__version__} trains Keras 3 models: the strategy changes how fast, and nothing else.",
            "",
            "Commands:",
            *(f"  python -m tfdist.{name:{width}}  {what}" for name, what in COMMANDS.items()),
            "",
            "python -m tfdist.train, with nothing behind it, trains a small CNN on handwritten digits.",
            "Each command lists its flags with --help.",
        ]
    )


def _parse(argv: list[str]) -> list[str]:
    """Returns the arguments without those that ask for help, which is all that this command gives."""
    flags.FLAGS(argv[:1])  # absl wants to have been asked
    return [argument for argument in argv if argument not in help_page.ASKED]


def _run(argv: Sequence[str]) -> int:
    """Prints the listing.

    Raises:
      UserError: something is given, which would change nothing.
    """
    if len(argv) > 1:
        name = argv[1]
        known = field_syntax.suggest(name, tuple(COMMANDS))
        advice = f": write python -m tfdist.{name}" if name in COMMANDS else f" for python -m tfdist{known}"
        raise UserError(f"unexpected argument {name!r}{advice}")
    print(listing())
    return 0


def main() -> None:
    """Entry point of `python -m tfdist`."""
    command_line.main(_run, _parse)


if __name__ == "__main__":
    main()
