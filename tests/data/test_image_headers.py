"""Sizes of images by their headers alone: no decoder takes memory for more pixels than are told there."""

import io
import struct

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tfdist.data import image_decoding


def saved(kind, width, height, **options):
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, kind, **options)
    return file.getvalue()


def gif(*frames, screen=(2, 2)):
    """A GIF that can be decoded; its frames are black and need not fit the screen."""
    content = b"GIF89a" + struct.pack("<HH", *screen) + b"\x80\0\0" + bytes(6)
    for width, height in frames:
        one = saved("GIF", width, height)
        comment = b"!\xfe\x03a,!\0"
        content += comment + one[one.index(b",", 13) :][:-1]
    return content + b";"


ANIMATED = dict(save_all=True, append_images=[Image.new("RGB", (7, 5), "red")])
SIZES = {
    "gif": (gif((7, 5), screen=(7, 5)), 35), "gif with a larger screen": (gif((2, 2), screen=(7, 5)), 35),
    "gif with a larger frame": (gif((2, 2), (7, 5)), 39), "gif of many frames": (gif(*[(7, 1)] * 5), 35),
    "gif that is all frames together": (gif((7, 1), (1, 5)), 35),
    "gif with colors of its own": (saved("GIF", 7, 5, **ANIMATED), 70), "webp": (saved("WEBP", 7, 5), 35),
    "webp without loss": (saved("WEBP", 7, 5, lossless=True), 35),
    "webp of many frames": (saved("WEBP", 7, 5, **ANIMATED), 35), "bmp": (saved("BMP", 7, 5), 35),
    "png": (saved("PNG", 7, 5), 35), "jpeg": (saved("JPEG", 7, 5), 35),
}  # fmt: skip


@pytest.mark.parametrize("content, pixels", SIZES.values(), ids=SIZES)
def test_an_image_of_too_many_pixels_is_not_decoded(content, pixels):
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"more pixels than max_pixels={pixels - 1}, "):
        image_decoding.bounded(tf.constant(content), pixels - 1)
    assert image_decoding.bounded(tf.constant(content), pixels) == content


def test_a_decoder_makes_no_more_pixels_than_are_counted():
    """GIFs of these kinds are what TensorFlow decodes to the size of the largest sides of all frames."""
    for content, pixels in SIZES.values():
        if content.startswith(b"GIF"):
            image = tf.io.decode_image(content, 3, expand_animations=False)
            assert np.prod(image.shape[:2]) <= pixels


@pytest.mark.parametrize("kind", ["gif with a larger frame", "webp", "webp of many frames", "bmp"])
def test_what_is_cut_off_is_left_to_the_decoder(kind):
    content, pixels = SIZES[kind]
    for length in range(len(content)):
        assert image_decoding.pixels_by_header(content[:length]) <= pixels


def test_in_a_pipeline():
    contents = [content for content, _ in SIZES.values()]
    pictures = image_decoding.Pictures(3, 36)
    images = tf.data.Dataset.from_tensor_slices(contents).map(pictures.decode).ignore_errors()
    few = [name for name, (_, pixels) in SIZES.items() if pixels <= 36 and name != "webp of many frames"]
    assert len(list(images)) == len(few)  # TensorFlow decodes no animated WebP to three channels
