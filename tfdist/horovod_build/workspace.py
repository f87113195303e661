"""What a build of Horovod needs, and a folder in which it is fetched, edited, compiled, tried and installed from."""

import dataclasses
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import zipfile
from collections.abc import Mapping

from tfdist.config import packages as installed
from tfdist.config.messages import logger
from tfdist.distributed import child_process, horovod_install
from tfdist.distributed.horovod_install import Build
from tfdist.errors import TrainingError, UserError

LIMIT_S = 3600.0  # seconds for one program, such as the compilation. On one slow core that takes minutes, not an hour
TICK_S = 20.0  # how often somebody who watches hears how far a program is


class Workspace:
    """A temporary folder for one build; every program started in it writes to the log and ends with it."""

    def __init__(self, folder: pathlib.Path, log: pathlib.Path, environ: dict[str, str]):
        self.folder, self.log, self._environ = folder, log, environ
        log.write_bytes(b"")

    def download(self) -> pathlib.Path:
        """Has pip fetch the source, and compare the digest before any of it runs."""
        wanted = self.folder / "requirements.txt"
        wanted.write_text(f"horovod=={horovod_install.VERSION} --hash=sha256:{SHA256}\n")
        arguments = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes")
        if self._pip("download", *arguments, "--dest", self.folder, "--requirement", wanted):
            fix = f"without a network, give --sdist={ARCHIVE}; the log is {self.log}"
            raise UserError(f"pip cannot fetch horovod=={horovod_install.VERSION} ({self._error()})", fix)
        return self.folder / ARCHIVE

    def compile(self, source: pathlib.Path) -> pathlib.Path:
        """Compiles the source; returns the path of the wheel."""
        arguments = ("--use-pep517", "--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir")
        if self._pip("wheel", "--verbose", *arguments, "--wheel-dir", self.folder, source):
            raise TrainingError(f"Horovod does not compile: {self._error()}: the log is {self.log}")
        return next(self.folder.glob("horovod-*.whl"))

    def loads(self, wheel: pathlib.Path) -> bool:
        """Tries in another process whether Horovod from this wheel can be imported beside the installed TensorFlow."""
        unpacked = self.folder / "check"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        return self._run([sys.executable, "-c", "import horovod.tensorflow"], unpacked) == 0

    def install(self, wheel: pathlib.Path) -> None:
        """Installs the wheel into the environment of this interpreter."""
        if self._pip("install", "--force-reinstall", "--no-deps", "--no-index", wheel):
            raise TrainingError(f"pip cannot install Horovod ({self._error()}): the log is {self.log}")

    def last_line(self) -> str:
        """Returns how far the last program is, or what it said last; see `progress`."""
        return progress(self.log.read_text(errors="replace"))

    def _pip(self, *arguments: object) -> int:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        return self._run([*pip, *map(str, arguments)])

    def _run(self, arguments: list[str], *path: pathlib.Path) -> int:
        """Runs a program to its end, with these folders before those of PYTHONPATH; returns its exit code."""
        theirs = map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(arguments)}\n".encode())
            log.flush()
            environ = {**self._environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *theirs])}
            tick = lambda seconds: logger.info(f"{seconds:.0f} s: {self.last_line()}")
            gently = signal.SIGINT  # lets pip undo what it began
            code = child_process.run(arguments, LIMIT_S, TICK_S, tick, gently, stdout=log, cwd=self.folder, env=environ)
        if code is None:
            raise TrainingError(f"the build took more than {LIMIT_S:g} s: the log is {self.log}")
        return code

    def _error(self) -> str:
        return first_error(self.log.read_text(errors="replace").rpartition("\n$ ")[2])


def progress(log: str) -> str:
    """Returns the line of a log that says how far its last program is: the last one with a percentage, or of all."""
    lines = [line for line in log.rpartition("\n$ ")[2].splitlines()[1:] if line.strip()]
    steps = [line for line in lines if re.match(r"\s*\[ *\d+%\]", line)]
    return _shorten((steps or lines or ["no message yet"])[-1])


def first_error(log: str) -> str:
    """Returns the line of a build's log that says why it failed: the compiler's first error, not what follows."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for pattern in (r"\berror: (?!subprocess-exited)", r"CMake Error", r"^\w+(Error|Exception): ", r"^ERROR: "):
        for line, after in zip(lines, [*lines[1:], ""]):
            if re.search(pattern, line) and not line.startswith("$ "):
                return _shorten(f"{line} {after}" if pattern == "CMake Error" else line)
    return _shorten(lines[-1]) if lines else "no message"


def _shorten(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= 300 else f"{line[:300]}..."


ARCHIVE = f"horovod-{horovod_install.VERSION}.tar.gz"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"  # checksum of the archive that pip delivers


def check_archive(path: pathlib.Path) -> None:
    """Makes sure that a file is the released archive."""
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"--sdist={path} cannot be read ({error.strerror})", f"give the path of {ARCHIVE}") from None
    if digest != SHA256:
        what = f"--sdist={path} is not the released {ARCHIVE}: its SHA-256 is {digest}, not {SHA256}"
        raise UserError(what, "download it again")


def unpack(archive: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Unpacks the archive below `folder`; returns the folder of the source."""
    shutil.unpack_archive(archive, folder)  # its digest vouches for it
    return folder / f"horovod-{horovod_install.VERSION}"


def prepare(source: pathlib.Path, wanted: horovod_install.Build) -> None:
    """Makes the changes in `horovod.patch`, and adds the stamp that says what the build is for."""
    for change in pathlib.Path(__file__).with_name("horovod.patch").read_text().split("\n--- a/")[1:]:
        name, _, _, *lines = change.split("\n\n")[0].splitlines()
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in signs) for signs in (" -", " +"))
        path = source / name
        text = path.read_text() if path.is_file() else ""
        if text.count(old) != 1:
            raise TrainingError(
                f"the source of Horovod {horovod_install.VERSION} is not as expected: "
                f"{name} should have {old.splitlines()[0]!r} once, and has it {text.count(old)} times"
            )
        path.write_text(text.replace(old, new))
    stamp = json.dumps(dataclasses.asdict(wanted), indent=1)
    (source / "horovod" / horovod_install.STAMP).write_text(f"{stamp}\n")


PLACES = (
    "HOROVOD_BUILD_ARCH_FLAGS", "HOROVOD_BUILD_CUDA_CC_LIST", "HOROVOD_CUDA_HOME",
    "HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB", "HOROVOD_NCCL_LINK",
)  # fmt: skip
"""Horovod's own variables that say where things are and for which processor, not what to build."""

_PACKAGES = ("setuptools", "wheel", "cloudpickle", "packaging", "psutil", "pyyaml")  # to build Horovod, and to run it
_EXTRA = "pip install 'tfdist[horovod]'"


def find(wanted: Build, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables by which the build finds its programs; `UserError` that names all that are missing."""
    # The cmake of the extra lies beside the interpreter, which need not be on PATH.
    path = os.pathsep.join([sysconfig.get_path("scripts"), environ.get("PATH", os.defpath)])
    program = lambda *names: next(filter(None, (shutil.which(name, path=path) for name in names)), "")
    lacking: list[tuple[str, str, str]] = []

    def need(there: object, what: str, fix: str = "", apt: str = "") -> None:
        """Notes what is missing unless it is there; a command or hint, or Debian's packages, help."""
        if not there:
            lacking.append((what, fix, apt))

    use = {
        "PATH": path,
        "CXX": environ.get("CXX") or program("c++", "g++", "clang++"),
        "CC": environ.get("CC") or program("cc", "gcc", "clang"),
        # Headers that Horovod uses and that GCC 14 no longer brings with others.
        "CXXFLAGS": f"{environ.get('CXXFLAGS', '')} -include string -include stdexcept",
        "HOROVOD_CMAKE": environ.get("HOROVOD_CMAKE") or program("cmake"),
    }
    text = "#include <string_view>\n#if __cplusplus < 201703L\n#error\n#endif\nstd::string_view tfdist_says_yes;\n"
    preprocess = [*shlex.split(use["CXX"]), "-std=c++17", "-E", "-x", "c++", "-"]
    need(use["CXX"] and "tfdist_says_yes" in _output(preprocess, path, text), "a C++17 compiler", apt="g++")
    need(use["CC"], "a C compiler", apt="gcc")
    need(program("make"), "make", apt="make")
    cmake = re.search(r"version (\d+)\.(\d+)", _output([use["HOROVOD_CMAKE"], "--version"]))
    need(cmake and (int(cmake[1]), int(cmake[2])) >= (3, 13), "cmake 3.13 or newer", _EXTRA)
    need(importlib.util.find_spec("pip"), "pip", "python -m ensurepip")
    for package in _PACKAGES:
        need(installed.version(package), package, _EXTRA)
    need(wanted.tensorflow.version, "TensorFlow", "pip install tensorflow")
    marker = pathlib.Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")  # pip refuses to install: PEP 668
    managed = sys.prefix == sys.base_prefix and marker.exists() and "PIP_BREAK_SYSTEM_PACKAGES" not in environ
    need(not managed, "a virtual environment (this Python is the system's)", "python3 -m venv .venv")
    if "MPI" in wanted.operations:
        mpi = program("mpicxx") and program("mpirun")
        need(mpi, "MPI (mpicxx, mpirun)", apt="openmpi-bin libopenmpi-dev")
    if "NCCL" in wanted.operations:
        on_path = os.path.dirname(os.path.dirname(os.path.realpath(program("nvcc") or "/")))
        named = environ.get("HOROVOD_CUDA_HOME")
        homes = (named,) if named else (environ.get("CUDA_HOME"), on_path, "/usr/local/cuda")
        cuda = next((p for p in homes if p and os.path.isfile(os.path.join(p, "bin", "nvcc"))), "")
        need(cuda, "the CUDA toolkit (nvcc)", "set HOROVOD_CUDA_HOME to its folder")
        home, include = environ.get("HOROVOD_NCCL_HOME"), environ.get("HOROVOD_NCCL_INCLUDE")
        own = (include, os.path.join(home, "include")) if home else (include,)
        places = (*own, "/usr/include", "/usr/local/include", "/usr/local/cuda/include")
        header = any(os.path.isfile(os.path.join(place, "nccl.h")) for place in places if place)
        need(header, "NCCL (nccl.h)", "set HOROVOD_NCCL_HOME to its folder", apt="libnccl-dev")
        use |= {"HOROVOD_CUDA_HOME": cuda}
    if lacking:
        missing, fixes, packages = (list(filter(None, column)) for column in zip(*lacking))
        installs = [f"apt-get install {' '.join(packages)}"] if packages else []
        fix = "; ".join(dict.fromkeys([*installs, *fixes]))
        raise UserError(f"Horovod cannot be built without {', '.join(missing)}", fix)
    return use


def _output(command: list[str], path: str = "", text: str = "") -> str:
    """Returns what a program prints; empty if it cannot run or fails."""
    program = shutil.which(command[0], path=path or None) or command[0]
    environ = {**os.environ, "PATH": path} if path else None
    try:
        done = child_process.answer([program, *command[1:]], 60, text, env=environ)
    except OSError:
        return ""
    return done.stdout if done and done.returncode == 0 else ""
