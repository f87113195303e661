"""Libraries of CUDA that do not load."""

import ctypes.util
import pathlib
import shutil

import pytest
from support.doctor_findings import one

from tfdist.distributed import gpus
from tfdist.doctor import tensorflow_probe

LISTED = """\
0, GPU-aaa, 0, 32000, 10, 31990, 575.1, NVIDIA GeForce RTX 5090
1, GPU-bbb, 0, 16000, 10, 15990, 575.1, Tesla T4
2, GPU-ccc, 0, 4000, 10, 3990, 575.1, GeForce GTX 980
3, GPU-ddd, 0, 80000, 10, 79990, 575.1, NVIDIA H100
"""


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
