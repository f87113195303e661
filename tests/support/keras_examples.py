"""Trains unmodified examples of keras.io by Keras and by `tfdist run`, and compares histories and weights.

`make keras-examples SOURCE=FOLDER` wants a folder with the examples, such as `examples/keras_io` of the repository of
Keras before its commit e5dad39. Each example runs in a process and a folder of its own. Data, epochs, batches and what
is drawn at random are replaced around the script (see `keras_examples_prelude`), which itself is not touched. Prints a
line of JSON for each: the precision, the calls of `fit`, and how far each world is from Keras, relative to the largest
number of a weight or of a column of the history, or what has stopped it.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import numpy as np

PRELUDE = pathlib.Path(__file__).with_name("keras_examples_prelude.py")
WORLDS = {
    "keras": None,
    "two replicas": ["--strategy=mirrored", "--virtual_devices=2"],
    "two workers": ["--strategy=multi_worker", "--nproc_per_node=2", "--show=all"],
}
PRECISIONS = ("float64", "float32")  # the first in which Keras trains the example


def outcome(example, world, floatx, limit):
    """Runs one example; returns the calls of `fit` that it made, or the last line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        flags = WORLDS[world]
        program = [sys.executable, *(["-m", "tfdist.run", *flags] if flags else []), str(PRELUDE), str(example)]
        environ = dict(os.environ, EXAMPLE_OUT=folder, EXAMPLE_FLOATX=floatx, CUDA_VISIBLE_DEVICES="", MPLBACKEND="agg")
        environ.update(TF_CPP_MIN_LOG_LEVEL="3", HOME=folder, KERAS_HOME=f"{folder}/.keras", TFDIST_SECRET="0" * 32)
        os.mkdir(f"{folder}/work")
        child = subprocess.Popen(
            program, cwd=f"{folder}/work", env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return f"did not end within {limit} s"
        # Every worker has written its own: all must agree with Keras.
        made = {}
        for file in sorted(pathlib.Path(folder).glob("*.npz")):
            made.setdefault(file.stem.split("-")[0], []).append(dict(np.load(file)))
        if child.returncode:
            lines = [line.strip() for line in said.splitlines() if line.strip()]
            told = [line for line in lines if line.startswith("tfdist: ")]
            return (told or lines or ["nothing was printed"])[-1][:300]
        return made


def distance(ours, theirs):
    """The largest difference of any number, relative to the largest number beside it."""
    worst = 0.0
    for process in ours.values():
        (reference,) = theirs.values()
        if [sorted(call) for call in process] != [sorted(call) for call in reference]:
            return float("inf")
        for call, judge in zip(process, reference, strict=True):
            for name, value in judge.items():
                if call[name].shape != value.shape:
                    return float("inf")
                if value.size:
                    worst = max(worst, np.max(np.abs(call[name] - value)) / max(np.max(np.abs(value)), 1e-3))
    return float(worst)


def judge(example, worlds, limit):
    """What came of one example: how far each world is from Keras, or what stopped it."""
    for floatx in PRECISIONS:
        reference = outcome(example, "keras", floatx, limit)
        if not isinstance(reference, str):
            break
    if isinstance(reference, str):
        return {"keras": reference}
    if not any(reference.values()):
        return {"keras": "calls no fit"}
    result = {"keras": floatx, "calls": len(*reference.values())}
    for world in worlds:
        ours = outcome(example, world, floatx, limit)
        result[world] = ours if isinstance(ours, str) else distance(ours, reference)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=pathlib.Path, help="the folder with the examples")
    parser.add_argument("--only", default="", help="examples whose path contains this")
    parser.add_argument("--worlds", default="two replicas,two workers")
    parser.add_argument("--limit", type=int, default=900, help="seconds for each run")
    arguments = parser.parse_args()
    for example in sorted(arguments.source.rglob("*.py")):
        if arguments.only in str(example):
            result = judge(example.resolve(), arguments.worlds.split(","), arguments.limit)
            print(json.dumps({"example": str(example.relative_to(arguments.source)), **result}), flush=True)


if __name__ == "__main__":
    main()
