"""A classifier's mistakes in a report: confusion matrix and worst examples."""

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
    """Returns accuracy, the matrix, the most frequent mistakes and the worst examples."""
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
        text = f"{findings.classes:,} classes are too many for a matrix; these are confused most:"
        return tag("p", text, class_="note")
    counts = findings.confusion()
    if findings.classes > WITH_NUMBERS:
        return _picture(findings, counts)
    classes, names = range(findings.classes), [findings.name(i) for i in range(findings.classes)]
    share = lambda i, total: tag("td", f"{100 * counts[i, i] / total:.0f} %" if total else "-", class_="sum")

    def cell(i: int, j: int) -> Html:
        if not counts[i, j]:
            return tag("td")
        what = f"{counts[i, j]:,} of {counts[i].sum():,}: {names[i]} taken for {names[j]}"
        kind, style = "hit" if i == j else "miss", f"--v:{_strength(counts, i, j):.0f}%"
        return tag("td", f"{counts[i, j]:,}", class_=kind, style=style, title="" if i == j else what)

    totals, predicted = counts.sum(1), counts.sum(0)
    head = [tag("th", name, scope="col") for name in names]
    rows = [
        tag("tr", tag("th", names[i], scope="row"), *(cell(i, j) for j in classes), share(i, totals[i]))
        for i in classes
    ]
    matrix = tag(
        "table",
        tag("thead", tag("tr", tag("th", "true ↓ as →"), *head, tag("th", "recall", scope="col"))),
        tag("tbody", *rows),
        tag("tfoot", tag("tr", tag("th", "precision", scope="row"), *map(share, classes, predicted), tag("td"))),
        class_="confusion long" if any(len(name) > 5 for name in names) else "confusion",
        id="confusion",
    )
    note = tag("p", "Rows are the true classes, columns the predictions.", class_="note")
    return tag("div", note, tag("div", matrix, class_="scroll", tabindex="0"))


def _strength(counts: np.ndarray, i: int, j: int) -> float:
    """Returns the strength of a color, in percent: of its row on the diagonal, of the largest mistake elsewhere."""
    if i == j:
        return 45 * counts[i, i] / counts[i].sum()
    largest = (counts - np.diag(np.diag(counts))).max()
    return 15 + 45 * counts[i, j] / largest


def _picture(findings: Findings, counts: np.ndarray) -> Html:
    """Draws the matrix as squares, for more classes than numbers can be read."""
    squares, side = [], findings.classes
    for i, j in np.argwhere(counts):
        style = f"--v:{_strength(counts, i, j) * 1.6:.0f}%"
        square = tag("rect", x=j, y=i, width=1, height=1, class_="hit" if i == j else "miss", style=style)
        what = f"{counts[i, j]:,}: {findings.name(i)} taken for {findings.name(j)}"
        squares.append(square if i == j else tag("g", tag("title", what), square))
    caption = f"{side} true classes from top to bottom, predictions from left to right"
    ground = tag("rect", x=0, y=0, width=side, height=side, class_="ground")
    texts = (tag("title", "Confusion matrix"), tag("desc", caption))
    svg = tag("svg", *texts, ground, *squares, viewBox=f"0 0 {side} {side}", role="img")
    return tag("figure", svg, tag("figcaption", caption), class_="matrix", id="confusion")


def _mistakes(findings: Findings) -> Html:
    pairs = findings.mistakes(PAIRS)
    if not pairs:
        return tag("p", "No mistake among them.", class_="note")
    totals = np.bincount(findings.labels, minlength=findings.classes)
    rows = [
        [findings.name(label), findings.name(prediction), f"{times:,}", f"{100 * times / totals[label]:.1f} %"]
        for label, prediction, times in pairs
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
    note = "Those with the highest cross-entropy: what they are, what they are taken for, how surely, and their row."
    note = tag("p", note, class_="note")
    return join(tag("h3", "Worst examples"), note, tag("ul", *cards, class_="worst", id="worst"))


def _card(findings: Findings, example: Example) -> Html:
    label, prediction = findings.name(example.label), findings.name(example.prediction)
    picture: Html | str = ""
    if example.png:
        source = "data:image/png;base64," + base64.b64encode(example.png).decode()
        picture = tag("img", src=source, alt=f"Example {example.row}: true {label}, predicted {prediction}")
    wrong = "wrong" if example.label != example.prediction else None
    return tag(
        "li",
        picture,
        tag("span", "true ", tag("b", label)),
        tag("span", "as ", tag("b", prediction), f" · {100 * example.probability:.0f}\u00a0%", class_=wrong),
        tag("small", f"loss {example.loss:.2f} · #{example.row}"),
    )
