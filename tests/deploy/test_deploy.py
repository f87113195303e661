"""What deploy/ has for clusters: checked against Kubernetes' schemas, and lived by processes in place of pods.

Each node's command runs here with the variables that its platform documents; addresses become 127.0.0.1, ports free
ones, and volumes folders. No Kubernetes, SkyPilot or container runs.
"""

import json
import os
import pathlib
import re
import shlex
import sys
import zipfile

import kubernetes_validate
import pytest
import yaml
from support import images, processes
from support.launchers import free_port, launch  # noqa: F401

import tfdist

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
ENTRYPOINT = ["tini", "--", "tfdist"]
JOBS = ("indexed-job.yaml", "smoke-job.yaml", "jobset.yaml", "training-runtime.yaml", "tfjob.yaml", "mpijob.yaml")
SECONDS = 300
SHORT = ["--config.train.epochs=1", "--config.optimizer.warmup=0%", "--notensorboard"]


def documents(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def values(document, key):
    """Yields what has this key, at any depth."""
    for name, value in document.items() if isinstance(document, dict) else enumerate(document):
        if name == key:
            yield value
        if isinstance(value, (dict, list)):
            yield from values(value, key)


pods = lambda document: [t["spec"] for t in values(document, "template") if "containers" in t["spec"]]


def command_of(container):
    """What follows `tfdist` in the words by which a container of the image starts, and its environment."""
    words = [*container.get("command", ENTRYPOINT), *container.get("args", ())]
    environ = {e["name"]: e.get("value", "hush") for e in container["env"]}
    assert environ.keys() == {"TFDIST_SECRET", "TFDS_DATA_DIR"}, "the others are the platform's"
    assert words[:3] == ENTRYPOINT
    return words[3:], environ


def indexed_job(index, name="indexed-job.yaml", host="{0}-0.{0}"):
    """As Kubernetes starts the pods of an indexed Job."""
    *services, document = documents(name)
    (spec,), called = [s for s in values(document, "spec") if "completions" in s], document["metadata"]["name"]
    (pod,) = pods(spec)
    words, environ = command_of(pod["containers"][0])
    assert spec["completions"] == spec["parallelism"] == 2 and "--nnodes=2" in words
    assert f"--master_addr={host.format(called)}" in words and pod.get("subdomain", called) == called
    assert all(s["spec"]["selector"] == {"job-name": called} == {"job-name": s["metadata"]["name"]} for s in services)
    return words, environ | {"JOB_COMPLETION_INDEX": str(index)}


def smoke_job(index):
    """The same, without a volume that both see."""
    words, environ = indexed_job(index, "smoke-job.yaml")
    return [w.replace("/runs/", f"/runs/{index}/") for w in words], environ | {"TFDS_DATA_DIR": f"/runs/{index}/data"}


def jobset(index):
    """As JobSet does: its pods are called <jobset>-<job>-<replica>-<pod>.<jobset>, https://jobset.sigs.k8s.io."""
    return indexed_job(index, "jobset.yaml", "{0}-node-0-0.{0}")


def trainjob(index, nodes="2"):
    """As Trainer's torch policy starts the pods of a TrainJob: Trainer 2.3, plugins/torch/torch_test.go."""
    (runtime,), (job,) = documents("training-runtime.yaml"), documents("trainjob.yaml")
    (pod,) = pods(runtime)
    (container,), trainer, name = pod["containers"], job["spec"]["trainer"], job["metadata"]["name"]
    assert container["name"] == "node" and job["spec"]["runtimeRef"] == {"name": runtime["metadata"]["name"]}
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2, "torch": {}} and trainer["numNodes"] == 2
    words, environ = command_of(container | {"args": trainer["args"]})
    environ |= {"PET_NNODES": nodes, "PET_NODE_RANK": str(index), "PET_NPROC_PER_NODE": "1"}  # of a request of 500m
    return words, environ | {"PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "JOB_COMPLETION_INDEX": str(index)}


def sdk(index):
    """As Kubeflow's SDK starts a function under the torch policy, with torchrun: its TORCH_COMMAND."""
    (_, environ), (shim,) = trainjob(index), re.findall(r"exec tfdist (.*?)\\n", (DEPLOY / "Dockerfile").read_text())
    return [*shlex.split(shim)[:-1], "train.py", "--config=digits_mlp", "--workdir=/runs/digits_mlp"], environ


def tfjob(index):
    """With the TF_CONFIG that the operator writes into each pod."""
    (job,) = documents("tfjob.yaml")
    worker = job["spec"]["tfReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "tensorflow", "the operator looks for this name"
    words, environ = command_of(container)
    hosts = [f"tfdist-worker-{i}.default.svc:2222" for i in range(worker["replicas"])]
    said = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}, "environment": "cloud"}
    return words, environ | {"TF_CONFIG": json.dumps(said)}


def skypilot(index):
    """As SkyPilot runs a task on its nodes."""
    (task,) = documents("skypilot.yaml")
    words = shlex.split(task["run"])
    assert words[:3] == ["python", "-m", "tfdist.launch"] and task["num_nodes"] == 2
    ips = {"SKYPILOT_NODE_RANK": str(index), "SKYPILOT_NODE_IPS": "tfdist-head\ntfdist-worker\n"}
    return ["launch", *words[3:]], ips | {"SKYPILOT_NUM_NODES": "2", "TFDIST_SECRET": "hush"}


def here(words, environ, ports, folder):
    """Puts what is on this machine in the place of pods' addresses, volumes and ports."""

    def local(text):
        for index, port in enumerate(ports):
            text = text.replace(f"tfdist-worker-{index}.default.svc:2222", f"127.0.0.1:{port}")
        return re.sub(r"(^/|(?<==)/?)runs/", f"{folder}/", re.sub(r"\btfdist-[a-z0-9.-]+", "127.0.0.1", text))

    words = [local(word) for word in words if not word.startswith("--master_port=")]
    environ = {name: local(value) for name, value in environ.items()}
    if "PET_NNODES" in environ:
        environ["PET_MASTER_PORT"] = str(ports[0])
    elif "--" in words:
        words.insert(words.index("--"), f"--master_port={ports[0]}")
    return [*words, *SHORT], environ


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


ELASTIC = pytest.param(lambda index: trainjob(index, nodes="1:2"), id="elastic_trainjob")  # as PyTorchJob has it
NODES = [indexed_job, smoke_job, jobset, trainjob, ELASTIC, sdk, skypilot, tfjob]


@pytest.mark.whole
@pytest.mark.parametrize("nodes", NODES)
def test_nodes_find_each_other_and_train_what_one_device_does(nodes, alone, launch, tmp_path):  # noqa: F811
    (tmp_path / "train.py").write_text("from tfdist.train.__main__ import main\n\nmain()\n")
    (tmp_path / "home").mkdir()
    ports, launchers = (free_port(), free_port()), []
    for index in (1, 0):
        words, environ = here(*nodes(index), ports, tmp_path)
        launchers.append(launch(*words, module="tfdist", **environ, HOME=str(tmp_path / "home")))
    for launcher in launchers:
        assert launcher.process.wait(SECONDS) == 0, launcher.out + launcher.err
    assert_as_alone(tmp_path / "0" if nodes == smoke_job else tmp_path, alone)


def assert_as_alone(folder, alone):
    result = json.loads(next(folder.glob("*/result.json")).read_text())
    assert (result["workers"], result["status"]) == (2, "completed")
    assert result["weights_norm"] == pytest.approx(alone["weights_norm"], rel=1e-6)


def test_each_job_of_an_array_has_its_folder(tmp_path):
    (tmp_path / "srun").symlink_to("/bin/echo")
    environ = {**os.environ, "SLURM_ARRAY_TASK_ID": "3", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["bash", str(DEPLOY / "slurm.sbatch"), "--config=digits_mlp", "--workdir=/shared/runs"]
    done = processes.run(words, env=environ, capture_output=True, text=True)
    assert done.stdout.endswith("--config.seed=3 --config=digits_mlp --workdir=/shared/runs --workdir=/shared/runs/3\n")


@pytest.mark.parametrize("name", [*JOBS, "runs-volume.yaml", "reader.yaml"])
def test_kubernetes_knows_every_field(name):
    """Also those of the jobs and pods that an operator makes, and with the line for GPUs."""
    for text in ((DEPLOY / name).read_text(), (DEPLOY / name).read_text().replace("# nvidia.com", "nvidia.com")):
        for document in yaml.safe_load_all(text):
            jobs = [template["spec"] for template in values(document, "template") if "backoffLimit" in template["spec"]]
            specs = jobs or [{"template": {"spec": pod}} for pod in pods(document)]
            checked = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, "spec": spec} for spec in specs]
            for one in checked + [document] * (document["apiVersion"] in ("v1", "batch/v1")):
                kubernetes_validate.validate(one, "1.31", strict=True)


@pytest.mark.parametrize("name", JOBS)
def test_what_a_pod_needs_at_the_first_try(name):
    """Each of these has been forgotten once."""
    text = (DEPLOY / name).read_text()
    for pod in (pod for document in yaml.safe_load_all(text) for pod in pods(document)):
        (container,), who = pod["containers"], pod["securityContext"]
        assert who["fsGroup"] == who["runAsUser"] == 1000 and who["runAsNonRoot"], "the image's user can write volumes"
        assert container["resources"].keys() == {"requests", "limits"}
        version, target = re.fullmatch(r"tfdist:(.+)-(cpu|mpi)", container["image"]).groups()
        assert version == tfdist.__version__ and target in {stage for stage, *_ in images.steps()}
        if "volumes" in pod:  # the launcher of an MPIJob writes nothing
            mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounted == {"runs": "/runs", "shm": "/dev/shm"} and len(pod["volumes"]) == 2
            assert pod["volumes"][1]["emptyDir"]["medium"] == "Memory" and pod["terminationGracePeriodSeconds"] > 30
    assert text.count("name: TFDIST_SECRET") == 1 and "secretKeyRef" in text
    assert name == "training-runtime.yaml" or "kubectl create secret generic tfdist --from-literal=secret=" in text
    for policy in (p for document in yaml.safe_load_all(text) for p in values(document, "podFailurePolicy")):
        rules = [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in policy["rules"]]
        assert rules == [("FailJob", [1, 2]), ("Ignore", [143]), ("Ignore", None)], "one layer of retries each"
        assert "restartPolicy: Never" in text and "--max_restarts=3" in text and "maxRestarts: 3" not in text


def test_the_image_installs_sources_last_and_is_not_roots():
    for stage, op, words in images.steps():
        assert op != "COPY" or "--from" in words or stage == "wheel" or words == "setup.cfg ./"
        assert op != "RUN" or "pip install" not in words or ("--no-deps" in words) == (stage in ("cpu", "cuda", "mpi"))
    for target in ("cpu", "cuda", "mpi"):
        last = {op: words for stage, op, words in images.steps() if stage == target}
        assert last["USER"].isdigit() and json.loads(last["ENTRYPOINT"]) == ENTRYPOINT and "HOME=" in last["ENV"]
    assert tfdist.__version__ in next(words for _, op, words in images.steps() if op == "LABEL")


@pytest.mark.whole
def test_the_image_has_what_the_package_is_made_of(tmp_path):
    """Its steps that need no network, run in a folder with what is copied and .dockerignore lets through."""
    copied = [n for stage, op, words in images.steps() if (stage, op) == ("wheel", "COPY") for n in words.split()[:-1]]
    assert set(copied) <= set(re.findall(r"^!([\w.]+)", (ROOT / ".dockerignore").read_text(), flags=re.M))
    processes.run(["cp", "-r", *copied, str(tmp_path)], cwd=ROOT, check=True)
    steps = [w for _, op, w in images.steps() if op == "RUN" and ("configparser" in w or "pip wheel" in w)]
    script = "\n".join(steps).replace("--wheel-dir /dist", "--wheel-dir dist --no-build-isolation --no-index -q")
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    processes.run(["sh", "-ec", script], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True)
    needs, cuda = (tmp_path / "needs.txt").read_text(), (tmp_path / "cuda.txt").read_text()
    wanted = {"tensorflow >=2.18,<2.22", 'setuptools; python_version >= "3.12"'}
    assert wanted <= set(needs.split("\n")) and "[and-cuda]" in cuda
    (wheel,) = (tmp_path / "dist").glob(f"tfdist-{tfdist.__version__}-*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {"tfdist/configs/digits_mlp.py", "tfdist/data/datasets/digits.csv.gz", "tfdist/launch/plan.py"} <= inside
