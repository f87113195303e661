"""`shards` over several processes: the bits of one device, on every worker."""

import functools

import pytest
from support import sharded_cases, worlds

NAMES = ["together", "all random", "masked and plain", "wide", "records, mixed", "tail smaller than the replicas"]
pytestmark = pytest.mark.whole  # each starts processes


@pytest.fixture(scope="module")
def alone(connect):
    return functools.cache(lambda case: sharded_cases.bits(case, connect(1)))


@pytest.fixture(scope="module")
def workers_of(request, tmp_path_factory):
    """The bits of all workers of a world, which is started once."""

    @functools.cache
    def of(world):
        strategy, workers, options = worlds.WORLDS[world]
        names = worlds.asked(request, NAMES, world=world)
        return worlds.outcomes(tmp_path_factory.mktemp("world"), strategy, workers, "sharded", names, **options)

    return of


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", [w for w in worlds.WORLDS if w not in ("multi_worker 1", "multi_worker 2 by ring")])
def test_the_bits_of_one_device(world, name, workers_of, alone):
    case = next(c for c in sharded_cases.CASES if c.name == name)
    for worker in workers_of(world):
        assert worker[name] == alone(case)
