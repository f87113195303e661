"""Types for what travels through a pipeline and a step, whose nesting is the user's."""

from typing import Any, TypeAlias

Structure: TypeAlias = Any
"""A tensor, a NumPy array or a Keras variable, or tuples, lists and dicts of them to any depth."""
