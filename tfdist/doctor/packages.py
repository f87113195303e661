"""Python packages that do not go together, from pip's records alone. No TensorFlow."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

from packaging.requirements import Requirement

from tfdist import __version__
from tfdist.config import keras_backend
from tfdist.distributed import horovod_install, tpu_host
from tfdist.doctor.check import Check, fail, ok, warn

SHOWN = ("tensorflow", "keras", "horovod", "tensorflow-datasets", "numpy")
WHEELS = (
    "tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tensorflow-tpu",
    "tf-nightly", "tf-nightly-cpu", "tf-nightly-gpu", "tf-nightly-tpu",
)  # fmt: skip
"""All of them install the same folder `tensorflow`; what was installed last has written over the others."""
KERAS = ("keras", "keras-nightly")


def versions() -> dict[str, str]:
    """Returns the versions that a bug report has to name, as far as installed."""
    installed = {"python": platform.python_version(), "tfdist": __version__}
    installed |= {name: version for name in SHOWN if (version := _version(name))}
    if "tensorflow" not in installed:
        others = {name: version for name in WHEELS if (version := _version(name))}
        installed |= others
    return installed


def conflicts() -> list[Check]:
    """Looks for packages that install the same folder, and versions outside of what tfdist was made for."""
    checks = [c for names, folder in ((WHEELS, "tensorflow"), (KERAS, "keras")) for c in _same_folder(names, folder)]
    try:
        listed = [Requirement(text) for text in metadata.requires("tfdist") or ()]
    except metadata.PackageNotFoundError:
        fix = "pip install -e . in tfdist's folder"
        return [*checks, warn("packages", "tfdist is not installed by pip, so nobody knows what it needs", fix)]
    needs = [need for need in listed if not need.marker or need.marker.evaluate({"extra": ""})]
    checks += [check for need in needs for check in _unfit(need)]
    return checks or [ok("packages", f"all {len(needs)} that tfdist needs fit, and none is there twice")]


def _same_folder(names: tuple[str, ...], folder: str) -> list[Check]:
    there = {name: version for name in names if (version := _version(name))}
    if len(there) < 2:
        return []
    named = " and ".join(f"{name} {version}" for name, version in there.items())
    fix = f"pip uninstall -y {' '.join(there)}, then pip install the one for your devices"
    return [fail("packages", f"{named} write over each other: both install the folder {folder}", fix)]


def _unfit(need: Requirement) -> list[Check]:
    wanted = f"{need.name}{need.specifier}"
    have = horovod_install.tensorflow().version if need.name == "tensorflow" else _version(need.name)
    # tensorflow-tpu and tensorflow-gpu are TensorFlow too.
    have = have or (next(filter(None, map(_version, WHEELS)), "") if need.name == "tensorflow" else "")
    if not have:
        return [fail("packages", f"{need.name} is not installed, tfdist needs {wanted}", f"pip install '{wanted}'")]
    if not need.specifier.contains(have, prereleases=True):
        return [fail("packages", f"{need.name} {have} is installed, tfdist needs {wanted}", f"pip install '{wanted}'")]
    return []


def backend(environ: Mapping[str, str]) -> list[Check]:
    """Checks whether Keras will run on TensorFlow: a variable or a file in the home folder can send it elsewhere."""
    found = keras_backend.find(environ)
    if found.name != "tensorflow":
        what = f"{found.chosen_by} says that Keras runs on {found.name}, tfdist needs TensorFlow"
        return [fail("keras", what, found.fix)]
    if environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        what = "TF_USE_LEGACY_KERAS makes tf.keras the old Keras 2, whose models and layers tfdist cannot train"
        return [warn("keras", what, "unset TF_USE_LEGACY_KERAS, or import keras instead of tf.keras")]
    return [ok("keras", f"Keras {_version('keras') or 'is not installed; it would run'} on TensorFlow")]


def horovod(needed: bool) -> list[Check]:
    """Checks whether the installed Horovod was built for the installed TensorFlow.

    Args:
      needed: this run would use it.
    """
    problem = horovod_install.problem()
    if not problem:
        operations = horovod_install.installed()
        what = f" ({', '.join(operations.operations)})" if operations else ""
        return [ok("horovod", f"Horovod {_version('horovod')}{what} was built for this TensorFlow")]
    what, _, fix = problem.rpartition(": ")
    if needed:
        return [fail("horovod", what, fix)]
    if "is not installed" in what:
        return [ok("horovod", f"{what}, which only --strategy=horovod would need")]
    return [warn("horovod", f"{what}; only --strategy=horovod minds", fix)]


def tpu(environ: Mapping[str, str]) -> list[Check]:
    """Checks whether the installed TensorFlow can use a TPU; says nothing where nothing says that there is one."""
    hint, problem = tpu_host.hint(environ), tpu_host.problem()
    if not hint:
        return []
    if problem:
        what, _, fix = problem.rpartition(": ")
        return [warn("tpu", f"{hint} says that there is a TPU; {what}", fix)]
    return [ok("tpu", f"{hint} says that there is a TPU, and this TensorFlow has support; only a run can start it")]


def _version(name: str) -> str:
    try:
        return metadata.version(name) or ""
    except metadata.PackageNotFoundError:
        return ""
