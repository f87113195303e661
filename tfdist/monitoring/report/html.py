"""HTML and SVG as text in which whatever is not markup is escaped, so that no name or message can become a tag."""

import html
from collections.abc import Collection

_EMPTY = {"br", "circle", "col", "img", "line", "path", "polyline", "rect"}  # elements that are written without an end


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: object) -> Html:
    """Returns an element; attributes `class_` and `data_x` stand for `class` and `data-x`, None leaves one out."""
    inner = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{inner}/>" if name in _EMPTY else f"<{name}{inner}>{join(*children)}</{name}>")


def join(*parts: object) -> Html:
    """Returns the parts one after the other, those that are not markup escaped."""
    return Html("".join(p if isinstance(p, Html) else html.escape(str(p)) for p in parts))


def table(head: list, rows: list[list], numbers: Collection[int] = (), **attributes: object) -> Html:
    """Returns a table, in a box that scrolls where the page is narrow; `numbers` are the columns that hold numbers."""
    kind = lambda i: "n" if i in numbers else None
    heads = [tag("th", cell, scope="col", class_=kind(i)) for i, cell in enumerate(head)]
    body = [tag("tr", *(tag("td", cell, class_=kind(i)) for i, cell in enumerate(row))) for row in rows]
    inside = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *body), **attributes)
    return tag("div", inside, class_="scroll", tabindex="0")
