"""More than one host on this machine: network namespaces with a switch between them, and a small Slurm on top.

It needs root, and of Debian's packages iproute2, openmpi-bin, slurm-wlm and munge; no service has to run:

    apt-get install --no-install-recommends iproute2 openmpi-bin slurm-wlm munge

Each host has a network, a host name and an /etc/hosts of its own, and shares the disk. Nothing of it can
be seen from outside, so any number of these can stand side by side with the same addresses.
"""

import contextlib
import os
import re
import shutil
import sys
import time
import uuid

import psutil
import pytest
from conftest import REPOSITORY

from support import processes
from support.launchers import marked
from support.running import Running

LIMIT_S = 120
"""For any program here; no test depends on how fast it is."""
GONE_S = 30
"""For what a program has started to be gone after it."""
NAMES = ("h1", "h2")
MORE = (*NAMES, "h3")
ADDRESSES = {name: f"10.77.0.{number}" for number, name in enumerate(MORE, 1)}
_OF_OTHERS = re.compile(
    "(CUDA|HOROVOD|LOCAL|MASTER|MLP|MPI|OMPI|PMI|PMIX|SLURM|TFDIST|TORCHELASTIC)_|(TF_CONFIG|RANK|WORLD_SIZE)$"
)


class Program(Running):
    """A running program."""

    def __init__(self, words, env, cwd):
        words = [*map(str, words)]
        self._direct = words[0] == sys.executable
        # Not only for a test that waits in vain: also for one that is killed itself, with which a forked
        # interpreter ends by itself.
        bounded = words if self._direct else ["timeout", "-k", "3", str(LIMIT_S), *words]
        super().__init__(bounded, LIMIT_S + 10, cwd=cwd, env=env, stdin=processes.DEVNULL)

    def family(self):
        """The program itself, and after it all that it has started."""
        try:
            process = psutil.Process(self.process.pid)
            return [process] * self._direct + process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def clean(tfds_dir):
    """This environment without what would tell of other workers."""
    env = {k: v for k, v in os.environ.items() if not _OF_OTHERS.match(k)}
    env |= {"PYTHONPATH": str(REPOSITORY), "TFDS_DATA_DIR": str(tfds_dir)}
    return env | {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}


@pytest.fixture
def start(tmp_path, tfds_dir):
    """Starts programs; afterwards none of them, and nothing that they started, is left."""
    mark = uuid.uuid4().hex

    def run(*words, **environ):
        return Program(words, clean(tfds_dir) | {"HOME": str(tmp_path), "TEST_MARK": mark} | environ, tmp_path)

    run.mark = mark
    yield run
    for _ in range(3):  # what starts others may do so while it is looked for
        left = marked(mark)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=GONE_S)


@pytest.fixture
def hooked(tmp_path):
    """Gives the variables with which a worker meets with a fault, see `fault_hook`."""
    shim = tmp_path / "shim"
    shim.mkdir()
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    (shim / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({tests!r})\nfrom support import fault_hook\nfault_hook.main()\n"
    )

    def variables(moment, kind, victim, path):
        given = {"FAULT": f"{moment}/{kind}/{victim}", "FAULT_FOLDER": str(tmp_path)}
        if moment == "import":
            given["NPY_FRESH"] = "1"  # a forked interpreter has imported it: with such a variable there is none
        return given | {"PYTHONPATH": f"{shim}{os.pathsep}{path}"}

    return variables


def needs(package, *programs):
    """Skips the test where a program is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [program for program in programs if not shutil.which(program, path=path)]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed: apt-get install {package}")


class Hosts:
    """Some hosts and a switch."""

    def __init__(self, folder, names):
        self.folder = folder
        mark = uuid.uuid4().hex[:8]
        self._switch, *spaces = (f"tfdist-{mark}-{name}" for name in ("switch", *names))
        self._spaces = dict(zip(names, spaces))

    def make(self):
        """Raises `OSError` where the kernel or the user may not."""
        lines = "".join(f"{ADDRESSES[name]} {name}\n" for name in self._spaces)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{lines}")
        self._ip("netns", "add", self._switch)
        self._ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        self._ip("-n", self._switch, "link", "set", "switch", "up")
        for name, space in self._spaces.items():
            self._ip("netns", "add", space)
            self._ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", name, "netns", self._switch)
            self._ip("-n", self._switch, "link", "set", name, "master", "switch", "up")
            self._ip("-n", space, "addr", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                self._ip("-n", space, "link", "set", link, "up")
            inside = 'echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" /etc/hosts && shift && exec "$@"'
            entry = f"nsenter --net=/var/run/netns/{space} unshare --uts --mount sh -c '{inside}'"
            self._script(f"on-{name}", f'exec {entry} {name} {self.folder}/hosts "$@"')
            processes.run([*self.on(name), "true"], check=True)

    def remove(self):
        for space in (*self._spaces.values(), self._switch):
            processes.run(["ip", "netns", "del", space], stderr=processes.DEVNULL)

    def on(self, name):
        """Words that, before a command, let it run on a host."""
        return [str(self.folder / f"on-{name}")]

    def unplug(self, name):
        """Nothing comes or goes any more, and nobody is told."""
        self._ip("-n", self._spaces[name], "link", "set", "eth0", "down")

    def ssh(self, **environ):
        """A PATH that begins with an ssh to the hosts, which gives a program there that PATH and `environ` only."""
        environ["PATH"] = f"{self.folder}/bin:{os.environ['PATH']}"
        given = " ".join(f"{name}='{value}'" for name, value in environ.items())
        (self.folder / "bin").mkdir()
        options = "while :; do case $1 in -[olpi]) shift 2;; -*) shift;; *) break;; esac; done"
        words = f"{options}; host=$1; shift; {options}"  # it takes options after the host, too
        self._script("bin/ssh", f'{words}\nexec env -i {given} {self.folder}/on-"$host" sh -c "$*"')
        return environ["PATH"]

    def _script(self, name, text):
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def _ip(self, *words):
        done = processes.run(["ip", *words], stderr=processes.PIPE, text=True)
        if done.returncode:
            raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def hosts(tmp_path_factory):
    with _made(Hosts(tmp_path_factory.mktemp("hosts"), NAMES)) as two:
        yield two


@pytest.fixture
def more_hosts(tmp_path_factory):
    with _made(Hosts(tmp_path_factory.mktemp("hosts"), MORE)) as three:
        yield three


@contextlib.contextmanager
def _made(made):
    """Makes hosts, or skips the test where that cannot be; removes them afterwards."""
    needs("iproute2 util-linux", "ip", "nsenter", "unshare")
    if os.geteuid():
        pytest.skip("only root can make network namespaces")
    try:
        try:
            made.make()
        except (OSError, processes.CalledProcessError) as error:
            pytest.skip(f"this kernel forbids network namespaces: {error}")
        yield made
    finally:
        made.remove()


SLURM_CONF = """\
ClusterName=tests
SlurmctldHost=h1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
KillWait=3
NodeName=h[1-2] CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""


@pytest.fixture
def slurm(hosts, start):
    """Nodes h1 and h2 with two CPUs each; the value is the path of slurm.conf, for SLURM_CONF."""
    needs("slurm-wlm munge", "munged", "slurmctld", "slurmd", "srun")
    folder = hosts.folder
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    conf = folder / "slurm.conf"
    conf.write_text(SLURM_CONF.format(folder=folder))
    environ = {"SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    names = {"key-file": "key", "socket": "munge", "pid-file": "munged.pid", "seed-file": "seed", "log-file": "log"}
    paths = [f"--{option}={folder / name}" for option, name in names.items()]
    daemons = [start(*hosts.on("h1"), "munged", "--foreground", "--force", *paths, **environ)]
    daemons += [start(*hosts.on("h1"), "slurmctld", "-D", "-c", "-f", conf, **environ)]
    daemons += [start(*hosts.on(name), "slurmd", "-D", "-f", conf, **environ) for name in NAMES]
    end = time.monotonic() + LIMIT_S
    asked = None
    while not asked or asked.lines != ["2 idle"]:
        said = "\n".join(daemon.text for daemon in daemons)
        assert time.monotonic() < end and all(d.process.poll() is None for d in daemons), f"Slurm: {said}"
        asked = start(*hosts.on("h1"), "sinfo", "--noheader", "--format=%D %t", **environ)
        asked.end()
    return conf
