"""Several hosts, Slurm and Open MPI: each way to start workers ends with the weights of one device.

What they need is said in `network_hosts.py`; where it is missing, the tests are skipped and say why.
"""

import json
import os
import re
import sys
import time

import psutil
import pytest
from conftest import REPOSITORY
from support import network_hosts

pytest_plugins = ("support.network_hosts",)  # its fixtures
PORT = 29500
LOST = re.compile(r"(\[0\](<stderr>:| ))?tfdist: failed: lost worker 1 \(h2\): silent for 1\d s")
HOROVODRUN = os.path.join(os.path.dirname(sys.executable), "horovodrun")
FLAGS = [
    *("--config.model.name=mlp", "--config.train.epochs=2", "--config.optimizer.warmup=0%"),
    *("--threads=1", "--progress=plain"),
]
ENDLESS = "--config.train.epochs=100000"


@pytest.fixture(scope="module")
def reference(tmp_path_factory, tfds_dir):
    """Norm of the weights that one process ends with, on one device."""
    folder = tmp_path_factory.mktemp("reference")
    program = network_hosts.Program(train("--strategy=default", "--workdir=run"), network_hosts.clean(tfds_dir), folder)
    assert program.end() == 0, program.text
    return json.loads((folder / "run/result.json").read_text())["weights_norm"]


def train(*flags):
    return [sys.executable, "-m", "tfdist.train", *FLAGS, *flags]


def by_hand(start, hosts, *flags):
    """One worker on each host, told by TF_CONFIG."""
    cluster = {"worker": [f"{address}:{PORT}" for address in map(network_hosts.ADDRESSES.get, network_hosts.NAMES)]}
    started = []
    for rank, name in enumerate(network_hosts.NAMES):
        told = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
        words = train("--strategy=multi_worker", "--workdir=run", *flags)
        started.append(start(*hosts.on(name), *words, TF_CONFIG=told, TFDIST_SECRET="hush"))
    return started


def by_launch(start, hosts, *flags):
    """One launcher on each host."""
    started = []
    for rank, name in enumerate(network_hosts.NAMES):
        where = [
            "--nnodes=2",
            f"--node_rank={rank}",
            f"--master_addr={network_hosts.ADDRESSES['h1']}",
            f"--master_port={PORT}",
        ]
        words = [sys.executable, "-m", "tfdist.launch", "--nproc_per_node=1", *where, "--"]
        started.append(start(*hosts.on(name), *words, *FLAGS, "--workdir=run", *flags, TFDIST_SECRET="hush"))
    return started


def by_horovodrun(start, hosts, *flags):
    """horovodrun on the first host, which reaches the other one by ssh."""
    path = hosts.ssh(TEST_MARK=start.mark)
    words = [HOROVODRUN, "--gloo", "-np", "2", "-H", "h1:1,h2:1", "--network-interface", "eth0"]
    return [start(*hosts.on("h1"), *words, *train("--workdir=run", *flags), PATH=path)]


def by_mpirun(start, hosts, *flags):
    """mpirun on the first host, which reaches the other one by ssh."""
    network_hosts.needs("openmpi-bin", "mpirun")
    environ = {"PATH": hosts.ssh(TEST_MARK=start.mark), "MASTER_ADDR": "h1", "TFDIST_SECRET": "hush"}
    names = ("HOME", "MASTER_ADDR", "PYTHONPATH", "TFDIST_SECRET", "TFDS_DATA_DIR", "TF_CPP_MIN_LOG_LEVEL")
    forwarded = [word for name in names for word in ("-x", name)]
    words = ["mpirun", "--allow-run-as-root", "-np", "2", "-H", "h1:1,h2:1", *forwarded]
    return [start(*hosts.on("h1"), *words, *train("--workdir=run", *flags), **environ)]


WAYS = [
    # how, strategy, what stands in the reason for it
    pytest.param(by_hand, "multi_worker", "asked for", id="by-hand", marks=pytest.mark.whole),
    pytest.param(by_launch, "multi_worker", "tfdist.launch", id="launch"),
    pytest.param(by_horovodrun, "horovod", "horovodrun", id="horovodrun", marks=pytest.mark.whole),
    pytest.param(by_mpirun, "multi_worker", "Open MPI", id="mpirun", marks=pytest.mark.faults),
]


def assert_agrees(programs, strategy, source, folder, reference):
    """All have ended well, as two workers that have learnt so from `source`, and with the weights of one."""
    codes = [program.end() for program in programs]
    assert codes == [0] * len(codes), output(programs)
    environment, result = (json.loads((folder / f"run/{name}.json").read_text()) for name in ("environment", "result"))
    assert (environment["strategy"], result["workers"], result["status"]) == (strategy, 2, "completed")
    assert source in environment["reason"]
    assert result["weights_norm"] == pytest.approx(reference, rel=1e-6)


def output(programs):
    return "\n---\n".join(program.text for program in programs)


@pytest.mark.whole
@pytest.mark.parametrize("way, strategy, source", WAYS)
def test_two_hosts(way, strategy, source, hosts, start, tmp_path, reference):
    assert_agrees(way(start, hosts), strategy, source, tmp_path, reference)


@pytest.mark.faults
@pytest.mark.parametrize("way", [by_hand, by_launch, by_horovodrun])
def test_an_unplugged_host(way, hosts, start):
    # Not by mpirun: Open MPI 4.1 itself was still waiting for its daemon on the lost host after two minutes.
    programs = way(start, hosts, ENDLESS)
    programs[0].until("epoch      3/100000")
    hosts.unplug("h2")
    codes = [program.end() for program in programs]
    assert codes == [1] * len(codes), output(programs)
    # The worker and its launcher listen to h2 by connections of their own, and the first to miss it ends both.
    lost = [line for line in programs[0].lines if LOST.fullmatch(line)]
    by_launcher = [line for line in programs[0].lines if "h2" in line and " is lost: " in line]
    assert len(lost) == 1 or (way is by_launch and not lost and by_launcher), output(programs)
    _, left = psutil.wait_procs(network_hosts.marked(start.mark), timeout=network_hosts.GONE_S)
    assert not left


@pytest.mark.whole
def test_slurm_two_nodes(slurm, hosts, start, tmp_path, reference):
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    program = start(*hosts.on("h1"), *srun, *train("--workdir=run"), SLURM_CONF=str(slurm), TFDIST_SECRET="hush")
    assert_agrees([program], "multi_worker", "Slurm", tmp_path, reference)


@pytest.mark.whole
def test_the_batch_script_of_deploy(slurm, hosts, start, tmp_path, reference):
    """As it is, with a secret that it makes itself; `python` is the one of the tests."""
    script = os.path.join(REPOSITORY, "deploy/slurm.sbatch")
    options = ["--wait", f"--chdir={tmp_path}", f"--output={tmp_path}/said"]
    environ = {"SLURM_CONF": str(slurm), "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    program = start(*hosts.on("h1"), "sbatch", *options, script, *FLAGS, "--workdir=run", **environ)
    code, said = program.end(), (tmp_path / "said").read_text()
    assert code == 0, program.text + said
    assert_agrees([program], "multi_worker", "Slurm", tmp_path, reference)


@pytest.mark.whole
@pytest.mark.faults
def test_a_requeued_job_goes_on_with_fewer_nodes(slurm, hosts, start, tmp_path, tfds_dir):
    """It saves at Slurm's signal, puts itself back, gets one node where it had two, and ends with the bits of one."""
    flags = [*FLAGS, "--config.train.virtual_replicas=2", "--config.train.epochs=60"]
    environ = {"SLURM_CONF": str(slurm), "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    (tmp_path / "said").touch()

    def ask(*words):
        program = start(*hosts.on("h1"), *words, **environ)
        assert program.end() == 0, program.text
        return program.text.strip()

    def result(folder):
        return json.loads((tmp_path / folder / "result.json").read_text())

    options = ["--parsable", f"--chdir={tmp_path}", f"--output={tmp_path}/said"]
    job = ask("sbatch", *options, os.path.join(REPOSITORY, "deploy/slurm.sbatch"), *flags, "--workdir=run")
    said = start("tail", "--lines=+1", "--follow", str(tmp_path / "said"))
    said.until(" 3/60")
    ask("scancel", "--signal=USR1", f"{job}.0")
    said.until(f"job {job} is in the queue again")
    end = time.monotonic() + network_hosts.LIMIT_S
    while ask("squeue", "--noheader", "--format=%T", f"--jobs={job}") != "PENDING":
        assert time.monotonic() < end, said.text
    assert (result("run")["status"], result("run")["workers"]) == ("preempted", 2)
    ask("scontrol", "update", "NodeName=h2", "State=DRAIN", "Reason=test")
    ask("scontrol", "update", f"JobId={job}", "NumNodes=1", "NumTasks=1", "StartTime=now")  # else after two minutes
    said.until("tfdist: completed")
    found = result("run")
    assert (found["workers"], found["resumed_from"] >= 60) == (1, True)
    alone = start(sys.executable, "-m", "tfdist.train", "--strategy=default", *flags, "--workdir=alone")
    assert alone.end() == 0, alone.text
    assert found["weights_sha256"] == result("alone")["weights_sha256"]


DETECT = (
    "import os, dataclasses, json, tfdist.cluster.discovery as c; "
    "print(json.dumps(dataclasses.asdict(c.find(os.environ))))"
)
TASKS = [
    # options of srun; rank, size, local rank and local size of each task
    ("-N1 -n2", [(0, 2, 0, 2), (1, 2, 1, 2)]),
    ("-N2 -n3", [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]),
    ("-N2 -n4 --distribution=cyclic", [(0, 4, 0, 2), (1, 4, 0, 2), (2, 4, 1, 2), (3, 4, 1, 2)]),
    ("-N1 -n1 : -N1 -n2", [(0, 3, 0, 1), (1, 3, 0, 2), (2, 3, 1, 2)]),  # a heterogeneous job
]


@pytest.mark.whole
def test_slurm_tasks(slurm, hosts, start):
    for options, places in TASKS:  # in one test: it is Slurm itself that takes its time
        parts = [[*part.split(), sys.executable, "-c", DETECT] for part in options.split(" : ")]
        words = ["srun", *parts[0], *(word for part in parts[1:] for word in (":", *part))]
        program = start(*hosts.on("h1"), *words, SLURM_CONF=str(slurm))
        assert program.end() == 0, program.text
        found = sorted((json.loads(line) for line in program.lines if line[0] == "{"), key=lambda c: c["rank"])
        assert [(c["rank"], c["size"], c["local_rank"], c["local_size"]) for c in found] == places, options
        assert {(c["source"], c["master"].partition(":")[0]) for c in found} == {
            ("Slurm", "127.0.0.1" if options.startswith("-N1 -n2") else "h1")
        }
        assert len({c["master"] for c in found}) == 1


@pytest.mark.whole
def test_mpirun(start, tmp_path, reference):
    network_hosts.needs("openmpi-bin", "mpirun")
    program = start("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *train("--workdir=run"))
    assert_agrees([program], "multi_worker", "Open MPI", tmp_path, reference)
