"""Text: characters from one sequence to another, translation by a transformer, and the kind of a review."""

import re
import string

import keras
import numpy as np
import tensorflow as tf

from programs.surface.program import L, Program, rng

ops = keras.ops

# -- sequence to sequence by LSTM -----------------------------------------------

SYMBOLS, UNITS = 7, 6


def seq2seq():
    encoder_inputs = keras.Input((None, SYMBOLS))
    _, state_h, state_c = L.LSTM(UNITS, return_state=True)(encoder_inputs)
    decoder_inputs = keras.Input((None, SYMBOLS))
    decoder = L.LSTM(UNITS, return_sequences=True, return_state=True)
    x, _, _ = decoder(decoder_inputs, initial_state=[state_h, state_c])
    model = keras.Model([encoder_inputs, decoder_inputs], L.Dense(SYMBOLS, activation="softmax")(x))
    model.compile(optimizer="rmsprop", loss="categorical_crossentropy", metrics=["accuracy"])
    return model


def sentences(n):
    """One-hot symbols; the target is what the decoder gets, a step ahead."""
    eye, r = np.eye(SYMBOLS, dtype="float32"), rng()
    source, target = r.integers(0, SYMBOLS, (n, 5)), r.integers(0, SYMBOLS, (n, 7))
    return [eye[source], eye[target[:, :-1]]], eye[target[:, 1:]]


def decoded(model, folder):
    """The first step of decoding, by an encoder and a decoder of the layers that have been trained."""
    encoder_inputs, decoder_inputs = model.inputs
    encoder = keras.Model(encoder_inputs, model.layers[2].output[1:])
    states = [keras.Input((UNITS,)), keras.Input((UNITS,))]
    outputs, *after = model.layers[3](decoder_inputs, initial_state=states)
    decoder = keras.Model([decoder_inputs, *states], [model.layers[4](outputs), *after])
    source = sentences(3)[0][0]
    return decoder.predict([source[:, :1], *encoder.predict(source, verbose=0)], verbose=0)


# -- translation by a transformer -----------------------------------------------

WORDS, LENGTH, WIDTH = 15, 6, 8


class PositionalEmbedding(L.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.token_embeddings = L.Embedding(WORDS, WIDTH)
        self.position_embeddings = L.Embedding(LENGTH, WIDTH)

    def call(self, inputs):
        positions = ops.arange(0, ops.shape(inputs)[-1], 1)
        return self.token_embeddings(inputs) + self.position_embeddings(positions)

    def compute_mask(self, inputs, mask=None):
        return ops.not_equal(inputs, 0)


class Block(L.Layer):
    """A block of the encoder; with `crosses`, of the decoder, which looks back alone and at the encoder."""

    def __init__(self, crosses=False, **kwargs):
        super().__init__(**kwargs)
        self.attention = L.MultiHeadAttention(num_heads=2, key_dim=WIDTH)
        self.cross = L.MultiHeadAttention(num_heads=2, key_dim=WIDTH) if crosses else None
        self.dense = keras.Sequential([L.Dense(12, activation="relu"), L.Dense(WIDTH)])
        self.norms = [L.LayerNormalization() for _ in range(3 if crosses else 2)]
        self.supports_masking = True

    def call(self, inputs, mask=None):
        x, encoded = inputs if self.cross else (inputs, None)
        own, theirs = mask if self.cross and mask is not None else (mask, None)
        padding = None if own is None else ops.cast(own[:, None, :], "int32")
        attended = self.attention(
            query=x, value=x, key=x, attention_mask=padding, use_causal_mask=self.cross is not None
        )
        x = self.norms[0](x + attended)
        if self.cross:
            padding = None if theirs is None else ops.cast(theirs[:, None, :], "int32")
            x = self.norms[1](x + self.cross(query=x, value=encoded, key=encoded, attention_mask=padding))
        return self.norms[-1](x + self.dense(x))

    def compute_mask(self, inputs, mask=None):
        return mask[0] if self.cross and mask is not None else mask


def transformer():
    source = keras.Input((None,), dtype="int64", name="encoder_inputs")
    target = keras.Input((None,), dtype="int64", name="decoder_inputs")
    encoded = Block()(PositionalEmbedding()(source))
    x = Block(crosses=True)([PositionalEmbedding()(target), encoded])
    model = keras.Model([source, target], L.Dense(WORDS, activation="softmax")(x))
    model.compile("rmsprop", keras.losses.SparseCategoricalCrossentropy(ignore_class=0), metrics=["accuracy"])
    return model


def translations(n):
    r = rng()
    source, target = r.integers(1, WORDS, (n, LENGTH)), r.integers(1, WORDS, (n, LENGTH + 1))
    for tokens in (source, target):
        tokens[np.arange(tokens.shape[1])[None] >= r.integers(2, LENGTH + 1, n)[:, None]] = 0
    columns = {"encoder_inputs": source, "decoder_inputs": target[:, :-1]}, target[:, 1:]
    return tf.data.Dataset.from_tensor_slices(columns).batch(16).prefetch(4).cache()


# -- text classification ----------------------------------------------------------


@keras.saving.register_keras_serializable()
def standardized(text):
    text = tf.strings.regex_replace(tf.strings.lower(text), "<br />", " ")
    return tf.strings.regex_replace(text, f"[{re.escape(string.punctuation)}]", "")


PRAISE, BLAME = ("splendid", "moving", "Clever!", "fine"), ("dull<br />", "endless", "Poor,", "flat")


def reviews(n):
    r = rng()
    y = r.integers(0, 2, n)
    texts = [" ".join(r.choice([*(PRAISE if good else BLAME), "the", "film", "plot"], 20)) for good in y]
    return np.array(texts), y.astype("float32")


def vectorizer():
    layer = L.TextVectorization(standardize=standardized, max_tokens=20, output_mode="int", output_sequence_length=24)
    layer.adapt(tf.data.Dataset.from_tensor_slices(reviews(41)[0]).batch(16))
    return layer


def text_classifier(dropout):
    def build():
        inputs = keras.Input((None,), dtype="int64")
        x = L.Dropout(dropout)(L.Embedding(20, 8)(inputs))
        for _ in range(2):
            x = L.Conv1D(6, 3, padding="valid", activation="relu", strides=2)(x)
        x = L.Dense(6, activation="relu")(L.GlobalMaxPooling1D()(x))
        out = L.Dense(1, activation="sigmoid", name="predictions")(L.Dropout(dropout)(x))
        model = keras.Model(inputs, out)
        model.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
        return model

    return build


def vectorized(n):
    layer = vectorizer()
    data = tf.data.Dataset.from_tensor_slices(reviews(n)).batch(16)
    return data.map(lambda text, label: (layer(tf.expand_dims(text, -1)), label)).cache().prefetch(10)


def end_to_end(model, folder):
    """What the model of raw text says, which has the vectorizer in it."""
    inputs = keras.Input((1,), dtype="string")
    whole = keras.Model(inputs, model(vectorizer()(inputs)))
    return [whole.predict(tf.constant(reviews(6)[0][:, None]), verbose=0)]


EXAMPLES = [
    Program("sequence to sequence", seq2seq, sentences, lambda folder: {"validation_split": 0.2}, decoded, rows=(32,
                                                                                                                 41),
            batch=16),
    Program("translation", transformer, translations, rows=(32, 41)),
    Program("text classification", text_classifier(0.5), vectorized, look=end_to_end, rows=(32, 41),
            unlike_one="Keras draws one mask per replica"),
    Program("text classification, without dropout", text_classifier(0.0), vectorized, look=end_to_end, rows=(32, 41)),
]  # fmt: skip
