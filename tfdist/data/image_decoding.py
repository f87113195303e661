"""Image files as pixels, inside a `tf.data` pipeline, once their headers have told how much memory that takes.

Pillow does not tell: it reads the size of a GIF's first frame alone, and allocates the canvas of a WebP to open it.
"""

import dataclasses
import struct
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdist.config.field_syntax import Options


def pixels_by_header(content: bytes) -> int:
    """Returns the pixels that decoding a GIF, WebP or BMP takes, and 0 for what is none or is cut off in its header."""
    try:
        if content.startswith(b"GIF"):
            (height, width), frames = gif_size(content)
            return max(frames, height * width)
        if content.startswith(b"RIFF"):
            height, width = webp_size(content)
        elif content.startswith(b"BM"):
            height, width = bmp_size(content)
        else:
            return 0
    except (IndexError, struct.error):
        return 0
    return height * width


def gif_size(content: bytes) -> tuple[tuple[int, int], int]:
    """Returns the largest height and width of the screen and of all frames, and the pixels of all frames together.

    Decoders unpack all frames even where only the first one is used, for an image with the largest sides of all.
    """
    width, height = struct.unpack_from("<HH", content, 6)
    frames = 0
    try:
        at = 13 + _color_table(content[10])
        while (block := content[at]) in b",!":
            if block == ord(","):
                frame_width, frame_height, flags = struct.unpack_from("<HHB", content, at + 5)
                width, height = max(width, frame_width), max(height, frame_height)
                frames += frame_width * frame_height
                at += 11 + _color_table(flags)
            else:
                at += 2
            while length := content[at]:
                at += 1 + length
            at += 1
    except (IndexError, struct.error):
        pass  # cut off: decoders end here, too
    return (height, width), frames


def _color_table(flags: int) -> int:
    """Returns the bytes of a GIF's color table."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def webp_size(head: bytes) -> tuple[int, int]:
    """Returns height and width in the first chunk of a WebP, of which there are three kinds."""
    if head[12:16] == b"VP8X":
        return int.from_bytes(head[27:30], "little") + 1, int.from_bytes(head[24:27], "little") + 1
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", head, 26)
    return height & 0x3FFF, width & 0x3FFF


def bmp_size(head: bytes) -> tuple[int, int]:
    """Returns height and width of a BMP; a negative height tells that its rows go down."""
    width, height = struct.unpack_from("<ii", head, 18)
    return abs(height), abs(width)


RATIOS = (8, 4, 2)  # in a half, a quarter or an eighth of its size a JPEG is decoded faster
MOST_PIXELS = 178_956_970  # as in Pillow: a small file may unpack to all memory


@dataclasses.dataclass(frozen=True, slots=True)
class Pictures:
    """Decoding of images whose files were not examined before."""

    channels: int
    most: int  # pixels in an image

    @classmethod
    def of(cls, options: Options) -> "Pictures":
        """Returns what `channels` and `max_pixels` of `data.options` say."""
        return cls(options.get("channels", 3), options.get("max_pixels", MOST_PIXELS))

    def decode(self, contents: tf.Tensor, shape: tuple[int, ...] | None = None) -> tf.Tensor:
        """Returns the pixels, of this shape or, where it is None, of any."""
        image = tf.io.decode_image(bounded(contents, self.most), self.channels, expand_animations=False)
        return tf.ensure_shape(image, shape or [None, None, self.channels])


def decoder(size: tuple[int, int] | None = None, policy: str = "crop") -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function (contents) -> uint8 [h, w, 3].

    A JPEG is shrunk while it is decoded, to no less than is needed for this `size`, if any: a photo of 4000x3000 for
    224x224 takes a tenth of the time so, and it is averaged over what is left out. See `ops.resize` for `policy`.
    """
    combine = tf.reduce_any if policy == "pad" else tf.reduce_all

    def whole(contents: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.io.decode_image(contents, 3, expand_animations=False), [None, None, 3])

    def shrunk(contents: tf.Tensor) -> tf.Tensor:
        shape = tf.io.extract_jpeg_shape(contents)[:2]
        enough = [combine(shape >= ratio * np.array(size, np.int32)) for ratio in RATIOS]
        way = tf.reduce_min([tf.where(e, i, len(RATIOS)) for i, e in enumerate(enough)])
        ways = [lambda ratio=ratio: tf.io.decode_jpeg(contents, 3, ratio=ratio) for ratio in (*RATIOS, 1)]
        return tf.ensure_shape(tf.switch_case(way, ways), [None, None, 3])

    if size is None:
        return whole
    return lambda contents: tf.cond(tf.io.is_jpeg(contents), lambda: shrunk(contents), lambda: whole(contents))


def bounded(contents: tf.Tensor, most: int) -> tf.Tensor:
    """Returns the contents of an image, once its header has told that decoding takes at most this many pixels.

    Whatever is decoded takes the memory for what its header tells, before a byte of it is looked at.
    """

    def jpeg() -> tf.Tensor:
        return tf.reduce_prod(tf.cast(tf.io.extract_jpeg_shape(contents)[:2], tf.float64))

    def png() -> tf.Tensor:
        sides = tf.io.decode_raw(tf.strings.substr(contents, 16, 8), tf.int32, little_endian=False)
        # 32 bits without a sign, in the type that TensorFlow has for them.
        return tf.reduce_prod(tf.cast(tf.bitwise.bitwise_and(tf.cast(sides, tf.int64), 0xFFFFFFFF), tf.float64))

    def other() -> tf.Tensor:
        # A list of one, since a scalar would be bytes in a pipeline and an array outside.
        count = lambda one: np.float64(pixels_by_header(one[0]))
        return tf.ensure_shape(tf.numpy_function(count, [contents[tf.newaxis]], tf.float64, stateful=False), [])

    # JPEGs and PNGs are most images, so Python is left out of them.
    is_png = tf.equal(tf.strings.substr(contents, 0, 4), b"\x89PNG")
    pixels = tf.case([(tf.io.is_jpeg(contents), jpeg), (is_png, png)], other)
    line = f"it has more pixels than max_pixels={most}, which data.options can change"
    few = tf.debugging.assert_less_equal(pixels, np.float64(most), line)
    with tf.control_dependencies([few] if few is not None else []):
        return tf.identity(contents)
