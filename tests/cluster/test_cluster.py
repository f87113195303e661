"""Who am I, who are the others: environments as launchers, Slurm and MPI really set them, and broken ones."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
from support.refusals import refused

from tfdist.cluster import addresses, discovery
from tfdist.cluster.discovery import ALONE, Cluster
from tfdist.config.runtime_options import PlacementOptions
from tfdist.distributed import connect
from tfdist.errors import UserError


def env(text, **more):
    """`A=1 B=2` as a dictionary."""
    return dict(pair.split("=", 1) for pair in text.split()) | more


def tf_config(kind="worker", index=0, chief=(), worker=(), **jobs):
    lists = {"chief": chief, "worker": worker} | jobs
    return {"TF_CONFIG": json.dumps({"cluster": lists, "task": {"type": kind, "index": index}})}


def dynamic(index=1, key="sparseCluster", kind="worker", **worker):
    """As the training operator writes it: this worker alone, and no parameter servers."""
    workers = {str(index): f"job-worker-{index}.ns.svc:2222"} if kind == "worker" else {}
    return {"TF_CONFIG": json.dumps({key: {"worker": workers, "ps": None}, "task": {"type": kind, "index": index}})}


def test_who_the_others_are_is_found_out_without_tensorflow():
    """Launchers ask, too, of which there is one on every machine: they would wait for it and hold its memory."""
    asked = "import sys, tfdist.cluster.discovery; print({'tensorflow', 'keras'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", asked], text=True) == "set()\n"


HAND = "RANK=1 WORLD_SIZE=4 MASTER_ADDR=node1 MASTER_PORT=29500"
LAUNCHED = f"{HAND} LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0"
TORCHRUN = f"{LAUNCHED} TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=1"
HOROVOD = (
    "HOROVOD_RANK=3 HOROVOD_SIZE=4 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2 HOROVOD_CROSS_RANK=1 HOROVOD_CROSS_SIZE=2"
)
PLATFORM = "MLP_WORKER_NUM=2 MLP_ROLE_INDEX=1 MLP_WORKER_GPU=8 MLP_WORKER_0_HOST=10.0.0.5 MLP_WORKER_0_PORT=2222"

# Captured from Slurm 22.05, Open MPI 4.1.4 and MPICH 4.0.2, less what nobody reads.
SRUN = (  # srun -N2 -n3, the second task
    "SLURM_GTIDS=0,1 SLURM_JOBID=1 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=n[1-2] SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 "
    "SLURM_LOCALID=1 SLURM_NNODES=2 SLURM_NODEID=0 SLURM_NODELIST=n[1-2] SLURM_NPROCS=3 SLURM_NTASKS=3 SLURM_PROCID=1 "
    "SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_LAUNCHER_PORT=35691 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2 "
    "SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_TASKS_PER_NODE=2,1"
)
SBATCH = (  # the batch script of -N2 -n3 itself
    "SLURM_GTIDS=0 SLURM_JOBID=2 SLURM_JOB_ID=2 SLURM_JOB_NODELIST=n[1-2] SLURM_LOCALID=0 SLURM_NNODES=2 "
    "SLURM_NODEID=0 "
    "SLURM_NODELIST=n[1-2] SLURM_NPROCS=3 SLURM_NTASKS=3 SLURM_PROCID=0 SLURM_TASKS_PER_NODE=2,1"
)
SALLOC = (  # the shell of `salloc -N2 -n3` with use_interactive_step
    "SLURM_JOB_ID=10 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=3 SLURM_PROCID=0 SLURM_STEPID=4294967290 "
    "SLURM_STEP_ID=4294967290 SLURM_STEP_NODELIST=n1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1 "
    "SLURM_STEP_TASKS_PER_NODE=1"
)
CYCLIC = (  # srun -N2 -n4 --distribution=cyclic, the last task
    "SLURM_DISTRIBUTION=cyclic SLURM_JOB_ID=5 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NTASKS=4 SLURM_PROCID=3 "
    "SLURM_STEP_ID=0 "
    "SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2)"
)
ARBITRARY = (  # srun -n3 --distribution=arbitrary with a host file of n2 n1 n2: rank 0 runs on n2
    "SLURM_DISTRIBUTION=arbitrary SLURM_JOB_ID=4 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NTASKS=3 SLURM_PROCID=0 "
    "SLURM_STEP_ID=0 "
    "SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=1,2"
)
SRUN_PMI2 = (  # srun --mpi=pmi2 -N2 -n2
    "PMI_FD=11 PMI_JOBID=3.0 PMI_RANK=1 PMI_SIZE=2 SLURM_JOB_ID=3 SLURM_LOCALID=0 SLURM_MPI_TYPE=pmi2 "
    "SLURM_NODEID=1 SLURM_NTASKS=2 "
    "SLURM_PROCID=1 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)"
)
MPIRUN = (  # mpirun -np 2
    "OMPI_APP_CTX_NUM_PROCS=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1 "
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_MCA_ess_base_jobid=1061879809 PMIX_NAMESPACE=1061879809 "
    "PMIX_RANK=1"
)
MPIRUN_IN_SBATCH = (  # mpirun -np 3 on three nodes of Slurm: SLURM_* are those of the daemons
    "OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 "
    "PMIX_NAMESPACE=174063617 "
    "PMIX_RANK=2 SLURM_JOB_ID=7 SLURM_LOCALID=0 SLURM_NODEID=2 SLURM_NTASKS=3 SLURM_PROCID=2 SLURM_STEP_ID=0 "
    "SLURM_STEP_NODELIST=n[1-3] SLURM_STEP_NUM_NODES=3 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=1(x3)"
)
HYDRA = "MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=8 PMI_RANK=1 PMI_SIZE=2"  # mpiexec.hydra -n 2
HYDRA_IN_SBATCH = (  # mpiexec.hydra -n 4 -ppn 2 on two nodes of Slurm: SLURM_* are those of the proxies
    "MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=6 PMI_RANK=3 PMI_SIZE=4 SLURM_JOB_ID=12 SLURM_LOCALID=0 "
    "SLURM_NODEID=1 SLURM_NTASKS=4 "
    "SLURM_PROCID=1 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)"
)
SRUN_1 = (
    "SLURM_JOB_ID=9 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n1 "
    "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1"
)

THREE = dict(chief=["a:1"], worker=["b:2", "a:3"])
ADDRESSES = ("a:1", "b:2", "a:3")

FOUND = [
    # name, environment, cluster
    ("nothing", {}, ALONE),
    ("empty variables", env("RANK= WORLD_SIZE= TF_CONFIG= SLURM_STEP_ID= OMPI_COMM_WORLD_SIZE= MLP_WORKER_NUM="),
     ALONE),
    ("only an address", env("MASTER_ADDR=node1 MASTER_PORT=29500 LOCAL_RANK=0 TFDIST_SECRET=abc"), ALONE),
    # tfdist.launch and torchrun
    ("launch", env(f"{LAUNCHED} TFDIST_ATTEMPT=2 TFDIST_SECRET=abc"),
     Cluster("tfdist.launch", 1, 4, 1, 2, "node1:29500", (), "abc", 2)),
    ("launch, rank 0",
     env("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=::1 MASTER_PORT=1 TFDIST_ATTEMPT=0 "
     "TFDIST_MEETING_FD=7"), Cluster("tfdist.launch", 0, 1, 0, 1, "[::1]:1", meeting_fd=7)),
    ("launch by torchrun", env(f"{TORCHRUN} TFDIST_ATTEMPT=0"), Cluster("tfdist.launch", 1, 4, 1, 2, "node1:29500")),
    ("launch in a Slurm task, under mpirun, on a platform and in a pod",
     env(f"{LAUNCHED} TFDIST_ATTEMPT=0 {SRUN} {MPIRUN} {PLATFORM}") | tf_config(**THREE),
     Cluster("tfdist.launch", 1, 4, 1, 2, "node1:29500")),
    ("torchrun", env(f"{TORCHRUN} TORCHELASTIC_USE_AGENT_STORE=True"),
     Cluster("torchrun's variables", 1, 4, 1, 2, "node1:29501")),
    ("torchrun on one host", env(TORCHRUN) | env("LOCAL_WORLD_SIZE=4"),
     Cluster("torchrun's variables", 1, 4, 1, 4, "127.0.0.1:29501")),
    ("torchrun of old", env(TORCHRUN), Cluster("torchrun's variables", 1, 4, 1, 2, "node1:29501")),
    ("torchrun, free port", env(f"{TORCHRUN} TORCHELASTIC_USE_AGENT_STORE=False"),
     Cluster("torchrun's variables", 1, 4, 1, 2, "node1:29500")),
    ("torchrun, last port", env(TORCHRUN) | {"MASTER_PORT": "65535"},
     Cluster("torchrun's variables", 1, 4, 1, 2, "node1:65534")),
    ("torchrun in a Slurm task", env(f"{TORCHRUN} {SRUN}"), Cluster("torchrun's variables", 1, 4, 1, 2, "node1:29501")),
    ("by hand", env(HAND, TFDIST_SECRET="abc"),
     Cluster("torchrun's variables", 1, 4, 0, 1, "node1:29500", secret="abc")),
    ("by hand, padded", env(HAND) | {"RANK": " 1 "}, Cluster("torchrun's variables", 1, 4, 0, 1, "node1:29500")),
    ("by hand, both local", env(f"{HAND} LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"),
     Cluster("torchrun's variables", 1, 4, 1, 2, "node1:29500")),
    ("by hand, local rank", env(f"{HAND} LOCAL_RANK=1"), Cluster("torchrun's variables", 1, 4, 1, 2, "node1:29500")),
    ("by hand, one host", env(HAND) | {"MASTER_ADDR": "127.0.0.1"},
     Cluster("torchrun's variables", 1, 4, 1, 4, "127.0.0.1:29500")),
    ("by hand, one host, local rank", env(f"{HAND} LOCAL_RANK=2") | {"MASTER_ADDR": "::1"},
     Cluster("torchrun's variables", 1, 4, 2, 4, "[::1]:29500")),
    ("by hand, single", env("RANK=0 WORLD_SIZE=1"), Cluster("torchrun's variables", 0, 1)),
    # TF_CONFIG
    ("TF_CONFIG chief", tf_config("chief", 0, **THREE), Cluster("TF_CONFIG", 0, 3, 0, 2, "a:1", ADDRESSES)),
    ("TF_CONFIG worker 0", tf_config("worker", 0, **THREE), Cluster("TF_CONFIG", 1, 3, 0, 1, "a:1", ADDRESSES)),
    ("TF_CONFIG worker 1", tf_config("worker", "1", **THREE), Cluster("TF_CONFIG", 2, 3, 1, 2, "a:1", ADDRESSES)),
    ("TF_CONFIG IPv6", tf_config(worker=["[fd00::1]:1", "[fd00::2]:1"]),
     Cluster("TF_CONFIG", 0, 2, 0, 1, "[fd00::1]:1", ("[fd00::1]:1", "[fd00::2]:1"))),
    ("TF_CONFIG no chief", tf_config(index=1, worker=["a:1", "b:2"], ps=[], evaluator=None),
     Cluster("TF_CONFIG", 1, 2, 0, 1, "a:1", ("a:1", "b:2"))),
    ("TF_CONFIG single", tf_config(worker=["a:1"]), Cluster("TF_CONFIG", 0, 1, 0, 1, "a:1", ("a:1",))),
    ("TF_CONFIG {}", {"TF_CONFIG": "{}"}, ALONE),
    ("TF_CONFIG no cluster", {"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'}, ALONE),
    ("TF_CONFIG empty cluster", {"TF_CONFIG": '{"cluster": {}}'}, ALONE),
    ("TF_CONFIG empty lists", tf_config(), ALONE),
    ("TF_CONFIG map", tf_config(index=1, worker={"1": "b:2", "0": "a:1"}),
     Cluster("TF_CONFIG", 1, 2, 0, 1, "a:1", ("a:1", "b:2"))),
    ("TF_CONFIG beside MASTER_ADDR", tf_config(index=1, worker=["a:1", "b:2"]) | env("MASTER_ADDR=c MASTER_PORT=3"),
     Cluster("TF_CONFIG", 1, 2, 0, 1, "a:1", ("a:1", "b:2"))),
    # Slurm. Ports: 15000 + (61 * job + 7 * step + restarts) % 16000
    ("srun", env(SRUN), Cluster("Slurm", 1, 3, 1, 2, "n1:15061")),
    ("srun without node number", {k: v for k, v in env(SRUN).items() if k != "SLURM_NODEID"},
     Cluster("Slurm", 1, 3, 1, 2, "n1:15061")),
    ("srun, next step", env(SRUN) | {"SLURM_STEP_ID": "1"}, Cluster("Slurm", 1, 3, 1, 2, "n1:15068")),
    ("srun, requeued", env(SRUN) | {"SLURM_RESTART_COUNT": "1"}, Cluster("Slurm", 1, 3, 1, 2, "n1:15062")),
    ("srun, next job", env(SRUN) | {"SLURM_JOB_ID": "2"}, Cluster("Slurm", 1, 3, 1, 2, "n1:15122")),
    ("srun, late job", env(SRUN) | {"SLURM_JOB_ID": "7212345"}, Cluster("Slurm", 1, 3, 1, 2, "n1:16045")),
    ("srun, own port", env(SRUN, MASTER_PORT="29500"), Cluster("Slurm", 1, 3, 1, 2, "n1:29500")),
    ("srun, own host", env(SRUN, MASTER_ADDR="n7"), Cluster("Slurm", 1, 3, 1, 2, "n7:15061")),
    ("srun, cyclic", env(CYCLIC), Cluster("Slurm", 3, 4, 1, 2, "n1:15305")),
    ("srun, arbitrary with a host", env(ARBITRARY, MASTER_ADDR="n2"), Cluster("Slurm", 0, 3, 0, 2, "n2:15244")),
    ("srun of a few in a large job",
     env(SRUN) | env("SLURM_NTASKS=9 SLURM_TASKS_PER_NODE=3(x3) SLURM_JOB_NODELIST=n[0-2]"),
     Cluster("Slurm", 1, 3, 1, 2, "n1:15061")),
    ("srun of old",
     {k: v for k, v in env(SRUN).items() if not k.startswith("SLURM_STEP_N") and k != "SLURM_STEP_TASKS_PER_NODE"},
     Cluster("Slurm", 1, 3, 1, 2, "n1:15061")),
    ("srun without host list", {k: v for k, v in env(SRUN).items() if "NODELIST" not in k},
     Cluster("Slurm", 1, 3, 1, 2, "")),
    ("srun on one node", env(SRUN) | env("SLURM_STEP_TASKS_PER_NODE=3 SLURM_STEP_NODELIST=n1 SLURM_NODEID=0"),
     Cluster("Slurm", 1, 3, 1, 3, "127.0.0.1:15061")),
    ("srun -n1", env(SRUN_1), Cluster("Slurm", 0, 1, 0, 1, "n1:15549")),
    ("batch script", env(SBATCH), ALONE),
    ("salloc", env(SALLOC), ALONE),
    ("step of words", env(SRUN) | {"SLURM_STEP_ID": "batch"}, ALONE),
    ("srun --mpi=pmi2", env(SRUN_PMI2), Cluster("Slurm", 1, 2, 0, 1, "n1:15183")),
    ("by hand in srun", env(SRUN) | env("RANK=1 WORLD_SIZE=3 MASTER_ADDR=n1 MASTER_PORT=29500"),
     Cluster("torchrun's variables", 1, 3, 1, 2, "n1:29500")),
    ("TF_CONFIG in srun", env(SRUN) | tf_config("worker", 0, **THREE),
     Cluster("TF_CONFIG", 1, 3, 0, 1, "a:1", ADDRESSES)),
    ("by hand in srun -n1", env(f"{HAND} {SRUN_1}"), Cluster("torchrun's variables", 1, 4, 0, 1, "node1:29500")),
    # MPI. Ports: 15000 + CRC-32 % 16000, from `printf $PMIX_NAMESPACE | gzip -1 | tail -c8 | od -An -tu4 -N4`
    ("mpirun", env(MPIRUN), Cluster("Open MPI", 1, 2, 1, 2, "127.0.0.1:15400")),
    ("another mpirun", env(MPIRUN) | {"PMIX_NAMESPACE": "1061945345"},
     Cluster("Open MPI", 1, 2, 1, 2, "127.0.0.1:16555")),
    ("mpirun, own address", env(MPIRUN, MASTER_ADDR="n1", MASTER_PORT="7"), Cluster("Open MPI", 1, 2, 1, 2, "n1:7")),
    ("mpirun without a name", {k: v for k, v in env(MPIRUN).items() if k != "PMIX_NAMESPACE"},
     Cluster("Open MPI", 1, 2, 1, 2, "")),
    ("mpirun on Slurm", env(MPIRUN_IN_SBATCH), Cluster("Open MPI", 2, 3, 0, 1, "")),
    ("mpirun on Slurm, own address", env(MPIRUN_IN_SBATCH, MASTER_ADDR="n1", MASTER_PORT="7"),
     Cluster("Open MPI", 2, 3, 0, 1, "n1:7")),
    ("mpirun -np 2 in srun -n1", env(f"{MPIRUN} {SRUN_1}"), Cluster("Open MPI", 1, 2, 1, 2, "127.0.0.1:15400")),
    ("hydra", env(HYDRA), Cluster("PMI", 1, 2, 1, 2, "")),
    ("hydra, own port", env(HYDRA, MASTER_PORT="7"), Cluster("PMI", 1, 2, 1, 2, "127.0.0.1:7")),
    ("hydra on Slurm", env(HYDRA_IN_SBATCH), Cluster("PMI", 3, 4, 1, 2, "")),
    ("plain PMI", env("PMI_RANK=1 PMI_SIZE=2"), Cluster("PMI", 1, 2, 0, 1, "")),
    ("horovodrun", env(HOROVOD), Cluster("horovodrun", 3, 4, 1, 2)),
    ("horovodrun in srun -n1", env(f"{HOROVOD} {SRUN_1}"), Cluster("horovodrun", 3, 4, 1, 2)),
    # The platform counts nodes
    ("platform", env(PLATFORM), Cluster("MLP_WORKER_NUM", 1, 2, 0, 1, "10.0.0.5:2222")),
    ("platform, single", env("MLP_WORKER_NUM=1"), Cluster("MLP_WORKER_NUM", 0, 1)),
    ("platform, own port", env(PLATFORM, MASTER_PORT="7"), Cluster("MLP_WORKER_NUM", 1, 2, 0, 1, "10.0.0.5:7")),
    ("platform and horovodrun", env(f"{PLATFORM} {HOROVOD}"), Cluster("horovodrun", 3, 4, 1, 2)),
    ("platform, several by hand on a node", env(f"{PLATFORM} {HAND} LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"),
     Cluster("torchrun's variables", 1, 4, 1, 2, "node1:29500")),
    ("platform and TF_CONFIG", env(PLATFORM) | tf_config(index=1, worker=["a:1", "b:2"]),
     Cluster("TF_CONFIG", 1, 2, 0, 1, "a:1", ("a:1", "b:2"))),
    ("single platform, several by hand", env(f"MLP_WORKER_NUM=1 {HAND}"),
     Cluster("torchrun's variables", 1, 4, 0, 1, "node1:29500")),
]  # fmt: skip


@pytest.mark.parametrize("environ, expected", [case[1:] for case in FOUND], ids=[case[0] for case in FOUND])
def test_find(environ, expected):
    assert discovery.find(environ) == expected


IN_A_NETWORK = [
    Cluster("torchrun's variables", 1, 4, master="node1:29500"),
    Cluster("Slurm", 0, 2, master="10.0.0.5:29500"),
    Cluster("TF_CONFIG", 0, 2, master="127.0.0.1:1", addresses=("127.0.0.1:1", "10.0.0.5:1")),
]
ON_ONE_MACHINE = [
    ALONE, Cluster("PMI", 1, 2), Cluster("torchrun's variables", 1, 4, master="localhost:29500"),
    Cluster("torchrun's variables", 1, 4, master="[::1]:29500"),
    Cluster("TF_CONFIG", 0, 2, master="127.0.0.1:1", addresses=("127.0.0.1:1", "127.0.0.2:1")),
]  # fmt: skip


@pytest.mark.parametrize("workers", IN_A_NETWORK)
def test_workers_in_a_network_need_a_secret(workers):
    with pytest.raises(UserError, match=r"without a secret.*: set TFDIST_SECRET .*, or give --insecure in a network"):
        discovery.check_secret(workers)
    discovery.check_secret(workers, insecure=True)
    discovery.check_secret(dataclasses.replace(workers, secret="hush"))


@pytest.mark.parametrize("workers", ON_ONE_MACHINE)
def test_workers_on_one_machine_need_no_secret(workers):
    discovery.check_secret(workers)


def test_a_run_in_a_network_without_a_secret_is_refused_at_once(monkeypatch):
    for name, value in env("RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.5 MASTER_PORT=29500").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"2 workers connect to 10\.0\.0\.5:29500 without a secret"):
        connect.locate(PlacementOptions(devices="none"))
    connect.locate(PlacementOptions(devices="none", insecure=True))


def test_the_secret_is_in_no_description_of_a_cluster():
    assert "hush" not in repr(Cluster("Slurm", 0, 2, secret="hush"))


def changed(text, **more):
    """The environment with some variables replaced, or removed (None)."""
    return {k: v for k, v in (env(text) | more).items() if v is not None}


REFUSED = [
    # environment, the whole message or what matters of it
    (env("RANK=1"), "WORLD_SIZE is not set beside RANK=1: set it, or unset RANK"),
    (env("WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1"),
     "RANK is not set beside WORLD_SIZE=2: set it, or unset WORLD_SIZE"),
    (env("RANK=1 WORLD_SIZE=2"),
     "MASTER_ADDR and MASTER_PORT are not set beside WORLD_SIZE=2: set them, or unset WORLD_SIZE"),
    (changed(HAND, MASTER_PORT=None), "MASTER_PORT is not set beside WORLD_SIZE=4"),
    (changed(HAND, RANK="one"), "RANK=one is not an integer of at least 0: correct it"),
    (changed(HAND, RANK="-1"), "RANK=-1 is not an integer of at least 0"),
    (changed(HAND, RANK="4"), "RANK=4 is outside WORLD_SIZE=4: it counts from 0 to 3"),
    (changed(HAND, RANK="9" * 5000), "is not an integer of at least 0"),
    (changed(HAND, WORLD_SIZE="0"), "WORLD_SIZE=0 is not an integer of at least 1"),
    (changed(HAND, WORLD_SIZE="2.0"), "WORLD_SIZE=2.0 is not an integer of at least 1"),
    (changed(HAND, WORLD_SIZE="٤"), "WORLD_SIZE=٤ is not an integer of at least 1"),
    (changed(HAND, MASTER_PORT="0"), "MASTER_PORT=0 is not a port: use a number from 1 to 65535"),
    (changed(HAND, MASTER_PORT="65536"), "MASTER_PORT=65536 is not a port"),
    (changed(HAND, MASTER_ADDR="node1:29500"), "MASTER_ADDR=node1:29500 is not a host name or IP address: correct it"),
    (changed(HAND, MASTER_ADDR="node..1"), "MASTER_ADDR=node..1 is not a host name or IP address"),
    (changed(HAND, MASTER_ADDR="tcp://node1"), "MASTER_ADDR=tcp://node1 is not a host name"),
    (env("RANK=0 WORLD_SIZE=1 MASTER_PORT=x"), "MASTER_PORT=x is not a port"),
    (changed(HAND, LOCAL_WORLD_SIZE="2"),
     "LOCAL_RANK is not set beside LOCAL_WORLD_SIZE=2: set it, or unset LOCAL_WORLD_SIZE"),
    (changed(HAND, LOCAL_WORLD_SIZE="2", LOCAL_RANK="2"),
     "LOCAL_RANK=2 is outside LOCAL_WORLD_SIZE=2: it counts from 0 to 1"),
    (changed(HAND, LOCAL_WORLD_SIZE="5", LOCAL_RANK="2"),
     "LOCAL_WORLD_SIZE=5 is more than WORLD_SIZE=4: correct one of them"),
    (changed(HAND, LOCAL_RANK="4"), "LOCAL_RANK=4 is outside WORLD_SIZE=4"),
    # tfdist.launch and torchrun
    (env("TFDIST_ATTEMPT=0"),
     "RANK and WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not set beside TFDIST_ATTEMPT=0"),
    (changed(TORCHRUN, RANK=None),
     "RANK is not set beside TORCHELASTIC_RUN_ID=none: set it, or unset TORCHELASTIC_RUN_ID"),
    (changed(LAUNCHED, TFDIST_ATTEMPT="first"), "TFDIST_ATTEMPT=first is not an integer of at least 0"),
    (changed(LAUNCHED, TFDIST_ATTEMPT="0", TFDIST_MEETING_FD="-1"),
     "TFDIST_MEETING_FD=-1 is not an integer of at least 0"),
    # TF_CONFIG
    ({"TF_CONFIG": "{"}, "TF_CONFIG is not a JSON object with a cluster in it ("),
    ({"TF_CONFIG": "[]"}, "TF_CONFIG is not a JSON object with a cluster in it ("),
    ({"TF_CONFIG": "[" * 100_000}, "TF_CONFIG is not a JSON object with a cluster in it ("),
    ({"TF_CONFIG": '{"cluster": ["a:1"]}'}, "TF_CONFIG is not a JSON object with a cluster in it ("),
    ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'},
     'TF_CONFIG\'s task is null: write "task": {"type": "worker", "index": 0}, with its own type, chief or'),
    ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": 1}'}, "TF_CONFIG's task is 1: write"),
    (tf_config("worker", None, **THREE), """TF_CONFIG's task is {"type": "worker", "index": null}: write"""),
    (tf_config("worker", -1, **THREE), """TF_CONFIG's task is {"type": "worker", "index": -1}: write"""),
    (tf_config("worker", True, **THREE), """TF_CONFIG's task is {"type": "worker", "index": true}: write"""),
    (tf_config("worker", 1.0, **THREE), """TF_CONFIG's task is {"type": "worker", "index": 1.0}: write"""),
    (tf_config("ps", 0, **THREE), """TF_CONFIG's task is {"type": "ps", "index": 0}: write"""),
    (tf_config(["worker"], 0, **THREE), """TF_CONFIG's task is {"type": ["worker"], "index": 0}: write"""),
    (tf_config("evaluator", 0, **THREE), """TF_CONFIG's task is {"type": "evaluator", "index": 0}: write"""),
    (tf_config("chief", 0, **THREE, evaluator=["c:1"]),
     "TF_CONFIG's cluster has 'evaluator', and tfdist knows chief and worker alone: remove it"),
    (tf_config("chief", 0, **THREE, ps=["c:1"]), "TF_CONFIG's cluster has 'ps', and tfdist knows chief and worker"),
    (tf_config("worker", 0, worker=["b:1"], master=["c:1"]), "TF_CONFIG's cluster has 'master', and tfdist knows"),
    (tf_config("chief", 0, chief=["a:1", "b:1"]), "TF_CONFIG names 2 chiefs: name one, and the others as workers"),
    (tf_config("worker", 2, **THREE),
     "TF_CONFIG's task is worker 2, its cluster lists 2 of that type: correct the index, which counts from 0"),
    (tf_config("chief", 0, worker=["a:1"]), "TF_CONFIG's task is chief 0, its cluster lists 0 of that type"),
    (tf_config("chief", 1, **THREE), "TF_CONFIG's task is chief 1, its cluster lists 1 of that type"),
    (tf_config(worker="a:1"), """TF_CONFIG's worker is "a:1", which is not a list of addresses: correct it"""),
    (tf_config(worker=["a:1", "b:1", "A:1"]), "TF_CONFIG names a:1 twice: give each worker its own address"),
    (tf_config("chief", 0, chief=["a:1"], worker=["a:1"]), "TF_CONFIG names a:1 twice"),
    (tf_config(worker=["a:1", "b"]),
     "TF_CONFIG's worker 1=b is not host:port, such as node1:29500 or [fd00::1]:29500: correct it"),
    (tf_config(worker=["a:1", "::1:80"]), "TF_CONFIG's worker 1=::1:80 is not host:port"),
    (tf_config(worker=["a:1", 7]), "TF_CONFIG's worker 1=7 is not host:port"),
    (tf_config(worker=["a:1", "http://b:1"]), "TF_CONFIG's worker 1=http://b:1 is not host:port"),
    (tf_config("chief", chief=["a:70000"]), "TF_CONFIG's chief 0=a:70000: port=70000 is not a port"),
    (tf_config(worker=["a:", "b:1"]), "TF_CONFIG's worker 0=a:: port= is not a port"),
    (tf_config(worker=["a b:1"]), "TF_CONFIG's worker 0=a b:1: host=a b is not a host name or IP address"),
    (tf_config(worker=["a\nb:1"]), "TF_CONFIG's worker 0=a b:1: host=a b is not a host name"),
    (changed(HAND, MASTER_ADDR="node1\nnode2"), "MASTER_ADDR=node1 node2 is not a host name"),
    (tf_config(worker=["[host]:1"]), "TF_CONFIG's worker 0=[host]:1 is not host:port"),
    (dynamic(), "TF_CONFIG is that of a dynamic TFJob, which lists not all workers: set enableDynamicWorker: false"),
    (dynamic(key="cluster", index=0), "TF_CONFIG is that of a dynamic TFJob"),
    ({"TF_CONFIG": '{"sparseCluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'},
     "TF_CONFIG is that of a dynamic TFJob"),
    (dynamic(kind="chief", index=0), "TF_CONFIG is that of a dynamic TFJob"),
    # Slurm
    (changed(SRUN, SLURM_PROCID=None),
     "SLURM_PROCID is not set beside SLURM_STEP_ID=0: set it, or unset SLURM_STEP_ID"),
    (changed(SRUN, SLURM_STEP_NUM_TASKS=None, SLURM_NTASKS=None),
     "SLURM_STEP_NUM_TASKS is not set beside SLURM_STEP_ID=0"),
    (changed(SRUN, SLURM_PROCID="3"), "SLURM_PROCID=3 is outside SLURM_STEP_NUM_TASKS=3"),
    (changed(SRUN, SLURM_JOB_ID="x"), "SLURM_JOB_ID=x is not an integer"),
    (changed(SRUN, SLURM_RESTART_COUNT="x"), "SLURM_RESTART_COUNT=x is not an integer"),
    (changed(SRUN, SLURM_STEP_TASKS_PER_NODE="2,x"),
     "SLURM_STEP_TASKS_PER_NODE=2,x does not add up to SLURM_STEP_NUM_TASKS=3: unset SLURM_STEP_ID"),
    (changed(SRUN, SLURM_STEP_TASKS_PER_NODE="2(x2)"),
     "SLURM_STEP_TASKS_PER_NODE=2(x2) does not add up to SLURM_STEP_NUM_TASKS=3"),
    (changed(SRUN, SLURM_STEP_TASKS_PER_NODE="2", SLURM_HET_SIZE="2"), "SLURM_STEP_NUM_TASKS=3: start it in one "),
    (changed(SRUN, SLURM_LOCALID="2"),
     "SLURM_LOCALID=2 on node 0 is outside SLURM_STEP_TASKS_PER_NODE=2,1: unset SLURM_STEP_ID"),
    (changed(SRUN, SLURM_NODEID="2"), "SLURM_LOCALID=1 on node 2 is outside SLURM_STEP_TASKS_PER_NODE=2,1"),
    (changed(SRUN, SLURM_STEP_NODELIST="n[1-"),
     "SLURM_STEP_NODELIST=n[1- is not a host list such as n[1-3,07]: correct it, or set MASTER_ADDR"),
    (env(ARBITRARY),
     "SLURM_DISTRIBUTION=arbitrary does not tell on which host rank 0 runs: set MASTER_ADDR to that host"),
    # MPI and horovodrun
    (changed(MPIRUN, OMPI_COMM_WORLD_RANK="2"), "OMPI_COMM_WORLD_RANK=2 is outside OMPI_COMM_WORLD_SIZE=2"),
    (changed(MPIRUN, OMPI_COMM_WORLD_SIZE=None), "OMPI_COMM_WORLD_SIZE is not set beside OMPI_COMM_WORLD_RANK=1"),
    (changed(HYDRA, PMI_SIZE="two"), "PMI_SIZE=two is not an integer of at least 1"),
    (changed(HYDRA, MPI_LOCALRANKID="2"), "MPI_LOCALRANKID=2 is outside MPI_LOCALNRANKS=2"),
    (env("HOROVOD_RANK=0"), "HOROVOD_SIZE is not set beside HOROVOD_RANK=0: set it, or unset HOROVOD_RANK"),
    (changed(HOROVOD, HOROVOD_RANK="4"), "HOROVOD_RANK=4 is outside HOROVOD_SIZE=4"),
    # The platform
    (env("MLP_WORKER_NUM=2"),
     "MLP_ROLE_INDEX and MLP_WORKER_0_HOST and MLP_WORKER_0_PORT are not set beside MLP_WORKER_NUM=2"),
    (changed(PLATFORM, MLP_ROLE_INDEX="2"), "MLP_ROLE_INDEX=2 is outside MLP_WORKER_NUM=2"),
    (changed(PLATFORM, MLP_WORKER_0_PORT="0"), "MLP_WORKER_0_PORT=0 is not a port"),
    (changed(PLATFORM, MLP_WORKER_0_HOST="a/b"), "MLP_WORKER_0_HOST=a/b is not a host name"),
    (changed(PLATFORM, MLP_WORKER_GPU="all"), "MLP_WORKER_GPU=all is not an integer of at least 0"),
    # Contradictions
    (tf_config("chief", 0, **THREE) | env(HAND),
     "this process is rank 0 of 3 by TF_CONFIG and rank 1 of 4 by torchrun's variables: unset TF_CONFIG, or unset"),
    (tf_config("chief", 0, **THREE) | env(SRUN),
     "this process is rank 0 of 3 by TF_CONFIG and rank 1 of 3 by Slurm: unset TF_CONFIG, or unset SLURM_STEP_ID"),
    (tf_config("chief", 0, chief=["a:1"]) | env(HAND),
     "this process is rank 0 of 1 by TF_CONFIG and rank 1 of 4 by torchrun's variables"),
    (env(f"{HAND} {HOROVOD}"),
     "this process is rank 1 of 4 by torchrun's variables and rank 3 of 4 by horovodrun: unset RANK and"),
    (env(f"{SRUN} {MPIRUN}"),
     "this process is rank 1 of 2 by Open MPI and rank 1 of 3 by Slurm: unset OMPI_COMM_WORLD_RANK and"),
    (env(f"{SRUN} {HYDRA}"),
     "this process is rank 1 of 3 by Slurm and rank 1 of 2 by PMI: unset SLURM_STEP_ID, or unset PMI_RANK and"),
    (env(f"{PLATFORM} {HAND}"),
     "this process is rank 1 of 4 by torchrun's variables and rank 1 of 2 by MLP_WORKER_NUM: unset RANK and"),
]  # fmt: skip


@pytest.mark.parametrize("environ, message", REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_refused(environ, message):
    with refused(re.escape(message)):
        discovery.find(environ)


@pytest.mark.parametrize("hosts, expected", [
    # The first of those to which `scontrol show hostnames` expands them; it knows no text after a bracket.
    ("n1", "n1"), ("a,b,c", "a"), ("n[1-3,07,10-12]", "n1"), ("n[08-11]", "n08"), ("n-1[3,5]", "n-13"),
    ("r[1-2]n[1-2]", "r1n1"), ("n[1-2][3-4]", "n13"), ("gpu[001-003],cpu[1-2],login", "gpu001"),
    ("b[01-02]x,a1", "b01x"), ("n[1-999999999]", "n1"),
])  # fmt: skip
def test_the_first_of_a_host_list(hosts, expected):
    assert addresses.first_host(hosts) == expected


@pytest.mark.parametrize("spread, tasks", [("999999(x999999),1(x999999)", "2000000000000"), ("9(x99999)", "899991")])
def test_tasks_that_no_machine_has(spread, tasks):
    """They took the memory of the machine, one number for each."""
    environ = changed(SRUN, SLURM_STEP_TASKS_PER_NODE=spread, SLURM_STEP_NUM_TASKS=tasks, SLURM_NODEID="")
    if tasks == "899991":
        assert discovery.find(environ).size == 899991
    else:
        with pytest.raises(UserError, match="does not add up to"):
            discovery.find(environ)
