"""A trained model as a SavedModel that takes what clients have: raw inputs, encoded pictures, columns of a table."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import augment
from tfdist.datasets.catalog import Column, Spec
from tfdist.errors import UserError

DEFAULT, ENCODED, TENSORS = "serving_default", "encoded", "tensors"
"""Signatures: what TensorFlow Serving calls if not told otherwise; of JPEG or PNG bytes; of a table as the model takes
it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Servable:
    """A model and how to read its inputs and outputs.

    Args:
      model: built.
      spec: what it was trained for.
      from_logits: whether scores of classes are logits.
      resize: how pictures of another size are brought to that of the model (see `augment.resize`).
    """

    model: keras.Model
    spec: Spec
    from_logits: bool
    resize: str = "crop"

    @property
    def classifies(self) -> bool:
        """Whether the model gives one score per class."""
        shape = self.model.output_shape if self.model.outputs else None
        return self.spec.classes is not None and shape == (None, self.spec.classes)

    @property
    def takes_pictures(self) -> bool:
        """Whether inputs are pictures whose range of values is known."""
        return len(self.spec.shape) == 3 and self.spec.shape[-1] in (1, 3) and self.spec.dtype == "uint8"

    def inputs(self) -> Any:
        """Specs of the tensors that the model takes, [None, ...], in its structure."""
        if self.model.inputs:
            return keras.tree.map_structure(
                lambda t: tf.TensorSpec((None, *t.shape[1:]), t.dtype, name=_name(t.name)), self.model._inputs_struct
            )
        return tf.TensorSpec((None, *self.spec.shape), self.spec.dtype, name="inputs")

    def answers(self, x: Any) -> dict[str, Any]:
        """Named outputs: of classes `class_ids`, `classes`, `probabilities` and `logits`; else what the model gives."""
        outputs = keras.tree.map_structure(_readable, self.model(x, training=False))
        if not self.classifies:
            return _named(outputs)
        found = {"class_ids": tf.argmax(outputs, -1)}
        found["probabilities"] = tf.nn.softmax(outputs) if self.from_logits else outputs
        if self.from_logits:
            found["logits"] = outputs
        if self.spec.names:
            found["classes"] = tf.gather(tf.constant(self.spec.names), found["class_ids"])
        return found

    def decoded(self, encoded: Any) -> Any:
        """Pictures as the data pipeline would have made them, from bytes [n]."""
        height, width, channels = self.spec.shape

        def one(text):
            image = tf.io.decode_image(text, channels=channels, expand_animations=False)
            image = augment.resize(tf.ensure_shape(image, [None, None, channels]), (height, width), self.resize)
            if self.spec.maximum == 255:
                return image
            return tf.cast(tf.round(tf.cast(image, tf.float32) * (self.spec.maximum / 255)), tf.uint8)

        return tf.map_fn(one, encoded, fn_output_signature=tf.TensorSpec(self.spec.shape, tf.uint8))

    def encode(self, images: np.ndarray) -> list[bytes]:
        """PNGs that `decoded` turns into these images again."""
        full = np.round(images * (255 / self.spec.maximum)).astype(np.uint8)
        return [tf.io.encode_png(image).numpy() for image in full]


def save(servable: Servable, path: str) -> dict[str, Callable]:
    """Writes the SavedModel.

    Returns:
      Its functions by signature.
    """
    module = tf.Module()
    # What a function uses and nothing here refers to would not be saved.
    module.kept = [v.value for v in servable.model.variables]
    structure = servable.inputs()
    flat = keras.tree.flatten(structure)
    functions: dict[str, Callable] = {}
    if servable.spec.columns:
        lookups = {c.name: _lookup(c) for c in servable.spec.columns if c.kind == "category"}
        module.lookups = list(lookups.values())
        functions[DEFAULT] = _of_columns(servable, lookups, structure)
        plain = TENSORS
    else:
        plain = DEFAULT
    names = [spec.name for spec in flat]
    if len(flat) == 1:
        flat, names = [tf.TensorSpec(flat[0].shape, flat[0].dtype, name="inputs")], ["inputs"]
    elif len(set(names)) < len(names):
        raise UserError(f"the model has two inputs of one name ({', '.join(names)}): give its Inputs names")
    functions[plain] = tf.function(
        lambda *x: servable.answers(keras.tree.pack_sequence_as(structure, x)), input_signature=flat
    )
    if servable.takes_pictures:
        functions[ENCODED] = tf.function(
            lambda images: servable.answers(servable.decoded(images)),
            input_signature=[tf.TensorSpec([None], tf.string, name="images")],
        )
    for name, function in functions.items():
        setattr(module, name, function)
    tf.saved_model.save(module, path, signatures={k: f.get_concrete_function() for k, f in functions.items()})
    return functions


def _of_columns(servable: Servable, lookups: dict[str, Any], structure: Any) -> Callable:
    """Of one tensor [n] for each column of a table, as it stands in the table."""
    columns = servable.spec.columns
    names = [_name(column.name) for column in columns]
    if len(set(names)) < len(names):
        raise UserError(f"two columns have one name in a signature ({', '.join(names)}): rename one of them")
    types = [tf.float32 if column.kind == "number" else tf.string for column in columns]

    def call(*values):
        numbers, categories = [], []
        for column, value in zip(columns, values):
            if column.kind == "number":
                scaled = (value - column.mean) / column.std
                numbers.append(tf.where(tf.math.is_nan(value), tf.zeros_like(value), scaled))
            else:
                categories.append(lookups[column.name].lookup(value))
        made = {"numbers": numbers, "categories": categories}
        stacked = {key: tf.stack(tensors, 1) for key, tensors in made.items() if tensors}
        if not isinstance(structure, dict):
            return servable.answers(next(iter(stacked.values())))
        return servable.answers({key: tf.cast(stacked[key], structure[key].dtype) for key in structure})

    return tf.function(
        call, input_signature=[tf.TensorSpec([None], kind, name=name) for name, kind in zip(names, types)]
    )


def _lookup(column: Column) -> Any:
    """Text to its place in the vocabulary plus one; 0 for any other."""
    keys, places = tf.constant(column.vocabulary), tf.range(1, len(column.vocabulary) + 1)
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, places), 0)


def _readable(tensor: Any) -> Any:
    """In a type that clients know."""
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tensor, tf.float32) if tensor.dtype in (tf.bfloat16, tf.float16) else tensor


def _named(outputs: Any) -> dict[str, Any]:
    if isinstance(outputs, dict):
        return {_name(key): value for key, value in outputs.items()}
    if isinstance(outputs, (list, tuple)):
        return {f"outputs_{i}": value for i, value in enumerate(outputs)}
    return {"outputs": outputs}


def _name(text: str) -> str:
    """As an argument of a function can be called."""
    return re.sub(r"\W", "_", text)
