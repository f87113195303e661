"""The released source of Horovod, and what it takes to compile it against a current TensorFlow. No TensorFlow."""

import dataclasses
import hashlib
import json
import pathlib
import tarfile

from tfdist.distributed import horovod_install
from tfdist.errors import TrainingError, UserError

ARCHIVE = f"horovod-{horovod_install.VERSION}.tar.gz"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"  # checksum of the archive that pip delivers


_STREAM_HEADER = '#include "tensorflow/stream_executor/stream.h"\n#endif // TENSORFLOW_VERSION >= 2011000000\n'

EDITS = (  # of a file, the text that stands there once, and what it becomes
    # It registers Horovod with XLA, through headers that have moved. Horovod uses it only on request.
    (
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
    ),
    # TensorFlow no longer exports this function. Builds with NCCL compile without it, and then do not load.
    (
        "horovod/tensorflow/mpi_ops.cc",
        _STREAM_HEADER,
        _STREAM_HEADER
        + "namespace stream_executor {\nnamespace gpu {\n"
        + "inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {\n"
        + "  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);\n}\n"
        + "} // namespace gpu\n} // namespace stream_executor\n",
    ),
    # The stamp becomes a file of the package, so that pip removes it with the rest.
    ("setup.cfg", "[egg_info]", f"[options.package_data]\nhorovod = {horovod_install.STAMP}\n\n[egg_info]"),
)


def check(path: pathlib.Path) -> None:
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
    # The first releases of Python 3.10 and 3.11 have no filter; the digest vouches for the archive.
    filtered: dict = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as tar:
        tar.extractall(folder, **filtered)
    return folder / f"horovod-{horovod_install.VERSION}"


def prepare(source: pathlib.Path, wanted: horovod_install.Build) -> None:
    """Makes the edits, and adds the stamp that says what the build is for."""
    for name, old, new in EDITS:
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
