"""The promise over several processes: multi_worker and Horovod end where one device ends, on every worker."""

import functools
import itertools

import numpy as np
import pytest
from support import training_cases, worlds

NAMES = [
    "uneven tail", "tail smaller than the replicas", "batch that no replica count divides", "clip global norm",
    "accumulate and clip", "masked sequences", "masked and plain", "weights averaged",
    "average measured, accumulated, clipped", "rates by layer", "rates by layer, Nadam, clipped",
    "batch norm, synchronized", "records, mixed", "records, mixed and accumulated", "stopped early",
    "loss of loss objects", "bfloat16", "float16",
]  # fmt: skip

SHORT = {"multi_worker 2": "uneven tail"}
"""Worlds of `make test`, with a case for each; three processes, and two devices in each, take minutes to trace on two
cores. The ring is that of `test_callbacks.py`, and Horovod trains in `test_compare.py`."""

SHRUNK = {"sums in float16": 1e-3, "sums in bfloat16": 1e-2}
"""Types in which sums may travel, and what that may change."""

SHARING = ("multi_worker 2", "multi_worker 3")
"""Worlds whose workers sum through the memory of their host."""


def cells():
    """Yields (world, case) of the whole table."""
    for world, name in itertools.product(worlds.WORLDS, NAMES):
        marks = [] if SHORT.get(world) == name else [pytest.mark.whole]
        yield pytest.param(world, name, marks=marks, id=f"{world.replace(' ', '-')}-{name}")


@pytest.fixture(scope="module")
def workers_of(request, tmp_path_factory):
    """What the workers of a world end with, for all cases that are asked of it: each world is started once."""

    @functools.cache
    def of(world):
        strategy, workers, options = worlds.WORLDS[world]
        names = worlds.asked(request, [*NAMES, *SHRUNK, "own loop"], world=world)
        results = worlds.outcomes(tmp_path_factory.mktemp("world"), strategy, workers, "training", names, **options)
        sums = "shared memory" if world in SHARING else "horovod" if strategy == "horovod" else "ring"
        replicas = workers * options.get("virtual_devices", 1)
        assert all(r["facts"] == dict(replicas=replicas, workers=workers, communication=sums) for r in results)
        return results

    return of


@pytest.fixture(scope="module")
def reference(connect):
    return functools.cache(lambda case: training_cases.outcome(case, connect(1), case.precision))


@pytest.mark.parametrize("world, name", cells())
def test_agrees_with_one_device(name, world, workers_of, reference):
    case = next(c for c in training_cases.CASES if c.name == name)
    found = workers_of(world)[0][name]
    training_cases.assert_agrees(found, reference(case), training_cases.TOLERANCE[case.precision])


@pytest.mark.parametrize("world, name", cells())
def test_every_worker_ends_with_the_same(name, world, workers_of):
    chief, *others = (worker[name] for worker in workers_of(world))
    weights, history, evaluation, outputs = chief
    for other in others:
        assert other[0].tobytes() == weights.tobytes()
        assert other[1] == history and other[2] == evaluation
        training_cases.all_same(other[3], outputs)


def shrinking():
    """Yields (world, type); `make test` has both types that Horovod takes or refuses."""
    twin = ("multi_worker 2", "sums in float16")
    for cell in itertools.product(worlds.WORLDS, SHRUNK):
        yield pytest.param(*cell, marks=[pytest.mark.whole] * (cell == twin or cell[0] not in SHORT))


@pytest.mark.parametrize("world, name", shrinking())
def test_gradients_that_travel_in_half_the_bytes(name, world, workers_of, reference):
    workers = workers_of(world)
    found = workers[0][name]
    if name == "sums in bfloat16" and world.startswith("horovod"):
        assert found == "reduce_dtype='bfloat16' cannot be used with strategy=horovod: use float16"
        return
    plain = reference(next(c for c in training_cases.CASES if c.name == "uneven tail"))
    distance = training_cases.distance(found[0], plain[0])
    assert distance < SHRUNK[name]
    if workers[0]["facts"]["replicas"] > 1:
        assert distance > 1e-6, "nothing was rounded"
    assert {worker[name][0].tobytes() for worker in workers} == {found[0].tobytes()}


@pytest.mark.whole
@pytest.mark.parametrize("world, name", [("horovod 2", "own loop")])
def test_gradients_that_a_script_applies_are_not_summed(name, world, workers_of):
    """Each rank has all of them: as Horovod's sum they stepped twice as far, without a word."""
    for worker in workers_of(world):
        np.testing.assert_allclose(worker[name], training_cases.own_loop(), rtol=1e-6)
