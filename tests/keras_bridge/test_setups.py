"""What is known of a model besides its weights: a setting that is not seen would be taken for the same."""

import random
import tempfile
import threading
import time
import uuid

import keras
import pytest
from programs.generated import running, writer

from tfdist.keras_bridge import setups

L = keras.layers


class Looks:
    """Looks at the model of a program in the place of training it."""

    notes = ()

    def __init__(self, look):
        self._look = look

    def fit(self, model, *args, **kwargs):
        self._look(model)
        raise KeyError

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


@pytest.mark.whole
def test_every_part_of_a_model_can_be_told(monkeypatch, tmp_path):
    """Of an Embedding nothing was known, as of all with an argument `weights`."""
    told = setups.text
    failed = []

    def text(thing, *left_out):
        if not told(thing, *left_out):
            failed.append(thing)
        return told(thing, *left_out)

    monkeypatch.setattr(setups, "text", text)
    for seed in range(1200, 1230):
        running.run(writer.write(seed), Looks(setups.of_training), tmp_path)
    setups.of_model(keras.Sequential([L.Embedding(3, 2), L.Bidirectional(L.GRU(2))]))
    assert not failed and "('units', 3)" in told(L.Dense(3))


def two_inputs(turned_in=False, turned_out=False):
    one, other = keras.Input((2,)), keras.Input((2,))
    outputs = [L.Subtract()([other, one] if turned_in else [one, other]), one * 2.0]
    return keras.Model([one, other], outputs[::-1] if turned_out else outputs)


@pytest.mark.parametrize(
    "one, other",
    [
        (lambda: keras.Sequential([L.Embedding(3, 2)]), lambda: keras.Sequential([L.Embedding(3, 2, mask_zero=True)])),
        (two_inputs, lambda: two_inputs(turned_in=True)),
        (two_inputs, lambda: two_inputs(turned_out=True)),
    ],
    ids=["mask", "inputs", "outputs"],
)
def test_models_of_other_setups(one, other):
    assert setups.of_model(one()) == setups.of_model(one()) != setups.of_model(other())


class Node:
    """Knows another that knows it, and counts."""

    def __init__(self, other=None):
        self.other, self.visits = other, 0
        if other:
            other.other = self

    def visit(self):
        self.visits += 1


NODES, CALLS = Node(Node()), []


class Odd(L.Layer):
    """Holds what is another in each process, object or call, and is no setting."""

    made, known = 0, []

    def __init__(self):
        super().__init__()
        Odd.made += 1
        Odd.known.append(self.name)
        self.folder, self.code, self.address, self.tag = (
            tempfile.mkdtemp(),
            uuid.uuid4().hex,
            id(self),
            self.name + "_x",
        )
        self.times = [time.time(), int(time.time()), time.perf_counter()]
        self.began, self.drawn_seed, self.lock = time.monotonic(), random.randrange(9**9), threading.Lock()
        self.calls, self.seen, self.node = 0, [], NODES

    def call(self, x):
        self.calls += 1
        self.took = time.perf_counter() - self.times[2]
        self.seen.append(2.0)
        CALLS.append(1.0)
        self.node.visit()
        return x


def test_what_is_no_setting_is_none():
    """An unchanged script would be refused after a kill, or a cell of a notebook that runs once more."""

    def loss(a, b):
        CALLS.append(2.0)
        return keras.ops.mean(a - b) * NODES.visits

    def made():
        model = keras.Sequential([keras.Input((2,)), Odd()])
        model.compile("sgd", loss)
        return setups.of_training(model) | setups.of_callbacks(
            model, [keras.callbacks.LambdaCallback(lambda *_: CALLS.append(4.0))]
        )

    first = made()
    CALLS.append(3.0)
    assert not Odd.__annotations__  # which makes them
    assert made() == first


class Anneals(keras.callbacks.Callback):
    def __init__(self, most):
        super().__init__()
        self.set(most)

    def set(self, most):
        self.rate = most

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = self.rate / (epoch + 1)


def test_a_setting_that_the_constructor_leaves_to_a_method():
    model = keras.Sequential([keras.Input((2,)), L.Dense(1)])
    made = lambda most: setups.of_callbacks(model, [Anneals(most)])
    assert made(0.5) == made(0.5) != made(0.25)


@pytest.mark.parametrize("settings, name", [({"scale": 2.0}, "scale"), ([3.0, 2.0], 1)], ids=["dict", "list"])
def test_settings_that_are_changed_in_place(settings, name):
    """A cell of a notebook that trained once more with another number gave back the earlier weights."""

    def made():
        model = keras.Sequential([keras.Input((2,)), L.Dense(1)])
        model.compile("sgd", lambda a, b: keras.ops.mean(a - b) * settings[name])
        return setups.of_training(model)

    first = made()
    assert made() == first
    settings[name] = 4.0
    assert made() != first
