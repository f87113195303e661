"""What deploy/ has for clusters: checked against Kubernetes' schemas, and lived by processes in place of pods.

Each node's command runs here with the variables that its platform documents; addresses become 127.0.0.1, ports free
ones, and volumes folders. No Kubernetes, SkyPilot or container runs.
"""

import json
import os
import pathlib
import shlex
import shutil
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
SHORT = ["--config.train.epochs=1", "--config.optimizer.warmup=0%", "--notensorboard"]


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
    assert policy["torch"] == {}  # which is `auto` in all of Trainer 2.0 to 2.3; 2.3 has no field for it
    environ = {"PET_NNODES": "2", "PET_NODE_RANK": str(index), "PET_NPROC_PER_NODE": "auto"}
    return command_of(container), environ | {"PET_MASTER_ADDR": "tfdist-node-0-0.tfdist", "PET_MASTER_PORT": "29400"}


def skypilot(index):
    """As SkyPilot runs a task on its nodes."""
    (task,) = documents("skypilot.yaml")
    words = shlex.split(task["run"])
    assert words[:3] == ["python", "-m", "tfdist.launch"] and task["num_nodes"] == 2
    ips = {"SKYPILOT_NODE_RANK": str(index), "SKYPILOT_NODE_IPS": "tfdist-head\ntfdist-worker\n"}
    return words[3:], ips | {"SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_NUM_NODES": "2"}


def jobset(index):
    """As JobSet starts the pods of its only job."""
    (job_set,) = documents("jobset.yaml")
    (job,) = job_set["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["completions"] == spec["parallelism"] == 2 and "--nnodes=2" in container["command"]
    # https://jobset.sigs.k8s.io: <jobset>-<job>-<replica>-<pod>.<jobset>
    host = "{0}-{1}-0-0.{0}".format(job_set["metadata"]["name"], job["name"])
    assert f"--master_addr={host}" in container["command"]
    return command_of(container), {"JOB_COMPLETION_INDEX": str(index)}


def here(words, environ, port, folder):
    """Puts what is on this machine in the place of pods' addresses, volumes and times."""

    def local(text):
        for host in ("tfdist-0.tfdist", "tfdist-node-0-0.tfdist", "tfdist-head", "tfdist-worker"):
            text = text.replace(host, "127.0.0.1")
        return text.replace("=runs/", f"={folder}/")

    words = [local(in_folder(word, folder)) for word in words if not word.startswith("--master_port=")]
    at = words.index("--")
    environ = {name: local(value) for name, value in environ.items()}
    if "PET_MASTER_PORT" in environ:
        environ["PET_MASTER_PORT"] = str(port)
    else:
        words.insert(at, f"--master_port={port}")
    return [*words, *SHORT], environ


def in_folder(word, folder):
    """Puts a folder of the test in the place of the volume."""
    return word.replace("/runs/", f"{folder}/")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, tfds_dir):
    """What the experiment ends with on one device."""
    folder = tmp_path_factory.mktemp("alone")
    done = processes.run(
        [sys.executable, "-m", "tfdist.train", "--config=digits_mlp", *SHORT, "--workdir=run", "--strategy=default"],
        cwd=folder, env={**os.environ, "TFDS_DATA_DIR": str(tfds_dir)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "run/result.json").read_text())


@pytest.mark.whole
@pytest.mark.parametrize("nodes", [indexed_job, jobset, trainjob, skypilot])
def test_nodes_find_each_other_and_train_what_one_device_does(nodes, alone, launch, tmp_path, tfds_dir):  # noqa: F811
    port, launchers = free_port(), []
    for index in (1, 0):
        words, environ = here(*nodes(index), port, tmp_path)
        launchers.append(launch(*words, **environ, TFDIST_SECRET="hush", TFDS_DATA_DIR=str(tfds_dir)))
    for launcher in launchers:
        assert launcher.process.wait(SECONDS) == 0, launcher.out + launcher.err
    assert_as_alone(tmp_path, alone)


def assert_as_alone(folder, alone):
    result = json.loads((folder / "digits_mlp/result.json").read_text())
    assert (result["workers"], result["status"]) == (2, "completed")
    assert result["weights_norm"] == pytest.approx(alone["weights_norm"], rel=1e-6)


@pytest.mark.whole
def test_tfjob(alone, tmp_path, tfds_dir):
    """With the TF_CONFIG that the operator writes into each pod."""
    (job,) = documents("tfjob.yaml")
    worker = job["spec"]["tfReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "tensorflow", "the operator looks for this name"
    assert [e["name"] for e in container["env"]] == ["TFDIST_SECRET"]
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(worker["replicas"])]
    running = []
    for index in range(worker["replicas"]):
        said = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}, "environment": "cloud"}
        words = [sys.executable, *(in_folder(word, tmp_path) for word in container["command"][1:]), *SHORT]
        own = {"TF_CONFIG": json.dumps(said), "TFDIST_SECRET": "hush", "TFDS_DATA_DIR": str(tfds_dir)}
        with open(tmp_path / f"{index}.log", "wb") as log:
            running.append(processes.Popen(words, env={**os.environ, **own}, stdout=log, stderr=log))
    for index, process in enumerate(running):
        assert process.wait(SECONDS) == 0, (tmp_path / f"{index}.log").read_text()
    assert_as_alone(tmp_path, alone)


@pytest.mark.whole
@pytest.mark.skipif(not shutil.which("mpirun"), reason="Open MPI is not installed")
def test_mpijob(alone, tmp_path, tfds_dir):
    """The launcher's command by a real mpirun, with two slots of this machine in place of the pods."""
    (job,) = documents("mpijob.yaml")
    (container,) = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    assert job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 2
    said = {e["name"]: e.get("value") for e in container["env"]}
    name = job["metadata"]["name"]
    assert said == {"MASTER_ADDR": f"{name}-worker-0.{name}", "MASTER_PORT": "29500", "TFDIST_SECRET": None}
    words = [in_folder(word, tmp_path) for word in container["command"]]
    at = words.index("python")
    words = [words[0], "--allow-run-as-root", "--oversubscribe", *words[1:at], sys.executable, *words[at + 1 :], *SHORT]
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TFDIST_SECRET": "hush"}
    own["TFDS_DATA_DIR"] = str(tfds_dir)
    done = processes.run(words, env={**os.environ, **own}, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert_as_alone(tmp_path, alone)


def test_kubernetes_knows_every_field():
    for document in documents("indexed-job.yaml"):
        kubernetes_validate.validate(document, "1.31", strict=True)


@pytest.mark.parametrize("name", ["indexed-job.yaml", "jobset.yaml", "mpijob.yaml", "tfjob.yaml", "trainjob.yaml"])
def test_the_secret_comes_from_a_secret(name):
    text = (DEPLOY / name).read_text()
    assert text.count("name: TFDIST_SECRET") == 1 and "secretKeyRef" in text
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
