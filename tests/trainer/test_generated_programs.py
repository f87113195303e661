"""Programs that are made up at random end under tfdist as with Keras' own fit on one device, or are refused truly.

TFDIST_TEST_SEED=123 runs the program of one seed, under each number of replicas. A failure prints the program.
"""

import dataclasses
import inspect
import os
import pathlib
import re

import keras
import pytest
from programs.generated import fitting_pieces, layer_pieces, objective_pieces, running, user_code, writer

SHORT = ((1203, 1), (1207, 2))
"""Seeds and numbers of replicas of `make test`, which are quick ones."""
WHOLE = range(1200, 1700)


def cells():
    if "TFDIST_TEST_SEED" in os.environ:
        return [pytest.param(int(os.environ["TFDIST_TEST_SEED"]), replicas) for replicas in (1, 2, 3)]
    whole = [(seed, 1 + seed % 3) for seed in WHOLE]
    return [*SHORT, *(pytest.param(*cell, marks=pytest.mark.whole) for cell in whole if cell not in SHORT)]


@pytest.mark.parametrize("seed, replicas", cells())
def test_ends_as_with_keras(seed, replicas, connect, tmp_path):
    program = writer.write(seed)
    wrong, _ = judged(program, connect(replicas), tmp_path / "once")
    if wrong and program.precision == "float32":  # where rounding may have grown; a real difference is there in float64
        exact, again = judged(dataclasses.replace(program, precision="float64"), connect(replicas), tmp_path / "again")
        wrong = exact if again.error is None else wrong
    assert not wrong, f"{replicas} replicas: {wrong}\n{program}"


def judged(program, distribution, folder):
    """Returns what is wrong with the program under tfdist, and what it comes to with Keras."""
    expected = running.by_keras(program, folder / "keras")
    got = running.by_tfdist(program, distribution, folder / "tfdist")
    return running.complaint(program, got, expected, distribution.replicas), expected


@pytest.mark.parametrize("kind", ["layers", "losses", "metrics", "optimizers"])
def test_every_class_of_keras_may_occur(kind):
    public = {name for name, c in vars(getattr(keras, kind)).items() if inspect.isclass(c) and name[0].isupper()}
    text = "".join(inspect.getsource(m) for m in (fitting_pieces, layer_pieces, objective_pieces, user_code, writer))
    missing = {name for name in public if not re.search(rf"\b{name}\b", text)}
    assert missing <= OTHERWISE[kind], missing - OTHERWISE[kind]


OTHERWISE = {
    # Other names of the same classes; those that need other packages; what has no layer's interface.
    "layers": {
        *("AvgPool1D", "AvgPool2D", "AvgPool3D", "MaxPool1D", "MaxPool2D", "MaxPool3D"),
        *("GlobalAvgPool1D", "GlobalAvgPool2D", "GlobalAvgPool3D"),
        *("GlobalMaxPool1D", "GlobalMaxPool2D", "GlobalMaxPool3D"),
        *("Convolution1DTranspose", "Convolution2DTranspose", "Convolution3D", "Convolution3DTranspose"),
        *("SeparableConvolution1D", "SeparableConvolution2D"),
        *("FlaxLayer", "JaxLayer", "TFSMLayer", "TorchModuleWrapper"),
        *("InputLayer", "InputSpec", "MaxNumBoundingBoxes", "CutMix", "MixUp", "HashedCrossing", "Wrapper"),
    },
    "losses": set(),
    "metrics": set(),
    "optimizers": {"Optimizer"},
}


def test_a_seed_gives_one_program():
    assert writer.write(7) == writer.write(7) != writer.write(8)


SETUPS = """
import sys
sys.path.insert(0, sys.argv[1])
from programs.generated import running, writer
from tfdist.keras_bridge import setups
class Api:
    notes = []
    def fit(self, model, *args, **kwargs):
        print(seed, sorted(setups.of_training(model).items()))
        raise KeyError
    def __getattr__(self, name):
        return lambda *args, **kwargs: None
for seed in range(1200, 1240):
    running.run(writer.write(seed), Api(), running.pathlib.Path("."))
"""


@pytest.mark.whole
def test_a_setup_is_the_same_in_another_process(run, tmp_path):
    """An address, or the order of a set, would refuse to resume an unchanged script."""
    (tmp_path / "made.py").write_text(SETUPS)
    folder = str(pathlib.Path(__file__).parents[1])
    one, other = (run("made", folder, real=True, PYTHONHASHSEED=seed).stdout for seed in "12")
    assert one.count("the setup of the model for its loss") > 30 and one == other
