"""Analyzes a trained classifier's predictions for the report."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from tfdist.config.messages import logger
from tfdist.data import sources
from tfdist.data.spec import Spec
from tfdist.data.structures import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.monitoring import confusion
from tfdist.trainer import evaluation

LIMIT = 10_000  # first examples that are analyzed
SCORES = 20_000_000  # maximum number of scores held: fewer examples where there are very many classes
PICTURE = 96  # maximum height and width of a picture, in pixels
_PIECE = 128


def of_run(
    model: keras.Model,
    source: sources.Source,
    spec: Spec,
    distribution: Distribution,
    batch_size: int | None = None,
    virtual_replicas: int = 0,
    limit: int = LIMIT,
) -> confusion.Findings | None:
    """Analyzes a classifier's mistakes on its evaluation data, the first `limit` examples. Every worker must call this.

    No run fails for it, except where one worker of several cannot predict and the others would wait for it. None on
    workers other than the chief, and where there are no classes, the model does not output one score per class, or the
    data have another order each time, so that targets cannot be matched to outputs.
    """
    shape: object = None
    with contextlib.suppress(AttributeError, ValueError):  # a subclassed model has none, and may output scores
        shape = model.output_shape
    scored = shape is None or (isinstance(shape, tuple) and len(shape) == 2 and shape[1] in (spec.classes, None))
    if spec.classes is None or spec.classes < 2 or not scored:
        return None
    lost = lambda error: logger.info(f"WARNING: no analysis of mistakes: {type(error).__name__}: {error}")
    first, partial, usable = source, False, False
    try:
        first, partial = source.head(min(limit, max(1, SCORES // spec.classes)))
        usable = first.repeats_order()
    except Exception as error:
        lost(error)
    if not all(distribution.peers.gather("the evaluation data for the report", usable)):
        return None
    try:
        batch = first.requested_batch(None, batch_size)
        scores = evaluation.predict(  # the training has run the equivalence check
            model, first, batch, 0, distribution=distribution, virtual_replicas=virtual_replicas, check_agreement="off"
        )
    except Exception as error:
        if distribution.workers > 1 and not isinstance(error, UserError):
            raise
        lost(error)
        return None
    if not distribution.is_chief:
        return None
    try:
        from_logits = getattr(getattr(model, "loss", None), "from_logits", None)
        if from_logits is None:
            from_logits = not confusion.look_like_probabilities(scores)
        findings = confusion.Findings(spec.classes, bool(from_logits), spec.names, partial=partial)
        with distribution.peers.during("saving"):  # no stall, though it may take long
            return findings if _findings(first, scores, spec, findings) else None
    except Exception as error:
        lost(error)
        return None


def _findings(source: sources.Source, scores: np.ndarray, spec: Spec, findings: confusion.Findings) -> bool:
    """Compares the scores with the targets, and makes pictures of the worst examples; False where it cannot."""
    if scores.shape[1:] != (findings.classes,):
        return False
    row = 0
    for x, y, *_ in source.pieces(_PIECE):
        labels = _labels(y, findings.classes)
        if labels is None:
            return False
        images = isinstance(x, np.ndarray) and x.ndim == 4 and x.shape[-1] in (1, 3) and min(x.shape[1:3]) > 1
        findings.add(labels, scores[row : row + len(labels)], x if images else None)
        row += len(labels)
    for example in findings.worst:
        if example.pixels is not None:
            example.png = png(example.pixels, spec)
    return True


def png(pixels: np.ndarray, spec: Spec) -> bytes:
    """Encodes an input as a small PNG; integers are scaled as for the models, others by their own range."""
    image = np.nan_to_num(pixels.astype(np.float64))
    whole = np.issubdtype(np.dtype(spec.dtype), np.integer)
    low, high = (0.0, spec.maximum) if whole else (image.min(), image.max())
    image = np.clip((image - low) / max(high - low, 1e-9), 0, 1)
    factor = PICTURE / max(image.shape[:2])
    if factor < 1:
        size = [max(1, round(side * factor)) for side in image.shape[:2]]
        image = tf.image.resize(image, size, "area").numpy()
    return tf.io.encode_png(np.round(255 * image).astype(np.uint8)).numpy()


def _labels(y: Structure, classes: int) -> np.ndarray | None:
    """Returns [n] class numbers, or None for other targets, such as sequences."""
    if not isinstance(y, np.ndarray):
        return None
    if y.shape[1:] == (classes,) and ((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all():
        return y.argmax(1)
    if y.shape[1:] in ((), (1,)) and np.issubdtype(y.dtype, np.integer):
        return y.reshape(-1).astype(np.int64)
    return None
