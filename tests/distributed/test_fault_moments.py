"""Faults in mid-run: each strategy, each moment, each fault, of the chief and of another worker.

Whatever happens, the run ends soon, nobody is left, the right one is named, and the same command goes on to the same
bits. The moment is met by a hook in the worker (`support/fault_hook.py`), never by a clock. `make faults` runs cells
such that each pair of values occurs; `make test-all` runs all.
"""

import contextlib
import os
import re
import select
import signal
import sys
import time

import psutil
import pytest
from support import fault_hook, launchers, network_hosts, undisturbed_runs
from support.small_disks import mounted  # noqa: F401  a fixture
from support.undisturbed_runs import HOROVODRUN, TRAIN, WAYS, result

pytest_plugins = ("support.network_hosts",)  # its fixtures
pytestmark = pytest.mark.faults
HOST = os.uname().nodename
LIMIT_S = {"mirrored": 20, "multi_worker": 20, "horovod": 35}
"""From the fault to the end of the last process, on a machine with as many cores as workers."""
START_S = 30
"""Those who have come wait so long for one that is silent before they have met (`--start_timeout`)."""
PATIENCE = 4
"""Times that; what counts is the figure that is recorded."""
FLAGS = [
    *("--config.model.name=mlp", "--config.train.epochs=3", "--config.train.steps_per_call=2"),
    *("--config.checkpoint.every=14 steps", "--config.optimizer.warmup=0%", "--threads=1", "--progress=plain"),
    *("--notensorboard", "--workdir=run"),
]
MOMENTS = ("import", "meeting", "first compile", "training", "evaluation", "checkpoint", "report", "result")
HOROVODRUN_AT = re.escape(network_hosts.ADDRESSES["h1"])
KINDS = ("SIGKILL", "SIGSTOP", "SIGTERM", "disk")
VICTIMS = (("mirrored", 0), ("multi_worker", 0), ("multi_worker", 1), ("horovod", 0), ("horovod", 1))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tfds_dir):
    """What the undisturbed run under each strategy ends with."""
    return undisturbed_runs.ends(FLAGS, tmp_path_factory, tfds_dir)


def named(text, victim, kind):
    """Whether a line tells of the victim by its rank and host."""
    # By its address, where it has never come to tell its host.
    who = rf"(worker|rank) {victim}\b.*({re.escape(HOST)}|127\.0\.0\.1:\d+.*has not joined)"
    lines = [line for line in text.splitlines() if re.search(who, line)]
    # horovodrun itself tells of one that has ended before tfdist was there.
    return lines or [line for line in text.splitlines() if re.search(rf"Process name: {victim}$", line)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("way, victim", VICTIMS, ids=lambda v: str(v))
def test_a_fault(way, victim, moment, kind, start, hooked, mounted, tmp_path, whole, record_property, tfds_dir):  # noqa: F811
    expected = whole(way)
    if kind == "disk":
        mounted(tmp_path / "run", "size=16m")
    path, early = network_hosts.clean(tfds_dir)["PYTHONPATH"], kind == "SIGSTOP" and moment in ("import", "meeting")
    flags = [*FLAGS, f"--start_timeout={START_S}"] if early else FLAGS
    program = start(*WAYS[way], *flags, **hooked(moment, kind, victim, path))
    alone = way == "mirrored"
    if kind == "SIGSTOP" and alone:  # nobody is there to miss it; it goes on when it may
        until_hit(program, tmp_path)
        program.family()[0].send_signal(signal.SIGCONT)
    code, text = ended(program, tmp_path, LIMIT_S[way] + early * START_S, start.mark, record_property), program.text
    assert (tmp_path / fault_hook.HIT).exists(), f"the moment never came:\n{text}"
    assert not tracebacks(text, way), text
    if code and kind in ("SIGKILL", "SIGSTOP") and not alone:
        assert named(text, victim, kind), text
    if code and kind == "disk":
        assert re.search(r"tfdist: (error|failed): .*(No space left|cannot be written)", text), text
        assert code in (1, 2), text
    if kind == "SIGTERM" and moment in ("first compile", "training", "evaluation") and way != "horovod":
        assert code == 143 and result(tmp_path)["status"] == "preempted", text
    goes_on(start, way, code, tmp_path, expected)


def tracebacks(text, way):
    """Those of the workers; horovodrun ends with one of its own whenever a rank has failed."""
    lines = [line for line in text.splitlines() if "Traceback (most recent call last)" in line]
    return [line for line in lines if way != "horovod" or line.startswith("[")]


def until_hit(program, folder):
    end = time.monotonic() + network_hosts.LIMIT_S
    stopped = lambda: any(p.status() == psutil.STATUS_STOPPED for p in alive(program))
    while not ((folder / fault_hook.HIT).exists() and stopped()):
        assert time.monotonic() < end and program.process.poll() is None, program.text
        time.sleep(0.05)


def alive(program):
    found = []
    for process in program.family():
        with contextlib.suppress(psutil.Error):
            process.status()
            found.append(process)
    return found


def ended(program, folder, limit, mark, record_property):
    """The exit code, with nobody left; records the seconds since the fault."""
    code = program.end()
    _, left = psutil.wait_procs(network_hosts.marked(mark), timeout=network_hosts.GONE_S)
    assert not left, f"left: {left}\n{program.text}"
    if (folder / fault_hook.HIT).exists():
        seconds = time.time() - float((folder / fault_hook.HIT).read_text())
        record_property("seconds from the fault to the end", round(seconds, 1))
        if where := os.environ.get("FAULT_FIGURES"):
            with open(where, "a") as file:
                file.write(f"{seconds:.1f}\t{code}\t{os.environ.get('PYTEST_CURRENT_TEST')}\n")
        assert seconds < PATIENCE * limit, f"{seconds:.0f} s:\n{program.text}"
    return code


def goes_on(start, way, code, folder, expected):
    """The run, or the same command without the fault where it has failed, ends with the same bits."""
    (folder / "run/ballast").unlink(missing_ok=True)
    if code:
        again = start(*WAYS[way], *FLAGS)
        assert again.end() == 0, again.text
    found = result(folder)
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert found["history"] == expected["history"] and found["evaluation"] == expected["evaluation"]


def test_the_chief_is_killed_while_another_worker_imports_tensorflow(start, hooked, tmp_path, tfds_dir):
    """Which keeps standard error back meanwhile: the worker says all the same why it ends. Without a launcher."""
    environ = hooked("import", "SIGKILL", 0, network_hosts.clean(tfds_dir)["PYTHONPATH"]) | {"FAULT_BY": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launchers.free_port())}
    place |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    _, other = (
        start(*TRAIN, "--strategy=multi_worker", *FLAGS, **environ, **place, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in (0, 1)
    )
    assert other.end() == 1, other.text
    assert other.lines[-1] == f"tfdist: failed: lost worker 0 ({HOST}): its process ended"


# -- the network -------------------------------------------------------------------------


def pipe(path):
    """A named pipe, open at this end, so that the other one never waits for that."""
    os.mkfifo(path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


@pytest.mark.covering(1)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("way", ["multi_worker", "horovod"])
def test_a_host_is_cut_off(way, victim, moment, start, hooked, hosts, tmp_path, whole, record_property, tfds_dir):
    """Both sides end, each by itself; afterwards the same command on one host goes on to the same bits."""
    expected = whole(way)
    pipes = {name: pipe(tmp_path / name) for name in ("asked", "done")}
    path = network_hosts.clean(tfds_dir)["PYTHONPATH"]
    environ = hooked(moment, "network", victim, path)
    early = way == "horovod" and moment in ("import", "meeting")  # tfdist.launch hears of its nodes all the time
    flags = [*FLAGS, f"--start_timeout={START_S}"] if early else FLAGS
    if way == "multi_worker":
        where = [
            "--nnodes=2", "--nproc_per_node=1", f"--master_addr={network_hosts.ADDRESSES['h1']}", "--master_port=29500",
        ]  # fmt: skip
        launch = [sys.executable, "-m", "tfdist.launch", *where]
        programs = [
            start(*hosts.on(name), *launch, f"--node_rank={rank}", "--", "--strategy=multi_worker", *flags,
                  TFDIST_SECRET="hush", **environ)
            for rank, name in enumerate(network_hosts.NAMES)
        ]  # fmt: skip
    else:
        ssh = hosts.ssh(TEST_MARK=start.mark)
        words = [HOROVODRUN, "--gloo", "-np", "2", "-H", "h1:1,h2:1", "--network-interface", "eth0"]
        programs = [start(*hosts.on("h1"), *words, *TRAIN, "--strategy=horovod", *flags, PATH=ssh, **environ)]
    ready, _, _ = select.select([pipes["asked"]], [], [], network_hosts.LIMIT_S)
    assert ready, f"the moment never came: {[program.text for program in programs]}"
    hosts.unplug(network_hosts.NAMES[victim])
    os.write(pipes["done"], b"x")
    codes = [
        ended(program, tmp_path, LIMIT_S[way] + early * START_S, start.mark, record_property) for program in programs
    ]
    for descriptor in pipes.values():
        os.close(descriptor)
    text = "\n".join(program.text for program in programs)
    assert not tracebacks(text, way), text
    if any(codes):
        assert cut_off_named(text, victim, network_hosts.NAMES[victim], moment if early else ""), text
    goes_on(start, way, max(codes), tmp_path, expected)


def cut_off_named(text, victim, host, early):
    """Whether a line tells of the victim by its rank and host: by its address where that is all that is known."""
    address = re.escape(network_hosts.ADDRESSES[host])
    if early == "import":  # nobody has heard of the host, but that horovodrun is on the first one
        return re.search(
            rf"worker {victim} of 2 has not come|\[1\].*horovodrun cannot be reached at {HOROVODRUN_AT}", text
        )
    # At the end the other side may have all that it needs, and be ended by horovodrun before it misses anybody.
    by_horovodrun = rf"^Process name: {victim}$"
    return re.search(rf"(worker|rank|node) {victim}\b.*\b({host}|{address})\b|{by_horovodrun}", text, re.MULTILINE)
