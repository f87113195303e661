"""The part of a report on what a classifier gets wrong: confusion matrix and worst examples."""

from __future__ import annotations

import base64

import numpy as np

from tfdist.monitoring.confusion import Example, Findings
from tfdist.monitoring.report.html import Html, join, table, tag

WITH_NUMBERS = 26
"""Classes up to which each cell of the matrix shows its count."""
AS_PICTURE = 100
"""Classes up to which the matrix is drawn at all."""
PAIRS = 10


def section(findings: Findings) -> Html:
    """Returns the whole part: how many are right, the matrix, the most frequent mistakes and the worst examples."""
    count = len(findings.labels)
    over = f"the first {count:,} examples" if findings.partial else f"{count:,} examples"
    right = int((findings.labels == findings.predictions).sum())
    intro = f"{right:,} of {over} of the evaluation data are right ({100 * findings.accuracy:.2f} %)."
    parts = [tag("p", intro, id="quality-count")]
    if findings.left_out:
        why = "their scores are not finite, or their labels are no classes"
        parts.append(tag("p", f"{findings.left_out:,} examples are left out: {why}.", class_="warn"))
    if count:
        parts += [tag("div", _matrix(findings), _mistakes(findings), class_="beside"), _worst(findings)]
    return join(*parts)


def _matrix(findings: Findings) -> Html:
    if findings.classes > AS_PICTURE:
        return tag(
            "p", f"{findings.classes:,} classes are too many for a matrix; these are confused most:", class_="note"
        )
    counts = findings.confusion()
    if findings.classes > WITH_NUMBERS:
        return _picture(findings, counts)
    totals, taken = counts.sum(1), counts.sum(0)
    head = [tag("th", findings.name(i), scope="col") for i in range(findings.classes)]
    rows = []
    for i in range(findings.classes):
        cells = [_cell(findings, counts, i, j) for j in range(findings.classes)]
        rows.append(
            tag(
                "tr",
                tag("th", findings.name(i), scope="row"),
                *cells,
                tag("td", _share(counts[i, i], totals[i]), class_="sum"),
            )
        )
    precision = [tag("td", _share(counts[i, i], taken[i]), class_="sum") for i in range(findings.classes)]
    matrix = tag(
        "div",
        tag(
            "table",
            tag("thead", tag("tr", tag("th", "true ↓ as →"), *head, tag("th", "recall", scope="col"))),
            tag("tbody", *rows),
            tag("tfoot", tag("tr", tag("th", "precision", scope="row"), *precision, tag("td"))),
            class_="confusion long" if any(len(findings.name(i)) > 5 for i in range(findings.classes)) else "confusion",
            id="confusion",
        ),
        class_="scroll",
        tabindex="0",
    )
    return tag("div", tag("p", "Rows are the true classes, columns the predictions.", class_="note"), matrix)


def _cell(findings: Findings, counts: np.ndarray, i: int, j: int) -> Html:
    count = int(counts[i, j])
    if not count:
        return tag("td")
    what = f"{count:,} of {int(counts[i].sum()):,}: {findings.name(i)} taken for {findings.name(j)}"
    return tag(
        "td",
        f"{count:,}",
        class_="hit" if i == j else "miss",
        style=f"--v:{_strength(counts, i, j):.0f}%",
        title="" if i == j else what,
    )


def _strength(counts: np.ndarray, i: int, j: int) -> float:
    """Returns how strong a colour is, in percent: of its row on the diagonal, of the largest mistake elsewhere."""
    if i == j:
        return 45 * counts[i, i] / counts[i].sum()
    largest = (counts - np.diag(np.diag(counts))).max()
    return 15 + 45 * counts[i, j] / largest


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _picture(findings: Findings, counts: np.ndarray) -> Html:
    """Draws the matrix as squares, for more classes than numbers can be read."""
    squares = []
    for i, j in np.argwhere(counts):
        what = f"{counts[i, j]:,}: {findings.name(i)}" + ("" if i == j else f" taken for {findings.name(j)}")
        style = f"--v:{_strength(counts, i, j) * 1.6:.0f}%"
        kind = "hit" if i == j else "miss"
        squares.append(
            tag("rect", x=j, y=i, width=1, height=1, class_=kind, style=style)
            if i == j
            else tag("g", tag("title", what), tag("rect", x=j, y=i, width=1, height=1, class_=kind, style=style))
        )
    return tag(
        "figure",
        tag(
            "svg",
            tag("title", "Confusion matrix"),
            tag("desc", f"{findings.classes} true classes from top to bottom, predictions from left to right"),
            tag("rect", x=0, y=0, width=findings.classes, height=findings.classes, class_="ground"),
            *squares,
            viewBox=f"0 0 {findings.classes} {findings.classes}",
            role="img",
        ),
        tag("figcaption", f"{findings.classes} true classes from top to bottom, predictions from left to right"),
        class_="matrix",
        id="confusion",
    )


def _mistakes(findings: Findings) -> Html:
    pairs = findings.mistakes(PAIRS)
    if not pairs:
        return tag("p", "No mistake among them.", class_="note")
    totals = np.bincount(findings.labels, minlength=findings.classes)
    rows = [
        [
            findings.name(pair.label),
            findings.name(pair.prediction),
            f"{pair.times:,}",
            f"{100 * pair.times / totals[pair.label]:.1f} %",
        ]
        for pair in pairs
    ]
    more = len(findings.mistakes(findings.classes**2)) - len(pairs)
    return tag(
        "div",
        tag("p", "Most frequent mistakes", class_="note"),
        table(["true", "taken for", "times", "of its class"], rows, (2, 3), id="mistakes"),
        tag("p", f"and {more:,} other pairs", class_="note") if more else "",
    )


def _worst(findings: Findings) -> Html:
    cards = [_card(findings, example) for example in findings.worst]
    return join(
        tag("h3", "Worst examples"),
        tag(
            "p",
            "Those with the highest cross-entropy: what they are, what they are taken for, how surely, and their row.",
            class_="note",
        ),
        tag("ul", *cards, class_="worst", id="worst"),
    )


def _card(findings: Findings, example: Example) -> Html:
    wrong = example.label != example.prediction
    shown = f"true {findings.name(example.label)}, predicted {findings.name(example.prediction)}"
    picture: Html | str = ""
    if example.png:
        source = "data:image/png;base64," + base64.b64encode(example.png).decode()
        picture = tag("img", src=source, alt=f"Example {example.row}: {shown}")
    return tag(
        "li",
        picture,
        tag("span", "true ", tag("b", findings.name(example.label))),
        tag(
            "span",
            "as ",
            tag("b", findings.name(example.prediction)),
            f" · {100 * example.probability:.0f}\u00a0%",
            class_="wrong" if wrong else None,
        ),
        tag("small", f"loss {example.loss:.2f} · #{example.row}"),
    )
