"""Examples per second of a folder of JPEGs, decoded, resized, shuffled and batched, against Keras' and TFDS' pipelines.

    make bench-input            (or: python benchmarks/bench_input.py --files=20000 --side=96 --size=64 --rounds=9)

Ways run in turn within one process on the same files, each time from a new iterator, the first batches untimed; ratios
are medians over rounds. The work is the same, as is asserted on a batch: JPEG to pixels, bilinear to one size. Ours
are rounded to the uint8 that the models take, the others stay the float32 that their pipelines give.
"""

import argparse
import os
import pathlib
import statistics
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import made_pictures
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from tfdist.data.batch_layout import Layout
from tfdist.data.datasets import image_folder, registry
from tfdist.data.records import RecordFeed

BATCH = 128


def ours(folder, size):
    found = image_folder.load(str(folder), "train", "train[:1]", size=size, policy="stretch")
    source = registry.sized(found.train, size, "stretch")
    return source, lambda: RecordFeed(source, Layout(BATCH, 1, 1), shuffle=0, seed=0).dataset(0)


def of_keras(folder, size, **options):
    """As its documentation has it."""
    options = {"seed": 0, **options}
    return keras.utils.image_dataset_from_directory(
        folder / "train", image_size=size, batch_size=BATCH, verbose=False, **options
    )


def of_tfds(folder, size):
    """As its documentation has it: decoded by the builder, resized in a map, shuffled, batched, prefetched."""
    builder = tfds.folder_dataset.ImageFolder(str(folder))
    resize = lambda x, y: (tf.image.resize(x, size), y)
    stored = builder.as_dataset(split="train", as_supervised=True, shuffle_files=True)
    return stored.map(resize, tf.data.AUTOTUNE).shuffle(1024).batch(BATCH).prefetch(tf.data.AUTOTUNE)


def check(source, folder, size):
    """Ours and Keras' pictures of the same files are the same."""
    keras_way = of_keras(folder, size, shuffle=False, seed=None)
    theirs = dict(zip(keras_way.file_paths, next(iter(keras_way))[0].numpy()))
    rows = [i for i in range(source.size) if source.name(i) in theirs]
    by_row = source.read(tf.constant(rows, tf.int64))
    for number, row in enumerate(rows):
        pixels, _ = source.decode(tf.nest.map_structure(lambda t, n=number: t[n], by_row), tf.zeros([2], tf.int32))
        assert np.abs(pixels.numpy() - theirs[source.name(row)]).max() <= 0.5 + 1e-3, "other pixels"
    assert len(rows) == BATCH and next(iter(source.in_order(1)))[0].shape == (1, *size, 3)


def speed(dataset, batches):
    """Examples per second of so many batches, once it runs."""
    iterator = iter(dataset.repeat())
    for _ in range(5):
        next(iterator)
    start = time.perf_counter()
    for _ in range(batches):
        next(iterator)
    return batches * BATCH / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--side", type=int, default=96, help="of the made pictures")
    parser.add_argument("--size", type=int, default=64, help="that they are made")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=80)
    parser.add_argument("--folder", default=os.path.join(tempfile.gettempdir(), "tfdist-pictures"))
    options = parser.parse_args()
    size = (options.size, options.size)
    folder = pathlib.Path(options.folder)
    made_pictures.make(folder / "train", options.files, options.side)
    start = time.perf_counter()
    source, mine = ours(folder, size)
    print(f"{source.size:,} JPEGs of {options.side}x{options.side}, looked at in {time.perf_counter() - start:.2f} s")
    check(source, folder, size)
    ways = {"tfdist": mine, "Keras": lambda: of_keras(folder, size), "TFDS": lambda: of_tfds(folder, size)}
    rounds = []
    for number in range(options.rounds):
        order = list(ways) if number % 2 else list(reversed(ways))
        rounds.append({name: speed(ways[name](), options.batches) for name in order})
    print(f"{'pipeline':10}{'examples/s':>12}{'tfdist/it':>12}   (target 1.0)")
    for name in ways:
        ratios = [r["tfdist"] / r[name] for r in rounds]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(
            f"{name:10}{statistics.median(r[name] for r in rounds):12,.0f}{statistics.median(ratios):12.2f}   {spread}"
        )


if __name__ == "__main__":
    main()
