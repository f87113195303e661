"""Classifies text: TextVectorization learns a vocabulary, an embedding and a classifier follow. Of which module of
Python's own library is a line?

tfdist run --virtual_devices=2 examples/text_classification.py
"""

import importlib.util
import pathlib

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
MODULES = ["argparse", "calendar", "tarfile"]
lines, labels = [], []
for label, name in enumerate(MODULES):
    source = pathlib.Path(importlib.util.find_spec(name).origin).read_text().splitlines()
    words = [line for line in map(str.strip, source) if len(line.split()) > 2]
    lines += words
    labels += [label] * len(words)
order = np.random.default_rng(0).permutation(len(lines))
lines, labels = np.array(lines)[order], np.array(labels)[order]
held_out = len(lines) // 5

vectorize = keras.layers.TextVectorization(max_tokens=2000, output_sequence_length=16)
vectorize.adapt(lines[held_out:])


def batches(x, y):
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
    return data.map(lambda x, y: (vectorize(x), y)).prefetch(tf.data.AUTOTUNE)


train, test = batches(lines[held_out:], labels[held_out:]), batches(lines[:held_out], labels[:held_out])
layers = [
    keras.Input((16,), dtype="int64"),
    keras.layers.Embedding(2000, 32, mask_zero=True),
    keras.layers.GlobalAveragePooling1D(),
    keras.layers.Dense(32, activation="gelu"),
    keras.layers.Dense(len(MODULES), activation="softmax"),
]
model = keras.Sequential(layers)
# With Adam, tfdist differs from Keras where a word occurs twice in a batch: docs/sameness.md tells why.
model.compile(keras.optimizers.SGD(0.2, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(train, epochs=5, validation_data=test, verbose=2)
loss, accuracy = model.evaluate(test, verbose=0)
print(f"test loss {loss:.6f}, accuracy {accuracy:.1%}")
