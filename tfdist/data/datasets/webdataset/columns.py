"""What the files of a sample mean: which is the input, which the target, and what is in them. No TensorFlow."""

from __future__ import annotations

import io
import json
from collections.abc import Collection

import numpy as np

from tfdist.config import field_syntax
from tfdist.config.field_syntax import Options
from tfdist.errors import UserError, one_line

OPTIONS = ("x", "y", "weight", "field", "classes", "classify", "channels", "max_pixels")
IMAGES = ("jpg", "jpeg", "png", "gif", "bmp")
_TARGETS = ("cls", "txt", "json", "npy")


def kind(extension: str) -> str:
    """Returns what a file is, by the last part of its extension: `png` of `left.png`."""
    return extension.rpartition(".")[2]


def check(options: Options) -> None:
    """Raises UserError where `data.options` has what this format does not know."""
    for option, value in options.items():
        if option not in OPTIONS:
            raise UserError(f"unknown {option!r} in data.options{field_syntax.suggest(option, OPTIONS)}")
        if option in ("x", "y", "weight", "field") and not (isinstance(value, str) and value):
            raise UserError(f"data.options: {option} must be a name, got {value!r}")
        if option in ("channels", "max_pixels"):
            field_syntax.check_whole(f"data.options: {option}", value)


def chosen(there: Collection[str], options: Options, what: str) -> list[str]:
    """Returns the extensions of the input, the target and, where it is asked for, the weight.

    Args:
      there: extensions of the first sample.
      options: `x`, `y` and `weight` name extensions where it is not plain which.
      what: the first sample, for messages.
    """
    listed = ", ".join(f".{extension}" for extension in there)
    names = []
    for column, usual in (
        ("x", [e for e in there if kind(e) in IMAGES] or [e for e in there if kind(e) == "npy"]),
        ("y", [e for e in there if e == "cls"]),
    ):
        name = options.get(column, "").lstrip(".").lower()
        if not name and len(usual) != 1:
            raise UserError(f"{what} does not tell which file is {column}: say data.options={column}=NAME, of {listed}")
        names.append(name or usual[0])
    names += [options["weight"].lstrip(".").lower()] if "weight" in options else []
    for name in names:
        if name not in there:
            raise UserError(f"data.options: there is no .{name} in {what}: it has {listed}")
    if kind(names[0]) not in (*IMAGES, "npy"):
        raise UserError(f"{what}: .{names[0]} is no input: only {', '.join(IMAGES)} and npy can be trained on")
    for name in names[1:]:
        if kind(name) not in _TARGETS:
            raise UserError(f"{what}: .{name} is no target: only {', '.join(_TARGETS)} hold numbers")
    if "field" in options and kind(names[1]) != "json":
        raise UserError(f"data.options: field={options['field']} is for .json files, and the target is .{names[1]}")
    if kind(names[0]) == "npy" and (wrong := [o for o in ("channels", "max_pixels") if o in options]):
        raise UserError(f"data.options: {wrong[0]} is for images, and the input is .{names[0]}")
    return names


def number(content: bytes, extension: str, field: str = "") -> np.ndarray:
    """Returns the numbers in a target's file.

    Args:
      extension: `cls` holds a whole number, `txt` any number, `json` numbers, `npy` an array.
      field: the entry of a JSON object, or nothing.

    Raises:
      ValueError: saying what else is in it.
    """
    if kind(extension) == "npy":
        return array(content)
    try:
        value = _value(content, extension, field)
        found = np.asarray(value)
        if found.dtype.kind not in "fiub":
            raise ValueError(f"no number: {one_line(value, 40)!r}")
    except RecursionError:  # of the parser, or of whatever walks through what it has let pass
        raise ValueError("its brackets are nested too deeply") from None
    return found


def _value(content: bytes, extension: str, field: str) -> object:
    """Returns what a text holds, see `number`."""
    if kind(extension) == "json":
        value = json.loads(content)
        if isinstance(value, dict) and not field:
            raise ValueError(f"an object: say data.options=field=NAME, of {', '.join(value)}")
        if field and (not isinstance(value, dict) or field not in value):
            raise ValueError(f"no {field!r} in it")
        return value[field] if field else value
    if b"_" in content:  # which Python leaves out
        raise ValueError(f"{one_line(content.decode(errors='replace'), 40)!r}")
    if kind(extension) == "cls":
        return int(content)
    value = float(content)
    return int(content) if value.is_integer() and content.strip().lstrip(b"+-").isdigit() else value


def array(content: bytes) -> np.ndarray:
    """Returns the array of numbers in a `.npy` file, which is never unpickled.

    Raises:
      ValueError: saying what else is in it.
    """
    try:
        found = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # a damaged file can fail anywhere in NumPy
        raise ValueError(f"no array of NumPy: {one_line(error, 80)}") from None
    if found.dtype.kind not in "fiub":
        raise ValueError(f"values of type {found.dtype}")
    return found
