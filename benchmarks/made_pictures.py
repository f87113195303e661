"""Pictures for measuring: smooth random colours, stripes by class and some noise, as JPEGs in a folder per class."""

import pathlib

import numpy as np
import tensorflow as tf

CLASSES = 5
_PIECE = 100


def make(root, count, side=96, quality=85, seed=0):
    """Makes `count` pictures of `side` x `side`, about 3 kB each for 96, unless they are there already."""
    root = pathlib.Path(root)
    done = root / ".done"
    if done.exists() and done.read_text() == f"{count} {side} {quality} {seed}":
        return root
    for c in range(CLASSES):
        (root / f"class{c}").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    across = np.arange(side) / side
    for first in range(0, count, _PIECE):
        total = np.zeros((_PIECE, side, side, 3), "float32")
        for octave in range(4):  # like natural pictures: the finer, the fainter
            cells = 3 * 2**octave
            coarse = rng.normal(size=(_PIECE, cells, cells, 3)).astype("float32")
            total += tf.image.resize(coarse, [side, side], "bicubic").numpy() / 2**octave
        label = np.arange(first, first + _PIECE) % CLASSES
        total += 0.8 * np.sin(3 * np.pi * (label[:, None] + 1) * across)[:, None, :, None]
        noisy = 128 + 45 * total + 6 * rng.normal(size=total.shape)
        for i, picture in enumerate(np.clip(noisy, 0, 255).astype("uint8")[: count - first]):
            encoded = tf.io.encode_jpeg(picture, quality=quality).numpy()
            (root / f"class{label[i]}" / f"{first + i:06d}.jpg").write_bytes(encoded)
    done.write_text(f"{count} {side} {quality} {seed}")
    return root
