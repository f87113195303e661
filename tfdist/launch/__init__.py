"""The command `python -m tfdist.launch`, and `tfdist.launch(function)`: starts, watches and restarts workers.

None of it imports TensorFlow but what the workers themselves run.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    """The package itself, since its name is that of the function, too."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from tfdist.launch.notebook import launch

        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
