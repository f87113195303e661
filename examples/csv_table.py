"""A CSV table with a model of your own, as an experiment of tfdist: miles per gallon of 398 cars, 2.0 off on average.

cd examples; tfdist train --config=csv_table.py --virtual_devices=2
"""

import importlib.resources

import keras

from tfdist.config import Data, Experiment, Model, Optimizer, Train

CARS = importlib.resources.files("tfdist.data.datasets") / "auto_mpg.csv"


def build(spec, hidden):
    """Returns a model for the table that `spec` describes, whose inputs are `numbers` and `categories`.

    `numbers` is float32 [batch, columns of numbers], standardized: (value - mean) / std of the training rows, 0 where
    a value is missing. `categories` is int32 [batch, columns of text]: place in the sorted vocabulary of the column
    plus one, and 0 for a text that the training rows do not have. `spec.columns` tells name, kind, mean, std and
    vocabulary of each, and `spec.target` of what is predicted; `spec.classes` is None where that is a number.
    """
    count = sum(column.kind == "number" for column in spec.columns)
    numbers = keras.Input((count,), name="numbers")
    vocabularies = [column.vocabulary for column in spec.columns if column.kind == "category"]
    categories = keras.Input((len(vocabularies),), dtype="int32", name="categories")
    x = [numbers]
    for i, vocabulary in enumerate(vocabularies):
        x.append(keras.layers.Embedding(len(vocabulary) + 1, 4)(categories[:, i]))
    x = keras.layers.Dense(hidden, activation="gelu")(keras.layers.Concatenate()(x))
    start = keras.initializers.Constant(spec.target.mean)  # the target is as in the file, and begins near its mean
    outputs = keras.layers.Dense(1, bias_initializer=start)(x)
    return keras.Model({"numbers": numbers, "categories": categories}, outputs)


def get_config():
    return Experiment(
        name="csv_table",
        # `csv:` and the path of your own file; a column whose values are not all numbers is a category.
        data=Data(
            name=f"csv:{CARS}",
            options="target=mpg, classify=False",
            train_split="train[:80%]",
            eval_split="train[80%:]",
        ),
        model=Model(name="csv_table:build", options="hidden=64"),
        optimizer=Optimizer(name="adamw", learning_rate=1e-2, schedule="cosine", weight_decay=0.01),
        train=Train(epochs=20, batch_size=32),
    )
