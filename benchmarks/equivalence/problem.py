"""The training that every tool of `make equivalence` does in its own way: data, first weights, independent judge.

Only NumPy is used here, since each tool runs in an environment of its own. A contestant trains, and calls
`record(epoch, weights)` after each epoch with the arrays of `NAMES`, kernels as [inputs, outputs]. `judge` computes
loss and accuracy from these, so no tool's own metrics are compared.
"""

import os
import pathlib
import signal

import numpy as np

EXAMPLES = int(os.environ.get("EXAMPLES", "4001"))
FEATURES, HIDDEN, CLASSES = 20, 64, 5
MICRO_BATCH, ACCUMULATE = 96, 2
"""Examples of a micro-batch over all devices, and micro-batches of an update. The last of an epoch's 42 micro-batches
has 65 examples, which neither two, three nor four devices divide."""
EPOCHS = int(os.environ.get("EPOCHS", "20"))
LEARNING_RATE, MOMENTUM, CLIP_NORM = 0.1, 0.9, 0.5
NORM_MOMENTUM, EPSILON = 0.9, 1e-3  # as Keras counts; PyTorch's momentum is 1 - 0.9
SEED = int(os.environ.get("SEED", "0"))
NORM = os.environ.get("NORM", "batch")
"""`batch`, or `layer`: LayerNorm, which looks at no other example, in its place."""
STATISTICS = {"batch": ("moving_mean", "moving_variance"), "layer": ()}[NORM]
NAMES = ("kernel", "gamma", "beta", *STATISTICS, "kernel_out", "bias_out")
OUT = pathlib.Path(os.environ.get("OUT", "."))


def data(seed: int = SEED) -> tuple[np.ndarray, np.ndarray]:
    """Returns float32 features [EXAMPLES, 20] and int32 labels [EXAMPLES] of a random teacher with a margin."""
    random = np.random.default_rng(1000 + seed)
    teacher, out = random.normal(size=(FEATURES, 12)) / 4, random.normal(size=(12, CLASSES))
    x = random.normal(size=(4 * EXAMPLES, FEATURES))
    scores = np.tanh(x @ teacher) @ out
    first, second = np.sort(scores)[:, :-3:-1].T
    clear = np.flatnonzero(first - second > 0.25)[:EXAMPLES]
    return x[clear].astype("float32"), scores[clear].argmax(1).astype("int32")


def first_weights(seed: int = SEED) -> list[np.ndarray]:
    """Returns the arrays of `NAMES` with which every tool begins."""
    random = np.random.default_rng(2000 + seed)
    ones, zeros = np.ones(HIDDEN), np.zeros(HIDDEN)
    kernels = [random.uniform(-1, 1, (a, b)) * (6 / (a + b)) ** 0.5 for a, b in ((FEATURES, HIDDEN), (HIDDEN, CLASSES))]
    statistics = (zeros, ones) if STATISTICS else ()
    weights = [kernels[0], ones, zeros, *statistics, kernels[1], np.zeros(CLASSES)]
    return [w.astype("float32") for w in weights]


def record(epoch: int, weights) -> None:
    """Writes the weights after an epoch (from 1 on), so that a run that is killed leaves what it had."""
    temporary = OUT / f".{epoch}.npz"
    np.savez(temporary, **dict(zip(NAMES, (np.asarray(w) for w in weights), strict=True)))
    temporary.rename(OUT / f"epoch-{epoch}.npz")


def maybe_kill(epoch: int, batch: int, rank: int = 0, world: int = 1) -> None:
    """Kills this process, if it is the last rank, once in the middle of epoch KILL_AT (from 1 on)."""
    mark = OUT / "killed"
    if (epoch, batch, rank) == (int(os.environ.get("KILL_AT", "0")), 20, world - 1) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def judge(weights, x=None, y=None) -> tuple[float, float]:
    """Returns the mean cross-entropy and the accuracy of the model as it predicts, on all examples, in float64."""
    x, y = data() if x is None else (x, y)
    kernel, gamma, beta, *statistics, kernel_out, bias_out = (np.asarray(w, "float64") for w in weights)
    h = x @ kernel
    mean, variance = statistics or (h.mean(1, keepdims=True), h.var(1, keepdims=True))
    h = (h - mean) / np.sqrt(variance + EPSILON) * gamma + beta
    logits = np.tanh(h) @ kernel_out + bias_out
    logits -= logits.max(1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return float(-log_p[np.arange(len(y)), y].mean()), float((log_p.argmax(1) == y).mean())
