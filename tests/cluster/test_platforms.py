"""Nodes as training platforms describe them, for the launcher and for one worker on each node."""

import json

import pytest
from support.launchers import planned  # noqa: F401

from tfdist.cluster import discovery, env_vars
from tfdist.cluster.discovery import Cluster
from tfdist.errors import UserError
from tfdist.launch import __main__ as launch_main


def env(text, **more):
    return dict(word.split("=", 1) for word in text.split()) | more


MLP = env("MLP_WORKER_NUM=2 MLP_ROLE_INDEX=1 MLP_WORKER_GPU=8 MLP_WORKER_0_HOST=10.0.0.5 MLP_WORKER_0_PORT=2222")
KUBEFLOW = env(
    "PET_NNODES=2 PET_NPROC_PER_NODE=4 PET_NODE_RANK=1 PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29400"
)
# With an elasticPolicy: training-operator 1.9, pkg/controller.v1/pytorch/elastic.go.
PYTORCHJOB = env("PET_NNODES=1:3 PET_NPROC_PER_NODE=1 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=job-worker-0:23456")
SAGEMAKER = env("SM_CURRENT_HOST=algo-2 SM_NUM_GPUS=8", SM_HOSTS='["algo-10", "algo-2", "algo-1"]')
SKYPILOT = env("SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_GPUS_PER_NODE=4", SKYPILOT_NODE_IPS="10.0.0.5\n10.0.0.6\n")
DLC = env("RANK=1 WORLD_SIZE=2 MASTER_ADDR=dlc-master-0 MASTER_PORT=23456 NPROC_PER_NODE=8")
LOCAL = env("LOCAL_RANK=0 LOCAL_WORLD_SIZE=1")


@pytest.mark.parametrize("environ, expected", [
    ({}, None), (env("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1"), None), (env("MLP_WORKER_NUM="), None),
    (MLP, ("MLP_WORKER_NUM", 2, 1, 8, "10.0.0.5", 2222)),
    ({k: v for k, v in MLP.items() if k != "MLP_WORKER_GPU"}, ("MLP_WORKER_NUM", 2, 1, 0, "10.0.0.5", 2222)),
    (MLP | {"MLP_WORKER_0_HOST": "fd00::5"}, ("MLP_WORKER_NUM", 2, 1, 8, "fd00::5", 2222)),
    (env("MLP_WORKER_NUM=1 MLP_WORKER_GPU=4"), ("MLP_WORKER_NUM", 1, 0, 4, "", 0)),
    (KUBEFLOW, ("PET_NNODES", 2, 1, 4, "job-node-0-0.job", 29400)),
    (KUBEFLOW | {"PET_NPROC_PER_NODE": "auto"}, ("PET_NNODES", 2, 1, 0, "job-node-0-0.job", 29400)),
    (KUBEFLOW | {"PET_MASTER_PORT": ""}, ("PET_NNODES", 2, 1, 4, "job-node-0-0.job", 29500)),
    (env("PET_NNODES=1"), ("PET_NNODES", 1, 0, 0, "", 0)),
    (KUBEFLOW | {"PET_NNODES": "1:3"}, ("PET_NNODES", 3, 1, 4, "job-node-0-0.job", 29400, 1)),
    (PYTORCHJOB, ("PET_NNODES", 3, -1, 1, "job-worker-0", 23456, 1)),
    (PYTORCHJOB | {"PET_NNODES": "1:1"}, ("PET_NNODES", 1, 0, 1, "job-worker-0", 23456)),
    (SAGEMAKER, ("SM_HOSTS", 3, 1, 8, "algo-1", 29500)),
    (env("SM_CURRENT_HOST=algo-1", SM_HOSTS='["algo-1"]'), ("SM_HOSTS", 1, 0, 0, "algo-1", 29500)),
    (SKYPILOT, ("SKYPILOT_NODE_RANK", 2, 1, 4, "10.0.0.5", 29500)),
    (DLC, ("NPROC_PER_NODE", 2, 1, 8, "dlc-master-0", 23456)),
    (DLC | LOCAL, None),  # a launcher has counted workers
    (SKYPILOT | KUBEFLOW, ("PET_NNODES", 2, 1, 4, "job-node-0-0.job", 29400)),
])  # fmt: skip
def test_node(environ, expected):
    assert env_vars.platform_node(environ) == (expected and env_vars.PlatformNode(*expected))


@pytest.mark.parametrize("environ, message", [
    (env("PET_NNODES=2"), "PET_NODE_RANK and PET_MASTER_ADDR are not set beside PET_NNODES=2"),
    (KUBEFLOW | {"PET_NNODES": "4:2"}, "PET_NNODES=2 is not an integer of at least 4"),
    (env("PET_NNODES=1:3"), "PET_MASTER_ADDR is not set beside PET_NNODES=3"),
    (KUBEFLOW | {"PET_NODE_RANK": "2"}, "PET_NODE_RANK=2 is outside PET_NNODES=2"),
    (KUBEFLOW | {"PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE=many is not an integer of at least 1"),
    (env("SM_HOSTS=[]"), "SM_CURRENT_HOST is not set beside SM_HOSTS=[]"),
    (env("SM_CURRENT_HOST=a", SM_HOSTS="a, b"), "SM_HOSTS=a, b is not a JSON list of host names"),
    (env("SM_CURRENT_HOST=a", SM_HOSTS="[" * 100_000), f"SM_HOSTS={'[' * 100} is not a JSON list of host names"),
    (env("SM_CURRENT_HOST=a SM_HOSTS=[1]"), "SM_HOSTS=[1] is not a JSON list of host names"),
    (SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST=algo-3 is none of SM_HOSTS: algo-1, algo-2, algo-10"),
    (env("SKYPILOT_NODE_RANK=0"), "SKYPILOT_NODE_IPS is not set beside SKYPILOT_NODE_RANK=0"),
    (SKYPILOT | {"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK=2 is outside SKYPILOT_NODE_IPS=2"),
    (SKYPILOT | {"SKYPILOT_NODE_IPS": "a b/c"}, "SKYPILOT_NODE_IPS=b/c is not a host name"),
    (DLC | {"RANK": "2"}, "RANK=2 is outside WORLD_SIZE=2"),
    (SAGEMAKER | MLP, "this is node 1 of 2 by MLP_WORKER_NUM and node 1 of 3 by SM_HOSTS: unset MLP_WORKER_NUM, or"),
])  # fmt: skip
def test_what_makes_no_sense(environ, message):
    with pytest.raises(UserError) as caught:
        env_vars.platform_node(environ)
    assert message in str(caught.value) and "\n" not in str(caught.value)


HOROVOD = env("HOROVOD_RANK=3 HOROVOD_SIZE=4 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2")


@pytest.mark.parametrize("environ, expected", [
    (KUBEFLOW, Cluster("PET_NNODES", 1, 2, 0, 1, "job-node-0-0.job:29400")),
    (SAGEMAKER, Cluster("SM_HOSTS", 1, 3, 0, 1, "algo-1:29500")),
    (SKYPILOT, Cluster("SKYPILOT_NODE_RANK", 1, 2, 0, 1, "10.0.0.5:29500")),
    (DLC, Cluster("NPROC_PER_NODE", 1, 2, 0, 1, "dlc-master-0:23456")),
    # Nodes are not counted where a launcher has counted workers.
    (DLC | HOROVOD, Cluster("horovodrun", 3, 4, 1, 2, "")), (SAGEMAKER | HOROVOD, Cluster("horovodrun", 3, 4, 1, 2)),
    (KUBEFLOW | env("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1"),
     Cluster("torchrun's variables", 5, 8, 1, 4, "a:1")),
])  # fmt: skip
def test_one_worker_on_each_node(environ, expected):
    assert discovery.find(environ) == expected


def tf_config(kind, index, **cluster):
    """As Google's and Azure's services and Ray write it, with fields that TensorFlow does not ask for."""
    return {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index, "cloud": "x"}, "job": {}})
    }


AZURE_MPI = env(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
)
AZURE_MPI |= env("AZ_BATCH_MASTER_NODE=10.0.0.4:6000 PMIX_NAMESPACE=1061879809")


@pytest.mark.parametrize("environ, rank, size, master", [
    # Vertex AI: cloud.google.com/ai-platform/training/docs/distributed-training-details; no evaluator is in the cluster
    (tf_config("chief", 0, chief=["pool0-0:2222"]) | env("CLOUD_ML_JOB={}"), 0, 1, "pool0-0:2222"),
    (tf_config("worker", 1, chief=["pool0-0:2222"], worker=["pool1-0:2222", "pool1-1:2222"]), 2, 3, "pool0-0:2222"),
    # Azure ML: learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu (TensorFlow, MPI, PyTorch)
    (tf_config("worker", 1, worker=["10.0.0.4:2222", "10.0.0.5:2222"]), 1, 2, "10.0.0.4:2222"),
    (AZURE_MPI, 3, 4, "10.0.0.4:15400"),
    (env("MASTER_ADDR=10.0.0.4 MASTER_PORT=6105 WORLD_SIZE=4 NODE_RANK=1 RANK=3 LOCAL_RANK=1"), 3, 4, "10.0.0.4:6105"),
    # Ray: python/ray/train/tensorflow/config.py
    (tf_config("worker", 0, worker=["10.1.0.7:41235", "10.1.1.9:37871"]), 0, 2, "10.1.0.7:41235"),
])  # fmt: skip
def test_services_that_count_workers(environ, rank, size, master):
    found = discovery.find(environ)
    assert (found.rank, found.size, found.master) == (rank, size, master)


@pytest.mark.parametrize("environ, message", [
    (PYTORCHJOB, r"PET_NNODES=1:3 is an elastic job, whose number of nodes changes: start python -m tfdist\.launch"),
    # A PyTorchJob that sets both: the rank is that of the pod, and the world that of all its processes.
    (KUBEFLOW | env("RANK=1 WORLD_SIZE=8 MASTER_ADDR=a MASTER_PORT=1"),
     "this process is rank 1 of 8 by torchrun's variables and rank 1 of 2 by PET_NNODES"),
])  # fmt: skip
def test_what_is_no_worker_is_refused(environ, message):
    with pytest.raises(UserError, match=f"^{message}"):
        discovery.find(environ)


@pytest.mark.parametrize("flags, environ, expected", [
    ([], KUBEFLOW, dict(WORLD_SIZE="8", RANK="4", GROUP_RANK="1", MASTER_PORT="29400")),
    ([], KUBEFLOW | {"PET_NNODES": "1:3"}, dict(WORLD_SIZE="12", RANK="4", MASTER_ADDR="job-node-0-0.job")),
    (["--nnodes=1:2"], KUBEFLOW, dict(WORLD_SIZE="8", RANK="4", MASTER_PORT="29400")),
    ([], PYTORCHJOB, dict(WORLD_SIZE="3", MASTER_ADDR="job-worker-0", MASTER_PORT="23456")),
    ([], SAGEMAKER, dict(WORLD_SIZE="24", RANK="8", GROUP_RANK="1", MASTER_ADDR="algo-1", MASTER_PORT="29500")),
    ([], SKYPILOT, dict(WORLD_SIZE="8", RANK="4", MASTER_ADDR="10.0.0.5")),
    ([], DLC, dict(WORLD_SIZE="16", RANK="8", MASTER_ADDR="dlc-master-0", MASTER_PORT="23456")),
    (["--nproc_per_node=1"], DLC, dict(WORLD_SIZE="2", RANK="1")),
    (["--nnodes=3", "--master_addr=w0"], {"JOB_COMPLETION_INDEX": "2"}, dict(WORLD_SIZE="3", RANK="2")),
    (["--nnodes=1"], {"JOB_COMPLETION_INDEX": "2"}, dict(WORLD_SIZE="1", RANK="0")),
    ([], KUBEFLOW | {"JOB_COMPLETION_INDEX": "1"}, dict(WORLD_SIZE="8", RANK="4")),
    ([], env("PET_NNODES=1 JOB_COMPLETION_INDEX=0"), dict(WORLD_SIZE="1", RANK="0")),
], ids=lambda v: " ".join(v) if isinstance(v, (list, dict)) else "")  # fmt: skip
def test_defaults_of_the_launcher(flags, environ, expected, planned):  # noqa: F811
    given = environ | {"TFDIST_SECRET": "hush"}
    words = launch_main.dry_run(planned(*flags, "--dry_run", "--", "actor.py", **given), given).split()
    assert {f"{name}={value}" for name, value in expected.items()} <= set(words), words


@pytest.mark.parametrize("index", ["0", "1"])
def test_a_pod_that_knows_its_index_and_not_the_size_of_the_job_does_not_train_alone(index, planned):  # noqa: F811
    """As those of a TrainJob without `spec.trainer`."""
    with pytest.raises(UserError, match=f"JOB_COMPLETION_INDEX={index} says that this is one pod.* or --nnodes=1"):
        planned("--dry_run", "--", "actor.py", JOB_COMPLETION_INDEX=index)
