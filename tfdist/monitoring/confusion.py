"""A classifier's mistakes: which classes it confuses, and its worst examples. NumPy only."""

import dataclasses

import numpy as np

WORST = 24  # examples that are kept


@dataclasses.dataclass(slots=True)
class Example:
    """One example with a high loss."""

    row: int  # its index in the data set
    label: int
    prediction: int
    probability: float  # that the model gives its prediction
    loss: float  # cross-entropy in nats: minus the logarithm of the probability of the label
    pixels: np.ndarray | None = None  # the input [height, width, channels], where that is an image
    png: bytes = b""  # the same as a picture to show


@dataclasses.dataclass(slots=True)
class Findings:
    """Predictions compared with labels, batch by batch, so that no more images are held than are kept."""

    classes: int
    from_logits: bool  # the scores are logits; else probabilities
    names: tuple[str, ...] = ()  # of the classes, if they have any
    most: int = WORST
    partial: bool = False  # there were more examples than were examined
    left_out: int = 0  # examples that do not count: a score that is not finite, or a label that is no class
    labels: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))  # of those that count
    predictions: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    worst: list[Example] = dataclasses.field(default_factory=list)  # from the highest loss on

    def add(self, labels: np.ndarray, scores: np.ndarray, images: np.ndarray | None = None) -> None:
        """Adds the next examples: labels [n], scores [n, classes], images [n, height, width, channels]."""
        first = len(self.labels) + self.left_out
        scores = np.asarray(scores, np.float64)
        rows = np.flatnonzero(np.isfinite(scores).all(1) & (labels >= 0) & (labels < self.classes))
        self.left_out += len(labels) - len(rows)
        labels, scores = labels[rows], scores[rows]
        logs = log_probabilities(scores, self.from_logits)
        predictions = scores.argmax(1)
        losses = -logs[np.arange(len(rows)), labels]
        for i in np.argsort(-losses, kind="stable")[: self.most]:
            example = Example(
                row=first + int(rows[i]),
                label=int(labels[i]),
                prediction=int(predictions[i]),
                probability=float(np.exp(logs[i, predictions[i]])),
                loss=float(losses[i]),
                pixels=None if images is None else np.array(images[rows[i]]),
            )
            self.worst.append(example)
        self.worst = sorted(self.worst, key=lambda example: (-example.loss, example.row))[: self.most]
        self.labels = np.concatenate([self.labels, labels])
        self.predictions = np.concatenate([self.predictions, predictions])

    @property
    def accuracy(self) -> float:
        """Share of the predictions that are right; 0 when nothing counts."""
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
