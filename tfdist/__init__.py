"""tfdist trains Keras 3 models on TensorFlow: the strategy changes how fast, and nothing else."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Callback": "tfdist.engine.callbacks.callback",
    "Checkpoints": "tfdist.checkpoints.manager",
    "Distribution": "tfdist.distributed.distribution",
    "TrainingError": "tfdist.errors",
    "UserError": "tfdist.errors",
    "connect": "tfdist.distributed.connect",
    "evaluate": "tfdist.engine.evaluation",
    "fit": "tfdist.engine.fit",
    "load_data": "tfdist.data.datasets.registry",
    "predict": "tfdist.engine.evaluation",
}

__all__ = [
    "Callback",
    "Checkpoints",
    "Distribution",
    "TrainingError",
    "UserError",
    "connect",
    "evaluate",
    "fit",
    "launch",
    "load_data",
    "predict",
]


def __getattr__(name: str) -> Any:
    """Loads a public name on first use, so that `import tfdist` does not import TensorFlow."""
    if name == "launch":  # a package that can be called, since its name is that of a command, too
        return importlib.import_module("tfdist.launch")
    if name not in _HOMES:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
