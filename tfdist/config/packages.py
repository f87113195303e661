"""Versions of installed packages, from pip's records alone."""

from importlib import metadata


def version(name: str) -> str:
    """Returns the version of a package; empty if it is not installed."""
    try:
        return metadata.version(name) or ""
    except metadata.PackageNotFoundError:
        return ""
