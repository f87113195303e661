"""`data.json` of a run folder: what the model was built for, so that it can be built again without the data."""

import dataclasses
import hashlib
import json
import pathlib
import re
import types
import typing
from collections.abc import Callable
from typing import Any, TypeAlias

from tfdist.config import FILE, local_files
from tfdist.data.spec import Spec
from tfdist.errors import UserError

NAME = "data.json"
FORMAT = 1

_MOST = 2**31 - 1  # the largest size of a tensor's dimension that TensorFlow's kernels take
_TYPE = re.compile(r"(u?int|b?float|complex|str|bytes)\d+|bool|string|object")
_KINDS: dict[object, tuple[tuple[type, ...], str]] = {
    int: ((int, types.NoneType), "an integer"),  # None is a dimension of any size
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
}

Json: TypeAlias = Any  # a value that JSON can hold: None, truth values, numbers, texts, and lists and dicts of them


def write(write_text: Callable[[str, str], None], spec: Spec) -> None:
    """Writes the description, durably, by `write_text`(file name, content) of a run folder."""
    content = {"format": FORMAT, "spec": dataclasses.asdict(spec)}
    # As text, not through the folder's JSON, which has no NaN: a statistic must come back as it is.
    write_text(NAME, json.dumps(content, indent=2) + "\n")


def read(path: pathlib.Path) -> Spec | None:
    """Reads what `write` has written into a run folder; None where there is none, as in folders of earlier versions."""
    file = path / NAME
    try:
        content = json.loads(local_files.content(file))
        if content["format"] != FORMAT:
            raise ValueError(f"it has format {content['format']}, and this tfdist reads {FORMAT}")
        spec = made(content["spec"])
        _check(spec)
        return spec
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"{file} cannot be used ({type(error).__name__}: {error})"
        raise UserError(what, "copy it back, or delete it") from None


def of_model(file: str) -> Spec | None:
    """Reads what the model in a run's `.keras` file was built for; None for others, and without `data.json` there."""
    return read(pathlib.Path(file).expanduser().parent) if file.endswith(FILE) else None


def _check(spec: Spec) -> None:
    """Raises ValueError for values that no data can have."""
    columns = (*spec.columns, *filter(None, [spec.target]))
    possible = {
        "shape": all(size is None or 0 <= size <= _MOST for size in spec.shape),
        "classes": spec.classes is None or 0 < spec.classes <= _MOST,
        "dtype": bool(_TYPE.fullmatch(spec.dtype)),
        "columns": all(column.kind in ("number", "category") for column in columns),
    }
    for name, fits in possible.items():
        if not fits:
            raise ValueError(f"it has {name}={getattr(spec, name)!r}")


def digest(spec: Spec) -> str:
    """Returns the SHA-256 of a description; fields with their defaults, as later versions may add, do not count."""
    return hashlib.sha256(json.dumps(_sparse(spec), sort_keys=True).encode()).hexdigest()


def facts(spec: Spec) -> dict[str, object]:
    """Returns what workers, and a run and its resume, must have alike of a description: statistics to rounding."""
    columns = (*spec.columns, *filter(None, [spec.target]))
    named = {f"column {c.name!r}": [c.kind, c.mean, c.std, *map(repr, c.vocabulary)] for c in columns}
    return {"names of classes": list(spec.names), "columns": [c.name for c in columns], **named}


def _sparse(value: object) -> Json:
    if not dataclasses.is_dataclass(value):
        return [_sparse(v) for v in value] if isinstance(value, tuple) else value
    fields = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
    return {name: _sparse(inner) for name, (inner, default) in fields.items() if inner != default}


def made(value: Json, kind: object = Spec) -> Any:
    """Makes a description, or another `kind` of value in it, from its `dataclasses.asdict`, or from JSON of that."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"it has {value!r} instead of an object")
        types_of = typing.get_type_hints(kind)
        return kind(**{name: made(inner, types_of[name]) for name, inner in value.items()})  # type: ignore[operator]
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return None if value is None else made(value, next(a for a in arguments if a is not type(None)))
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"it has {value!r} instead of a list")
        inner = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(made(v, k) for k, v in zip(inner, value, strict=True))
    possible, called = _KINDS[kind]
    if isinstance(value, bool) or not isinstance(value, possible):
        raise ValueError(f"it has {value!r} instead of {called}")
    return value
