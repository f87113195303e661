"""The models of the zoo and the configs compile for TPUs and GPUs that are not here: `make topology-check`."""

import json

import pytest
from conftest import REPOSITORY
from support import mesh, zoo_cases

from tfdist.data import sources
from tfdist.topology import compiler, known, program

pytestmark = [
    pytest.mark.topology,
    pytest.mark.skipif(
        not all(map(compiler.is_there, compiler.KINDS)), reason="not all compilers: make topology-check"
    ),
]
TOPOLOGIES = ("v5e-1", "v5e-8", "h100x4")
CONFIGS = {
    "digits": lambda: mesh.experiment_of("configs/digits.py"),
    "digits_mlp": lambda: mesh.experiment_of("configs/digits_mlp.py"),
    "stdlib_gpt": lambda: mesh.experiment_of("configs/stdlib_gpt.py"),
}


def compiled(name, build, batch, accumulate=1):
    """What the compiler says of an update; `build` returns model and source for a distribution."""
    topology = known.find(name)
    distribution = program.distribution(topology.replicas, "TPU" if topology.compilers == "tpu" else "GPU", "a test")
    model, source = build(distribution)
    result = compiler.compiled(program.export(model, source, distribution, batch, accumulate), topology)
    assert result.needs <= topology.memory and result.arguments > 0
    assert (result.all_reduces > 0) == (topology.replicas > 1)
    if topology.replicas > 1:
        trained = sum(v.value.dtype.size * v.value.shape.num_elements() for v in model.trainable_variables)
        assert result.exchanged >= 0.9 * trained  # each gradient travels
    print(json.dumps({"topology": name, "needs": result.needs, "seconds": round(result.seconds, 1)}))


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", [*zoo_cases.OWN, *zoo_cases.APPLICATIONS])
def test_each_model_of_the_zoo_compiles(name, topology):
    case = {**zoo_cases.OWN, **zoo_cases.APPLICATIONS}[name]

    def build(distribution):
        return zoo_cases.build(case), sources.Arrays(zoo_cases.data(case))

    compiled(topology, build, case.batch, case.accumulate)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", CONFIGS)
def test_each_config_compiles(monkeypatch, name, topology):
    monkeypatch.chdir(REPOSITORY)
    experiment = CONFIGS[name]()
    compiled(topology, lambda d: mesh.built(experiment, d)[:2], experiment.train.batch_size)
