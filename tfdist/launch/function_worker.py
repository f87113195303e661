"""One worker of `tfdist.launch(function)`: calls the function and leaves what it returns in the folder they share."""

from __future__ import annotations

import os
import pathlib
import pickle
import sys
import traceback

import cloudpickle

from tfdist.config import messages
from tfdist.errors import UserError, one_line, printable
from tfdist.launch import notebook


def main(folder: pathlib.Path, rank: int) -> int:
    """Returns the exit code of the worker of this rank."""
    messages.chief_only(rank == 0)
    try:
        function, args = pickle.loads((folder / notebook.WORK).read_bytes())
        result = function(*args)
    except Exception as error:  # whatever the user's function raises
        if not isinstance(error, UserError):  # which says in a line what to change
            traceback.print_exc()
        return _failed(folder, rank, f"{type(error).__name__}: {_text(error)}")
    try:
        content = cloudpickle.dumps(result)
    except Exception as error:  # whatever its objects raise
        return _failed(folder, rank, f"what it returned cannot be sent back ({_text(error)}): return numbers")
    (folder / notebook.RESULT.format(rank=rank)).write_bytes(content)
    return 0


def _text(error: Exception) -> str:
    try:
        return one_line(error, 400)
    except Exception as another:  # of its __str__
        return f"its text cannot be made, {type(another).__name__}"


def _failed(folder: pathlib.Path, rank: int, line: str) -> int:
    (folder / notebook.ERROR.format(rank=rank)).write_text(printable(line, 1000), errors="backslashreplace")
    return 1


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), int(os.environ["RANK"])))
