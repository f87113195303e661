"""`image_folder:/path`: a folder of images for each class, as examples by number."""

import concurrent.futures
import dataclasses
import hashlib
import multiprocessing.pool
import os
import struct
import sys
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tfdist import config
from tfdist.config import local_files
from tfdist.config.field_syntax import Options
from tfdist.config.messages import logger
from tfdist.data import image_decoding
from tfdist.data.datasets import examples
from tfdist.data.loaded import Loaded
from tfdist.data.records import reason
from tfdist.data.sources import Records
from tfdist.data.spec import Spec
from tfdist.errors import UserError

_HEAD, _TAIL = 512, 16
_THREADS = 16  # more than cores: on a disk of the network most of the time is waiting


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Files of a split, in an order that depends on their relative paths alone and mixes the classes."""

    folder: str
    paths: tuple[str, ...]  # relative to `folder`
    labels: tuple[int, ...]

    def path(self, number: int) -> str:
        return os.path.join(self.folder, self.paths[number])


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """A file's kind and size by its first and last bytes."""

    kind: str = ""  # `jpeg`, `png`, `gif`, `bmp` or `webp`; empty for something else
    size: tuple[int, int] = (0, 0)  # height and width by the header, for which memory is taken, or once it is decoded
    problem: str = ""  # what is wrong, or empty
    doubtful: bool = False  # only decoding it tells whether it is an image
    frames: int = 0  # pixels of all frames of a GIF, which are all unpacked

    pixels = property(lambda self: max(self.frames, self.size[0] * self.size[1]))


def listing(root: str, what: str) -> tuple[tuple[str, ...], dict[str, Split]]:
    """Finds the classes, sorted, and the files of each split; `what` is the data set, for messages.

    A folder is a class, and what is in folders below it belongs to that class. Folders at the top with one of
    `SPLIT_NAMES` are splits of such folders; without any, all is `train`. Names with a dot before them are left out.
    """
    if not os.path.isdir(root):
        raise UserError(f"{what}: there is no such folder", "give the path of one that has a folder for each class")
    tops = _folders(root)
    if any(name.lower() in examples.SPLIT_NAMES and _folders(os.path.join(root, name)) for name in tops):
        folders = {name: os.path.join(root, name) for name in tops if _folders(os.path.join(root, name))}
    else:
        folders = {"train": root}
    by_split = {
        split: {name: sorted(_files(os.path.join(folder, name), name, [root, folder])) for name in _folders(folder)}
        for split, folder in folders.items()
    }
    names = tuple(sorted({name for classes in by_split.values() for name, files in classes.items() if files}))
    if not names:
        raise UserError(f"{what}: there are no images", "put those of each class into a folder of its own in it")
    if len(names) == 1:
        what = f"{what}: there is only one class, {names[0]!r}"
        raise UserError(what, "put the images of each into a folder of its own")
    number, splits = {name: i for i, name in enumerate(names)}, {}
    for split, classes in by_split.items():
        files = [(path, number[name]) for name, paths in classes.items() for path in paths]
        for path, _ in files:
            if not path.isascii() and path != os.fsencode(path).decode(errors="replace"):
                readable = os.fsencode(path).decode(errors="backslashreplace")
                raise UserError(f"{what}: the name of {readable} is not written in UTF-8", "rename it")
        files.sort(key=lambda file: (hashlib.blake2b(file[0].encode(), digest_size=8).digest(), file[0]))
        if files:
            splits[split] = Split(folders[split], tuple(f[0] for f in files), tuple(f[1] for f in files))
    return names, splits


def _entries(path: str) -> list[tuple[str, bool]]:
    """Returns the names in a folder without a dot before them, each with whether it is a folder."""
    try:
        return [(entry.name, entry.is_dir()) for entry in os.scandir(path) if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"the folder {path} cannot be read ({error.strerror})", "correct its permissions") from None


def _folders(path: str) -> list[str]:
    return sorted(name for name, is_folder in _entries(path) if is_folder)


def _files(folder: str, below: str, above: list[str]) -> Iterator[str]:
    """Finds all files in `folder` and below, as paths from `below` on; it follows links, but not to a folder above."""
    if any(os.path.samefile(folder, other) for other in above):
        return
    above = [*above, folder]
    for name, is_folder in _entries(folder):
        if is_folder:
            yield from _files(os.path.join(folder, name), f"{below}/{name}", above)
        else:
            yield f"{below}/{name}"


def look_at(paths: list[str]) -> list[Look]:
    """Classifies each file by its first and last bytes."""
    with multiprocessing.pool.ThreadPool(_THREADS) as pool:
        return pool.map(_look, paths)


def _look(path: str) -> Look:
    try:
        with local_files.opened(path) as opened:
            file = opened.fileno()
            length, head = os.fstat(file).st_size, os.pread(file, _HEAD, 0)
            if not head:
                return Look(problem="is empty")
            return _judged(file, head, os.pread(file, _TAIL, max(0, length - _TAIL)), length)
    except OSError as error:
        return Look(problem=f"cannot be read: {error.strerror}")
    except (IndexError, struct.error):  # it ends where its header says that there is more
        return Look(problem="is cut off")


def _judged(file: int, head: bytes, tail: bytes, length: int) -> Look:
    if head.startswith(b"\xff\xd8\xff"):
        size = _jpeg_size(file, head)
        if size == (0, 0):
            return Look("jpeg", problem="is cut off")
        # Behind the end there may be more, such as zeros or a film: those are decoded to be sure.
        return Look("jpeg", size, doubtful=not tail.endswith(b"\xff\xd9"))
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        width, height = struct.unpack(">II", head[16:24])
        return Look("png", (height, width), doubtful=b"IEND" not in tail)
    if head.startswith((b"GIF87a", b"GIF89a")):
        # A frame may be smaller than the whole, so the decoder has the last word.
        size, frames = image_decoding.gif_size(os.pread(file, length, 0))
        return Look("gif", size, doubtful=True, frames=frames)
    if head.startswith(b"BM"):
        (end, header), (bits,) = struct.unpack("<II", head[10:18]), struct.unpack("<H", head[28:30])
        start = os.pread(file, 2048, 0)
        # TensorFlow takes the numbers of a palette's colors for grays, which is right for grays in order only.
        colors = [start[i : i + 3] for i in range(14 + header, min(end, len(start)) - 3, 4)]
        if bits < 24 and any(color != bytes([i] * 3) for i, color in enumerate(colors)):
            return Look("bmp", problem="is a BMP with a palette, which TensorFlow does not decode")
        return Look("bmp", image_decoding.bmp_size(head), doubtful=True)
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return Look("webp", image_decoding.webp_size(head), doubtful=True)
    return Look(problem="is not a JPEG, PNG, GIF, BMP or WebP image")


def _jpeg_size(file: int, head: bytes) -> tuple[int, int]:
    """Reads height and width in the frame header, which the segments before it lead to; (0, 0) if there is none."""
    at = 2
    for _ in range(100):
        here = head[at : at + 9] if at + 9 <= len(head) else os.pread(file, 9, at)
        if len(here) < 9 or here[0] != 0xFF:
            return 0, 0
        marker = here[1]
        if marker == 0xFF:  # fill bytes
            at += 1
            continue
        if marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD7:  # without a length, and decoders pass over them
            at += 2
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", here[5:9])
            return (height, width) if height and width else (0, 0)
        if marker in (0xD9, 0xDA):
            return 0, 0
        at += 2 + struct.unpack(">H", here[2:4])[0]
    return 0, 0


def load(
    root: str,
    data: config.Data,
    options: Options,
    size: tuple[int, int] | None = None,
    whole: bool = False,
    hold_out: bool = True,
) -> Loaded:
    """Finds the images and looks at each file once, by its first and last bytes; those in doubt are decoded.

    A file that turns out to be broken only while it is trained on ends the run with its name. With `data.on_error=skip`
    it counts with weight 0 instead, as if it were not there: the others keep their places, so nothing else changes.

    Args:
      root: the folder, see `listing`.
      options: `max_pixels` in an image; those with more count as broken.
      size: height and width that the images will be made, or None. JPEGs are decoded no larger than it takes.
      whole: the training images are needed in their full size.
      hold_out: where the folder has no splits and others are not asked for, evaluate on a tenth and train on the rest.

    Returns:
      Whole images: x uint8 [h, w, 3], y int32, and with `skip` a weight float32.
    """
    examples.check_options(options, ("max_pixels",))
    root, skip = os.path.expanduser(root), data.on_error == "skip"
    what = f"data.name='image_folder:{root}'"
    names, listed = listing(root, what)
    sizes = {name: len(split.paths) for name, split in listed.items()}
    splits = data.train_split, data.eval_split
    if hold_out and (held := examples.held_out(*splits, sizes)) != splits:
        logger.info(
            f"{what} has no split {data.eval_split!r}: a tenth of its images, the same at every run, is held out for "
            f"the evaluation (data.train_split={held[0]}, data.eval_split={held[1]} of {sizes['train']:,})"
        )
        splits = held
    train, evaluation = (
        [(part, row) for part, rows in examples.select_split(text, sizes, field, root) for row in rows.tolist()]
        for field, text in zip(("data.train_split", "data.eval_split"), splits)
    )
    needed = sorted({*train, *evaluation})
    paths = [listed[part].path(row) for part, row in needed]
    most = options.get("max_pixels", image_decoding.MOST_PIXELS)
    by_file = dict(zip(needed, _examined(paths, most, root, what, skip)))
    shapes = {look.size for look in by_file.values() if not look.problem}
    every = shapes.pop() if len(shapes) == 1 else None

    def records(field: str, rows: list[tuple[str, int]], shrink: bool) -> Records:
        good = [file for file in rows if not by_file[file].problem]
        if not good:
            raise UserError(f"{what}: all {len(rows):,} files of {field} are broken", "give it images")
        jpegs = [by_file[file].size for file in good if by_file[file].kind == "jpeg"] if size and shrink else []
        combine = any if data.resize == "pad" else all
        least = size if any(combine(a >= 2 * b for a, b in zip(jpeg, size or ())) for jpeg in jpegs) else None
        labels = np.array([listed[part].labels[row] for part, row in good], np.int32)
        files = [listed[part].path(row) for part, row in good]
        return _records(files, labels, image_decoding.decoder(least, data.resize), None if least else every, skip)

    trained = records("data.train_split", train, shrink=size is not None and not whole)
    evaluated, shape = records("data.eval_split", evaluation, shrink=True), size or every
    if shape is None:
        raise UserError("data.image_size is needed, since the images have different sizes", "write one such as 224")
    return Loaded(trained, evaluated, trained.size, Spec((*shape, 3), "uint8", len(names), 255.0, names))


def _examined(paths: list[str], most: int, root: str, what: str, skip: bool) -> list[Look]:
    """Returns what each file is; refuses those that are no images, or names them in a line if they are skipped."""
    looks = look_at(paths)
    # Before anything is decoded, which takes all the memory that a header tells.
    huge = [i for i, look in enumerate(looks) if look.pixels > most]
    if huge and not skip:
        first = min(huge, key=paths.__getitem__)
        raise UserError(
            f"{what}: {paths[first]} has {looks[first].pixels:,} pixels, more than {most:,}",
            "make it smaller, set data.on_error=skip, or allow it with "
            f"data.options=max_pixels={max(looks[i].pixels for i in huge)}",
        )
    for i in huge:
        problem = f"has {looks[i].pixels:,} pixels, more than max_pixels={most}"
        looks[i] = dataclasses.replace(looks[i], problem=problem, doubtful=False)

    def decoded(i: int) -> Look:
        try:
            with tf.device("CPU:0"):
                shape = image_decoding.decoder()(tf.io.read_file(paths[i])).shape
        except tf.errors.OpError as error:
            return dataclasses.replace(looks[i], problem=f"cannot be decoded: {reason(error)}")
        return dataclasses.replace(looks[i], size=(int(shape[0]), int(shape[1])))

    doubtful = [i for i, look in enumerate(looks) if look.doubtful]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for i, look in zip(doubtful, pool.map(decoded, doubtful)):
            looks[i] = look
    bad = sorted((i for i, look in enumerate(looks) if look.problem), key=paths.__getitem__)
    if bad:
        named = examples.first_few([f"{os.path.relpath(paths[i], root)} {looks[i].problem}" for i in bad], "more")
        count = f"{len(bad):,} of {len(paths):,} files {'are not images' if len(bad) > 1 else 'is not an image'}"
        if not skip:
            raise UserError(f"{what}: {count}: {named}", "remove them, or set data.on_error=skip")
        logger.info(f"WARNING: {count} and skipped: {named}")
    return looks


def _records(
    files: list[str],
    labels: np.ndarray,
    pixels: Callable[[tf.Tensor], tf.Tensor],
    size: tuple[int, int] | None,
    skip: bool,
) -> Records:
    """Makes a source of images, decoded by `pixels`, which makes all of them `size` if that is given.

    With `skip`, an image that cannot be decoded after all counts with weight 0.
    """
    with tf.device("CPU:0"):
        table = (tf.constant(files), tf.constant(labels))

    def decode(stored: tuple, seed: tf.Tensor) -> tuple:
        path, label = stored
        image = pixels(tf.io.read_file(path))
        return image if size is None else tf.ensure_shape(image, [*size, 3]), label

    def decode_or_skip(stored: tuple, seed: tf.Tensor) -> tuple:
        # A data set of one example is what catches an error inside a pipeline.
        one = tf.data.Dataset.from_tensors(stored)
        good = one.map(lambda *stored: (*decode(stored, seed), 1.0)).ignore_errors()
        return good.concatenate(one.map(nothing)).take(1).get_single_element()

    def nothing(path: tf.Tensor, label: tf.Tensor) -> tuple:
        line = tf.strings.join(["tfdist: WARNING: ", path, " cannot be decoded and is skipped"])
        with tf.control_dependencies([tf.print(line, output_stream=sys.stdout)]):
            return tf.zeros([*(size or (1, 1)), 3], tf.uint8), tf.identity(label), 0.0

    read = lambda rows: tuple(tf.gather(column, rows) for column in table)
    return Records(len(files), read, decode_or_skip if skip else decode, name=files.__getitem__, labels=labels)
