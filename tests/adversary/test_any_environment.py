"""Variables of every launcher in mixtures that contradict each other: a place among the workers, or one line."""

import json
import tempfile

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from support import adversary

from tfdist.cluster import discovery
from tfdist.config.runtime_options import PlacementOptions
from tfdist.distributed import connect
from tfdist.errors import UserError, shown

COUNTS = ("0", "1", "2", "3", "8", "-1", "1.0", "0x1", " 1 ", "1e0", "\u0661", "9" * 30, "", "two", "1\n2", "\x1b[2J")
HOSTS = (
    "127.0.0.1", "localhost", "::1", "[::1]", "n1", "n1.example.org", "10.0.0.5", "256.1.1.1", "a b", "", "x" * 300,
    "\x1b[2J",
)  # fmt: skip
PORTS = ("29500", "0", "1", "65535", "65536", "-1", "", "http", "99999999999999999999")
LISTS = (
    "n[1-2]", "n1,n2", "n[01-03,07]", "n[1-999999999]", "n[1-9999][1-9999]", "n[", "n[]", "n[3-1]", "a[1-2]b[1-2]", "",
    "\x1b[2J",
)  # fmt: skip
SPREADS = ("2", "1(x2)", "2(x3),1", "999999(x999999)", "1(x", "0", "0(x999999)", "")
JOBS = ("0", "1", "77", "4294967290", "-5", "abc", "9" * 40, "")
VARIABLES = {
    **dict.fromkeys(
        ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "PET_NNODES"), COUNTS
    ),
    **dict.fromkeys(("PET_NODE_RANK", "PET_NPROC_PER_NODE", "TFDIST_ATTEMPT", "TFDIST_MEETING_FD"), COUNTS),
    **{f"HOROVOD_{name}": COUNTS for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")},
    **{f"OMPI_COMM_WORLD_{name}": COUNTS for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "NODE_RANK")},
    **dict.fromkeys(("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMIX_RANK"), COUNTS),
    **{
        f"SLURM_{name}": COUNTS for name in ("PROCID", "LOCALID", "NODEID", "NTASKS", "STEP_NUM_TASKS", "RESTART_COUNT")
    },
    **dict.fromkeys(("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID"), JOBS),
    **dict.fromkeys(("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), LISTS),
    **dict.fromkeys(("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), SPREADS),
    "SLURM_DISTRIBUTION": ("block", "cyclic", "arbitrary", "?"),
    **dict.fromkeys(("MASTER_ADDR", "PET_MASTER_ADDR", "MLP_WORKER_0_HOST"), HOSTS),
    **dict.fromkeys(("MASTER_PORT", "PET_MASTER_PORT", "MLP_WORKER_0_PORT"), PORTS),
    **dict.fromkeys(("MLP_WORKER_NUM", "MLP_ROLE_INDEX", "MLP_WORKER_GPU"), COUNTS),
    "TORCHELASTIC_USE_AGENT_STORE": ("True", "False", ""),
    "TFDIST_SECRET": ("s", "", "\x1b", "x" * 100000),
    "TPU_NAME": ("local", ""),
    "KUBERNETES_SERVICE_HOST": HOSTS,
    "CLUSTER_SPEC": ('{"cluster":{"workerpool0":["a:1"]},"task":{"type":"workerpool0","index":0}}', "{"),  # Vertex AI
    "AIP_MODEL_DIR": ("gs://b/model/", ""),
}
ADDRESSES = st.lists(
    st.sampled_from(["a:1", "b:2", "[::1]:3", "a", "a:0", ":1", "127.0.0.1:70000", "", "a:1"]), max_size=4
)
TASKS = st.one_of(ADDRESSES, st.dictionaries(st.sampled_from(["0", "1", "2", "x"]), st.just("a:1")), adversary.values())
TF_CONFIGS = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "cluster": st.dictionaries(st.sampled_from(["chief", "worker", "ps", "evaluator", "x"]), TASKS, max_size=3),
            "sparseCluster": st.dictionaries(st.sampled_from(["worker", "chief"]), TASKS, max_size=2),
            "task": st.one_of(
                st.fixed_dictionaries(
                    {
                        "type": st.sampled_from(["worker", "chief", "evaluator", "master", None, 3]),
                        "index": st.one_of(st.integers(-1, 4), st.sampled_from(["0", "1", None, 1.0, True, 10**400])),
                    }
                ),
                adversary.values(),
            ),
            "environment": st.just("cloud"),
        },
    ),
    adversary.values(),
)


def as_json(value):
    """Also where it holds what JSON has no word for."""
    return json.dumps(value, default=str)


TF_CONFIG_TEXTS = st.one_of(
    TF_CONFIGS.map(as_json), TF_CONFIGS.map(as_json).flatmap(adversary.mutated), adversary.texts()
)


@st.composite
def environments(draw):
    """A few sources at once: each whole, or with one variable missing or odd."""
    names = draw(st.lists(st.sampled_from(sorted(VARIABLES)), max_size=12, unique=True))
    prefixes = ("SLURM_", "OMPI_", "HOROVOD_", "PMI", "MLP_", "MASTER_", "RANK WORLD_SIZE", "PET_")
    for prefix in draw(st.lists(st.sampled_from(prefixes), max_size=3)):
        names += [name for name in VARIABLES if name.startswith(tuple(prefix.split()))]
    likely = {COUNTS: ("0", "1", "2"), HOSTS: ("n1", "127.0.0.1"), PORTS: ("29500",), LISTS: ("n[1-2]",), JOBS: ("7",)}
    likely[SPREADS] = ("1(x2)", "2")
    environ = {}
    for name in names:
        pool = VARIABLES[name]
        environ[name] = draw(st.sampled_from(likely.get(pool, pool) if draw(st.integers(0, 9)) else pool))
    if draw(st.booleans()):
        environ["TF_CONFIG"] = draw(TF_CONFIG_TEXTS)
    return {name: value.replace("\0", "") for name, value in environ.items()}


def found(environ):
    """The cluster of an environment, or the line why there is none."""
    try:
        here = discovery.find(environ)
    except UserError as error:
        adversary.is_one_line(shown(error))
        event("refused")
        return None
    assert 0 <= here.rank < here.size and 0 <= here.local_rank < max(here.local_size, 1) <= max(here.size, 1), here
    event(here.source or "alone")
    return here


@pytest.mark.whole
@adversary.examples(5000)
@given(environments())
def test_any_environment(environ):
    found(environ)


@pytest.mark.whole
@adversary.examples(1000)
@given(environments(), st.sampled_from(["auto", "default", "mirrored", "multi_worker", "horovod"]))
def test_where_a_worker_would_be(environ, strategy):
    """With the choice of the strategy and of the devices that follows from it."""
    import os

    before = dict(os.environ)
    os.environ.update({name: value for name, value in environ.items() if "\ud800" not in value})
    try:
        connect.locate(PlacementOptions(strategy=strategy))
    except UserError as error:
        adversary.is_one_line(shown(error))
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.whole
@adversary.examples(40)
@given(environ=environments())
def test_any_environment_of_the_command(tfds_dir, environ):
    """Nobody else comes: a worker of several says who is missing, and one that is alone works."""
    flags = ["--start_timeout=2", "--dry_run", "--config.model.name=mlp"]
    with tempfile.TemporaryDirectory() as folder:
        line = adversary.judged(adversary.run("tfdist.train", flags, folder, tfds_dir, environ))
    event("refused" if line else "works")
