"""Writes examples to TFRecord files and trains on them: interleaved, parsed and batched by tf.data.

tfdist run --virtual_devices=2 examples/tfrecords.py
"""

import importlib.resources
import tempfile

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
digits = np.loadtxt(importlib.resources.files("tfdist.data.datasets") / "digits.csv.gz", delimiter=",")


def write(path, rows):
    with tf.io.TFRecordWriter(path) as writer:
        for row in rows:
            image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[row[:64].astype("uint8").tobytes()]))
            label = tf.train.Feature(int64_list=tf.train.Int64List(value=[int(row[64])]))
            example = tf.train.Example(features=tf.train.Features(feature={"image": image, "label": label}))
            writer.write(example.SerializeToString())


def parse(records):
    features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
    batch = tf.io.parse_example(records, features)
    return tf.cast(tf.io.decode_raw(batch["image"], tf.uint8), tf.float32) / 16, batch["label"]


def read(pattern, examples):
    files = tf.data.Dataset.list_files(pattern, shuffle=False)
    records = files.interleave(tf.data.TFRecordDataset, cycle_length=3, deterministic=True)
    records = records.apply(tf.data.experimental.assert_cardinality(examples))  # Keras miscounts updates without it
    return records.batch(64).map(parse, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)  # batches of the global size


with tempfile.TemporaryDirectory() as folder:
    for shard in range(5):
        write(f"{folder}/{'test' if shard == 4 else 'train'}-{shard}.tfrecord", digits[shard::5])
    layers = [keras.Input((64,)), keras.layers.Dense(64, activation="gelu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    train, test = read(f"{folder}/train-*", 1438), read(f"{folder}/test-*", 359)
    model.fit(train, epochs=8, validation_data=test, verbose=2)
    loss, accuracy = model.evaluate(test, verbose=0)
print(f"test loss {loss:.6f}, accuracy {accuracy:.1%}")
