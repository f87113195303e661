"""Sizes of images by their headers: what a decoder allocates memory for before it decodes a byte. No TensorFlow.

Pillow does not tell: it reads the size of a GIF's first frame alone, and allocates the canvas of a WebP to open it.
"""

from __future__ import annotations

import struct


def pixels(content: bytes) -> int:
    """Returns the pixels that decoding a GIF, WebP or BMP takes, and 0 for what is none or is cut off in its header."""
    try:
        if content.startswith(b"GIF"):
            (height, width), frames = gif(content)
            return max(frames, height * width)
        if content.startswith(b"RIFF"):
            height, width = webp(content)
        elif content.startswith(b"BM"):
            height, width = bmp(content)
        else:
            return 0
    except (IndexError, struct.error):
        return 0
    return height * width


def gif(content: bytes) -> tuple[tuple[int, int], int]:
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


def webp(head: bytes) -> tuple[int, int]:
    """Returns height and width in the first chunk of a WebP, of which there are three kinds."""
    if head[12:16] == b"VP8X":
        return int.from_bytes(head[27:30], "little") + 1, int.from_bytes(head[24:27], "little") + 1
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", head, 26)
    return height & 0x3FFF, width & 0x3FFF


def bmp(head: bytes) -> tuple[int, int]:
    """Returns height and width of a BMP; a negative height tells that its rows go down."""
    width, height = struct.unpack_from("<ii", head, 18)
    return abs(height), abs(width)
