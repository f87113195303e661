"""The backend that Keras runs on; tfdist needs TensorFlow. Imports neither."""

import os
import pathlib
import sys
from collections.abc import Mapping
from typing import NamedTuple

from tfdist.config import local_files
from tfdist.errors import UserError


class KerasBackend(NamedTuple):
    """The backend of Keras, and what chose it."""

    name: str
    chosen_by: str
    fix: str  # how to choose TensorFlow instead


def find(environ: Mapping[str, str]) -> KerasBackend:
    """Returns the backend that Keras takes when it is imported: a variable's, else a file's in the home folder."""
    chosen = environ.get("KERAS_BACKEND", "")
    if chosen:
        return KerasBackend(chosen, "KERAS_BACKEND", "unset KERAS_BACKEND")
    home = environ.get("KERAS_HOME") or os.path.join(os.path.expanduser("~"), ".keras")
    file = pathlib.Path(home, "keras.json")
    chosen = (local_files.read_object(file) or {}).get("backend", "tensorflow")
    return KerasBackend(chosen, str(file), f'write "backend": "tensorflow" in {file}')


def check(environ: Mapping[str, str]) -> None:
    """Checks that Keras runs, or will run, on TensorFlow; else it fails with a traceback, at import or later."""
    backend = find(environ)
    if "keras" in sys.modules:  # which has chosen, whatever the variable says by now
        backend = backend._replace(name=sys.modules["keras"].config.backend())
    if backend.name != "tensorflow":
        raise UserError(f"{backend.chosen_by} makes Keras run on {backend.name}, tfdist needs TensorFlow", backend.fix)
