"""What people write with Keras ends the same under every strategy, and as with Keras' own fit on one device."""

import inspect
import re

import keras
import pytest
from programs import surface
from programs.surface import program as programs
from support import scheduling, worlds

WORLDS = {"multi_worker 2": ("multi_worker", 2), "horovod 2": ("horovod", 2)}

TWINS = {"metrics a mean over updates", "layer Lambda", "loss a single logit"}  # kinds of which `make test` has others
KNOWN: dict[tuple[str, str], str] = {}
"""What is wrong today, by program and strategy ("*" for all): each entry goes with its mending."""


def cells():
    """Yields each program under each strategy, on one device and on two replicas with each number of rows.

    Elsewhere a number that leaves a shorter last batch is enough, since it has whole batches, too. `make test` has one
    cell of every 34th program, on one device, two replicas or three; some on workers are in `test_workers.py`.
    """
    for turn, program in enumerate(surface.PROGRAMS):
        strategies = [programs.ONE] if program.unlike_one else programs.STRATEGIES
        group, rest = divmod(turn, 34)
        short = program.name not in TWINS and strategies[group % min(3, len(strategies))]
        uneven = [rows for rows in program.rows if rows % program.batch] or program.rows
        for strategy in strategies:
            taken = program.rows if strategy in (programs.ONE, "mirrored 2") else uneven[:1]
            for rows in taken:
                in_short = rest == 0 and (rows, strategy) == (taken[group // 3 % len(taken)], short)
                marks = [] if in_short else [pytest.mark.whole]
                reason = known(program, strategy)
                marks += [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
                yield pytest.param(program, rows, strategy, id=f"{program}@{rows}-{strategy}", marks=marks)


def known(program, strategy):
    return KNOWN.get((program.name, strategy)) or KNOWN.get((program.name, "*"))


@pytest.fixture(scope="module")
def reference(connect, tmp_path_factory):
    """What a program ends with on one device: by Keras itself, where it is right."""
    known = {}

    def get(program, rows, strategy):
        run = programs.by_tfdist if program.unlike_keras and strategy != programs.ONE else programs.by_keras
        if (program, rows, run) not in known:
            known[program, rows, run] = run(program, rows, connect(1), tmp_path_factory.mktemp("program"))
        return known[program, rows, run]

    return get


@pytest.fixture(scope="module")
def run(request, connect, tmp_path_factory):
    """Runs a program under a strategy; the workers of a world run all at once that this process asks of them."""
    found = {}

    part = scheduling.parts(item.nodeid for item in request.session.items)

    def in_world(strategy, here):
        asked = [i.callspec.params for i in request.session.items if hasattr(i, "callspec") and part(i.nodeid) == here]
        names = [f"{p['program']}@{p['rows']}" for p in asked if p.get("strategy") == strategy and "program" in p]
        folder = tmp_path_factory.mktemp("world")
        return worlds.outcomes(folder, *WORLDS[strategy], "program", list(dict.fromkeys(names)))

    def get(program, rows, strategy, nodeid):
        if strategy in WORLDS:
            here = part(nodeid)
            if (strategy, here) not in found:
                found[strategy, here] = in_world(strategy, here)
            outcomes = [worker[f"{program}@{rows}"] for worker in found[strategy, here]]
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
            return outcomes
        replicas = 1 if strategy == programs.ONE else int(strategy.split()[1])
        return [programs.by_tfdist(program, rows, connect(replicas), tmp_path_factory.mktemp("program"))]

    return get


@pytest.mark.parametrize("program, rows, strategy", cells())
def test_agrees_with_keras_on_one_device(program, rows, strategy, reference, run, request):
    outcomes = run(program, rows, strategy, request.node.nodeid)
    refusal = program.refusal(strategy)
    for got in outcomes:
        if refusal:
            assert isinstance(got, str) and refusal in got and "\n" not in got
        elif strategy == programs.ONE and program.unlike_keras:
            assert isinstance(got, programs.Outcome), got
        else:
            inexact = program.inexact if rows % program.batch else ()
            programs.assert_agrees(got, reference(program, rows, strategy), program, inexact)


@pytest.mark.parametrize("kind", ["losses", "metrics", "optimizers", "callbacks"])
def test_every_class_of_keras_occurs(kind):
    public = {n for n, c in vars(getattr(keras, kind)).items() if inspect.isclass(c) and n[0].isupper()}
    text = inspect.getsource(getattr(surface, kind))
    missing = {n for n in public if not re.search(rf"\b{n}\b", text)}
    assert missing <= OCCUR_ELSEWHERE[kind], missing - OCCUR_ELSEWHERE[kind]


OCCUR_ELSEWHERE = {
    "losses": set(),
    "metrics": set(),
    "optimizers": set(),
    # The first two are made by fit itself; the others need a server, or a package that tfdist does not ask for.
    "callbacks": {"History", "CallbackList", "ProgbarLogger", "RemoteMonitor", "OrbaxCheckpoint"},
}


def test_names_are_unique():
    names = [program.name for program in surface.PROGRAMS]
    assert len(names) == len(set(names)) >= 120
