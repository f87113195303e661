"""Trains on data that Grain reads: a source of examples, shuffled by a seed, transformed and batched.

tfdist run --virtual_devices=2 examples/grain_data.py
"""

import importlib.resources

import grain
import keras
import numpy as np

keras.utils.set_random_seed(1)


class Digits:
    """Examples by number, as a database or a folder of files would give them."""

    def __init__(self, rows):
        table = np.loadtxt(importlib.resources.files("tfdist.data.datasets") / "digits.csv.gz", delimiter=",")
        self.rows = table[rows].astype("float32")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i, :64], self.rows[i, 64]


def batches(rows):
    data = grain.MapDataset.source(Digits(rows)).shuffle(seed=1)
    return data.map(lambda example: (example[0] / 16, int(example[1]))).batch(64)


train, test = batches(slice(1437)), batches(slice(1437, None))
layers = [keras.Input((64,)), keras.layers.Dense(64, activation="gelu"), keras.layers.Dense(10, activation="softmax")]
model = keras.Sequential(layers)
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(train, epochs=8, validation_data=test, verbose=2)
loss, accuracy = model.evaluate(test, verbose=0)
print(f"test loss {loss:.6f}, accuracy {accuracy:.1%}")
