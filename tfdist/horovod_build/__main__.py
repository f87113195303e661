"""Builds Horovod for the installed TensorFlow: `python -m tfdist.horovod_build`.

The environment stays as it is until there is a wheel that loads. The log is in
the user's cache folder.

Exit codes: 0 Horovod is there; 1 it does not compile or load; 2 something that
the build needs is missing; 130 or 143 ended by a signal.
"""

import importlib
import os
import pathlib
import tempfile

from absl import flags

from tfdist.config import local_files
from tfdist.config.commands import command_line
from tfdist.config.messages import logger
from tfdist.distributed import horovod_install
from tfdist.distributed.horovod_install import VERSION, Build
from tfdist.errors import TrainingError, UserError
from tfdist.horovod_build import workspace as workspace_lib


def ensure(operations: tuple[str, ...], sdist: str = "") -> str:
    """Installs Horovod unless it is there already; returns what is there now, in words.

    Args:
      operations: `Gloo`, and `MPI` and `NCCL` where wanted.
      sdist: path of the source archive; pip fetches it if empty.
    """
    wanted = Build(horovod_install.tensorflow(), horovod_install.python(), operations)
    if there := _already(wanted):
        return there
    archive = pathlib.Path(sdist).absolute() if sdist else None
    if archive:
        workspace_lib.check_archive(archive)
    tools, folder = workspace_lib.find(wanted), _folder()
    with local_files.locked(folder / "lock", "another build of Horovod", workspace_lib.LIMIT_S):
        if there := _already(wanted):  # somebody else's build, after a wait
            return there
        with tempfile.TemporaryDirectory(prefix="tfdist-horovod-", ignore_cleanup_errors=True) as temporary:
            environ = environment(operations, tools, temporary)
            _build(workspace_lib.Workspace(pathlib.Path(temporary), folder / "build.log", environ), wanted, archive)
    return f"Horovod {VERSION} is built for {_describe(wanted)}"


def _already(wanted: Build) -> str:
    """Says what is installed already, if it serves; else nothing."""
    importlib.invalidate_caches()
    have = horovod_install.installed()
    return f"Horovod {VERSION} is already built for {_describe(have)}" if have and have.serves(wanted) else ""


def _describe(build: Build) -> str:
    return f"TensorFlow {build.tensorflow.version} ({', '.join(build.operations)})"


def _build(workspace: workspace_lib.Workspace, wanted: Build, archive: pathlib.Path | None) -> None:
    """Compiles Horovod, tries whether it loads, and installs it."""
    what = f"building Horovod {VERSION} for {_describe(wanted)}"
    logger.info(f"{what}: about 2 minutes on two cores, the log is {workspace.log}")
    source = workspace_lib.unpack(archive or workspace.download(), workspace.folder / "source")
    workspace_lib.prepare(source, wanted)
    wheel = workspace.compile(source)
    if not workspace.loads(wheel):
        raise TrainingError(f"Horovod is built and does not load: {workspace.last_line()}: the log is {workspace.log}")
    workspace.install(wheel)


def environment(operations: tuple[str, ...], tools: dict[str, str], temporary: str) -> dict[str, str]:
    """Returns the variables of the build. What is built follows from the options alone, not from the caller's."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_") or k in workspace_lib.PLACES}
    for name in ("MFLAGS", "MAKELEVEL", "CCL_ROOT"):  # of a make that runs this; would add oneCCL
        environ.pop(name, None)
    mpi = {"HOROVOD_WITH_MPI": "1"} if "MPI" in operations else {"HOROVOD_WITHOUT_MPI": "1"}
    nccl = {"HOROVOD_GPU_OPERATIONS": "NCCL"} if "NCCL" in operations else {}
    given = {**environ, **tools, **mpi, **nccl, "TMPDIR": temporary}
    return given | {
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_NVTX": "1",
        "HOROVOD_WITH_GLOO": "1",
        # The bundled Gloo asks for the behavior of a CMake so old that CMake 4 refuses.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        # Horovod passes options that only make understands, and -j8 unless told otherwise.
        "CMAKE_GENERATOR": "Unix Makefiles",
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def _folder() -> pathlib.Path:
    """Returns the folder of the log, which outlives the build, and of the lock."""
    folder = local_files.cache("horovod")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "build.log").open("ab").close()
    except OSError as error:
        what = f"the cache folder {folder} cannot be written ({error.strerror})"
        raise UserError(what, "set XDG_CACHE_HOME to another folder") from None
    return folder


def _run(argv: list[str]) -> int:
    command_line.clean_up_when_ended("ended by {}, Horovod is not built")
    options = (("MPI", flags.FLAGS.mpi), ("NCCL", flags.FLAGS.nccl))
    logger.info(ensure(("Gloo", *(name for name, wanted in options if wanted)), flags.FLAGS.sdist))
    return 0


def main() -> None:
    flags.DEFINE_bool("mpi", False, "Build with MPI too, for a start by mpirun; needs mpicxx and mpirun.")
    flags.DEFINE_bool("nccl", False, "Build with NCCL too, for GPUs; needs the CUDA toolkit and NCCL with its header.")
    flags.DEFINE_string("sdist", "", f"Path of {workspace_lib.ARCHIVE}, for a machine without a network.")
    command_line.main(_run, command_line.parse_own, "interrupted, Horovod is not built")


if __name__ == "__main__":
    main()
