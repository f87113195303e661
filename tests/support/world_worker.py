"""One worker of a world: `python world_worker.py FOLDER KIND NAME...`; see `KINDS`.

What each name comes to goes to FOLDER/<rank>.pickle, by name. The options of `tfdist.connect` come in CONNECT, as JSON.
"""

import json
import os
import pathlib
import pickle
import sys
import traceback

import tfdist

DISTRIBUTION = tfdist.connect(**json.loads(os.environ["CONNECT"]))
FOLDER = pathlib.Path(sys.argv[1])

# Modules of cases make tensors, for which the strategy must have been started: each kind imports its own here.


def training(name):
    """What a case of `training_cases` ends with; "sums in float16" is one of them whose sums travel so."""
    from support import training_cases

    if name == "own loop":
        return training_cases.own_loop()
    case_of = {case.name: case for case in training_cases.CASES}
    if not name.startswith("sums in "):
        return training_cases.outcome(case_of[name], DISTRIBUTION, case_of[name].precision)
    case = case_of["uneven tail"]
    try:
        return training_cases.outcome(case, DISTRIBUTION, case.precision, reduce_dtype=name.removeprefix("sums in "))
    except tfdist.UserError as error:
        return str(error)


def sharded(name):
    """The bits that a case of `sharded_cases` ends with."""
    from support import sharded_cases

    return sharded_cases.bits(next(c for c in sharded_cases.CASES if c.name == name), DISTRIBUTION)


def zoo(name):
    """What a model of tfdist's ends with: [PRECISION/]NAME."""
    from support import zoo_cases

    model, _, precision = name.partition("/")
    case = {**zoo_cases.OWN, **zoo_cases.APPLICATIONS}[model]
    return zoo_cases.outcome(case, DISTRIBUTION, precision or "float32")


def program(name):
    """What a program NAME@ROWS comes to, or the error of it: the other programs can still be judged."""
    from programs.examples import EXAMPLES
    from programs.surface import PROGRAMS
    from programs.surface.program import by_tfdist

    title, rows = name.split("@")
    written = FOLDER / f"written by {sys.argv.index(name)}"
    written.mkdir(exist_ok=True)
    try:
        return by_tfdist(next(p for p in [*PROGRAMS, *EXAMPLES] if p.name == title), int(rows), DISTRIBUTION, written)
    except Exception:
        return RuntimeError(traceback.format_exc())


def scene(name):
    """What a scene of `callback_scenes` finds."""
    from support import callback_scenes

    return callback_scenes.found(name, DISTRIBUTION, FOLDER)


def zero(name):
    """The bits that a training ends with, without and with slices of the optimizer's state."""
    from support import zero_cases

    special = {"refusal": zero_cases.refusal, "resume": zero_cases.resume}
    return special[name](DISTRIBUTION, FOLDER) if name in special else zero_cases.both(name, DISTRIBUTION)


KINDS = {"training": training, "sharded": sharded, "zoo": zoo, "program": program, "scene": scene, "zero": zero}
found = {name: KINDS[sys.argv[2]](name) for name in sys.argv[3:]}
found["facts"] = {fact: getattr(DISTRIBUTION, fact) for fact in ("replicas", "workers", "communication")}
(FOLDER / f"{DISTRIBUTION.rank}.pickle").write_bytes(pickle.dumps(found))
