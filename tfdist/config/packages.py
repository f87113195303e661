"""Versions of installed packages, from pip's records alone, and the backend of Keras. Imports none of them."""

import os
import pathlib
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import NamedTuple

from tfdist.config import local_files
from tfdist.errors import UserError


def version(name: str) -> str:
    """Returns the version of a package; empty if it is not installed."""
    try:
        return metadata.version(name) or ""
    except metadata.PackageNotFoundError:
        return ""


class KerasBackend(NamedTuple):
    name: str
    chosen_by: str
    fix: str  # how to choose TensorFlow instead


def backend(environ: Mapping[str, str]) -> KerasBackend:
    """Returns the backend that Keras takes when it is imported: a variable's, else a file's in the home folder."""
    chosen = environ.get("KERAS_BACKEND", "")
    if chosen:
        return KerasBackend(chosen, "KERAS_BACKEND", "unset KERAS_BACKEND")
    home = environ.get("KERAS_HOME") or os.path.join(os.path.expanduser("~"), ".keras")
    file = pathlib.Path(home, "keras.json")
    chosen = (local_files.read_object(file) or {}).get("backend", "tensorflow")
    return KerasBackend(chosen, str(file), f'write "backend": "tensorflow" in {file}')


def check_backend(environ: Mapping[str, str]) -> None:
    """Checks that Keras runs, or will run, on TensorFlow; else it fails with a traceback, at import or later."""
    found = backend(environ)
    if "keras" in sys.modules:  # which has chosen, whatever the variable says by now
        found = found._replace(name=sys.modules["keras"].config.backend())
    if found.name != "tensorflow":
        raise UserError(f"{found.chosen_by} makes Keras run on {found.name}, tfdist needs TensorFlow", found.fix)
