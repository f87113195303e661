"""`train.batch_size=auto`: real children that run out of memory, are killed, or hang."""

import json
import os

import psutil
import pytest
from conftest import REPOSITORY
from support.refusals import refused

from tfdist import config
from tfdist.config import validation
from tfdist.config.runtime_options import Environment
from tfdist.distributed import connect
from tfdist.train import batch_size_search

SUPPORT = str(REPOSITORY / "tests" / "support")
OPTIONS = "examples=400, shape=(4, 4, 1), classes=5"


@pytest.fixture
def find(monkeypatch):
    """`find` for a model that bears up to `most` rows; no process is left of it."""
    monkeypatch.setenv("PYTHONPATH", f"{SUPPORT}{os.pathsep}{REPOSITORY}")
    monkeypatch.setenv("RANK", "nonsense")  # the child must not take itself for a worker

    def run(most, kind="Greedy", accumulate=1):
        experiment = config.Experiment(
            data=config.Data(name="synthetic", options=OPTIONS),
            model=config.Model(name="memory_hungry_model:model", options=f"most={most}, kind={kind}"),
            train=config.Train(batch_size=0, accumulate=accumulate),
        )
        where = Environment(strategy="default", threads=1)
        monkeypatch.delenv("RANK")
        site = connect.locate(where)
        monkeypatch.setenv("RANK", "nonsense")
        return batch_size_search.find(validation.validate(experiment), where, site)

    yield run
    assert not [
        p
        for p in psutil.Process().children(recursive=True)
        if "tfdist.train.batch_size_search" in " ".join(p.cmdline())
    ]


@pytest.mark.whole
def test_the_largest_that_fits_to_one_step_of_bisection(find):
    found = find(most=100)
    assert found.share == 96  # 64 do, 128 do not
    assert found.why.startswith("96 examples per replica fit in ") and found.why.endswith(" GB, 128 do not")


@pytest.mark.faults
def test_micro_batches_count(find):
    assert find(most=50, accumulate=4).share == 192  # 4 x 32 do, 4 x 64 do not, 4 x 48 do


@pytest.mark.faults
def test_smaller_than_the_first(find):
    assert find(most=5).share == 4


@pytest.mark.faults
def test_killed_by_the_kernel_is_too_much(find):
    assert find(most=40, kind="Fatal").share == 32  # 32 do, 64 and 48 do not


def test_in_time_with_what_was_known_or_with_an_error(find, monkeypatch):
    monkeypatch.setattr(batch_size_search, "LIMIT_S", 1.0)
    with refused(r"train.batch_size=auto: no batch fits \(no result after 1 s\): give a n"):
        find(most=0, kind="Stuck")


@pytest.mark.faults
def test_not_even_one(find, monkeypatch):
    with refused(r"train.batch_size=auto: no batch fits \(not even 1 example fits\): give a number, or use a sm"):
        find(most=0)
    monkeypatch.setattr(batch_size_search, "SHARE", 1e-6)  # the machine's memory bounds it on a CPU
    with refused(r"no batch fits \(not even 1 example fits\)"):
        find(most=1000)


@pytest.mark.whole
def test_an_error_of_the_experiment_is_told(find):
    with refused(r"model.options: memory_hungry_model:model takes no such arguments"):
        find(most="3, depth=7")


def test_what_has_nothing_to_do_with_memory(find):
    with refused(r"auto: trying it ended with ValueError: .*Faulty.*: give a number, and the run"):
        find(most=0, kind="Faulty")
    answer = batch_size_search._parsed([], -6, False)
    assert answer.end == "its process ended with code -6 before it had tried one"


@pytest.mark.parametrize("lines, code, late, expected", [
    ([], 1, False, (0, 0)),
    (['{"trying": 16}'], -9, False, (0, 16)),
    (['{"trying": 16}'], -9, True, (0, 0)),
    (['{"trying": 16}', '{"fits": 16, "peak": 7}', '{"trying": 32}', "rubbish"], -9, False, (16, 32)),
    (['{"trying": 16}', '{"fits": 16, "peak": 7}', '{"trying": 32}', '{"too_many": 32}'], 0, False, (16, 32)),
    (['{"trying": 16}', '{"fits": 16, "peak": 7}', '{"ended": true}'], 0, False, (16, 0)),
])  # fmt: skip
def test_what_a_child_says(lines, code, late, expected):
    answer = batch_size_search._parsed(lines, code, late)
    assert (answer.fits, answer.too_many) == expected


FLAGS = [
    "--config.data.name=synthetic",
    f"--config.data.options={OPTIONS}",
    "--config.model.name=memory_hungry_model:model",
    "--threads=1",
    "--config.model.options=most=100",
    "--config.train.epochs=2",
    "--config.optimizer.warmup=0%",
    "--notensorboard",
    "--workdir=out",
    "--config.train.batch_size=auto",
]


def numbers(tmp_path):
    folder = tmp_path / "out"
    found = json.loads((folder / "experiment.json").read_text())["train"]["batch_size"]
    return found, json.loads((folder / "result.json").read_text())["global_batch"]


@pytest.mark.whole
def test_a_run_takes_it_and_keeps_it(run, tmp_path):
    flags = [flag.replace("examples=400", "examples=40") for flag in FLAGS]
    done = run("tfdist.train", *flags, path=SUPPORT)
    assert done.returncode == 0, done.stderr
    assert "tfdist: train.batch_size=40: 40 examples per replica fit in " in done.stdout
    assert " GB, all there are\n" in done.stdout and numbers(tmp_path) == (40, 40)
    # Now the model has become smaller, say.
    again = run("tfdist.train", *flags[:-1], "--config.train.batch_size", "auto", "--dry_run", path=SUPPORT)
    assert again.returncode == 0, again.stderr
    assert "tfdist: train.batch_size=40, as found by the previous run" in again.stdout


@pytest.mark.faults
def test_two_workers_agree(run, tmp_path):
    done = run("tfdist.launch", "--nproc_per_node=2", "--", *FLAGS, path=SUPPORT)
    assert done.returncode == 0, done.stderr
    assert "tfdist: train.batch_size=192: 96 examples per replica fit in " in done.stdout
    assert numbers(tmp_path) == (192, 192)
