"""GPUs that TensorFlow has no code for, libraries of CUDA that do not load, and a TPU without its TensorFlow."""

import ctypes.util
import pathlib
import shutil

import pytest
from support.doctor_findings import one
from support.nvidia_drivers import printing

from tfdist.distributed import gpus
from tfdist.doctor import tensorflow_probe

pytest_plugins = ("support.nvidia_drivers",)  # its fixture

BUILT = ("sm_60", "sm_70", "sm_80", "sm_89", "compute_90")
"""What the wheel of TensorFlow 2.21 for Linux says of itself."""
LISTED = """\
0, GPU-aaa, 0, 32000, 10, 31990, 575.1, NVIDIA GeForce RTX 5090
1, GPU-bbb, 0, 16000, 10, 15990, 575.1, Tesla T4
2, GPU-ccc, 0, 4000, 10, 3990, 575.1, GeForce GTX 980
3, GPU-ddd, 0, 80000, 10, 79990, 575.1, NVIDIA H100
"""


def answering(capabilities):
    """The body of an nvidia-smi that lists these GPUs, and tells their capabilities where it is asked for them."""
    return f'case "$*" in *compute_cap*) {printing(capabilities)};; *) {printing(LISTED)};; esac'


def asked(built, environ=None):
    answer = tensorflow_probe.Answer(capabilities=built)
    return tensorflow_probe.gpu_code(answer, gpus.survey(timeout=30), environ or {}, timeout=30)


def test_a_gpu_that_is_newer_than_tensorflow(driver):
    driver(answering("0, 12.0\n1, 7.5\n2, 7.0\n3, 9.0"))
    text = "GPU 0 (NVIDIA GeForce RTX 5090, compute capability 12.0) is newer than this TensorFlow, which was built"
    one(asked(BUILT), "warn", text, "tf-nightly or NVIDIA's container")
    hidden = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    one(asked(BUILT, hidden), "ok", "was built for 6.0, 7.0")


def test_a_gpu_that_tensorflow_has_no_code_for(driver):
    driver(answering("0, 12.0\n1, 7.5\n2, 5.2\n3, 9.0"))
    older, newer = asked(BUILT)
    assert (older.status, newer.status) == ("fail", "warn")
    assert older.finding.startswith("this TensorFlow has no code for GPU 2 (GeForce GTX 980, compute capability 5.2): ")
    one(asked(("sm_52", "sm_75", "sm_90", "sm_120a")), "ok", "built for 5.2, 7.5, 9.0, 12.0")
    one(asked(("sm_52", "sm_75", "sm_90")), "fail", "no code for GPU 0 (NVIDIA GeForce RTX 5090", "--devices")


@pytest.mark.parametrize("told", ['Field "compute_cap" is not a valid field to query.', "0, [N/A]", "", "x, 9.0"])
def test_a_driver_that_does_not_tell(told, driver):
    driver(answering(told))
    assert asked(BUILT) == []


def test_a_tensorflow_without_cuda(driver):
    driver(answering("0, 12.0"))
    assert asked(()) == []
    assert asked(("nonsense",)) == []


@pytest.mark.parametrize(
    "cuda, cudnn, count, last", [("12.5.1", "9", 7, "libcudnn.so.9"), ("13.0", "9.10", 7, "libcudnn.so.9")]
)
def test_which_libraries_are_needed(cuda, cudnn, count, last):
    names = tensorflow_probe.needed(cuda, cudnn)
    assert len(names) == count and names[-1] == last and f"libcublas.so.{cuda[:2]}" in names


def test_a_cuda_that_nobody_has_looked_at():
    assert tensorflow_probe.needed("99.0", "9") == () and tensorflow_probe.needed("", "") == ()


def test_libraries_that_do_not_load(tmp_path):
    """Really loaded, each by its name: one is whole, one is cut off, and one is not there."""
    folder = tmp_path / "nvidia" / "cudnn" / "lib"
    folder.mkdir(parents=True)
    whole = next(
        line.split()[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if "/libm" in line
    )
    shutil.copy(whole, folder / "libwhole.so.1")
    (folder / "libcut.so.1").write_bytes((folder / "libwhole.so.1").read_bytes()[:100])
    assert tensorflow_probe.pip_folders([str(tmp_path)]) == [folder]
    cut, missing = tensorflow_probe.unloadable(["libwhole.so.1", "libcut.so.1", "libnowhere.so.7"], [folder])
    assert cut.startswith("libcut.so.1 (") and "not found" not in cut
    assert missing == "libnowhere.so.7 (not found)"
    assert tensorflow_probe.unloadable([ctypes.util.find_library("c")], []) == ()


def test_tensorflow_names_them():
    given = tensorflow_probe.Answer(
        *("2.21.0", "3.15.1", "12.5.1"),
        said=("Cannot dlopen some GPU libraries.",),
        unloadable=tuple(f"lib{i}.so.12 (not found)" for i in range(5)),
    )
    listed = gpus.Survey(tuple(gpus.parse_line(line) for line in LISTED.splitlines()))
    text = "CUDA's libraries do not load: lib0.so.12 (not found), lib1.so.12 (not found), lib2.so.12 (not found) and 2 "
    one(tensorflow_probe.tensorflow(given, listed, {}), "fail", text, "pip install 'tfdist[cuda]'")
