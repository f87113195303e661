"""The doctor's checks of memory, disk, data and ports, one by one: each is made to fail for real, and to pass."""

import socket

import psutil
from support.doctor_findings import one
from support.small_disks import mounted  # noqa: F401  a fixture

from tfdist.doctor import machine
from tfdist.doctor import workers as checks

# -- machine --------------------------------------------------------------------


def test_the_limits_of_a_container(tmp_path):
    """Its own group has one, and that above it another."""
    (tmp_path / "own").write_text("1:name=systemd:/old\n0::/job/step\n")
    groups = machine.groups(tmp_path / "cgroup", tmp_path / "own")
    step, job = groups[:2]
    assert groups == [tmp_path / "cgroup/job/step", tmp_path / "cgroup/job", tmp_path / "cgroup"]
    step.mkdir(parents=True)
    for path, text in {
        step / "memory.max": "max",
        step / "memory.current": "1000",
        step / "cpu.max": "50000 100000",
        job / "memory.max": "1000000000",
        job / "memory.current": "600000000",
        job / "cpu.max": "150000 100000",
    }.items():
        path.write_text(text + "\n")
    here = machine.look(groups)
    assert (here.memory_total, here.memory_free, here.quota) == (1_000_000_000, 400_000_000, 0.5)
    one(machine.cores(here), "warn", "this container or job may use 0.5 of", "--threads=1")
    one(machine.memory(here), "warn", "0.4 of 0.9 GiB free", "data.cache=stream")
    (job / "memory.max").write_text(f"{psutil.virtual_memory().total - 1}\n")
    (job / "memory.current").write_text("0\n")
    here = machine.look(groups)
    assert here.memory_free < here.memory_total == psutil.virtual_memory().total - 1  # others use the machine too
    (step / "cpu.max").write_text("max 100000\n")
    (job / "cpu.max").unlink()
    (job / "memory.max").write_text("max\n")
    free = machine.look(groups)
    one(machine.cores(free), "ok", "for this process")
    assert free.memory_total == psutil.virtual_memory().total and free.quota is None
    assert machine.groups(tmp_path, tmp_path / "none") == []


def test_shared_memory(mounted, tmp_path):  # noqa: F811
    folder = mounted(tmp_path / "shm", "size=64m")
    one(machine.shared_memory(folder), "warn", "0.06 of 0.06 GiB free", "--shm-size=2g")
    one(machine.shared_memory(folder, least=1e6), "ok", "GiB free")
    one(machine.shared_memory(tmp_path / "nowhere"), "warn", "cannot be used (No such file or directory)", "emptyDir")


# -- disk -----------------------------------------------------------------------


def test_a_full_disk(mounted, tmp_path):  # noqa: F811
    disk = mounted(tmp_path / "disk", "size=2m")
    (disk / "ballast").write_bytes(bytes(2 << 20))
    one(machine.room(disk / "run"), "fail", "only 0.0 kB free", "free some")
    assert [p.name for p in disk.iterdir()] == ["ballast"]


def test_a_disk_that_fills_up_soon(mounted, tmp_path):  # noqa: F811
    disk = mounted(tmp_path / "disk", "size=200m")
    one(machine.room(disk), "warn", "only 209.7 MB free", "free some")
    text = "3 checkpoints like the newest take 320.0 MB"
    one(machine.room(disk, checkpoint=80_000_000, keep=3), "warn", text, "checkpoint.keep")
    one(machine.room(disk, checkpoint=300_000_000), "fail", "only", "free some")


def test_a_disk_that_cannot_be_written(mounted, tmp_path):  # noqa: F811
    disk = mounted(tmp_path / "disk", "ro,size=2m")
    one(machine.room(disk), "fail", "this user may not write in", "mend permissions or mount")
    inodes = mounted(tmp_path / "inodes", "size=200m,nr_inodes=2")
    (inodes / "last").write_text("")
    one(machine.room(inodes), "fail", "its inodes are used up", "delete files there")
    (tmp_path / "file").write_text("")
    one(machine.room(tmp_path / "file" / "x"), "fail", "file is a file, and", "choose another --workdir")


HERE = "127.0.0.1"


def unknown(*args, **kwargs):
    """No test asks the name servers of the machine that it runs on."""
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_free_and_a_taken_port(port):
    one(checks.port_here(HERE, port), "ok", f"{HERE}:{port} is free")
    one(checks.port_here(checks.ALL, port), "ok", "free on all interfaces")
    with socket.create_server((HERE, port)):
        one(checks.port_here(HERE, port), "fail", f"{HERE}:{port} is taken", "choose another port")
        one(checks.port_here(checks.ALL, port), "fail", "it is taken", "end the program")
        one(checks.port_here(checks.ALL, port, needed=False), "warn", "tfdist.launch would meet there", "--master_port")


def test_addresses_that_are_not_ours(port, monkeypatch):
    one(checks.port_here("192.0.2.1", port), "fail", "(cannot assign requested address)", "an address of this host")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    one(checks.port_here("h1", port), "fail", "cannot be used (name or service not known)", "an address of this host")
