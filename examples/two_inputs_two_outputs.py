"""Trains a functional model with two inputs and two outputs, each output with a loss, a weight and metrics of its own.

tfdist run --virtual_devices=2 examples/two_inputs_two_outputs.py
"""

import importlib.resources

import keras
import numpy as np

keras.utils.set_random_seed(1)
digits = np.loadtxt(importlib.resources.files("tfdist.data.datasets") / "digits.csv.gz", delimiter=",")
images, labels = digits[:, :64].reshape(-1, 8, 8, 1) / 16, digits[:, 64].astype("int32")
scale = np.random.default_rng(0).uniform(0.5, 2, size=(len(digits), 1))
# The digit in the image, and what it is worth at a scale that is given beside it.
x = {"image": images, "scale": scale}
y = {"digit": labels, "worth": labels[:, None] * scale}
split = lambda columns, rows: {name: column[rows] for name, column in columns.items()}
train, test = [(split(x, rows), split(y, rows)) for rows in (slice(1437), slice(1437, None))]

image, factor = keras.Input((8, 8, 1), name="image"), keras.Input((1,), name="scale")
seen = keras.layers.Conv2D(16, 3, activation="gelu")(image)
seen = keras.layers.Dense(64, activation="gelu")(keras.layers.Flatten()(seen))
digit = keras.layers.Dense(10, activation="softmax", name="digit")(seen)
both = keras.layers.Dense(64, activation="gelu")(keras.layers.Concatenate()([seen, factor]))
worth = keras.layers.Dense(1, name="worth")(both)
model = keras.Model({"image": image, "scale": factor}, {"digit": digit, "worth": worth})

model.compile(
    keras.optimizers.Adam(3e-3),
    loss={"digit": "sparse_categorical_crossentropy", "worth": "mse"},
    loss_weights={"digit": 1.0, "worth": 0.1},
    metrics={"digit": ["accuracy"], "worth": ["mae"]},
)
# shuffle=False, since the order is random already, and Keras and tfdist shuffle differently.
model.fit(*train, batch_size=64, epochs=8, shuffle=False, validation_data=test, verbose=2)
result = model.evaluate(*test, batch_size=64, verbose=0, return_dict=True)
print(f"test loss {result['loss']:.6f}, accuracy {result['digit_accuracy']:.1%}, mae {result['worth_mae']:.4f}")
