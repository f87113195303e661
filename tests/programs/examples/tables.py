"""An endpoint layer with its loss and metric, and FeatureSpace on a table of numbers, integers and strings."""

import keras
import tensorflow as tf

from programs.surface.program import L, Program, normal, rng

# -- endpoint layer -----------------------------------------------------------


class LogisticEndpoint(L.Layer):
    """The last layer: it takes the targets as an input, and brings loss and metric along."""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.BinaryAccuracy(name="accuracy")

    def call(self, logits, targets=None, sample_weight=None):
        if targets is not None:
            self.add_loss(self.loss_fn(targets, logits, sample_weight))
            self.accuracy.update_state(targets, logits, sample_weight)
        return keras.ops.softmax(logits)


def endpoint():
    inputs, targets = keras.Input((3,), name="inputs"), keras.Input((10,), name="targets")
    logits = L.Dense(10)(inputs)
    model = keras.Model([inputs, targets], LogisticEndpoint(name="predictions")(logits, targets))
    model.compile(keras.optimizers.Adam(1e-3))
    return model


def endpoint_data(n):
    return ({"inputs": normal(n, 3), "targets": rng().integers(0, 2, (n, 10)).astype("float32")},)


def without_targets(model, folder):
    """What the model predicts for one who has no targets, by another model of the same layers."""
    dense = next(layer for layer in model.layers if isinstance(layer, L.Dense))
    inference = keras.Model(dense.input, keras.ops.softmax(dense.output))
    return [inference.predict(endpoint_data(7)[0]["inputs"], verbose=0)]


# -- FeatureSpace ---------------------------------------------------------------


def patients(n):
    r = rng()
    columns = {
        "sex": r.integers(0, 2, n),
        "age": r.integers(29, 78, n),
        "chol": r.uniform(120, 400, n).astype("float32"),
        "oldpeak": r.uniform(0, 6, n).astype("float32"),
        "thal": r.choice(["normal", "fixed", "reversible"], n),
    }
    return columns, ((columns["chol"] > 250) ^ (columns["sex"] == 1)).astype("int64")


def space(n):
    """Adapted to the table of so many rows."""
    kinds = keras.utils.FeatureSpace
    made = kinds(
        features={
            "sex": kinds.integer_categorical(num_oov_indices=0),
            "age": kinds.float_discretized(num_bins=8),
            "chol": kinds.float_normalized(),
            "oldpeak": kinds.float_normalized(),
            "thal": kinds.string_categorical(num_oov_indices=0),
        },
        crosses=[kinds.cross(feature_names=("sex", "age"), crossing_dim=16)],
        output_mode="concat",
    )
    made.adapt(tf.data.Dataset.from_tensor_slices(patients(n)[0]).batch(16))
    return made


def feature_space(dropout):
    """The model of encoded rows, beside the one of raw rows, which shares its layers."""

    def build():
        table = space(41)
        encoded = table.get_encoded_features()
        x = L.Dense(8, activation="relu")(encoded)
        out = L.Dense(1, activation="sigmoid")(L.Dropout(dropout)(x))
        model = keras.Model(encoded, out)
        model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
        model.for_raw_rows = keras.Model(table.get_inputs(), out)
        return model

    return build


def encoded_rows(n):
    table = space(41)
    return tf.data.Dataset.from_tensor_slices(patients(n)).batch(16).map(lambda x, y: (table(x), y)).prefetch(2)


def of_a_new_patient(model, folder):
    columns = patients(5)[0]
    return [model.for_raw_rows.predict({k: tf.convert_to_tensor(v[:, None]) for k, v in columns.items()}, verbose=0)]


def on_table(dropout, **kwargs):
    name = "FeatureSpace" + (", without dropout" if not dropout else "")
    return Program(
        name,
        feature_space(dropout),
        encoded_rows,
        lambda folder: {"validation_data": encoded_rows(17)},
        of_a_new_patient,
        rows=(32, 41),
        **kwargs,
    )


EXAMPLES = [
    Program("endpoint layer", endpoint, endpoint_data, look=without_targets, rows=(32, 41), batch=16),
    on_table(0.5, unlike_one="Keras draws one mask per replica"),
    on_table(0.0),
]
