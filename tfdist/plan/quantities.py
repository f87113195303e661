"""Bandwidths, times and numbers of machines, as people write them. No TensorFlow."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from tfdist.errors import UserError

MOST_NODES = 1 << 16
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"
_LONGEST_LATENCY_S = 60.0


def bits_per_second(text: str) -> float:
    """Returns the bandwidth that `text` means: `10Gbit`, `100 Mbit/s`.

    Raises:
      UserError: it is not understood.
    """
    match = re.fullmatch(rf"\s*{_NUMBER}\s*([kKmMgGtT]?)(?:bit(?:/s|ps)?|bps)\s*", text, re.ASCII)
    # A capital B would be bytes.
    value = float(match[1]) * _BITS[f"{match[2].lower()}bit"] if match else 0.0
    if not 0 < value < math.inf:
        raise UserError(f"--link={text} is not understood: write bits per second, such as 10Gbit or 100Mbit")
    return value


def latency_seconds(text: str) -> float:
    """Returns the time that `text` means: `0.1ms`, `50us`, `0ms`.

    Raises:
      UserError: it is not understood.
    """
    match = re.fullmatch(rf"\s*{_NUMBER}\s*(us|ms|s)\s*", text, re.ASCII)
    value = float(match[1]) * _SECONDS[match[2]] if match else math.inf
    if not value <= _LONGEST_LATENCY_S:
        raise UserError(f"--latency={text} is not understood: write a time one way, such as 0.1ms or 50us")
    return value


def counts(texts: Sequence[str]) -> tuple[int, ...]:
    """Returns the numbers of machines in ascending order, each once.

    Raises:
      UserError: one of them is no number of machines, or there is none.
    """
    for text in texts:
        if not (text.isascii() and text.isdigit() and 0 < int(text[:9]) <= MOST_NODES and len(text) < 9):
            raise UserError(f"--nodes must be whole numbers from 1 to {MOST_NODES}, such as 1,2,4,8: got {text!r}")
    if not texts:
        raise UserError("--nodes names none: give some, such as 1,2,4,8")
    return tuple(sorted({int(text) for text in texts}))


def in_bits(value: float) -> str:
    """Returns a bandwidth for a person."""
    unit = next((u for u in ("tbit", "gbit", "mbit", "kbit") if value >= _BITS[u]), "bit")
    return f"{value / _BITS[unit]:g} {unit[0].upper() if unit[0] in 'tgm' else unit[0]}{unit[1:]}/s"


def in_time(seconds: float) -> str:
    """Returns a time for a person."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


def in_bytes(size: float) -> str:
    """Returns a number of bytes for a person."""
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB" if size >= 1e3 else f"{size:.0f} B"
