"""The compilers' own environments: made on demand in a cache folder, never in the user's environment. No TensorFlow."""

import contextlib
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator

from tfdist.config import local_files
from tfdist.config.messages import logger
from tfdist.errors import TrainingError, UserError

KINDS = ("tpu", "cuda")
PLACE = "TFDIST_TOPOLOGY"  # the environment variable that names another folder than the one below the user's cache
OLDEST = (3, 11)  # what the pinned compilers run on
LIMIT_S = 3600.0  # seconds for pip, and for waiting for another installation. Half a gigabyte comes over the network


def requirements(kind: str) -> pathlib.Path:
    """Returns the file that pins the packages of an environment, with their digests."""
    return pathlib.Path(__file__).with_name(f"{kind}.txt")


def folder(kind: str) -> pathlib.Path:
    """Returns where an environment is or would be; other pins make another folder."""
    digest = hashlib.sha256(requirements(kind).read_bytes()).hexdigest()[:12]
    return pathlib.Path(os.environ.get(PLACE) or local_files.cache("topology")).absolute() / f"{kind}-{digest}"


def is_there(kind: str) -> bool:
    """Whether an environment is complete."""
    return (folder(kind) / "ready").exists()


def python(kind: str, asker: str) -> pathlib.Path:
    """Returns the interpreter of an environment, for a flag that needs it; raises `UserError` where there is none."""
    if not is_there(kind):
        fix = f"run python -m tfdist.topology --install={kind}"
        raise UserError(f"{asker} needs the compilers for {kind}, which are not installed", fix)
    return folder(kind) / "bin" / "python"


def install(kind: str) -> str:
    """Makes an environment unless it is there; returns what is there, in words."""
    place = folder(kind)
    if is_there(kind):
        return f"the compilers for {kind} are already in {place}"
    if sys.version_info[:2] < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        fix = f"install them with tfdist under that Python; with the same {PLACE}, this one finds them"
        raise UserError(f"the compilers need Python {wanted} or newer, and this is {platform.python_version()}", fix)
    with _alone(place):
        if is_there(kind):  # somebody else's, after a wait
            return f"the compilers for {kind} are already in {place}"
        logger.info(f"installing the compilers for {kind} in {place}: the log is {_log(place)}")
        shutil.rmtree(place, ignore_errors=True)  # of an installation that was ended
        if _run([sys.executable, "-m", "venv", "--without-pip", str(place)], place):
            what = f"{sys.executable} cannot make a virtual environment ({_reason(place)})"
            raise UserError(what, "install its venv module")
        pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "--no-input"]
        pinned = ["--require-hashes", "--only-binary", ":all:", "--requirement", str(requirements(kind))]
        if _run([*pip, "install", "--disable-pip-version-check", *pinned], place):
            raise UserError(
                f"pip cannot install the compilers for {kind} ({_reason(place)}): "
                f"they need Linux on x86_64 and a network; the log is {_log(place)}"
            )
        if _run([str(place / "bin" / "python"), "-c", "import jax"], place):
            raise TrainingError(f"the compilers for {kind} do not run ({_reason(place)}): the log is {_log(place)}")
        (place / "ready").touch()
    return f"the compilers for {kind} are in {place}"


@contextlib.contextmanager
def _alone(place: pathlib.Path) -> Iterator[None]:
    """Lets one installation at a time work on a folder, with a log of its own."""
    lock = place.with_suffix(".lock")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        what = f"{place.parent} cannot be written ({error.strerror})"
        raise UserError(what, f"set {PLACE} to another folder") from None
    with local_files.locked(lock, f"another installation in {place}", LIMIT_S):
        _log(place).write_bytes(b"")
        yield


def _log(place: pathlib.Path) -> pathlib.Path:
    return place.with_suffix(".log")


def _run(arguments: list[str], place: pathlib.Path) -> int:
    """Runs a program to its end, its words in the log; returns its exit code."""
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    with _log(place).open("ab") as log:
        log.write(f"$ {' '.join(arguments)}\n".encode())
        log.flush()
        try:
            done = subprocess.run(
                arguments, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"the installation took more than {LIMIT_S:g} s: the log is {_log(place)}") from None
    return done.returncode


def _reason(place: pathlib.Path) -> str:
    """Returns why the last program has failed: pip's first error, else what was said last."""
    lines = _log(place).read_text(errors="replace").rpartition("\n$ ")[2].splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return [*errors[:1], *(line.strip() for line in reversed(lines) if line.strip())][0][:200]
