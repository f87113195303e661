"""Loads an exported model with its own runtime and compares what it gives with what is expected.

`python verify.py saved_model|onnx|litert PATH TRIALS.npz` prints the largest difference as JSON. It is run as a file,
in a process of its own, as whoever serves the model would load it: so it imports nothing of tfdist.

An array of TRIALS is named `<trial>/<signature>/in/<name>` or `.../out/<name>`.
"""

import json
import sys
from collections.abc import Callable

import numpy as np

Runner = Callable[[str, dict], dict]


def main() -> None:
    """Runs all trials, and prints the largest difference."""
    kind, path, trials = sys.argv[1:]
    sys.modules["tfdist"] = None  # type: ignore[assignment]  # whatever needs it shall fail here
    run = {"saved_model": saved_model, "onnx": onnx, "litert": litert}[kind](path)
    arrays_of: dict = {}
    for name, array in np.load(trials).items():
        trial, signature, way, place = name.split("/", 3)
        arrays_of.setdefault((trial, signature), {"in": {}, "out": {}})[way][place] = array
    worst = 0.0
    for (_, signature), arrays in arrays_of.items():
        outputs = {name: np.asarray(array) for name, array in run(signature, arrays["in"]).items()}
        compare = of_classes if {"class_ids", "probabilities"} <= outputs.keys() else of_all
        worst = max(worst, compare(outputs, arrays["out"]))
    print(json.dumps({"difference": worst}))


def of_all(outputs: dict, expected: dict) -> float:
    """Returns the largest difference of any output."""
    return max(difference(outputs[name], array) for name, array in expected.items())


def of_classes(outputs: dict, expected: dict) -> float:
    """Returns the largest difference of the outputs that `tfdist.export.saved_model` gives for classes.

    Rounding may decide between two classes whose scores are as good as equal: another class counts as much as its
    probability is less. And what rounding changes of logits, it changes of probabilities.
    """
    expected, outputs = dict(expected), dict(outputs)
    ids, known = outputs.pop("class_ids"), expected.pop("class_ids")
    sure = np.asarray(expected["probabilities"], np.float64)
    if ids.shape != known.shape:
        return float("inf")
    rows = np.arange(len(ids))
    worst = float(np.nan_to_num(sure[rows, known] - sure[rows, ids]).max(initial=0.0))
    if "classes" in expected:
        names = dict(zip(known.tolist(), expected.pop("classes").tolist()))
        names_given = outputs.pop("classes").tolist()
        if any(names.get(i, name) != name for i, name in zip(ids.tolist(), names_given)):
            return float("inf")
    scale = max(1.0, float(np.abs(np.nan_to_num(expected.get("logits", sure))).max(initial=0.0)))
    gap = difference(outputs.pop("probabilities"), expected.pop("probabilities"))
    return max(worst / scale, gap / scale, of_all(outputs, expected) if expected else 0.0)


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference, relative to the largest value if above 1; infinite where they do not compare."""
    if got.shape != expected.shape:
        return float("inf")
    if expected.dtype.kind != "f":
        got = got.astype(expected.dtype)
        return 0.0 if (got == expected).all() else float("inf")
    with np.errstate(invalid="ignore"):
        gap = np.abs(got.astype(np.float64) - expected)
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    gap = np.where(same, 0.0, np.where(np.isfinite(gap), gap, np.inf))
    return float(gap.max(initial=0.0) / max(1.0, float(np.abs(np.nan_to_num(expected)).max(initial=0.0))))


def saved_model(path: str) -> Runner:
    """Loads a SavedModel; returns what runs a signature with inputs by name."""
    import tensorflow as tf

    loaded = tf.saved_model.load(path)

    def run(signature: str, inputs: dict) -> dict:
        function = loaded.signatures[signature]
        types = {name: spec.dtype for name, spec in function.structured_input_signature[1].items()}
        return {k: v.numpy() for k, v in function(**{k: tf.constant(v, types[k]) for k, v in inputs.items()}).items()}

    return run


def onnx(path: str) -> Runner:
    """Loads an ONNX file; returns what runs a signature with inputs by name."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda signature, inputs: {str(i): o for i, o in enumerate(session.run(None, inputs))}


def litert(path: str) -> Runner:
    """Loads a LiteRT file; returns what runs a signature with inputs by name."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(path)
    (name,) = interpreter.get_signature_list()
    runner, known = interpreter.get_signature_runner(name), interpreter.get_signature_list()[name]

    def run(signature: str, inputs: dict) -> dict:
        outputs = runner(**{k: inputs[k] for k in known["inputs"]})
        return {name.removeprefix("output_"): output for name, output in outputs.items()}

    return run


if __name__ == "__main__":
    main()
