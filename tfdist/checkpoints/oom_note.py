"""What a run has learnt about its memory, for the next attempt: into how many micro-batches an update must be cut."""

from __future__ import annotations

import json
import re

from tfdist.checkpoints.run_folder import RunFolder
from tfdist.config import regular_file

NAME = "accumulate.json"
_ADVICE = re.compile(r"out of memory.* train\.accumulate=(\d+) ")


def advice(accumulate: int) -> str:
    """Returns the end of a message, which `heed` understands on whichever worker it arrives."""
    return f"train.accumulate={accumulate} needs less of it and changes nothing else"


def note(folder: RunFolder, accumulate: int) -> None:
    """Keeps the number of micro-batches for the next attempt."""
    folder.write(NAME, {"accumulate": accumulate})


def heed(folder: RunFolder, message: str) -> None:
    """Notes what the message of an error advises, whether this worker has failed or another one."""
    advised = _ADVICE.search(message)
    if advised:
        note(folder, int(advised[1]))


def noted(folder: RunFolder) -> int:
    """Returns what the attempt before has noted; 1 if nothing."""
    try:
        return max(1, int(json.loads(regular_file.content(folder.path / NAME))["accumulate"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 1
