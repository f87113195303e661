"""tfdist trains Keras 3 models on TensorFlow: the strategy changes how fast, and nothing else."""

import importlib
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable

    from tfdist.checkpoints.manager import Checkpoints as Checkpoints
    from tfdist.data.datasets.registry import load_data as load_data
    from tfdist.distributed.connect import connect as connect
    from tfdist.distributed.distribution import Distribution as Distribution
    from tfdist.errors import TrainingError as TrainingError
    from tfdist.errors import UserError as UserError
    from tfdist.keras_bridge.batch_norm import synchronize_batch_norm as synchronize_batch_norm
    from tfdist.keras_bridge.rematerialization import remat as remat
    from tfdist.monitoring.fit_report import Report as Report
    from tfdist.trainer.callbacks import Callback as Callback
    from tfdist.trainer.evaluation import evaluate as evaluate
    from tfdist.trainer.evaluation import predict as predict
    from tfdist.trainer.fit import fit as fit
    from tfdist.trainer.keras_patch import patch_keras as patch_keras
    from tfdist.trainer.keras_patch import unpatch_keras as unpatch_keras

__version__ = "0.2.0"

_HOMES = {
    "Callback": "tfdist.trainer.callbacks",
    "Checkpoints": "tfdist.checkpoints.manager",
    "Distribution": "tfdist.distributed.distribution",
    "Report": "tfdist.monitoring.fit_report",
    "TrainingError": "tfdist.errors",
    "UserError": "tfdist.errors",
    "connect": "tfdist.distributed.connect",
    "evaluate": "tfdist.trainer.evaluation",
    "fit": "tfdist.trainer.fit",
    "load_data": "tfdist.data.datasets.registry",
    "patch_keras": "tfdist.trainer.keras_patch",
    "predict": "tfdist.trainer.evaluation",
    "remat": "tfdist.keras_bridge.rematerialization",
    "synchronize_batch_norm": "tfdist.keras_bridge.batch_norm",
    "unpatch_keras": "tfdist.trainer.keras_patch",
}

__all__ = [*_HOMES]

if not TYPE_CHECKING:  # type checkers would take any name for one that it returns

    def __getattr__(name: str) -> Any:
        """Loads a public name on first use, so that `import tfdist` does not import TensorFlow."""
        if name not in _HOMES:
            raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


class CallablePackage(types.ModuleType):
    """A package of a command whose name is that of a public function, too: it can be called as the function.

    Python puts a package at its name once any of its modules is imported, and `tfdist.evaluate` must remain a function.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def _function(self) -> "Callable[..., Any]":
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module(_HOMES[name]), name)

    @property
    def __signature__(self) -> "inspect.Signature":
        """What `inspect.signature` and notebooks show."""
        import inspect

        return inspect.signature(self._function)
