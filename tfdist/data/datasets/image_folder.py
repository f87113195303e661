"""`image_folder:/path`: a folder of images for each class, as examples by number."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import sys

import numpy as np
import tensorflow as tf

from tfdist.config.messages import logger
from tfdist.data import image_decoding, splits
from tfdist.data.datasets import image_scan
from tfdist.data.records import reason
from tfdist.data.sources import Records
from tfdist.errors import UserError

_NAMED = 3
"""Broken files that a message names."""


@dataclasses.dataclass(frozen=True, slots=True)
class Folder:
    """Two splits of whole images (x uint8 [h, w, 3], y int32; with `skip` a weight float32) and their classes."""

    train: Records
    eval: Records
    names: tuple[str, ...]
    size: tuple[int, int] | None
    """Height and width, where all images have the same."""


def load(
    root: str,
    train_split: str,
    eval_split: str,
    broken: str = "refuse",
    size: tuple[int, int] | None = None,
    policy: str = "crop",
    whole: bool = False,
    most: int = image_decoding.MOST_PIXELS,
    hold_out: bool = True,
) -> Folder:
    """Finds the images and looks at each file once, by its first and last bytes; those in doubt are decoded.

    A file that turns out to be broken only while it is trained on ends the run with its name. With `skip` it counts
    with weight 0 instead, as if it were not there: the others keep their places, so nothing else changes.

    Args:
      root: the folder, see `image_scan.listing`.
      broken: `refuse`, or `skip` the files that are no images.
      size: height and width that the images will be made, or None. JPEGs are decoded no larger than it takes.
      policy: how images are made that size, see `ops.resize`.
      whole: the training images are needed in their full size.
      most: pixels in an image; those with more count as broken.
      hold_out: where the folder has no splits and others are not asked for, evaluate on a tenth and train on the rest.

    Raises:
      UserError: no such folder or split, no images, or broken ones that are not to be skipped.
    """
    root = os.path.expanduser(root)
    what = f"data.name='image_folder:{root}'"
    names, listed = image_scan.listing(root, what)
    sizes = {name: len(split.paths) for name, split in listed.items()}
    if hold_out:
        train_split, eval_split = _held_out(train_split, eval_split, sizes, what)
    train, evaluation = (
        [(part, row) for part, rows in splits.select(text, sizes, field, root) for row in rows.tolist()]
        for field, text in (("data.train_split", train_split), ("data.eval_split", eval_split))
    )
    needed = sorted({*train, *evaluation})
    paths = [listed[part].path(row) for part, row in needed]
    by_file = dict(zip(needed, _looked_at(paths, most, root, what, broken == "skip")))
    shapes = {look.size for look in by_file.values() if not look.problem}
    every = shapes.pop() if len(shapes) == 1 else None

    def records(field: str, rows: list[tuple[str, int]], shrink: bool) -> Records:
        good = [file for file in rows if not by_file[file].problem]
        if not good:
            raise UserError(f"{what}: all {len(rows):,} files of {field} are broken: give it images")
        kept = [by_file[file] for file in good]
        ways = image_decoding.ways(
            [look.kind for look in kept], np.array([look.size for look in kept]), size if shrink else None, policy
        )
        labels = np.array([listed[part].labels[row] for part, row in good], np.int32)
        files = [listed[part].path(row) for part, row in good]
        return _records(files, labels, ways, every if max(ways) < 2 else None, broken == "skip")

    trained = records("data.train_split", train, shrink=size is not None and not whole)
    return Folder(trained, records("data.eval_split", evaluation, shrink=True), names, every)


def _held_out(train: str, evaluation: str, sizes: dict[str, int], what: str) -> tuple[str, str]:
    """Returns the splits, and says where a tenth is held out."""
    held = splits.held_out(train, evaluation, sizes)
    if held != (train, evaluation):
        logger.info(
            f"{what} has no split {evaluation!r}: a tenth of its images, the same at every run, is held out for the "
            f"evaluation (data.train_split={held[0]}, data.eval_split={held[1]} of {sizes['train']:,})"
        )
    return held


def _looked_at(paths: list[str], most: int, root: str, what: str, skip: bool) -> list[image_scan.Look]:
    """Returns what each file is, after the broken ones have been named."""
    looks = _certain(paths, _none_huge(paths, image_scan.look_at(paths), most, what, skip))
    _tell_broken(paths, looks, root, what, skip)
    return looks


def _none_huge(
    paths: list[str], looks: list[image_scan.Look], most: int, what: str, skip: bool
) -> list[image_scan.Look]:
    """Returns the looks, with images of more than so many pixels as broken ones; refuses these unless they are skipped.

    To be called before anything is decoded.
    """
    huge = [i for i, look in enumerate(looks) if look.pixels > most]
    if huge and not skip:
        first = min(huge, key=paths.__getitem__)
        raise UserError(
            f"{what}: {paths[first]} has {looks[first].extent}, more than {most:,}: make it smaller, set "
            f"data.on_error=skip, or allow it with data.options=max_pixels={max(looks[i].pixels for i in huge)}"
        )
    for i in huge:
        problem = f"has {looks[i].extent}, more than max_pixels={most}"
        looks[i] = dataclasses.replace(looks[i], problem=problem, doubtful=False)
    return looks


def _tell_broken(paths: list[str], looks: list[image_scan.Look], root: str, what: str, skip: bool) -> None:
    """Names the files that are no images: in a line if they are skipped, else in an error."""
    bad = sorted((i for i, look in enumerate(looks) if look.problem), key=paths.__getitem__)
    if not bad:
        return
    named = ", ".join(f"{os.path.relpath(paths[i], root)} {looks[i].problem}" for i in bad[:_NAMED])
    count = f"{len(bad):,} of {len(paths):,} files {'are no images' if len(bad) > 1 else 'is no image'}"
    more = ", ..." if len(bad) > _NAMED else ""
    if not skip:
        raise UserError(f"{what}: {count}: {named}{more}: remove them, or set data.on_error=skip")
    logger.info(f"WARNING: {count} and skipped: {named}{more}")


def _certain(paths: list[str], looks: list[image_scan.Look]) -> list[image_scan.Look]:
    """Decodes the files that are in doubt, and returns the looks at all of them."""
    doubtful = [i for i, look in enumerate(looks) if look.doubtful]

    def decoded(i: int) -> image_scan.Look:
        try:
            with tf.device("CPU:0"):
                shape = image_decoding.decoder([image_decoding.OTHER])(tf.io.read_file(paths[i]), 0).shape
        except tf.errors.OpError as error:
            return dataclasses.replace(looks[i], problem=f"cannot be decoded: {reason(error)}")
        return dataclasses.replace(looks[i], size=(int(shape[0]), int(shape[1])))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for i, look in zip(doubtful, pool.map(decoded, doubtful)):
            looks[i] = look
    return looks


def _records(
    files: list[str], labels: np.ndarray, ways: np.ndarray, size: tuple[int, int] | None, skip: bool
) -> Records:
    """Makes a source of images.

    Args:
      ways: how each file is decoded, see `image_decoding.ways`.
      size: the one that all images have once they are decoded, or None.
      skip: an image that cannot be decoded after all counts with weight 0.
    """
    used, which = np.unique(ways, return_inverse=True)
    with tf.device("CPU:0"):
        table = (tf.constant(files), tf.constant(labels), tf.constant(which.astype(np.int32)))
    pixels = image_decoding.decoder(used.tolist())

    def read(rows: tf.Tensor) -> tuple:
        return tuple(tf.gather(column, rows) for column in table)

    def decode(stored: tuple, seed: tf.Tensor) -> tuple:
        del seed
        path, label, which = stored
        image = pixels(tf.io.read_file(path), which)
        return image if size is None else tf.ensure_shape(image, [*size, 3]), label

    def decode_or_skip(stored: tuple, seed: tf.Tensor) -> tuple:
        """Decodes by way of a data set of one example, which is what catches an error inside a pipeline."""
        one = tf.data.Dataset.from_tensors(stored)
        good = one.map(lambda *stored: (*decode(stored, seed), 1.0)).ignore_errors()
        return good.concatenate(one.map(nothing)).take(1).get_single_element()

    def nothing(path: tf.Tensor, label: tf.Tensor, which: tf.Tensor) -> tuple:
        del which
        line = tf.strings.join(["tfdist: WARNING: ", path, " cannot be decoded and is skipped"])
        said = tf.print(line, output_stream=sys.stdout)
        with tf.control_dependencies([said]):
            return tf.zeros([*(size or (1, 1)), 3], tf.uint8), tf.identity(label), 0.0

    return Records(len(files), read, decode_or_skip if skip else decode, name=files.__getitem__, labels=labels)
