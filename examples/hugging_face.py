"""Trains on a data set of Hugging Face `datasets`, read in batches by its `to_tf_dataset`.

tfdist run --virtual_devices=2 examples/hugging_face.py
"""

import importlib.resources

import datasets
import keras
import numpy as np

keras.utils.set_random_seed(1)
digits = np.loadtxt(importlib.resources.files("tfdist.data.datasets") / "digits.csv.gz", delimiter=",")
columns = {"pixels": digits[:, :64].astype("float32"), "label": digits[:, 64].astype("int64")}
data = datasets.Dataset.from_dict(columns).train_test_split(test_size=0.2, seed=1)
# data = datasets.load_dataset("mnist")  # in its place: a data set of the Hub, which it downloads
data = data.map(lambda rows: {"pixels": np.divide(rows["pixels"], 16)}, batched=True)

options = dict(columns="pixels", label_cols="label", batch_size=64)
train = data["train"].to_tf_dataset(shuffle=False, **options)  # train_test_split has shuffled the rows
test = data["test"].to_tf_dataset(shuffle=False, **options)
layers = [keras.Input((64,)), keras.layers.Dense(64, activation="gelu"), keras.layers.Dense(10, activation="softmax")]
model = keras.Sequential(layers)
model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(train, epochs=8, validation_data=test, verbose=2)
loss, accuracy = model.evaluate(test, verbose=0)
print(f"test loss {loss:.6f}, accuracy {accuracy:.1%}")
