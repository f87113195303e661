"""The images of deploy/Dockerfile, built here, and pods of them on two hosts that are network namespaces."""

import os
import shutil

import pytest
from support import images, network_hosts, processes
from support.network_hosts import hosts, more_hosts, start  # noqa: F401
from test_deploy import SHORT, alone, assert_as_alone, command_of, documents, pods, smoke_job  # noqa: F401

pytestmark = pytest.mark.whole
SETTINGS = {  # what Kubeflow's operator gives a launcher's container, and where it mounts keys and hosts
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    "OMPI_MCA_orte_set_default_slots": "1",
}


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """Returns a function that builds a target once; layers are gigabytes, and stay no longer than the tests."""
    network_hosts.needs("debootstrap", "debootstrap")
    if os.geteuid():
        pytest.skip("only root can build images")
    folder, built = tmp_path_factory.mktemp("image"), {}
    yield lambda target: images.build(target, folder, built)
    shutil.rmtree(folder)


def test_anybody_can_run_it(image, start):  # noqa: F811
    """OpenShift gives containers a user without a name; torchrun is what Kubeflow's SDK starts."""
    cpu = image("cpu")
    said = start(*cpu.command([*cpu.settings["ENTRYPOINT"], *cpu.settings["CMD"]]))
    assert said.end() == 0 and any(line.endswith(" ok") for line in said.lines), said.text
    assert "python 3" in said.text and "tfdist 0." in said.text, "not <user> 0.2.0: it is the user's name as well"
    words = ["torchrun", "-m", "tfdist.train", "--config=digits_mlp", *SHORT, "--workdir=/runs/a"]
    said = start(*cpu.command(["tini", "--", "sh", "-c", '"$@" && cat /runs/a/result.json', "sh", *words], user=100650))
    assert said.end() == 0 and '"status": "completed"' in said.text, said.text


def named(hosts, names):  # noqa: F811
    """Gives the hosts the names that a headless service gives pods."""
    with open(hosts.folder / "hosts", "a") as file:
        file.writelines(f"{network_hosts.ADDRESSES[host]} {' '.join(said)}\n" for host, said in names.items())


def volume(folder):
    """Makes a volume that the image's user may write, as fsGroup does."""
    folder.mkdir()
    os.chown(folder, 1000, 1000)
    return folder


def test_two_pods_of_the_smoke_job(image, hosts, start, alone, tmp_path):  # noqa: F811
    """Word by word as the manifest has it."""
    cpu, runs = image("cpu"), {host: volume(tmp_path / host) for host in network_hosts.NAMES}
    named(hosts, {"h1": ["tfdist-smoke-0.tfdist-smoke"], "h2": ["tfdist-smoke-1.tfdist-smoke"]})
    started = []
    for index, host in enumerate(network_hosts.NAMES):
        (pod,) = pods(documents("smoke-job.yaml")[1])
        words, environ = command_of(pod["containers"][0])
        environ |= {"JOB_COMPLETION_INDEX": str(index)}
        words = cpu.command([*cpu.settings["ENTRYPOINT"], *words, *SHORT], volumes=[("/runs", runs[host])], **environ)
        started.append(start(*hosts.on(host), *words))
    for pod in started:
        assert pod.end() == 0, pod.text
    assert_as_alone(runs["h1"], alone)


def test_pods_of_the_mpi_operator(image, more_hosts, start, alone, tmp_path):  # noqa: F811
    """Workers are sshd; mpirun in the launcher's pod reads the hosts that the operator mounts."""
    mpi, runs, keys, etc = image("mpi"), volume(tmp_path / "runs"), tmp_path / "keys", tmp_path / "etc"
    (job,) = documents("mpijob.yaml")
    (launcher,), (worker,) = (pod["containers"] for pod in pods(job))
    keys.mkdir(), etc.mkdir()
    processes.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", keys / "id_rsa"], check=True)
    shutil.copy(keys / "id_rsa.pub", keys / "authorized_keys")
    for key in keys.iterdir():  # as kubelet writes a Secret's files for fsGroup
        os.chown(key, 0, 1000), key.chmod(0o640)
    names = [f"tfdist-worker-{i}.tfdist.default.svc" for i in (0, 1)]
    (etc / "hostfile").write_text("".join(f"{name} slots=1\n" for name in names))
    named(more_hosts, {h: [n, n.removesuffix(".default.svc")] for h, n in zip(network_hosts.NAMES, names)})
    mounted = [("/runs", runs), ("/home/tfdist/.ssh", keys)]
    pods_of_workers = [
        start(*more_hosts.on(host), *mpi.command(worker["command"], volumes=mounted)) for host in network_hosts.NAMES
    ]
    environ = SETTINGS | {e["name"]: e.get("value", "hush") for e in launcher["env"]}
    words = mpi.command([*launcher["command"], *SHORT], volumes=[*mounted[1:], ("/etc/mpi", etc)], **environ)
    said = start(*more_hosts.on("h3"), *words)
    assert said.end() == 0, "\n".join(one.text for one in (said, *pods_of_workers))
    assert_as_alone(runs, alone)
