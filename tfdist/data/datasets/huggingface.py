"""`hf:path`, `hf:name` and `webdataset:/pattern`: read by number with Hugging Face `datasets`, if it is installed."""

import glob
import hashlib
import itertools
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.config.field_syntax import Options, expanded
from tfdist.data import image_decoding
from tfdist.data.datasets import examples
from tfdist.data.datasets.examples import Parts, by_file_name, cut_splits, matching, split_names
from tfdist.data.loaded import Loaded
from tfdist.data.spec import Spec
from tfdist.errors import UserError, one_line

COLUMNS = ("x", "y", "weight")
OPTIONS = (*COLUMNS, "classes", "classify", "channels", "max_pixels")

NUMBERS = ("int", "uint", "float", "bool")

Part = tuple[Any, np.ndarray]  # a split as `datasets` has it, and which of its rows


def load(name: str, splits: Mapping[str, str], options: Options, free: bool, prepare: bool) -> Loaded:
    """Opens a folder that `save_to_disk` has written, or a name on the Hub; `config=NAME` of one that has several."""
    examples.check_options(options, (*OPTIONS, "config"), (*COLUMNS, "config"))
    what, path = f"hf:{name}", os.path.expanduser(name)

    def from_folder_or_hub(datasets: Any) -> Any:
        if os.path.isdir(path):
            return datasets.load_from_disk(path)
        if name.startswith(("/", ".", "~")):
            raise UserError(f"{what}: there is no such folder", "give one that save_to_disk has written, or a name")
        return datasets.load_dataset(name, options.get("config"))

    hint = "give a folder that save_to_disk has written, or the name of a data set on the Hub"
    return loaded(what, opened(what, from_folder_or_hub, hint, prepare), splits, options, free)


def load_tars(path: str, splits: Mapping[str, str], options: Options, free: bool, prepare: bool) -> Loaded:
    """Makes a table of the examples, unless an earlier run has, and opens it as `load` does.

    Columns are named by the extensions of the files, entries of a `.json` file by both: `json.label`.
    """
    examples.check_options(options, OPTIONS, COLUMNS)
    what, by_split = f"webdataset:{path}", tar_files(path)
    needed = {name: by_split[name] for name in by_split if name in split_names(splits.values())} or by_split

    def converted(datasets: Any) -> Any:
        # By which files these are: `datasets` looks at the time of their content alone, which may be set.
        stats = [(path, os.stat(path)) for path in itertools.chain(*needed.values())]
        about = repr([(path, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in stats])
        tables = os.path.join(datasets.config.HF_DATASETS_CACHE, hashlib.sha256(about.encode()).hexdigest()[:16])
        builder = datasets.load_dataset_builder("webdataset", data_files=needed, cache_dir=tables)
        if not (prepare or os.path.isdir(builder.cache_dir)):
            raise UserError(f"{what} is not in {builder.cache_dir} yet, and a dry run copies nothing", "run without it")
        if not os.path.isdir(builder.cache_dir):
            for one in itertools.chain(*needed.values()):
                _check_end(one)
        generate = builder._generate_examples  # what every builder implements
        builder._generate_examples = lambda **files: _exact(generate(**files), builder.info.features)
        builder.download_and_prepare()
        return builder.as_dataset().flatten()

    hint = "write them again with webdataset.TarWriter: one .cls or other target, and one input, in each example"
    return loaded(what, opened(what, converted, hint, prepare), splits, options, free)


def tar_files(path: str) -> dict[str, list[str]]:
    """Finds the tar files of each split, sorted, see `splits.by_file_name`.

    The path is a file, a folder, or a pattern with braces or wildcards: `train-{000..009}.tar`, `train-*.tar`.
    """
    what, path = f"data.name=webdataset:{path}", os.path.expanduser(path)
    if os.path.isdir(path):
        patterns = [os.path.join(glob.escape(path), end) for end in ("*.tar", "*.tar.*", "*.tgz")]
    else:
        patterns = [glob.escape(path)] if os.path.isfile(path) else expanded("data.name", path)
    found = {pattern: matching(pattern) for pattern in patterns}
    if missing := [p for p in patterns if not (found[p] or glob.has_magic(p))]:
        raise UserError(f"{what}: there is no file {missing[0]}", "correct the name or its numbers, or bring it here")
    paths = sorted({f for files in found.values() for f in files})
    if not paths:
        raise UserError(f"{what} has no files", "give a tar file, a folder, or a pattern such as train-{000..009}.tar")
    return by_file_name(paths)


def _check_end(path: str) -> None:
    """Refuses a tar file that goes on, or ends, where Python's `tarfile` takes it to be whole."""
    with tarfile.open(path) as tar:
        for _ in tar:
            pass
        tar.fileobj.seek(tar.offset)
        end, fix = tar.fileobj.read(tarfile.BLOCKSIZE), "copy or write it again"
        if len(end) < tarfile.BLOCKSIZE:
            raise UserError(f"{path} is cut off: it does not end with zeros", fix)
        if any(end):
            raise UserError(f"{path} has a damaged header at byte {tar.offset}", fix)
        while piece := tar.fileobj.read(1 << 20):
            if piece.count(0) < len(piece):
                what = f"{path} goes on after the end of an archive, at byte {tar.offset}: those examples would be lost"
                raise UserError(what, "leave apart what was put together with cat, or write it again")


def _exact(keyed: Iterable[tuple[object, dict]], features: dict) -> Iterator[tuple[object, dict]]:
    """Refuses examples with numbers that the types of the first ones would change: `datasets` makes 2 of 2.5."""
    for number, example in keyed:
        if changed := next(_changed(example, features, ""), ""):
            what = f"{changed} of {example['__key__']} in {example['__url__']} is of another type than the first"
            raise ValueError(what)
        yield number, example


def _changed(value: Any, feature: Any, name: str) -> Iterator[str]:
    if isinstance(feature, dict):
        for key in feature if isinstance(value, dict) else ():
            yield from _changed(value.get(key), feature[key], f"{name}.{key}".lstrip("."))
    elif (stored := _stored(feature)).startswith(NUMBERS):
        numbers = np.asarray([v for v in keras.tree.flatten(value) if v is not None])
        if not ((numbers.astype(stored) == numbers) | (numbers != numbers)).all():
            yield name


def opened(what: str, open_with: Callable[[Any], Any], hint: str, prepare: bool) -> dict[str, Any]:
    """Returns the splits by name, of what open_with(datasets) returns; `prepare=False` to refuse to download."""
    if not prepare:  # read when the package is imported
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import datasets

        found = open_with(datasets)
    except UserError:
        raise
    except ImportError:
        what = f"data.name={what} is read with a package that is not installed"
        raise UserError(what, "pip install datasets") from None
    except Exception as error:  # of the network, of the Hub, of Arrow, of code that reads files
        why = one_line(error.__cause__ or error, 200).rstrip(".")
        raise UserError(f"data.name={what} cannot be opened: {why}", hint) from None
    return dict(found) if isinstance(found, dict) else {"train": found}


def loaded(what: str, by_split: Mapping[str, Any], splits: Mapping[str, str], options: Options, free: bool) -> Loaded:
    """Looks at the targets and at the first input.

    `options`: `x=NAME, y=NAME` and `weight=NAME`, the columns, where it is not plain which; `channels=1` for images
    that are not to be RGB; `max_pixels`; `classes` and `classify`, see `examples.targets_and_weights`.
    """
    sizes = {split: len(rows) for split, rows in by_split.items()}
    train, evaluation = cut_splits(splits, by_split, sizes, what)
    data, rows = train[0]
    features = data.features
    x, y = _columns(features, options, what)
    weights = [options["weight"]] if "weight" in options else []
    names = getattr(features[y], "names", None) or ()
    for split in sorted(split_names(splits.values())):
        other = by_split[split].features
        if missing := [column for column in (x, y, *weights) if column not in other]:
            raise UserError(f"{what}: {split} has no column {missing[0]!r}: it has {', '.join(other)}")
        its, usual = _stored(other[x]), _stored(features[x])
        if its != usual and {its[:5], usual[:5]} != {"float"}:
            raise UserError(f"{what}: {x} is {its} in {split}, and {usual} in another split", "make them alike")
        pairs = itertools.zip_longest(getattr(other[y], "names", names), names)
        if odd := [pair for pair in pairs if names and len(set(pair)) > 1]:
            is_not = f"class {odd[0][0]!r} of {y} in {split} has the number of {odd[0][1]!r} in another split"
            raise UserError(f"{what}: {is_not}", "make the ClassLabel alike")
    target_options: Options = {name: options[name] for name in ("classes", "classify") if name in options}
    if names and target_options.get("classify") is not False:
        target_options.setdefault("classes", len(names))
    *tables, classes = examples.targets_and_weights(
        ([_column(part, column, what) for column in (y, *weights)] for part in (train, evaluation)),
        target_options,
        what,
    )
    names = tuple(names) if classes else ()

    def name(data: Any, row: int) -> str:
        if "__key__" not in data.features:
            return f"example {row} of {what}"
        example = data.select_columns(["__key__", "__url__"])[row]  # of a tar file
        return f"{example['__key__']} in {example['__url__']}"

    both = [Parts([(_as_arrow(data, x), rows) for data, rows in part]) for part in (train, evaluation)]
    if type(features[x]).__name__ == "Image":
        pictures = image_decoding.Pictures.of(options)
        images = lambda table, rows: [_contents(value) for value in table[rows].column(x).to_pylist()]
        first = lambda: pictures.decode(tf.constant(images(_as_arrow(data, x), rows[:1])[0]))
        shape = tuple(examples.first_input(first, lambda: name(data, int(rows[0]))).shape)
        spec = Spec(shape, "uint8", classes, 255.0, names)
        reads = [part.reader(images) for part in both]
        decode = lambda contents: pictures.decode(contents, None if free else shape)
    else:
        values = _column([(data, rows[:1])], x, what)
        shape, dtype = values.shape[1:] or (1,), values.dtype
        dtype = np.dtype(keras.config.floatx()) if dtype.kind == "f" else dtype
        maximum = 255.0 if dtype == np.uint8 else float(_column(train, x, what).max()) or 1.0
        spec = Spec(shape, dtype.name, classes, maximum, names)

        def numbers(table: Any, rows: np.ndarray) -> np.ndarray:
            values = _dense(table[rows].column(x), f"{what}: {x}")
            if (values.shape[1:] or (1,)) != shape:
                raise ValueError(f"its shape is {list(values.shape[1:])} and that of the first {list(shape)}")
            return values.reshape(-1, *shape)

        reads, decode = [part.reader(numbers, dtype, shape) for part in both], lambda x: x
    made = [
        examples.records(read, decode, table, Parts(part).namer(name))
        for part, read, table in zip((train, evaluation), reads, tables)
    ]
    return Loaded(made[0], made[1], made[0].size, spec)


def _columns(features: Mapping[str, Any], options: Options, what: str) -> tuple[str, str]:
    """Returns the names of the input and of the target."""
    kinds = {name: _kind(feature) for name, feature in features.items()}
    listed, chosen = ", ".join(f"{name} ({kind})" for name, kind in kinds.items()), {}
    for column, kind, usual in (
        ("y", "ClassLabel", ("label", "labels", "y", "cls")),
        ("x", "Image", ("image", "x", "npy")),
    ):
        name = options.get(column)
        if name is None:
            alike = [n for n in features if kinds[n] == kind] or [n for n in usual if n in features]
            if len(alike) != 1:
                what = f"{what} does not tell which column is {column}"
                raise UserError(what, f"say data.options={column}=NAME, of {listed}")
            name = alike[0]
        if name not in features:
            raise UserError(f"data.options: there is no column {name!r} for {column} in {what}: it has {listed}")
        chosen[column] = name
    x = features[chosen["x"]]
    if kinds[chosen["x"]] != "Image" and not _stored(x).startswith(NUMBERS):
        what = f"{what}: the input {chosen['x']} is {_kind(x)}: only images and numbers can be trained on: {listed}"
        raise UserError(what)
    return chosen["x"], chosen["y"]


def _kind(feature: object) -> str:
    dtype = getattr(feature, "dtype", "")
    return str(dtype) if type(feature).__name__ == "Value" else type(feature).__name__


def _stored(feature: Any) -> str:
    """Returns the type of a feature, or of the elements of a list or an array, as `datasets` names it."""
    inner = getattr(feature, "feature", None)
    return str(getattr(feature, "dtype", "")) if inner is None else _stored(inner)


def _as_arrow(data: Any, column: str) -> Any:
    """Returns a column by itself, as it is stored: `datasets` would make arrays of float32 out of float64."""
    return data.select_columns([column]).with_format("arrow")


def _dense(values: Any, what: str) -> np.ndarray:
    """Returns a column of numbers of Arrow."""
    import pyarrow as pa
    from pyarrow import compute

    if isinstance(values, pa.ChunkedArray):
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
        what = f"{what} has lists of different lengths, such as {lengths[0]} and {lengths[1]}"
        raise UserError(what, "make them alike")
    inner = _dense(values.flatten(), what)
    return inner.reshape(len(values), lengths[0] if lengths else 0, *inner.shape[1:])


def _column(parts: Sequence[Part], column: str, what: str) -> np.ndarray:
    """Returns a column of numbers of all parts, in memory."""
    tables = [_as_arrow(data, column)[int(rows[0]) : int(rows[-1]) + 1] for data, rows in parts]
    return np.concatenate([_dense(table.column(column), f"{what}: {column}") for table in tables])


def _contents(value: dict[str, Any] | None) -> bytes:
    """Returns the bytes of an image, which may be in a file of its own; none where it has none."""
    value = value or {}
    if value.get("bytes") is None and value.get("path"):
        with open(value["path"], "rb") as file:
            return file.read()
    return value.get("bytes") or b""
