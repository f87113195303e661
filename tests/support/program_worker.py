"""One worker that runs programs: `python program_worker.py FOLDER NAME@ROWS...`; what comes out goes to
FOLDER/<rank>.pickle.

The options of `tfdist.connect` come in CONNECT, as JSON.
"""

import json
import os
import pathlib
import pickle
import sys
import traceback

import tfdist

DISTRIBUTION = tfdist.connect(**json.loads(os.environ["CONNECT"]))

# They make tensors, for which the strategy must have been started.
from programs.examples import EXAMPLES  # noqa: E402
from programs.surface import PROGRAMS  # noqa: E402
from programs.surface.program import by_tfdist  # noqa: E402

folder = pathlib.Path(sys.argv[1])
programs = {program.name: program for program in [*PROGRAMS, *EXAMPLES]}
found: dict = {}
for number, asked in enumerate(sys.argv[2:]):
    name, rows = asked.split("@")
    written = folder / f"written by {number}"
    written.mkdir(exist_ok=True)
    try:
        found[asked] = by_tfdist(programs[name], int(rows), DISTRIBUTION, written)
    except Exception:  # the other programs can still be judged
        found[asked] = RuntimeError(traceback.format_exc())
(folder / f"{DISTRIBUTION.rank}.pickle").write_bytes(pickle.dumps(found))
