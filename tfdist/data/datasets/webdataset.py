"""`webdataset:/pattern`: tar files by WebDataset's convention, which Hugging Face `datasets` makes a table of, once."""

import glob
import os
from collections.abc import Mapping
from typing import Any

from tfdist.config.field_syntax import Options, expanded
from tfdist.data.datasets import examples, huggingface
from tfdist.data.loaded import Loaded
from tfdist.data.splits import by_file_name, named
from tfdist.errors import UserError

_END = 1024  # bytes of zeros at the end of a tar file


def load(path: str, splits: Mapping[str, str], options: Options, free: bool, prepare: bool) -> Loaded:
    """Makes a table of the examples, unless an earlier run has, and opens it as `huggingface.load` does.

    Columns are named by the extensions of the files, entries of a `.json` file by both: `json.label`.
    """
    examples.check_options(options, huggingface.OPTIONS, huggingface.COLUMNS)
    what = f"webdataset:{path}"
    by_split = files(path)
    needed = {name: by_split[name] for name in by_split if name in named(splits.values())} or by_split

    def converted(datasets: Any) -> Any:
        builder = datasets.load_dataset_builder("webdataset", data_files=needed)
        if not (prepare or os.path.isdir(builder.cache_dir)):
            raise UserError(f"{what} is not in {builder.cache_dir} yet, and a dry run copies nothing", "run without it")
        builder.download_and_prepare()
        return builder.as_dataset().flatten()

    hint = "write them again with webdataset.TarWriter: one .cls or other target, and one input, in each example"
    return huggingface.loaded(what, huggingface.opened(what, converted, hint, prepare), splits, options, free)


def files(path: str) -> dict[str, list[str]]:
    """Finds the tar files of each split, sorted, see `splits.by_file_name`.

    The path is a file, a folder, or a pattern with braces or wildcards: `train-{000..009}.tar`, `train-*.tar`.
    """
    what = f"data.name=webdataset:{path}"
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        patterns = [os.path.join(glob.escape(path), end) for end in ("*.tar", "*.tar.*", "*.tgz")]
    else:
        patterns = [glob.escape(path)] if os.path.isfile(path) else expanded("data.name", path)
    found = {pattern: glob.glob(pattern, recursive=True) for pattern in patterns}
    if missing := [p for p in patterns if not (found[p] or glob.has_magic(p))]:
        raise UserError(f"{what}: there is no file {missing[0]}", "correct the name or its numbers, or bring it here")
    paths = sorted({f for matching in found.values() for f in matching if os.path.isfile(f)})
    if not paths:
        raise UserError(f"{what} has no files", "give a tar file, a folder, or a pattern such as train-{000..009}.tar")
    for one in paths:
        # Python's `tarfile` takes what is cut off between two members for the whole.
        if one.endswith(".tar") and not _has_end(one):
            raise UserError(f"{one} is cut off or no tar file: it does not end with zeros", "copy or write it again")
    return by_file_name(paths)


def _has_end(path: str) -> bool:
    with open(path, "rb") as file:
        file.seek(-min(_END, os.path.getsize(path)), os.SEEK_END)
        return file.read() == bytes(_END)
