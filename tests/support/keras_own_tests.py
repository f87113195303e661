"""Keras' own tests of fit, evaluate, predict and callbacks, answered by tfdist: a plugin of pytest.

`make keras-tests` runs them three times. Plain Keras comes first and notes what passes here at all: that depends on
which of torch, Grain, SciPy, pandas and JAX are installed. Then tfdist answers, on one device and on two replicas. It
must pass what plain Keras has passed, save for EXCEPTIONS; the rest is skipped.

The tests are read from a checkout, and run against the installed Keras, which therefore must be of the same version.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
import pathlib
import sys
import types
from collections.abc import Callable, Iterator

import pytest

import tfdist

EXCEPTIONS: dict[str, tuple[str, str]] = {}
"""By pattern for the name of a test: the strategy ("*" for both), and why tfdist does not pass it."""

_PASSED = pytest.StashKey[set[str]]()
"""Names of the tests that plain Keras passes: those that it has passed so far, or all of them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--strategy", choices=["keras", "default", "mirrored"], default="default", help="who answers")
    parser.addoption("--passed", type=pathlib.Path, required=True, help="the file of what plain Keras has passed")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for marker in ("requires_trainable_backend", "multi_device"):
        config.addinivalue_line("markers", f"{marker}: of Keras' own tests")
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401 -- after TensorFlow it may crash
    strategy = config.getoption("--strategy")
    if strategy == "keras":
        config.stash[_PASSED] = set()
    else:
        config.stash[_PASSED] = set(json.loads(config.getoption("--passed").read_text()))
        options = {"virtual_devices": 2, "threads": 1} if strategy == "mirrored" else {"threads": 1}
        config.stash[_ANSWERS] = Answers(tfdist.connect(strategy, **options))
    _stand_ins(pathlib.Path(config.rootpath))


def _stand_ins(checkout: pathlib.Path) -> None:
    """Imports the installed Keras, before its checkout would be found, and what its tests import at their top.

    Raises:
      pytest.UsageError: the checkout is of another version.
    """
    import keras

    said = (checkout / "keras/src/version.py").read_text()
    if f'"{keras.__version__}"' not in said:
        raise pytest.UsageError(f"the installed Keras is {keras.__version__}, and the checkout says: {said.strip()}")
    try:
        import jax  # noqa: F401
    except ImportError:
        sys.modules["jax"] = types.ModuleType("jax")
    # One test takes this from the file next to the sources, which sets up other backends as well.
    sys.modules["conftest"] = types.ModuleType("conftest")
    sys.modules["conftest"].skip_if_backend = lambda backend, reason: pytest.mark.skipif(  # type: ignore[attr-defined]
        backend == "tensorflow", reason=reason
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    strategy = config.getoption("--strategy")
    for item in items:
        if item.get_closest_marker("multi_device"):
            item.add_marker(pytest.mark.skip(reason="is for several devices of JAX"))
        if strategy == "keras":
            continue
        if item.nodeid not in config.stash[_PASSED]:
            item.add_marker(pytest.mark.skip(reason="plain Keras does not pass it here"))
        for pattern, (where, reason) in EXCEPTIONS.items():
            if fnmatch.fnmatch(strategy, where) and fnmatch.fnmatchcase(item.name, pattern):
                item.add_marker(pytest.mark.xfail(strict=True, reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call" and report.passed:
        item.config.stash[_PASSED].add(item.nodeid)
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Of plain Keras, failures are noted by leaving them out, and are no failure of the command."""
    if session.config.getoption("--strategy") == "keras":
        session.config.getoption("--passed").write_text(json.dumps(sorted(session.config.stash[_PASSED])))
        if exitstatus == pytest.ExitCode.TESTS_FAILED and session.config.stash[_PASSED]:
            session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(autouse=True)
def _answered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs a test in the scope of the strategy, with tfdist behind the methods of the model."""
    answers = request.config.stash.get(_ANSWERS, None)
    if answers is None:
        yield
        return
    answers.replace(monkeypatch)
    # Not around all of the test: its setUp clears the session, and with it the scope.
    test = request.node.obj

    @functools.wraps(test)
    def in_scope(*arguments, **options):
        with answers.distribution.scope():
            return test(*arguments, **options)

    request.node.obj = in_scope
    yield


class Answers:
    """Keras' methods of a model that train, measure and predict, answered by tfdist.

    Args:
      distribution: under which tfdist answers.
    """

    def __init__(self, distribution: tfdist.Distribution):
        self.distribution = distribution

    def replace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts tfdist behind the methods, for one test."""
        import keras

        trainer = next(c for c in keras.Model.__mro__ if "fit" in vars(c))
        for ours in (tfdist.fit, tfdist.evaluate, tfdist.predict):
            monkeypatch.setattr(trainer, ours.__name__, self._method(ours))

    def _method(self, ours: Callable) -> Callable:
        # Without being asked Keras returns a list or a number, and tfdist a dictionary.
        like_keras = {"return_dict": False} if ours is tfdist.evaluate else {}

        @functools.wraps(ours)
        def method(model, *args, **kwargs):
            return ours(model, *args, distribution=self.distribution, **like_keras | kwargs)

        return method


_ANSWERS = pytest.StashKey[Answers]()
