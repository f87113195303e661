"""The installed Horovod, and the TensorFlow that it was built for. Imports neither of the two."""

import dataclasses
import hashlib
import importlib.util
import pathlib
import sysconfig
from importlib import metadata

from tfdist.config import local_files

VERSION = "0.28.1"
STAMP = "tfdist_build.json"  # in Horovod's package; there `tfdist.horovod_build` says what it was built for

_FIX = "run python -m tfdist.horovod_build"
_TENSORFLOW_NAMES = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly", "tf-nightly-cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class TensorFlow:
    """The installed TensorFlow; an empty version if there is none."""

    version: str = ""
    build: str = ""  # tells builds of one version apart: a digest of its libraries, empty if pip did not record them


@dataclasses.dataclass(frozen=True, slots=True)
class Build:
    """Target and operations of a build of Horovod."""

    tensorflow: TensorFlow
    python: str  # suffix of extension modules, which names the Python and the machine
    operations: tuple[str, ...]  # `Gloo` and, where built, `MPI` and `NCCL`
    horovod: str = VERSION

    def serves(self, wanted: "Build") -> bool:
        """Returns whether this build does all that `wanted` does; more operations do no harm."""
        same = dataclasses.replace(self, operations=wanted.operations) == wanted
        return same and set(wanted.operations) <= set(self.operations)


def tensorflow() -> TensorFlow:
    """Returns the TensorFlow that this interpreter would import, from pip's records alone."""
    for name in _TENSORFLOW_NAMES:
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        lines = (package.read_text("RECORD") or "").splitlines()
        libraries = "\n".join(sorted(line for line in lines if line.startswith("tensorflow/libtensorflow")))
        return TensorFlow(package.version, hashlib.sha256(libraries.encode()).hexdigest()[:16] if libraries else "")
    return TensorFlow()


def python() -> str:
    """Returns the suffix of extension modules for this Python, such as `.cpython-311-x86_64-linux-gnu.so`."""
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def installed() -> Build | None:
    """Returns the build that is installed here; None if there is none, or not one of `tfdist.horovod_build`."""
    folder = _folder()
    if folder is None or not _library(folder).is_file():
        return None
    stamp = local_files.read_object(folder / STAMP) or {}
    try:
        return Build(
            horovod=stamp["horovod"],
            tensorflow=TensorFlow(**stamp["tensorflow"]),
            python=stamp["python"],
            operations=tuple(stamp["operations"]),
        )
    except (KeyError, TypeError):
        return None


def problem() -> str:
    """Returns why Horovod cannot be used with the installed TensorFlow, and the fix; "" if nothing is wrong.

    A Horovod that was installed by other means is taken as it is, unless its record names another TensorFlow.
    """
    here, folder = tensorflow(), _folder()
    if not here.version:
        return "TensorFlow is not installed: run pip install tensorflow"
    if folder is None:
        return f"Horovod is not installed: {_FIX}"
    if not _library(folder).is_file():
        return f"Horovod is installed without its part for TensorFlow (tensorflow/{_library(folder).name}): {_FIX}"
    build, record = installed(), local_files.read_object(folder / "metadata.json") or {}
    theirs = build.tensorflow if build else TensorFlow(record.get("tensorflow", ""))
    if theirs.version and _plain(theirs.version) != _plain(here.version):
        return f"Horovod was built for TensorFlow {theirs.version} and {here.version} is installed: {_FIX}"
    if build and build.tensorflow.build != here.build:
        return f"Horovod was built for another TensorFlow {here.version} than the one that is installed: {_FIX}"
    return ""


def _folder() -> pathlib.Path | None:
    spec = importlib.util.find_spec("horovod")
    # A folder that merely has the name is found too, as a namespace without a file.
    return pathlib.Path(spec.origin).parent if spec and spec.origin else None


def _library(folder: pathlib.Path) -> pathlib.Path:
    return folder / "tensorflow" / f"mpi_lib{python()}"


def _plain(version: str) -> str:
    """Returns a version as pip and TensorFlow itself both write it: 2.21.0-rc1 is 2.21.0rc1, 2.21.0+nv is 2.21.0."""
    return version.partition("+")[0].replace("-", "")
