"""A classifier's mistakes: which classes it confuses, and its worst examples. NumPy only."""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

WORST = 24
"""Examples that are kept."""


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """One example with a high loss."""

    row: int
    """Its index in the data set."""
    label: int
    prediction: int
    probability: float
    """Probability that the model gives its prediction."""
    loss: float
    """Cross-entropy in nats: minus the logarithm of the probability of the label."""
    pixels: np.ndarray | None = None
    """The input [height, width, channels] where that is an image."""
    png: bytes = b""
    """The same as a picture to show."""


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """Predictions compared with labels."""

    classes: int
    labels: np.ndarray
    """[examples] of those that count."""
    predictions: np.ndarray
    """[examples] the class with the highest score."""
    worst: tuple[Example, ...]
    """Examples with the highest loss, from the highest on."""
    left_out: int = 0
    """Examples that do not count: a score that is not finite, or a label that is no class."""
    partial: bool = False
    """There were more examples than were examined."""
    names: tuple[str, ...] = ()
    """Names of the classes, if they have any."""

    @property
    def accuracy(self) -> float:
        """Returns the share of the predictions that are right; 0 when nothing counts."""
        return float((self.labels == self.predictions).mean()) if len(self.labels) else 0.0

    def confusion(self) -> np.ndarray:
        """Counts how many examples of one class (row) were taken for another (column): [classes, classes]."""
        both = self.labels.astype(np.int64) * self.classes + self.predictions
        return np.bincount(both, minlength=self.classes**2).reshape(self.classes, self.classes)

    def mistakes(self, most: int) -> list[tuple[int, int, int]]:
        """Returns label, prediction and count of the most frequent mistakes, the most frequent first."""
        wrong = self.labels != self.predictions
        pairs, counts = np.unique(np.stack([self.labels, self.predictions])[:, wrong], axis=1, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:most]
        return [(int(pairs[0, i]), int(pairs[1, i]), int(counts[i])) for i in order]

    def name(self, number: int) -> str:
        """Returns the name of a class, or its number."""
        return self.names[number] if number < len(self.names) else str(number)


class Tally:
    """Accumulates findings batch by batch, so that no more images are held than are kept.

    Args:
      classes: their number.
      from_logits: the scores are logits; else probabilities.
      worst: number of worst examples to keep.
    """

    def __init__(self, classes: int, from_logits: bool, worst: int = WORST):
        self._classes, self._from_logits, self._most = classes, from_logits, worst
        self._labels: list[np.ndarray] = []
        self._predictions: list[np.ndarray] = []
        self._worst: list[tuple[float, int, Example]] = []
        self._rows = self._left_out = 0

    def add(self, labels: np.ndarray, scores: np.ndarray, images: np.ndarray | None = None) -> None:
        """Adds the next examples.

        Args:
          labels: [n] class numbers.
          scores: [n, classes].
          images: [n, height, width, channels], or None.
        """
        scores = np.asarray(scores, np.float64)
        count = np.isfinite(scores).all(1) & (labels >= 0) & (labels < self._classes)
        rows = np.flatnonzero(count)
        labels, scores = labels[rows], scores[rows]
        logs = log_probabilities(scores, self._from_logits)
        predictions = scores.argmax(1)
        losses = -logs[np.arange(len(rows)), labels]
        for i in np.argsort(-losses, kind="stable")[: self._most]:
            example = Example(
                row=self._rows + int(rows[i]),
                label=int(labels[i]),
                prediction=int(predictions[i]),
                probability=float(np.exp(logs[i, predictions[i]])),
                loss=float(losses[i]),
                pixels=None if images is None else np.array(images[rows[i]]),
            )
            heapq.heappush(self._worst, (example.loss, -example.row, example))
            if len(self._worst) > self._most:
                heapq.heappop(self._worst)
        self._labels.append(labels)
        self._predictions.append(predictions)
        self._rows += len(count)
        self._left_out += len(count) - len(rows)

    def findings(self, partial: bool = False, names: tuple[str, ...] = ()) -> Findings:
        """Returns the findings of all examples."""
        return Findings(
            classes=self._classes,
            labels=np.concatenate([np.zeros(0, np.int64), *self._labels]),
            predictions=np.concatenate([np.zeros(0, np.int64), *self._predictions]),
            worst=tuple(example for *_, example in sorted(self._worst, reverse=True)),
            left_out=self._left_out,
            partial=partial,
            names=names,
        )


def log_probabilities(scores: np.ndarray, from_logits: bool) -> np.ndarray:
    """Returns [n, classes] logarithms of the probabilities that scores represent."""
    if not from_logits:
        scores = np.log(np.clip(scores, 1e-300, None))  # not of 0, which is minus infinity
    scores = scores - scores.max(1, keepdims=True) if len(scores) else scores
    return scores - np.log(np.exp(scores).sum(1, keepdims=True))


def look_like_probabilities(scores: np.ndarray) -> bool:
    """Tells whether each row is a distribution, where the loss does not specify it."""
    finite = scores[np.isfinite(scores).all(1)]
    return bool(len(finite)) and bool((finite >= 0).all()) and bool(np.allclose(finite.sum(1), 1, atol=1e-2))
