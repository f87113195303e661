"""The benchmarks run, and a comparison with another commit says which rows are slower."""

import json
import os
import sys

import pytest
from conftest import REPOSITORY
from support import processes

if not (REPOSITORY / ".git").exists():
    pytest.skip("this is no checkout of git", allow_module_level=True)


def bench(tmp_path, *options):
    words = [sys.executable, str(REPOSITORY / "benchmarks/bench.py"), f"--output={tmp_path}/bench.json", *options]
    return processes.run(words, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=600)


def test_a_commit_that_is_not_there_is_named(tmp_path):
    done = bench(tmp_path, "--against=no-such-commit")
    assert done.returncode == 1
    assert done.stderr.startswith("--against=no-such-commit cannot be checked out: ") and done.stderr.count("\n") == 1


@pytest.mark.whole
def test_this_commit_beside_itself(tmp_path):
    done = bench(tmp_path, "--against=HEAD", "--rounds=1", "--workloads=mlp", "--replicas=1")
    report = json.loads((tmp_path / "bench.json").read_text())
    (row,) = report["mlp/1"]
    assert row["now"]["examples_per_second"] > 0 and row["HEAD"]["peak_mb"] > 100
    ratio = row["now"]["examples_per_second"] / row["HEAD"]["examples_per_second"]
    slower = ratio < 0.9  # on a machine that others use, too
    assert (done.returncode, report["slower"]) == (int(slower), ["mlp/1"] * slower), done.stderr


@pytest.mark.whole
def test_the_table_of_equivalence_tells_tfdist_from_keras(tmp_path):
    words = [sys.executable, str(REPOSITORY / "benchmarks/equivalence/run.py"), f"--output={tmp_path}", "--epochs=2"]
    words += ["--tools=tfdist, mirrored;Keras, MirroredStrategy, no accumulation"]
    done = processes.run(words, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=1200)
    ours, theirs = json.loads((tmp_path / "equivalence.json").read_text())
    assert not ours["failed"] and max(*ours["distance"].values(), ours["kill"], ours["other"]) < 1e-5, done.stderr
    assert min(theirs["distance"].values()) > 0.01
    assert "| tfdist, mirrored " in (tmp_path / "equivalence.md").read_text()


@pytest.mark.whole
def test_faults_leave_the_bits_of_an_undisturbed_training(tmp_path):
    words = [sys.executable, str(REPOSITORY / "benchmarks/chaos/run.py"), f"--output={tmp_path}", "--tools=tfdist"]
    words += ["--minutes=0.7", "--every=20"]
    done = processes.run(words, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=1800)
    (row,) = json.loads((tmp_path / "goodput.json").read_text())
    assert row["ended"] and row["same"] == 0 and row["orphans"] == 0 and row["faults"], done.stderr
    assert "| tfdist | 0." in (tmp_path / "goodput.md").read_text()
