"""`hf:path` and `hf:name`: data sets of Hugging Face `datasets`, read by number, if that package is installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.config.field_syntax import Options
from tfdist.data import image_decoding
from tfdist.data.datasets import examples
from tfdist.data.datasets.examples import Rows
from tfdist.data.loaded import Loaded
from tfdist.data.records import reason
from tfdist.data.sources import Records
from tfdist.data.spec import Spec
from tfdist.data.splits import select
from tfdist.errors import UserError, one_line

_OPTIONS = ("x", "y", "weight", "config", "classes", "classify", "channels", "max_pixels")

Part = tuple[Any, np.ndarray]  # a split as `datasets` has it, and which of its rows


def load(name: str, splits: Mapping[str, str], options: Options, free: bool, prepare: bool) -> Loaded:
    """Opens a data set, and looks at its targets and at its first input.

    Args:
      name: a folder that `save_to_disk` has written, or a name on the Hub.
      splits: those for training and evaluation, by the field that asks for each.
      options: `x=NAME, y=NAME` and `weight=NAME`, the columns, where it is not plain which; `config=NAME` of a data set
        that has several; `channels=1` for images that are not to be RGB; `max_pixels`; `classes` and `classify`, see
        `examples.targets_and_weights`.
      free: images are made one size later; otherwise all must have the size of the first.
      prepare: False to refuse what would have to be downloaded first.

    Raises:
      UserError: the package or the data set is not there, or columns that cannot be trained on.
    """
    what = f"hf:{name}"
    examples.check_options(options, _OPTIONS, ("x", "y", "weight", "config"))
    opened = _opened(name, options, prepare)
    sizes = {split: len(rows) for split, rows in opened.items()}
    parts = {
        field: [(opened[split], rows) for split, rows in select(text, sizes, field, what)]
        for field, text in splits.items()
    }
    train, evaluation = parts.values()
    features = train[0][0].features
    x, y = _columns(features, options, what)
    weights = [options["weight"]] if "weight" in options else []
    for data, _ in (*train, *evaluation):
        if missing := [column for column in (x, y, *weights) if column not in data.features]:
            raise UserError(f"{what}: a split has no column {missing[0]!r}: it has {', '.join(data.features)}")
    *tables, classes = examples.targets_and_weights(
        ([_column(part, column, what) for column in (y, *weights)] for part in (train, evaluation)),
        _with_classes(features[y], options),
        what,
    )
    names = tuple(getattr(features[y], "names", None) or ()) if classes else ()
    if type(features[x]).__name__ == "Image":
        pictures = image_decoding.Pictures.of(options)
        shape = _image_shape(train, x, pictures, what)
        spec = Spec(shape, "uint8", classes, 255.0, names)
        made = [
            _images(part, x, t, pictures.decoder(None if free else shape), what)
            for part, t in zip((train, evaluation), tables)
        ]
    else:
        first = _column([(train[0][0], train[0][1][:1])], x, what)
        shape, dtype = first.shape[1:] or (1,), first.dtype
        dtype = np.dtype(keras.config.floatx()) if dtype.kind == "f" else dtype
        maximum = 255.0 if dtype == np.uint8 else float(_column(train, x, what).max()) or 1.0
        spec = Spec(shape, dtype.name, classes, maximum, names)
        made = [_numbers_by_row(part, x, t, shape, dtype, what) for part, t in zip((train, evaluation), tables)]
    return Loaded(made[0], made[1], made[0].size, spec)


def _opened(name: str, options: Options, prepare: bool) -> dict[str, Any]:
    """Returns the splits by name."""
    what = f"data.name=hf:{name}"
    if not prepare:  # read when the package is imported
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import datasets
    except ImportError:
        raise UserError(f"{what} is read with a package that is not installed", "pip install datasets") from None
    path = os.path.expanduser(name)
    try:
        if os.path.isdir(path):
            opened = datasets.load_from_disk(path)
        elif name.startswith(("/", ".", "~")):
            raise UserError(f"{what}: there is no such folder", "give one that save_to_disk has written, or a name")
        else:
            opened = datasets.load_dataset(name, options.get("config"))
    except UserError:
        raise
    except Exception as error:  # of the network, of the Hub, of Arrow, of code that reads files
        hint = "give a folder that save_to_disk has written, or the name of a data set on the Hub"
        raise UserError(f"{what} cannot be opened: {one_line(error, 200).rstrip('.')}", hint) from None
    return dict(opened) if isinstance(opened, dict) else {"train": opened}


def _columns(features: Mapping[str, Any], options: Options, what: str) -> tuple[str, str]:
    """Returns the names of the input and of the target."""
    kinds = {name: _kind(feature) for name, feature in features.items()}
    listed = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    chosen = {}
    for column, kind, usual in (("y", "ClassLabel", ("label", "labels", "y")), ("x", "Image", ("image", "x"))):
        name = options.get(column)
        if name is None:
            alike = [n for n in features if kinds[n] == kind] or [n for n in usual if n in features]
            if len(alike) != 1:
                raise UserError(
                    f"{what} does not tell which column is {column}", f"say data.options={column}=NAME, of {listed}"
                )
            name = alike[0]
        if name not in features:
            raise UserError(f"data.options: there is no column {name!r} for {column} in {what}: it has {listed}")
        chosen[column] = name
    x = features[chosen["x"]]
    if kinds[chosen["x"]] != "Image" and not _is_numeric(x):
        raise UserError(
            f"{what}: the input {chosen['x']} is {_kind(x)}: only images and numbers can be trained on: {listed}"
        )
    return chosen["x"], chosen["y"]


def _kind(feature: object) -> str:
    dtype = getattr(feature, "dtype", "")
    return str(dtype) if type(feature).__name__ == "Value" else type(feature).__name__


def _is_numeric(feature: Any) -> bool:
    """Returns whether a feature is a number, or a list or an array of them."""
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _is_numeric(inner)
    return str(getattr(feature, "dtype", "")).startswith(("int", "uint", "float", "bool"))


def _with_classes(feature: Any, options: Options) -> Options:
    """Returns the options, with as many classes as a ClassLabel has names."""
    names = getattr(feature, "names", None)
    target_options: Options = {name: options[name] for name in ("classes", "classify") if name in options}
    if names and target_options.get("classify") is not False:
        target_options.setdefault("classes", len(names))
    return target_options


def _as_arrow(data: Any, column: str) -> Any:
    """Returns a column by itself, as it is stored: `datasets` would make arrays of float32 out of float64."""
    return data.select_columns([column]).with_format("arrow")


def _numbers(table: Any, column: str, what: str) -> np.ndarray:
    """Returns a column of numbers of a table of Arrow."""
    return _dense(table.column(column).combine_chunks(), f"{what}: {column}")


def _dense(values: Any, what: str) -> np.ndarray:
    import pyarrow as pa
    from pyarrow import compute

    if isinstance(values, pa.ChunkedArray):  # of no chunks
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if values.null_count:
        raise UserError(f"{what} has examples without a value", "leave them out")
    if not pa.types.is_nested(values.type):
        array = values.to_numpy(zero_copy_only=False)
        if array.dtype.kind not in "fiub":
            raise UserError(f"{what} has values of type {values.type}", "give numbers")
        return array
    lengths = compute.unique(compute.list_value_length(values)).to_pylist()
    if len(lengths) > 1:
        raise UserError(
            f"{what} has lists of different lengths, such as {lengths[0]} and {lengths[1]}", "make them alike"
        )
    inner = _dense(values.flatten(), what)
    return inner.reshape(len(values), lengths[0] if lengths else 0, *inner.shape[1:])


def _column(parts: Sequence[Part], column: str, what: str) -> np.ndarray:
    """Returns a column of numbers of all parts, in memory."""
    tables = [_as_arrow(data, column)[int(rows[0]) : int(rows[-1]) + 1] for data, rows in parts]
    return np.concatenate([_numbers(table, column, what) for table in tables])


def _numbers_by_row(
    parts: Sequence[Part], column: str, tables: list[np.ndarray], shape: tuple[int, ...], dtype: np.dtype, what: str
) -> Records:
    """Returns a source of inputs that are numbers."""
    places, stored = Rows([rows for _, rows in parts]), [_as_arrow(data, column) for data, _ in parts]

    def get(numbers: np.ndarray) -> np.ndarray:
        inputs = np.empty([len(numbers), *shape], dtype)
        for part, which, rows in places.by_part(numbers):
            values = _numbers(stored[part][rows], column, what)
            if (values.shape[1:] or (1,)) != shape:
                raise ValueError(f"its shape is {list(values.shape[1:])} and that of the first {list(shape)}")
            inputs[which] = values.reshape(-1, *shape)
        return inputs

    name = lambda number: f"example {places.place(number)[1]} of {what}"
    return examples.records(examples.stored_reader(get, dtype, shape), lambda x: x, tables, name)


def _images(
    parts: Sequence[Part], column: str, tables: list[np.ndarray], decode: Callable[[tf.Tensor], tf.Tensor], what: str
) -> Records:
    """Returns a source of images, decoded by TensorFlow."""
    places, stored = Rows([rows for _, rows in parts]), [_as_arrow(data, column) for data, _ in parts]

    def get(numbers: np.ndarray) -> np.ndarray:
        contents = np.empty(len(numbers), object)
        for part, which, rows in places.by_part(numbers):
            contents[which] = [_contents(value) for value in stored[part][rows].column(column).to_pylist()]
        return contents

    name = lambda number: f"example {places.place(number)[1]} of {what}"
    return examples.records(examples.stored_reader(get, tf.string), decode, tables, name)


def _contents(value: dict[str, Any] | None) -> bytes:
    """Returns the bytes of an image, which may be in a file of its own; none where it has none."""
    if not value or (value.get("bytes") is None and not value.get("path")):
        return b""
    if value.get("bytes") is not None:
        return value["bytes"]
    with open(value["path"], "rb") as file:
        return file.read()


def _image_shape(parts: Sequence[Part], column: str, pictures: image_decoding.Pictures, what: str) -> tuple[int, ...]:
    data, rows = parts[0]
    where = f"example {int(rows[0])} of {what}"
    try:
        with tf.device("CPU:0"):
            contents = _contents(_as_arrow(data, column)[int(rows[0])].column(column)[0].as_py())
            return tuple(int(n) for n in pictures.decode(tf.constant(contents)).shape)
    except tf.errors.OpError as error:
        raise UserError(f"{where} cannot be decoded: {reason(error)}") from None
    except OSError as error:
        raise UserError(f"{where} cannot be read: {one_line(error, 100)}") from None
