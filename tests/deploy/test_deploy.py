"""What deploy/ has for clusters: checked against Kubernetes' schemas, and lived by processes in place of pods.

Each node's command runs here with the variables that its platform documents; addresses become 127.0.0.1, ports free
ones, and volumes folders. No Kubernetes, SkyPilot or container runs.
"""

import json
import os
import pathlib
import shlex
import sys

import kubernetes_validate
import pytest
import yaml
from support import processes
from support.launchers import free_port, launch  # noqa: F401

import tfdist

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
SECONDS = 300


def documents(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def command_of(container):
    words = container["command"]
    assert words[:3] == ["python", "-m", "tfdist.launch"]
    assert [e["name"] for e in container["env"]] == ["TFDIST_SECRET"], "the others are the platform's"
    return words[3:]


def indexed_job(index):
    """As Kubernetes starts the pods of an indexed Job."""
    _, job = documents("indexed-job.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2 and "--nnodes=2" in container["command"]
    return command_of(container), {"JOB_COMPLETION_INDEX": str(index)}


def trainjob(index):
    """As Trainer's torch policy starts the pods of a TrainJob."""
    runtime, job = documents("trainjob.yaml")
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    policy = runtime["spec"]["mlPolicy"]
    assert policy["numNodes"] == job["spec"]["trainer"]["numNodes"] == 2
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    environ = {"PET_NNODES": "2", "PET_NODE_RANK": str(index), "PET_NPROC_PER_NODE": policy["torch"]["numProcPerNode"]}
    return command_of(container), environ | {"PET_MASTER_ADDR": "tfdist-node-0-0.tfdist", "PET_MASTER_PORT": "29400"}


def skypilot(index):
    """As SkyPilot runs a task on its nodes."""
    (task,) = documents("skypilot.yaml")
    words = shlex.split(task["run"])
    assert words[:3] == ["python", "-m", "tfdist.launch"] and task["num_nodes"] == 2
    ips = {"SKYPILOT_NODE_RANK": str(index), "SKYPILOT_NODE_IPS": "tfdist-head\ntfdist-worker\n"}
    return words[3:], ips | {"SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_NUM_NODES": "2"}


def here(words, environ, port, folder):
    """Puts what is on this machine in the place of pods' addresses, volumes and times."""
    hosts = ("tfdist-0.tfdist", "tfdist-node-0-0.tfdist", "tfdist-head", "tfdist-worker")

    def local(text):
        for host in hosts:
            text = text.replace(host, "127.0.0.1")
        return text.replace("/runs/", f"{folder}/").replace("=runs/", f"={folder}/")

    words = [local(word) for word in words if not word.startswith("--master_port=")]
    at = words.index("--")
    environ = {name: local(value) for name, value in environ.items()}
    if "PET_MASTER_PORT" in environ:
        environ["PET_MASTER_PORT"] = str(port)
    else:
        words.insert(at, f"--master_port={port}")
    return [*words, "--config.train.epochs=1", "--config.optimizer.warmup=0%", "--notensorboard"], environ


@pytest.fixture(scope="module")
def alone(tmp_path_factory, tfds_dir):
    """What the experiment ends with on one device."""
    folder = tmp_path_factory.mktemp("alone")
    words = ["--config=digits_mlp", "--config.train.epochs=1", "--config.optimizer.warmup=0%", "--notensorboard"]
    done = processes.run(
        [sys.executable, "-m", "tfdist.train", *words, "--workdir=run", "--strategy=default"],
        cwd=folder, env={**os.environ, "TFDS_DATA_DIR": str(tfds_dir)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "run/result.json").read_text())


@pytest.mark.whole
@pytest.mark.parametrize(
    "nodes", [indexed_job, *(pytest.param(n, marks=pytest.mark.whole) for n in (trainjob, skypilot))]
)
def test_nodes_find_each_other_and_train_what_one_device_does(nodes, alone, launch, tmp_path, tfds_dir):  # noqa: F811
    port, launchers = free_port(), []
    for index in (1, 0):
        words, environ = here(*nodes(index), port, tmp_path)
        launchers.append(launch(*words, **environ, TFDIST_SECRET="hush", TFDS_DATA_DIR=str(tfds_dir)))
    for launcher in launchers:
        assert launcher.process.wait(SECONDS) == 0, launcher.out + launcher.err
    result = json.loads((tmp_path / "digits_mlp/result.json").read_text())
    assert (result["workers"], result["status"]) == (2, "completed")
    assert result["weights_norm"] == pytest.approx(alone["weights_norm"], rel=1e-6)


def test_kubernetes_knows_every_field():
    for document in documents("indexed-job.yaml"):
        kubernetes_validate.validate(document, "1.31", strict=True)


@pytest.mark.parametrize("name", ["indexed-job.yaml", "trainjob.yaml"])
def test_the_secret_comes_from_a_secret(name):
    text = (DEPLOY / name).read_text()
    assert text.count("TFDIST_SECRET") == 1 and "secretKeyRef" in text
    assert "kubectl create secret generic tfdist --from-literal=secret=" in text


def test_the_image_has_what_the_package_is_made_of():
    copied = " ".join(line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line.startswith("COPY"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "configs", "flags", "tfdist"):
        assert name in copied and (ROOT / name).exists()
    assert tfdist.__version__


@pytest.mark.parametrize("path", sorted(DEPLOY.iterdir()), ids=lambda p: p.name)
def test_few_words(path):
    lines = path.read_text().splitlines()
    assert sum(line.startswith("# ") for line in lines) <= 10 and max(map(len, lines)) <= 120
