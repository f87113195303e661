"""The command that builds Horovod, with the real pip and compiler, on a Horovod and an environment that are made small.

`make test` runs it on the real ones first; the last test here finds that build.
"""

import fcntl
import hashlib
import io
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import sysconfig
import tarfile
import venv
from importlib import metadata

import pytest
from support.covering import first

from tfdist.distributed import horovod_install
from tfdist.errors import TrainingError, UserError
from tfdist.horovod_build import __main__ as horovod_build
from tfdist.horovod_build import workspace

REPOSITORY = pathlib.Path(__file__).parents[2]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
RECORD = "tensorflow/libtensorflow_framework.so.2,sha256={},1\ntensorflow/__init__.py,sha256=abc,3\n"
ENDS = [(signal.SIGTERM, 143, "ended by SIGTERM"), (signal.SIGINT, 130, "interrupted")]

SETUP = """
import json, os, shlex, subprocess, sysconfig
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

class Build(build_ext):
    def build_extensions(self):
        folder = os.path.join(self.build_lib, "horovod", "tensorflow")
        library = os.path.join(folder, "mpi_lib" + sysconfig.get_config_var("EXT_SUFFIX"))
        with open(os.path.join(folder, "environment.json"), "w") as file:
            json.dump(dict(os.environ), file)
        compiler = shlex.split(os.environ["CXX"])
        subprocess.check_call([*compiler, "-shared", "-fPIC", "-o", library, "horovod/tensorflow/mpi_ops.cc"])

setup(name="horovod", version="0.28.1", packages=find_packages(),
      ext_modules=[Extension("horovod.tensorflow.mpi_lib", [])],
      cmdclass={"build_ext": Build}, install_requires=["cloudpickle"],
      entry_points={"console_scripts": ["horovodrun = horovod:main"]})
"""
HEADER = '#include "tensorflow/stream_executor/stream.h"\n#endif // TENSORFLOW_VERSION >= 2011000000\n'
MPI_OPS = f"#if 0\n#if 1\n{HEADER}#endif\nint answer() {{ return 42; }}\n"
ASSIGNMENT = """  FLATBUFFERS_CONSTEXPR_CPP14 span &operator=(const span &other)
      FLATBUFFERS_NOEXCEPT {
    data_ = other.data_;
    count_ = other.count_;
  }
"""
SOURCE = {
    "setup.py": SETUP,
    "third_party/flatbuffers/include/flatbuffers/stl_emulation.h": f"a\n{ASSIGNMENT}b\n",
    "setup.cfg": "[egg_info]\ntag_build = \n",
    "horovod/__init__.py": "",
    "horovod/tensorflow/__init__.py": """\
import cloudpickle, ctypes, pathlib
ctypes.CDLL(str(next(pathlib.Path(__file__).parent.glob('mpi_lib*'))))
""",
    "horovod/tensorflow/mpi_ops.cc": MPI_OPS,
    "horovod/tensorflow/CMakeLists.txt": """\
a
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")
b
""",
}


def tar(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


class Site:
    """A virtual environment with pip, what tfdist's commands import, and a TensorFlow that must not be imported."""

    def __init__(self, folder, shared, leave_out=(), tensorflow="9.9.0"):
        venv.create(folder / "venv", symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        (self.packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
        needed = {"absl-py", "ml-collections", "pip", *workspace._PACKAGES}
        for name in needed - {*leave_out}:
            for top in {file.parts[0] for file in metadata.files(name)} - {"..", "__pycache__"}:
                (self.packages / top).symlink_to(metadata.distribution(name).locate_file(top))
        if tensorflow:
            self.tensorflow(tensorflow)
        self.cache = shared / "cache"
        self.links = shared / "links"
        self.links.mkdir(parents=True, exist_ok=True)
        self.digest = workspace.SHA256
        self.folder = folder

    def tensorflow(self, version, build="aaa", name="tensorflow"):
        (self.packages / "tensorflow").mkdir(exist_ok=True)
        (self.packages / "tensorflow" / "__init__.py").write_text("raise AssertionError('TensorFlow was imported')\n")
        info = self.packages / f"{name.replace('-', '_')}-9.9.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text(RECORD.format(build))

    def release(self, changes=()):
        """Makes a Horovod that pip finds, and that the command takes for the released one."""
        path = tar(self.links / "horovod-0.28.1.tar.gz", SOURCE | dict(changes))
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return path

    def run(self, *arguments, setup="", popen=False, **environ):
        code = f"""
from tfdist.horovod_build import __main__ as horovod_build, workspace
workspace.SHA256 = {self.digest!r}
{setup}
horovod_build.main()
"""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "HOROVOD_", "MAKE", "XDG_"))}
        env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.links)}
        env |= {"XDG_CACHE_HOME": str(self.cache), "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(self.folder)} | environ
        command = [self.python, "-c", code, *map(str, arguments)]
        kwargs = dict(cwd=self.folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return subprocess.Popen(command, **kwargs) if popen else subprocess.run(command, **kwargs, timeout=120)

    def have(self, name):
        return any(path.name.lower().startswith(f"{name}-") for path in self.packages.iterdir())


@pytest.fixture
def site(tmp_path, tmp_path_factory):
    """Makes an environment."""

    def make(**kwargs):
        (tmp_path / "one").mkdir()
        return Site(tmp_path / "one", tmp_path, **kwargs)

    return make


def programs(folder, **bodies):
    """Puts shell scripts into a folder; returns a PATH that begins with it."""
    folder.mkdir(exist_ok=True)
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def one_line(done, code):
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr.startswith("tfdist: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr.strip()


def log_of(line):
    return pathlib.Path(re.search(r"the log is (\S+)", line)[1])


@pytest.mark.whole
def test_from_the_source_to_an_installation(site):
    one = site()
    archive = one.release()
    done = one.run(HOROVOD_WITH_PYTORCH="1", MAKEFLAGS=" -j8 --jobserver-auth=3,4", MFLAGS="-j8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "building Horovod 0.28.1 for TensorFlow 9.9.0 (Gloo): about " in done.stdout
    assert done.stdout.endswith("tfdist: Horovod 0.28.1 is built for TensorFlow 9.9.0 (Gloo)\n")
    package = one.packages / "horovod"
    used = json.loads((package / "tensorflow" / "environment.json").read_text())
    assert {k: v for k, v in used.items() if k.startswith("HOROVOD_") and k != "HOROVOD_CMAKE"} == {
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_NVTX": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
    }
    assert re.fullmatch(r"-j\d+", used["MAKEFLAGS"]) and "MFLAGS" not in used

    # Again: no compiler, no pip, no TensorFlow is touched.
    done = one.run(PATH="/nonexistent", PIP_FIND_LINKS="/nonexistent")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "tfdist: Horovod 0.28.1 is already built for TensorFlow 9.9.0 (Gloo)\n"

    # Another build of TensorFlow: that of before is not for it.
    one.tensorflow("9.9.0", build="bbb")
    done = one.run()
    assert done.returncode == 0 and "building Horovod" in done.stdout, done.stdout + done.stderr
    archive.unlink()
    one.tensorflow("9.9.0", build="ccc")
    assert "pip cannot fetch horovod==0.28.1 (" in one_line(one.run(), 2)

    # pip removes all of it, stamp included.
    subprocess.run([one.python, "-m", "pip", "uninstall", "--yes", "horovod"], check=True, capture_output=True)
    assert not package.exists()


@pytest.mark.whole
def test_other_options_build_again_and_fewer_do_not(site, tmp_path):
    one = site()
    archive = one.release()
    path = programs(tmp_path / "bin", mpicxx="echo g++", mpirun="echo 4.1")
    assert one.run(f"--sdist={os.path.relpath(archive, one.folder)}", PATH=path).returncode == 0
    done = one.run("--mpi", PATH=path)
    assert done.stdout.endswith("tfdist: Horovod 0.28.1 is built for TensorFlow 9.9.0 (Gloo, MPI)\n"), done.stderr
    used = json.loads((one.packages / "horovod" / "tensorflow" / "environment.json").read_text())
    assert used["HOROVOD_WITH_MPI"] == "1" and "HOROVOD_WITHOUT_MPI" not in used
    for arguments in ([], ["--mpi"]):
        done = one.run(*arguments, PATH=path)
        assert done.stdout == "tfdist: Horovod 0.28.1 is already built for TensorFlow 9.9.0 (Gloo, MPI)\n", done.stderr

    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    programs(tmp_path / "cuda" / "bin", nvcc="echo release 12.5")
    (tmp_path / "nccl" / "include").mkdir(parents=True)
    (tmp_path / "nccl" / "include" / "nccl.h").write_text("#define NCCL_MAJOR 2\n")
    places = dict(HOROVOD_CUDA_HOME=str(tmp_path / "cuda"), HOROVOD_NCCL_HOME=str(tmp_path / "nccl"))
    done = one.run("--nccl", **places)
    assert done.stdout.endswith("(Gloo, NCCL)\n"), done.stderr
    used = json.loads((one.packages / "horovod" / "tensorflow" / "environment.json").read_text())
    assert used["HOROVOD_GPU_OPERATIONS"] == "NCCL" and places.items() <= used.items()


@pytest.mark.whole
def test_a_source_that_does_not_compile(site):
    one = site()
    one.release({"horovod/tensorflow/mpi_ops.cc": MPI_OPS.replace("42", "fortytwo")})
    line = one_line(one.run(), 1)
    assert re.match(
        r"tfdist: failed: Horovod does not compile: \S+mpi_ops.cc:\d+:\d+: error: .fortytwo. was not declared", line
    )
    assert "fortytwo" in log_of(line).read_text()
    assert not one.have("horovod") and not list(one.folder.glob("tfdist-horovod-*"))


@pytest.mark.whole
def test_a_build_that_does_not_load(site):
    one = site()
    one.release({"horovod/tensorflow/__init__.py": "raise ImportError('undefined symbol: _ZN3abc')\n"})
    line = one_line(one.run(), 1)
    assert "Horovod is built and does not load: ImportError: undefined symbol: _ZN3abc: the log is " in line
    assert not one.have("horovod")


@pytest.mark.whole
def test_pip_that_cannot_install(site):
    one = site()
    one.release()
    (one.python.parent / "horovodrun").mkdir()
    line = one_line(one.run(), 1)
    assert "tfdist: failed: pip cannot install Horovod (" in line and "horovodrun" in log_of(line).read_text()


@pytest.mark.whole
def test_another_source_than_the_released_one(site):
    one = site()
    archive = one.release()
    one.digest = "0" * 64
    line = one_line(one.run(f"--sdist={archive}"), 2)
    assert f"--sdist={archive} is not the released horovod-0.28.1.tar.gz: its SHA-256 is" in line and "not 0000" in line
    line = one_line(one.run(), 2)
    assert "pip cannot fetch horovod==0.28.1 (ERROR: THESE PACKAGES DO NOT MATCH THE HASHES" in line
    assert "setup.py" not in log_of(line).read_text()  # nothing of it was run
    line = one_line(one.run("--sdist=nowhere.tar.gz"), 2)
    assert "nowhere.tar.gz cannot be read (No such file or directory): give the path of horovod-0.28.1.tar.gz" in line


ALL = "a C++17 compiler, a C compiler, make, cmake 3.13 or newer"
MISSING = [
    ([], {"PATH": "/nonexistent"}, f"without {ALL}: apt-get install g++ gcc make; pip install 'tfdist[horovod]'"),
    (["--mpi"], {"PATH": "/nonexistent"},
     f"without {ALL}, MPI (mpicxx, mpirun): apt-get install g++ gcc make openmpi-bin libopenmpi-dev; pip"),
    (["--nccl"], {"HOROVOD_CUDA_HOME": "/nonexistent"}, "the CUDA toolkit (nvcc)"),
    (["--nccl"], {"HOROVOD_CUDA_HOME": "/nonexistent"}, "set HOROVOD_CUDA_HOME to its folder"),
    ([], {"CXX": "false"}, "without a C++17 compiler: apt-get install g++"),
    ([], {"CXX": "c++ -std=c++11 -D__cplusplus=201103L"}, "without a C++17 compiler: apt-get install g++"),
    ([], {"HOROVOD_CMAKE": "/nonexistent"}, "without cmake 3.13 or newer: pip install 'tfdist[horovod]'"),
    ([], {"XDG_CACHE_HOME": "/dev/null"}, "cannot be written (Not a directory): set XDG_CACHE_HOME to another folder"),
    (["--mpy"], {}, "unknown flag --mpy: did you mean --mpi?"),
    (["mpi"], {}, "unexpected argument 'mpi': flags are written --name=value"),
]  # fmt: skip


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """An environment in which nothing gets installed."""
    folder = tmp_path_factory.mktemp("bare")
    return Site(folder, folder)


@pytest.mark.parametrize("arguments, environ, message", first(5, MISSING))
def test_what_is_missing(arguments, environ, message, bare):
    assert message in one_line(bare.run(*arguments, **environ), 2)


def test_old_cmake_no_pip_no_wheel_no_tensorflow_in_one_line(site, tmp_path):
    one = site(leave_out=["pip", "wheel"], tensorflow="")
    done = one.run(PATH=programs(tmp_path / "bin", cmake="echo cmake version 3.10.2"))
    assert one_line(done, 2).endswith(
        "without cmake 3.13 or newer, pip, wheel, TensorFlow: "
        "pip install 'tfdist[horovod]'; python -m ensurepip; pip install tensorflow"
    )


def test_a_python_that_belongs_to_the_system(tmp_path, monkeypatch):
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    wanted = horovod_install.Build(horovod_install.TensorFlow("9.9.0"), SUFFIX, ("Gloo",))
    with pytest.raises(UserError, match=r"a virtual environment \(this Python is the system's\): .*python3 -m venv"):
        workspace.find(wanted, {"PATH": os.environ["PATH"]})


@pytest.mark.parametrize("number, code, said", first(0, ENDS))
def test_a_signal_ends_the_compiler_too(number, code, said, site, tmp_path):
    one = site()
    one.release()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # It holds the pipe open for as long as it lives, as does its child.
    slow = f'case "$*" in *-shared*) exec 9>{pipe}; echo started >&9; sleep 300 & wait;; *) exec g++ "$@";; esac'
    programs(tmp_path / "bin", slow=slow)
    process = one.run(popen=True, CXX=str(tmp_path / "bin" / "slow"))
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as end:
        readable(end)
        assert end.read(8) == b"started\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        readable(end)
        assert end.read() == b""  # nobody is left
    assert (process.returncode, err) == (code, f"tfdist: {said}, Horovod is not built\n")
    assert not list(one.folder.glob("tfdist-horovod-*")) and not one.have("horovod")


def readable(file):
    poll = select.poll()
    poll.register(file, select.POLLIN | select.POLLHUP)
    assert poll.poll(60_000), "no word within 60 s"


@pytest.mark.whole
def test_a_second_build_waits_for_the_first(site):
    one = site()
    one.release()
    folder = one.cache / "tfdist" / "horovod"
    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        line = one_line(one.run(setup="workspace.LIMIT_S = -1"), 2)
        assert f"another build of Horovod holds {folder / 'lock'} for -1 s: end it and run again" in line
        process = one.run(popen=True)
        assert process.stdout.readline() == "tfdist: another build of Horovod is running: waiting for it\n"
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out.endswith("is built for TensorFlow 9.9.0 (Gloo)\n"), out + err


def test_a_build_that_never_ends_is_given_up(site):
    line = one_line(site().run(setup="workspace.LIMIT_S = 0"), 1)
    assert "tfdist: failed: the build took more than 0 s: the log is " in line


WANTED = horovod_install.Build(horovod_install.TensorFlow("2.21.0", "aaa"), SUFFIX, ("Gloo",))


def test_the_edits(tmp_path):
    source = workspace.unpack(tar(tmp_path / "a.tar.gz", SOURCE), tmp_path / "b")
    workspace.prepare(source, WANTED)
    assert (source / "horovod/tensorflow/CMakeLists.txt").read_text() == "a\nb\n"
    assert (source / "third_party/flatbuffers/include/flatbuffers/stl_emulation.h").read_text().endswith("delete;\nb\n")
    assert HEADER + "namespace stream_executor {" in (source / "horovod/tensorflow/mpi_ops.cc").read_text()
    with pytest.raises(TrainingError, match=r"CMakeLists.txt should have 'list\(APPEND .*' once, and has it 0 times"):
        workspace.prepare(source, WANTED)


@pytest.mark.parametrize(
    "log, line",
    [
        ("a.cc: In function\n  a.cc:3:1: error: no x\nb.cc:1: error: no y\n", "a.cc:3:1: error: no x"),
        ("CMake Error at CMakeLists.txt:3 (find_package):\n  No MPI\n\nerror: subprocess-exited-with-error\n",
         "CMake Error at CMakeLists.txt:3 (find_package): No MPI"),
        ("c++: fatal error: Killed signal terminated program cc1plus\nmake: *** [x] Error 1\n",
         "c++: fatal error: Killed signal terminated program cc1plus"),
        ("Traceback:\n  x\nRuntimeError: CMake failed\nERROR: Failed building wheel\n", "RuntimeError: CMake failed"),
        ("", "no message"),
        ("a.cc:1: error: " + 400 * "x", "a.cc:1: error: " + 285 * "x" + "..."),
    ],
)  # fmt: skip
def test_the_first_error_of_a_log(log, line):
    assert workspace.first_error(log) == line


STAMP = {
    "horovod": "0.28.1", "tensorflow": {"version": "2.21.0", "build": None}, "python": SUFFIX, "operations": ["Gloo"],
}  # fmt: skip
FIX = ": run python -m tfdist.horovod_build"
PROBLEMS = [
    # TensorFlow installed, files of the package, problem
    ("2.21.0", {"tfdist_build.json": STAMP}, ""),
    ("2.21.0", {"metadata.json": {"tensorflow": "2.21.0"}}, ""),
    ("2.21.0", {}, ""),
    ("2.21.0", {"tfdist_build.json": [1]}, ""),
    ("2.21.0rc1", {"metadata.json": {"tensorflow": "2.21.0-rc1"}}, ""),
    ("2.21.0+nv25.2", {"metadata.json": {"tensorflow": "2.21.0"}}, ""),
    ("", {}, "TensorFlow is not installed: run pip install tensorflow"),
    ("2.21.0", None, f"Horovod is not installed{FIX}"),
    ("2.21.0", {f"tensorflow/mpi_lib{SUFFIX}": None},
     f"Horovod is installed without its part for TensorFlow (tensorflow/mpi_lib{SUFFIX}){FIX}"),
    ("2.20.0", {"tfdist_build.json": STAMP}, f"Horovod was built for TensorFlow 2.21.0 and 2.20.0 is installed{FIX}"),
    ("2.21.0", {"metadata.json": {"tensorflow": "2.20.0"}},
     f"Horovod was built for TensorFlow 2.20.0 and 2.21.0 is installed{FIX}"),
    ("2.21.0", {"tfdist_build.json": {**STAMP, "tensorflow": {"version": "2.21.0", "build": "old"}}},
     f"Horovod was built for another TensorFlow 2.21.0 than the one that is installed{FIX}"),
]  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["tensorflow", "tensorflow-cpu"])
@pytest.mark.parametrize("version, files, problem", PROBLEMS)
def test_problem(version, files, problem, name, site):
    one = site(tensorflow="")
    if version:
        one.tensorflow(version, name=name)
    lines = "\n".join(line for line in RECORD.format("aaa").splitlines() if "/lib" in line)
    build = hashlib.sha256(lines.encode()).hexdigest()[:16]
    if files is None:
        (one.folder / "horovod").mkdir()  # merely has the name
    else:
        for path, content in {"__init__.py": "", f"tensorflow/mpi_lib{SUFFIX}": "", **files}.items():
            file = one.packages / "horovod" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if content is not None:
                text = json.dumps(content).replace("null", json.dumps(build))
                file.write_text(text if file.suffix == ".json" else content)
    code = "from tfdist.distributed import horovod_install; print(horovod_install.problem())"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([one.python, "-c", code], cwd=one.folder, env=env, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{problem}\n", "")


def test_the_real_one_is_built_and_the_command_knows(run, tmp_path):
    poison = tmp_path / "poison"
    poison.mkdir()
    (poison / "tensorflow.py").write_text("raise AssertionError('TensorFlow was imported')\n")
    done = run("tfdist.horovod_build", path=str(poison), PATH="/nonexistent")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"tfdist: Horovod 0.28.1 is already built for TensorFlow \S+ \(Gloo.*\)\n", done.stdout)
    assert horovod_install.problem() == ""
    assert horovod_build.environment(("Gloo",), {"PATH": "x"}, "y")["PATH"] == "x"
