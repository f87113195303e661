"""Eight logical CPUs for the whole session; TensorFlow allows to split the CPU once per process."""

import argparse
import functools
import gc
import logging
import os
import pathlib
import signal
import socket
import sys
import tempfile

import pytest
from absl import flags
from support import covering, processes, scheduling

import tfdist

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("PYTHONHASHSEED", "0")  # else `tfdist run` starts each program once more, to have it so
# Else each of some hundred processes compiles the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
REPOSITORY = pathlib.Path(__file__).parent.parent

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell starts what it puts into the background so, and programs under test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, and programs under test would inherit that, too

# Here and not in a fixture: test modules make tensors while they are collected.
logging.disable()  # pytest would print what it says behind its own last line
EIGHT = tfdist.connect("mirrored", virtual_devices=8, threads=1)
logging.disable(logging.NOTSET)
from tfdist.verification import equivalence_check  # noqa: E402  it loads TensorFlow, which must not have started before

# Else models that have passed in an earlier run of the tests would not be checked in this one.
equivalence_check.passed_folder = functools.cache(lambda: pathlib.Path(tempfile.mkdtemp(prefix="checked-models-")))
processes.settle()
gc.freeze()  # what TensorFlow and Keras have made stays, and need not be gone through again and again
gc.set_threshold(20_000, 20)


@pytest.hookimpl(tryfirst=True)  # before cells are left out by their marks
def pytest_collection_modifyitems(items):
    covering.mark_the_rest(items)


def pytest_addoption(parser):
    parser.addoption("--part", type=_part, help="run part I of N of the tests, as I/N (make test-all PART=2/6)")


def _part(text):
    number, _, total = text.partition("/")
    if not (number.isdecimal() and total.isdecimal() and 1 <= int(number) <= int(total)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part such as 2/6")
    return int(number), int(total)


@pytest.hookimpl(specname="pytest_collection_modifyitems", trylast=True)  # of what the marks have left
def pytest_keep_one_part(config, items):
    if config.option.part:
        mine = set(scheduling.select([item.nodeid for item in items], *config.option.part))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in mine])
        items[:] = [item for item in items if item.nodeid in mine]


def pytest_sessionfinish(session, exitstatus):
    """Notes which part passed; the processes of xdist leave that to the one that started them."""
    if session.config.option.part and not hasattr(session.config, "workerinput"):
        scheduling.record(REPOSITORY, "{}/{}".format(*session.config.option.part), exitstatus == 0)


def pytest_xdist_make_scheduler(config, log):
    return scheduling.ByPart(config, log) if config.option.dist == "loadscope" else None


@pytest.fixture(autouse=True)
def no_command():
    """Messages name arguments, but for a process that has parsed flags, as another test may have in this one."""
    flags.FLAGS.unparse_flags()


@pytest.fixture(scope="session")
def connect():
    """Distributions by number of replicas, each made once."""
    made = {8: EIGHT}

    def get(replicas):
        if replicas not in made:
            name = "default" if replicas == 1 else "mirrored"
            logging.disable(logging.INFO)  # a test that is not the first to ask would not see that line
            made[replicas] = tfdist.connect(name, virtual_devices=None if replicas == 1 else replicas)
            logging.disable(logging.NOTSET)
        return made[replicas]

    return get


@pytest.fixture(autouse=True)
def nothing_connected(monkeypatch):
    """`fit` without a distribution uses one device, whatever the tests before have connected."""
    from tfdist.distributed import connect

    monkeypatch.setattr(connect, "_IN_ORDER", [])


@pytest.fixture(autouse=True)
def plain_precision():
    """Whatever precision a test sets ends with it."""
    import keras

    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.fixture(autouse=True)
def plain_environment():
    """Whatever variables of TensorFlow's and Keras' a test sets end with it."""
    yield
    processes.restore()


@pytest.fixture
def port():
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture
def said():
    """Collects the lines that tfdist says to a person, as they are said."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("tfdist")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.fixture(scope="session")
def tfds_dir(tmp_path_factory):
    """Prepared data of the session, not of the person who runs the tests."""
    return tmp_path_factory.mktemp("tfds")


@pytest.fixture
def run(tmp_path, tfds_dir):
    """Runs `python -m <arguments>` in an empty folder; returns the finished process.

    `real` asks for a fresh interpreter, as in `processes`.
    """

    def start(*arguments, path="", popen=False, real=False, **environ):
        env = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "TF_CONFIG")}
        env |= {"TFDS_DATA_DIR": str(tfds_dir), "PYTHONPATH": os.pathsep.join(filter(None, [path, str(REPOSITORY)]))}
        env |= environ
        command = [sys.executable, "-m", *map(str, arguments)]
        kwargs = dict(cwd=tmp_path, env=env, text=True, stdout=processes.PIPE, stderr=processes.PIPE, real=real)
        return processes.Popen(command, **kwargs) if popen else processes.run(command, **kwargs, timeout=300)

    return start
