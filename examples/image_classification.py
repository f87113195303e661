"""Augments images and fine-tunes a model of keras.applications: its new head first, then all of its layers.

tfdist run --virtual_devices=2 examples/image_classification.py
"""

import importlib.resources

import keras
import numpy as np

keras.utils.set_random_seed(1)
digits = np.loadtxt(importlib.resources.files("tfdist.data.datasets") / "digits.csv.gz", delimiter=",")
images, labels = digits[:, :64].reshape(-1, 8, 8, 1), digits[:, 64].astype("int32")  # 1,797 images, values 0 to 16
train, test = (images[:1437], labels[:1437]), (images[1437:], labels[1437:])

vgg16 = keras.applications.VGG16(include_top=False, weights=None)
# With weights="imagenet", which it downloads, pass 255 * x / 16 through keras.applications.vgg16.preprocess_input.
base = keras.Model(vgg16.inputs, vgg16.get_layer("block2_pool").output)  # images this small need no more blocks
inputs = keras.Input((8, 8, 1))
x = keras.layers.RandomTranslation(0.1, 0.1)(inputs)
x = keras.layers.RandomRotation(0.05)(x)
x = keras.layers.Resizing(16, 16)(x)
x = base(keras.layers.Concatenate()([x, x, x]))  # gray as RGB
outputs = keras.layers.Dense(10, activation="softmax")(keras.layers.Flatten()(x))
model = keras.Model(inputs, outputs)

base.trainable = False
model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(*train, batch_size=64, epochs=1, validation_data=test, verbose=2)

base.trainable = True
model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(*train, batch_size=64, epochs=3, validation_data=test, verbose=2)
loss, accuracy = model.evaluate(*test, batch_size=64, verbose=0)
print(f"test loss {loss:.6f}, accuracy {accuracy:.1%}")
