"""One worker that trains models of the zoo: `python zoo_worker.py FOLDER [PRECISION/]NAME...`.

The results go to FOLDER/<rank>.pickle.

The options of `tfdist.connect` come in CONNECT, as JSON.
"""

import json
import os
import pathlib
import pickle
import sys

import tfdist

DISTRIBUTION = tfdist.connect(**json.loads(os.environ["CONNECT"]))

from support import zoo_cases  # noqa: E402  makes tensors, for which the strategy must have been started

found = {}
for name in sys.argv[2:]:
    model, _, precision = name.partition("/")
    found[name] = zoo_cases.outcome(
        {**zoo_cases.OWN, **zoo_cases.APPLICATIONS}[model], DISTRIBUTION, precision or "float32"
    )
pathlib.Path(sys.argv[1], f"{DISTRIBUTION.rank}.pickle").write_bytes(pickle.dumps(found))
