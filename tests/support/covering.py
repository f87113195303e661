"""`@pytest.mark.covering(strength)`: a part of a table of cases in `make test`, all of it in `make test-all`.

Of the cells of one test, those stay that a covering array of that strength needs: with 1 each value of each parameter
occurs, with 2 each pair of values of two parameters does, and 0 takes one cell. The others are marked `whole`.
"""

import itertools

import pytest


def mark_the_rest(items):
    """Marks the cells of tests with `covering` that are not needed; to be called with all that was collected."""
    tables = {}
    for item in items:
        mark = item.get_closest_marker("covering")
        if mark is not None and item.get_closest_marker("whole") is None:
            tables.setdefault((item.nodeid.partition("[")[0], *mark.args), []).append(item)
    for (_, strength), cells in tables.items():
        for cell in set(cells) - set(chosen(cells, strength)):
            cell.add_marker(pytest.mark.whole)


def first(count, cells):
    """The first cells of a list are of `make test`, if any; the others are marked `whole`."""
    whole = lambda i: [pytest.mark.whole] * (i >= count)
    return [pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=whole(i)) for i, c in enumerate(cells)]


def chosen(cells, strength):
    """Returns cells that together have all that is to be covered: always the one next that adds the most."""
    parts = {}
    for cell in cells:
        values = sorted((name, id(value)) for name, value in cell.callspec.params.items())
        parts[cell] = set(itertools.combinations(values, strength))
    missing, picked = set().union(*parts.values()), []
    while missing:
        best = max(cells, key=lambda cell: len(parts[cell] & missing))  # the first of equals
        picked.append(best)
        missing -= parts[best]
    return picked
