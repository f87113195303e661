"""Python packages that do not go together, from pip's records alone. No TensorFlow."""

import platform
from collections.abc import Mapping
from importlib import metadata

from packaging.requirements import Requirement

from tfdist import __version__
from tfdist.config import packages
from tfdist.config.packages import version
from tfdist.distributed import horovod_install, tpu_host
from tfdist.doctor.check import Finding, fail, ok, warn

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
    installed |= _installed(SHOWN)
    return installed if "tensorflow" in installed else installed | _installed(WHEELS)


def conflicts() -> list[Finding]:
    """Looks for packages that install the same folder, and versions outside of what tfdist was made for."""
    checks = []
    for names, folder in ((WHEELS, "tensorflow"), (KERAS, "keras")):
        if len(there := _installed(names)) > 1:
            named = " and ".join(f"{name} {version}" for name, version in there.items())
            fix = f"pip uninstall -y {' '.join(there)}, then pip install the one for your devices"
            checks.append(fail(f"{named} write over each other: both install the folder {folder}", fix))
    try:
        listed = [Requirement(text) for text in metadata.requires("tfdist") or ()]
    except metadata.PackageNotFoundError:
        fix = "pip install -e . in tfdist's folder"
        return [*checks, warn("tfdist is not installed by pip, so nobody knows what it needs", fix)]
    needs = [need for need in listed if not need.marker or need.marker.evaluate({"extra": ""})]
    checks += [check for need in needs for check in _unfit(need)]
    return checks or [ok(f"all {len(needs)} that tfdist needs fit, and none is there twice")]


def _unfit(need: Requirement) -> list[Finding]:
    wanted = f"{need.name}{need.specifier}"
    have = version(need.name)
    if need.name == "tensorflow":  # tensorflow-tpu and tensorflow-gpu are TensorFlow too
        have = horovod_install.tensorflow().version or next(iter(_installed(WHEELS).values()), "")
    if have and need.specifier.contains(have, prereleases=True):
        return []
    is_there = f"{have} is installed" if have else "is not installed"
    return [fail(f"{need.name} {is_there}, tfdist needs {wanted}", f"pip install '{wanted}'")]


def backend(environ: Mapping[str, str]) -> list[Finding]:
    """Checks whether Keras will run on TensorFlow: a variable or a file in the home folder can send it elsewhere."""
    found = packages.backend(environ)
    if found.name != "tensorflow":
        what = f"{found.chosen_by} says that Keras runs on {found.name}, tfdist needs TensorFlow"
        return [fail(what, found.fix)]
    if environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        what = "TF_USE_LEGACY_KERAS makes tf.keras the old Keras 2, whose models and layers tfdist cannot train"
        return [warn(what, "unset TF_USE_LEGACY_KERAS, or import keras instead of tf.keras")]
    return [ok(f"Keras {version('keras') or 'is not installed; it would run'} on TensorFlow")]


def horovod(needed: bool) -> list[Finding]:
    """Checks whether the installed Horovod was built for the installed TensorFlow; `needed` by this run."""
    problem = horovod_install.problem()
    if not problem:
        operations = horovod_install.installed()
        what = f" ({', '.join(operations.operations)})" if operations else ""
        return [ok(f"Horovod {version('horovod')}{what} was built for this TensorFlow")]
    what, _, fix = problem.rpartition(": ")
    if needed:
        return [fail(what, fix)]
    if "is not installed" in what:
        return [ok(f"{what}, which only --strategy=horovod would need")]
    return [warn(f"{what}; only --strategy=horovod minds", fix)]


def tpu(environ: Mapping[str, str]) -> list[Finding]:
    """Checks whether the installed TensorFlow can use a TPU; says nothing where nothing says that there is one."""
    hint, problem = tpu_host.hint(environ), tpu_host.problem()
    if not hint:
        return []
    if problem:
        what, _, fix = problem.rpartition(": ")
        return [warn(f"{hint} says that there is a TPU; {what}", fix)]
    return [ok(f"{hint} says that there is a TPU, and this TensorFlow has support; only a run can start it")]


def _installed(names: tuple[str, ...]) -> dict[str, str]:
    return {name: found for name in names if (found := version(name))}
