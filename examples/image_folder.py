"""Trains on a folder of images, one folder per class, by `keras.utils.image_dataset_from_directory`.

tfdist run --virtual_devices=2 examples/image_folder.py
"""

import importlib.resources
import pathlib
import tempfile

import keras
import numpy as np

keras.utils.set_random_seed(1)
with tempfile.TemporaryDirectory() as folder:
    # Files as yours may be: FOLDER/zero/1.png, FOLDER/one/2.png, ...
    digits = np.loadtxt(importlib.resources.files("tfdist.data.datasets") / "digits.csv.gz", delimiter=",")
    for i, row in enumerate(digits):
        path = pathlib.Path(folder, f"digit{int(row[64])}", f"{i}.png")
        path.parent.mkdir(exist_ok=True)
        keras.utils.save_img(path, row[:64].reshape(8, 8, 1) * 15, scale=False)

    options = dict(image_size=(8, 8), color_mode="grayscale", batch_size=64, seed=1, validation_split=0.2)
    train, test = keras.utils.image_dataset_from_directory(folder, subset="both", **options)
    layers = [
        keras.Input((8, 8, 1)),
        keras.layers.Rescaling(1 / 255),
        keras.layers.Conv2D(32, 3, activation="gelu"),
        keras.layers.Flatten(),
        keras.layers.Dense(len(train.class_names), activation="softmax"),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(train, epochs=8, validation_data=test, verbose=2)
    loss, accuracy = model.evaluate(test, verbose=0)
print(f"test loss {loss:.6f}, accuracy {accuracy:.1%}")
