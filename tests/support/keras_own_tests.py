"""Keras' own tests of fit, evaluate, predict and callbacks, answered by tfdist: a plugin of pytest.

`make keras-tests` runs them three times: by plain Keras, which shows what passes at all here, and by tfdist on one
device and on two replicas. What plain Keras passes tfdist must pass, save for EXCEPTIONS.
"""

from __future__ import annotations

import fnmatch
import functools
import sys
import types
from collections.abc import Callable, Iterator

import pytest

import tfdist

EXCEPTIONS: dict[str, tuple[str, str]] = {}
"""By pattern for the name of a test: the strategy ("*" for both), and why tfdist does not pass it."""

_MISSING = ("jax",)
"""Packages that Keras' tests import at their top and use in tests of other backends only."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strategy", choices=["keras", "default", "mirrored"], default="default", help="who answers: Keras, or tfdist"
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("requires_trainable_backend", "multi_device"):
        config.addinivalue_line("markers", f"{marker}: of Keras' own tests")
    for name in _MISSING:
        try:
            __import__(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
    # One of Keras' tests imports it from there.
    sys.modules["conftest"] = types.ModuleType("conftest")
    sys.modules["conftest"].skip_if_backend = lambda backend, reason: pytest.mark.skipif(  # type: ignore[attr-defined]
        backend == "tensorflow", reason=reason
    )
    strategy = config.getoption("--strategy")
    if strategy != "keras":
        options = {"virtual_devices": 2, "threads": 1} if strategy == "mirrored" else {"threads": 1}
        config.stash[_ANSWERS] = Answers(tfdist.connect(strategy, **options))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    strategy = config.getoption("--strategy")
    for item in items:
        if item.get_closest_marker("multi_device"):
            item.add_marker(pytest.mark.skip(reason="is for several devices of JAX"))
        for pattern, (where, reason) in EXCEPTIONS.items() if strategy != "keras" else ():
            if fnmatch.fnmatch(strategy, where) and fnmatch.fnmatch(item.name, pattern):
                item.add_marker(pytest.mark.xfail(strict=True, reason=reason))


@pytest.fixture(autouse=True)
def _answered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs a test in the scope of the strategy, with tfdist behind the methods of the model."""
    answers = request.config.stash.get(_ANSWERS, None)
    if answers is None:
        yield
        return
    answers.replace(monkeypatch)
    with answers.distribution.scope():
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
