"""The number of micro-batches into which an update must be cut after a run was out of memory, for its next attempt."""

import re

from tfdist.checkpoints import files
from tfdist.checkpoints.run_folder import RunFolder

NAME = "accumulate.json"
_ADVICE = re.compile(r"out of memory.* train\.accumulate=(\d+) ")


def advice(accumulate: int) -> str:
    """Returns the end of an error message, which `record_advice` parses on whichever worker it arrives."""
    return f"train.accumulate={accumulate} needs less of it and changes nothing else"


def write(folder: RunFolder, accumulate: int) -> None:
    """Records the number of micro-batches for the next attempt."""
    folder.write(NAME, {"accumulate": accumulate})


def record_advice(folder: RunFolder, message: str) -> None:
    """Records what an error message advises, of this worker or another one."""
    if advised := _ADVICE.search(message):
        write(folder, int(advised[1]))


def read(folder: RunFolder) -> int:
    """Returns what the previous attempt has recorded; 1 if nothing."""
    try:
        return max(1, int((files.read_object(folder.path / NAME) or {})["accumulate"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        return 1
