"""One worker that trains cases: `python case_worker.py FOLDER NAME...`; what comes out goes to FOLDER/<rank>.pickle.

The options of `tfdist.connect` come in CONNECT, as JSON.
"""

import json
import os
import pathlib
import pickle
import sys

import tfdist

DISTRIBUTION = tfdist.connect(**json.loads(os.environ["CONNECT"]))

from support import training_cases  # noqa: E402  makes tensors, for which the strategy must have been started

found = {}
for name in sys.argv[2:]:
    case = next(c for c in training_cases.CASES if c.name == name)
    found[name] = training_cases.outcome(case, DISTRIBUTION, case.precision)
shrunk: dict = {}
case = next(c for c in training_cases.CASES if c.name == "uneven tail")
for dtype in ("float16", "bfloat16"):
    try:
        shrunk[dtype] = training_cases.outcome(case, DISTRIBUTION, case.precision, reduce_dtype=dtype)
    except tfdist.UserError as error:
        shrunk[dtype] = str(error)
path = pathlib.Path(sys.argv[1], f"{DISTRIBUTION.rank}.pickle")
seen = {name: getattr(DISTRIBUTION, name) for name in ("replicas", "workers", "communication")}
seen |= {"found": found, "shrunk": shrunk}
path.write_bytes(pickle.dumps(seen))
