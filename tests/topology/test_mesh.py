"""Trainings on an emulated mesh agree with one device: `make topology-check`, which installs the compilers."""

import numpy as np
import pytest
from conftest import REPOSITORY
from support import mesh

from tfdist.topology import compiler

pytestmark = [
    pytest.mark.topology,
    pytest.mark.skipif(not any(map(compiler.is_there, compiler.KINDS)), reason="no compilers: make topology-check"),
]

CASES = {
    "digits_mlp": lambda **t: mesh.experiment_of("configs/digits_mlp.py", **t),
    "digits": lambda **t: mesh.experiment_of("configs/digits.py", **t),
    "gpt": mesh.gpt,
}


@pytest.mark.parametrize("precision,bound", [("float64", 1e-12), ("float32", 1e-6)])
@pytest.mark.parametrize("replicas", [1, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_three_epochs_agree_with_one_device(monkeypatch, name, replicas, precision, bound):
    monkeypatch.chdir(REPOSITORY)
    alone = mesh.on_one_device(CASES[name](precision=precision))
    together, programs, updates = mesh.on_mesh(CASES[name](precision=precision), replicas)
    assert programs == 2 and updates >= 12  # full batches, and a tail that is uneven
    size = np.linalg.norm(alone)
    print(f"{name} {replicas} {precision}: {max(np.linalg.norm(w - alone) for w in together) / size:.1e}")
    for weights in together:
        assert np.linalg.norm(weights - alone) / size < bound
