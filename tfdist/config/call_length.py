"""How long a call of the compiled function should last, which makes several updates. Pure; no TensorFlow."""

SHORTEST_S = 0.2
"""Python's share of it is small, and progress stays lively."""
TIMES_BETWEEN = 20
"""It lasts longer where so many times the time between two calls is more: far workers take long to agree."""
LONGEST_S = 1.0
"""It never lasts longer than that, since signals and callbacks wait for its end."""


def seconds(between: float) -> float:
    """Returns how long calls should last with so many seconds from the end of one to the start of the next."""
    return min(max(SHORTEST_S, TIMES_BETWEEN * between), LONGEST_S)
