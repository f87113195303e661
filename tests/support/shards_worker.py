"""One worker that trains with shards: `python shards_worker.py FOLDER NAME...`; its bits go to FOLDER/<rank>.pickle.

The options of `tfdist.connect` come in CONNECT, as JSON.
"""

import json
import os
import pathlib
import pickle
import sys

import tfdist

DISTRIBUTION = tfdist.connect(**json.loads(os.environ["CONNECT"]))

from support import sharded_cases  # noqa: E402  makes tensors, for which the strategy must have been started

found = {}
for name in sys.argv[2:]:
    case = next(c for c in sharded_cases.CASES if c.name == name)
    found[name] = sharded_cases.bits(case, DISTRIBUTION)
pathlib.Path(sys.argv[1], f"{DISTRIBUTION.rank}.pickle").write_bytes(pickle.dumps(found))
