"""What tfdist makes of signs of a TPU, and of each way in which one does not start; there is none here."""

import os
import sys
import threading
import urllib.error

import pytest
import tensorflow as tf

import tfdist
from tfdist.cluster.discovery import ALONE, Cluster
from tfdist.config.runtime_options import PlacementOptions
from tfdist.distributed import connect, tpu_host
from tfdist.distributed import connect as connect_lib
from tfdist.distributed.gpus import Selection
from tfdist.distributed.strategies import tpu
from tfdist.doctor import machine as doctor_machine

PLAIN = {"tensorflow": "2.20.0"}
FOR_TPUS = {"tensorflow-tpu": "2.20.0", "libtpu": "0.0.14"}
WITHOUT = "is installed without support for TPUs, which tensorflow-tpu has"
INSTALL = "pip uninstall -y tensorflow tensorflow-cpu tensorflow-tpu && pip install tensorflow-tpu=="
NEWEST = "2.20.0 libtpu==0.0.14"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without a TPU; called with files of /dev, chips on its PCI bus and installed packages, with these."""

    def of(nodes=(), chips=(), installed=PLAIN, library="/lib/libtpu.so"):
        for name in nodes:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        for number, (vendor, device) in enumerate(chips):
            (tmp_path / f"pci/{number}").mkdir(parents=True)
            (tmp_path / f"pci/{number}/vendor").write_text(f"{vendor}\n")
            (tmp_path / f"pci/{number}/device").write_text(f"{device}\n")
        monkeypatch.setattr(tpu_host, "_NODES", str(tmp_path / "accel[0-9]*"))
        monkeypatch.setattr(tpu_host, "_VFIO", str(tmp_path / "vfio/[0-9]*"))
        monkeypatch.setattr(tpu_host, "_PCI", str(tmp_path / "pci/*/vendor"))
        monkeypatch.setattr(tpu_host.packages, "version", lambda name: installed.get(name, ""))
        monkeypatch.setattr(tpu_host, "_libtpu", lambda: library)

    of()
    return of


@pytest.mark.parametrize("found, environ, sign", [
    ({}, {}, ""), ({}, {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_ID": "0"}, ""), ({}, {"TPU_NAME": "local"}, "TPU_NAME"),
    ({}, {"COLAB_TPU_ADDR": "10.0.0.2:8470"}, "COLAB_TPU_ADDR"), ({"nodes": ["accel0", "accel1"]}, {}, "accel0"),
    ({"nodes": ["accel/accel0"]}, {}, ""),  # Linux' own accelerators
    ({"nodes": ["vfio/0"]}, {}, ""),  # something passed through
    ({"nodes": ["vfio/vfio"]}, {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, ""),
    ({"nodes": ["vfio/0"]}, {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "/dev/vfio with TPU variables"),
    ({"nodes": ["vfio/0"]}, {"TPU_ACCELERATOR_TYPE": "v5litepod-8"}, "/dev/vfio with TPU variables"),
    ({"chips": [("0x1ae0", "0x0063")]}, {}, "a PCI device of Google's"),
    ({"chips": [("0x1ae0", "0x0042"), ("0x10de", "0x0063")]}, {}, ""),  # its network card; a card of NVIDIA's
])  # fmt: skip
def test_signs_are_strict(found, environ, sign, machine):
    machine(**found)
    assert tpu_host.hint(environ).endswith(sign) and bool(tpu_host.hint(environ)) == bool(sign)


@pytest.mark.parametrize(
    "installed, library, problem",
    [
        (FOR_TPUS, "/lib/libtpu.so", ""),
        ({"tensorflow-tpu": "2.19.1", "libtpu": "0.0.52"}, "/lib/libtpu.so", ""),
        ({"tensorflow-tpu": "2.20.0", "libtpu": "0.0.32.1"}, "/lib/libtpu.so",
         "libtpu 0.0.32.1 is too new for tensorflow-tpu 2.20.0, whose import would fail: pip install libtpu==0.0.14"),
        (FOR_TPUS, "", f"libtpu, the driver in Python's packages, is missing: {INSTALL}{NEWEST}"),
        (PLAIN, "", f"TensorFlow 2.20.0 {WITHOUT}: {INSTALL}{NEWEST}"),
        ({"tensorflow": "2.19.0"}, "", f"which tensorflow-tpu has: {INSTALL}2.19.1"),
        ({"tensorflow-cpu": "2.18.1"}, "", f"TensorFlow 2.18.1 {WITHOUT}: {INSTALL}2.18.0"),
        ({"tensorflow": "2.21.0"}, "", f"which tensorflow-tpu has, and for 2.21 there is none: {INSTALL}{NEWEST}"),
        ({}, "", f"TensorFlow for TPUs is not installed: {INSTALL}{NEWEST}"),
    ],
)  # fmt: skip
def test_what_to_install(installed, library, problem, machine):
    machine(installed=installed, library=library)
    assert tpu_host.problem().endswith(problem) and bool(tpu_host.problem()) == bool(problem)


def test_a_libtpu_with_which_tensorflow_cannot_be_imported_is_refused_before(machine):
    machine(installed={"tensorflow-tpu": "2.20.0", "libtpu": "0.0.52"})
    with pytest.raises(tfdist.UserError, match=r"TensorFlow cannot be imported: libtpu 0\.0\.52 is too new for"):
        connect_lib.locate(PlacementOptions(devices="none"))


def test_the_cloud_is_asked_for_a_tpu_only_where_there_is_a_sign_of_one(machine):
    machine(installed=FOR_TPUS)
    for environ, asks in (({}, False), ({"TPU_NAME": "local"}, True)):
        tpu_host.keep_from_asking(environ)
        assert ("TPU_SKIP_MDS_QUERY" not in environ) == asks
    machine()
    empty = {}
    tpu_host.keep_from_asking(empty)
    assert empty == {}  # of TensorFlow for other devices


def test_what_tensorflow_reads_is_set_before_its_import(machine):
    environ = {"TF_XLA_FLAGS": "--tf_mlir_enable_mlir_bridge=false --mine", "PJRT_DEVICE": "CPU"}
    tpu_host.prepare(environ)
    assert environ == {
        "PJRT_DEVICE": "CPU",  # as somebody has set it
        "NEXT_PLUGGABLE_DEVICE_USE_C_API": "true",
        "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": "/lib/libtpu.so",
        "TF_XLA_FLAGS": "--tf_mlir_enable_mlir_bridge=false --mine "
        "--tf_mlir_enable_convert_control_to_data_outputs_pass=true --tf_mlir_enable_merge_control_flow_pass=true",
    }
    machine(library="")
    empty = {}
    tpu_host.prepare(empty)
    assert empty == {}


def chosen(environ, **flags):
    return connect.choose(PlacementOptions(**flags), Selection((), None), ALONE, environ)


def test_auto_takes_a_tpu_that_tensorflow_can_use(machine):
    machine(installed=FOR_TPUS)
    assert chosen({"TPU_NAME": "local"}).name == "tpu"
    assert chosen({}).name == "default"
    assert chosen({"TPU_NAME": "local"}, devices="none").name == "default"
    assert chosen({"TPU_NAME": "local"}, virtual_devices=2).name == "mirrored"
    assert chosen({}, tpu="pod").name == "tpu"


def test_auto_goes_on_without_and_says_what_to_install(machine):
    choice = chosen({"TPU_NAME": "local"})
    assert choice.name == "default"
    assert choice.reason == (
        "1 CPU here; not tpu, though TPU_NAME says that there is one: TensorFlow 2.20.0 is installed without support "
        f"for TPUs, which tensorflow-tpu has: {INSTALL}{NEWEST}"
    )
    with pytest.raises(tfdist.UserError, match=r"--strategy=tpu cannot run here: TensorFlow 2\.20\.0 is installed"):
        chosen({"TPU_NAME": "local"}, strategy="tpu")


def test_one_process_drives_a_tpu(machine):
    machine(installed=FOR_TPUS)
    workers = Cluster("TF_CONFIG", 0, 2)
    with pytest.raises(tfdist.UserError, match=r"one process and there are 2 workers \(TF_CONFIG\): start one"):
        connect.choose(PlacementOptions(strategy="tpu"), Selection((), None), workers, {})


RESOLVER = "distribute.cluster_resolver.TPUClusterResolver"
SYSTEM = "tpu.experimental.initialize_tpu_system"
ANOTHER = "another process holds the TPU, and only one can: end that one"
NONE_HERE = "TensorFlow finds no TPU here: choose a runtime or machine with one"
NO_SUCH = "Google's client does not find a TPU of that name ready in this project and zone"


@pytest.mark.parametrize(
    "where, error, line",
    [
        (SYSTEM, tf.errors.NotFoundError(
            None, None, "No OpKernel was registered to support Op 'ConfigureDistributedTPU'"
         ), f"this TensorFlow was built without TPUs; end this process, and {INSTALL}{NEWEST} "),
        (SYSTEM, tf.errors.NotFoundError(None, None, "TPUs not found in the cluster. Failed in initialization: x"),
         NONE_HERE),
        (SYSTEM, tf.errors.InvalidArgumentError(None, None, "No matching devices found for '/device:TPU_SYSTEM:0'"),
         NONE_HERE),
        ("distribute.TPUStrategy", RuntimeError("Cannot find any TPU cores in the system (master address )"),
         NONE_HERE),
        (SYSTEM, tf.errors.InternalError(None, None, "RET_CHECK failure (x/tpu_node_interfaces.cc:432) *platform"),
         NONE_HERE),
        (SYSTEM, tf.errors.AbortedError(None, None, "The TPU is already in use by process with pid 7"), ANOTHER),
        (SYSTEM, tf.errors.FailedPreconditionError(
            None, None, "open(/dev/vfio/0): Device or resource busy; Couldn't open iommu group /dev/vfio/0"
         ), ANOTHER),
        (SYSTEM, tf.errors.PermissionDeniedError(None, None, "open(/dev/accel0): Permission denied"),
         "this user may not open the TPU's device files"),
        (SYSTEM, tf.errors.InternalError(None, None, "Could not open libtpu.so"),
         "libtpu is missing or of another version: pip"),
        (SYSTEM, tf.errors.InternalError(None, None, "The framework PJRT API version is 0.54, the plugin's 0.40"),
         "libtpu is missing or of another version: pip"),
        (RESOLVER, ImportError("googleapiclient and oauth2client must be installed"), NO_SUCH),
        (RESOLVER, urllib.error.URLError("[Errno -2] Name or service not known"), NO_SUCH),
        (SYSTEM, ValueError("Could not lookup TPU metadata. Exception: The Application Default Credentials are not"),
         NO_SUCH),
        (RESOLVER, ValueError("Please provide a TPU Name to connect to."), NO_SUCH),
        ("config.experimental_connect_to_cluster", RuntimeError('TPU "mine" is not yet ready; state: "CREATING"'),
         NO_SUCH),
        (SYSTEM, tf.errors.UnavailableError(None, None, "failed to connect to all addresses"),
         "the TPU does not answer: look"),
        (SYSTEM, RuntimeError("something\nnew"),
         "(RuntimeError: something new): see what python -m tfdist.doctor finds"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)  # fmt: skip
def test_each_failure_is_one_line_with_its_cure(where, error, line, machine, monkeypatch):
    def fail(*arguments, **named):
        raise error

    for step in (RESOLVER, "config.experimental_connect_to_cluster", SYSTEM, "distribute.TPUStrategy"):
        monkeypatch.setattr(f"tensorflow.{step}", fail if step == where else lambda *arguments, **named: None)
    with pytest.raises(tfdist.UserError, match=r"^--tpu=mine cannot be used") as raised:
        tpu.create("mine", "asked for", 60)
    assert line in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("does, line", [
    ("kill -SEGV $$", f"{NONE_HERE}, or leave --strategy=tpu out (its start ended a process by SIGSEGV)"),
    ("echo 'AbortedError: The TPU is already in use by process with pid 7'; exit 1", ANOTHER),
    ("echo noise >&2; echo 'RuntimeError: new' >&2; exit 1", "(RuntimeError: new): see what python -m tfdist.doc"),
    ("exec sleep 60", "--tpu=local has not started within 0.2 s: look whether another process holds it"),
    ("exit 0", ""),
])  # fmt: skip
def test_where_no_device_is_seen_another_process_tries(does, line, tmp_path, monkeypatch):
    """tensorflow-tpu 2.20 ends the process that starts a TPU which is not there, by SIGSEGV."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{does}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    if not line:
        tpu.try_elsewhere("local", 60, {})
        return
    with pytest.raises(tfdist.UserError) as raised:
        tpu.try_elsewhere("local", 0.2 if "sleep" in does else 60, {"PATH": os.defpath})
    assert line in str(raised.value) and "\n" not in str(raised.value)


def test_auto_goes_on_where_that_process_fails_and_tensorflow_is_not_told_of_a_tpu(machine, monkeypatch, said):
    machine(installed=FOR_TPUS)
    monkeypatch.setenv("TPU_NAME", "local")
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setattr(connect_lib, "_CONNECTED", {})  # or a later test would be given the same again
    given = []

    def fail(name, limit, environ):
        given.append(environ["PJRT_DEVICE"])
        raise tfdist.UserError(f"--tpu={name} does not start")

    monkeypatch.setattr(tpu, "try_elsewhere", fail)
    monkeypatch.setattr(tpu, "create", lambda *arguments: pytest.fail("started here"))
    distribution = tfdist.connect("auto")
    assert distribution.name == "default" and "TPU_NAME says that there is a TPU: it has not" in distribution.reason
    assert "WARNING: --tpu=local does not start" in said
    assert given == ["TPU"] and "PJRT_DEVICE" not in os.environ
    with pytest.raises(tfdist.UserError, match="does not start"):
        tfdist.connect("tpu")


def test_a_start_that_hangs_is_given_up(machine, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", lambda tpu: over.wait())
    try:
        with pytest.raises(tfdist.UserError, match=r"--tpu=local has not started within 0.1 s: look whether another"):
            tpu.create("local", "asked for", 0.1)
    finally:
        over.set()


def test_tensorflows_own_word_without_a_tpu(machine):
    """The resolver proves nothing, and the start of the system says what TensorFlow without TPUs says."""
    with pytest.raises(tfdist.UserError, match=r"^--tpu=local cannot be used: this TensorFlow was built without"):
        tpu.create("local", "asked for", 60)


def test_auto_trains_on_what_there_is_where_a_tpu_does_not_start(machine, monkeypatch, said):
    machine(installed=FOR_TPUS, nodes=["accel0"], library="")
    monkeypatch.setattr(tpu_host, "problem", lambda: "")

    def fail(name, reason, limit):
        raise tfdist.UserError(f"--tpu={name} does not start")

    monkeypatch.setattr(tpu, "create", fail)
    distribution = tfdist.connect("auto")
    assert distribution.name == "default" and "accel0 says that there is a TPU: it has not" in distribution.reason
    assert "WARNING: --tpu=local does not start" in said
    with pytest.raises(tfdist.UserError, match="does not start"):
        tfdist.connect("tpu")


def test_auto_never_touches_a_tpu_without_a_sign(machine, monkeypatch):
    monkeypatch.setattr(connect_lib, "_tpu", lambda *arguments: pytest.fail("touched"))
    machine(installed=FOR_TPUS)
    assert tfdist.connect("auto").name == "default"


def test_the_doctor_says_what_is_missing(machine):
    assert doctor_machine.tpu({}) == []
    (check,) = doctor_machine.tpu({"TPU_NAME": "x"})
    assert check.status == "warn" and check.fix == f"{INSTALL}{NEWEST}"
    assert check.finding.startswith("TPU_NAME says that there is a TPU; TensorFlow 2.20.0 is installed without support")
    machine(installed=FOR_TPUS)
    assert doctor_machine.tpu({"TPU_NAME": "x"})[0].status == "ok"
