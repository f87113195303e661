"""Refusals that a user reads."""

import contextlib

import pytest

from tfdist.errors import UserError


@contextlib.contextmanager
def refused(message=""):
    """Expects a UserError of one line that matches."""
    with pytest.raises(UserError, match=message) as error:
        yield error
    assert "\n" not in str(error.value)
