"""Parses addresses of workers as users, Slurm and TensorFlow write them. No TensorFlow."""

import ipaddress
import re
from typing import NamedTuple

from tfdist.errors import UserError


def join(host: str, port: int) -> str:
    """Returns `host:port`, with an IPv6 address in brackets, or raises UserError."""
    host = checked_host(host, "host")
    return f"[{host}]:{checked_port(str(port), 'port')}" if ":" in host else f"{host}:{checked_port(str(port), 'port')}"


class Address(NamedTuple):
    host: str  # host name or IP address, IPv6 without brackets
    port: int


def split(address: str, name: str = "address") -> Address:
    """Reads `host:port`; raises UserError, which calls it `name`, if it is none."""
    host, _, port = address.rpartition(":")
    if not host or (":" in host) != (host.startswith("[") and host.endswith("]")):
        raise UserError(f"{name}={address} is not host:port, such as node1:29500 or [fd00::1]:29500", "correct it")
    return Address(checked_host(host, f"{name}={address}: host"), checked_port(port, f"{name}={address}: port"))


def first_host(hosts: str, name: str = "host list") -> str:
    """Returns the first host of a Slurm list such as `n[1-3,07],gpu[01-02]x`, or raises UserError."""
    first = re.split(r",(?![^\[]*\])", hosts)[0]  # up to a comma outside brackets
    host = re.sub(r"\[(\d+)([-,]\d+)*\]", r"\1", first)
    if not is_host(host):
        raise UserError(f"{name}={hosts} is not a host list such as n[1-3,07]", "correct it, or set MASTER_ADDR")
    return host


def checked_host(text: str, name: str) -> str:
    """Returns a host without brackets; raises UserError, which calls it `name`, if it is none."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") and ":" in text else text
    if not is_host(bare):
        raise UserError(f"{name}={text} is not a host name or IP address", "correct it")
    return bare


def is_host(text: str) -> bool:
    """Returns whether a text can be a host name or IP address."""
    if ":" not in text:
        # Python's resolver raises no OSError at a part that is empty or too long.
        return len(text) <= 253 and bool(
            re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(\.[A-Za-z0-9_-]{1,63})*\.?", text)
        )
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Returns whether a host name or IP address, without brackets, is a loopback address."""
    if host.lower().rstrip(".") in ("localhost", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_port(text: str, name: str) -> int:
    """Returns a port; raises UserError, which calls it `name`, if it is none."""
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or not 1 <= int(text) <= 65535:
        raise UserError(f"{name}={text} is not a port", "use a number from 1 to 65535")
    return int(text)
