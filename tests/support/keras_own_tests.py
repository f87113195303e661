"""Keras' own tests of fit, evaluate, predict and callbacks, answered by tfdist: a plugin of pytest.

`make keras-tests` runs them three times. Plain Keras comes first and notes what passes here at all: that depends on
which of torch, Grain, SciPy, pandas and JAX are installed. Then tfdist answers, on one device and on two replicas. It
must pass what plain Keras has passed, save for EXCEPTIONS; the rest is skipped.

The tests are read from a checkout, and run against the installed Keras, which therefore must be of the same version.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import tfdist


class Except(NamedTuple):
    """Tests that plain Keras passes and tfdist does not."""

    reason: str
    strategy: str
    """`*` for both."""
    names: tuple[str, ...]
    """Patterns; what they match must fail."""


EXCEPTIONS = [
    Except("sparse and ragged tensors are refused in one line", "*", ("test_*_sparse_*",
                                                                      "test_trainer_with_raggeds_*")),
    Except(
        "an epoch has steps_per_epoch updates (docs/python.md): Keras' is shorter where the data ends within it, and "
        "longer where steps_per_execution does not divide it",
        "*",
        ("test_fit_flow_steps_per_epoch_*", "test_*steps_per_epoch_*not_match_*",
         "test_steps_per_execution_*match_multi_epoch_*"),
    ),
    Except("the last batch of an epoch has its own number in callbacks, and not that of one which steps_per_execution "
           "would have had; and a smaller one is a call of its own", "*", ("test_steps_per_execution_*steps_count_*",)),
    Except("a generator for three epochs is refused in one line; Keras trains the first alone", "*",
           ("test_fit_with_data_adapter_generator",)),
    Except("a train_step of one's own is traced once more, to find out which variables its optimizers update",
           "default", ("test_retracing",)),
    Except("two replicas refuse batches of one in one line", "mirrored",
           ("test_callbacks_can_update_state_at_batch_boundary",
            "test_fit_with_data_adapter_torch_dataloader_iterable*", "test_loss_scaling_prevents_underflow",
            "test_raise_error_terminate_stops_on_later_batch", "test_retracing", "test_terminate_on_nan_*")),
    Except("train_on_batch, test_on_batch and predict_on_batch are Keras' own, which give every replica all rows",
           "mirrored", ("test_nested_inputs", "test_on_batch_methods_*jit")),
    Except("the sum that its layer gives to add_loss is not a mean over examples, and refused in one line", "mirrored",
           ("test_internal_only_loss",)),
]  # fmt: skip
"""At most eight; each is a difference on purpose, or a reason of the test."""

_PASSED = pytest.StashKey[set[str]]()
"""Names of the tests that plain Keras passes: those that it has passed so far, or all of them."""

_DISTRIBUTION = pytest.StashKey[tfdist.Distribution]()


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
        config.stash[_DISTRIBUTION] = tfdist.connect(strategy, **options)
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
        for case in EXCEPTIONS:
            if case.strategy in ("*", strategy) and any(fnmatch.fnmatchcase(item.name, name) for name in case.names):
                item.add_marker(pytest.mark.xfail(strict=True, reason=case.reason))


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
def _answered(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test as a script after `patch_keras`."""
    import keras

    # Some diverge from one first guess in five, and tfdist ends a training whose loss is NaN.
    keras.utils.set_random_seed(0)
    distribution = request.config.stash.get(_DISTRIBUTION, None)
    if distribution is None:
        yield
        return
    tfdist.patch_keras(distribution)
    yield
    tfdist.unpatch_keras()
