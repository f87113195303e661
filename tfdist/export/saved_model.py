"""A trained model as a SavedModel that takes what clients have: raw inputs, encoded pictures, columns of a table."""

import dataclasses
import keyword
import re

import keras
import numpy as np
import tensorflow as tf

from tfdist.data import image_decoding
from tfdist.data.augmentation import ops
from tfdist.data.spec import Column, Spec, Structure
from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals

DEFAULT, ENCODED, TENSORS = "serving_default", "encoded", "tensors"
"""Signatures: what TensorFlow Serving calls if not told otherwise; for JPEG or PNG bytes; for tensors of a table."""
_SPACE = r"[\pZ\t-\r\x1c-\x1f\x{85}]"  # what str.strip takes away, for RE2
_FINE = 1000  # standard deviations from 0 up to which float32 tells values apart, to a ten-thousandth of one


@dataclasses.dataclass(frozen=True, slots=True)
class Servable:
    """A model and how to read its inputs and outputs."""

    model: keras.Model
    spec: Spec
    from_logits: bool  # scores of classes are logits
    resize: str = "crop"  # how pictures of another size are brought to that of the model, see `ops.resize`
    shrink: bool = False  # large JPEGs are decoded no larger than that takes, as those of an image folder

    takes_pictures = property(
        lambda self: len(self.spec.shape) == 3 and self.spec.shape[-1] in (1, 3) and self.spec.dtype == "uint8"
    )
    """Whether inputs are pictures whose range of values is known."""

    def answers(self, x: Structure) -> dict[str, tf.Tensor]:
        """Returns named outputs: `class_ids`, `classes`, `probabilities`, `logits`; without classes the model's own."""
        known = lambda t: tf.cast(t, tf.float32) if t.dtype in (tf.bfloat16, tf.float16) else t  # to clients
        outputs = keras.tree.map_structure(lambda t: known(tf.convert_to_tensor(t)), self.model(x, training=False))
        # Judged by what it gives, and not by `output_shape`, which a class of one's own has not.
        if self.spec.classes is None or not tf.is_tensor(outputs) or outputs.shape[1:] != [self.spec.classes]:
            return _named(outputs)
        named = {"class_ids": tf.argmax(outputs, -1)}
        named["probabilities"] = tf.nn.softmax(outputs) if self.from_logits else outputs
        if self.from_logits:
            named["logits"] = outputs
        if self.spec.names:
            named["classes"] = tf.gather(tf.constant(self.spec.names), named["class_ids"])
        return named

    def decoded(self, encoded: tf.Tensor) -> tf.Tensor:
        """Decodes bytes [n] to pictures [n, height, width, channels], as the data pipeline would have made them."""
        height, width, channels = self.spec.shape
        if self.shrink:
            pixels = image_decoding.decoder((height, width), self.resize)
        else:
            pixels = lambda text: tf.io.decode_image(text, channels=channels, expand_animations=False)

        def one(text: tf.Tensor) -> tf.Tensor:
            image = pixels(text)
            image = ops.resize(tf.ensure_shape(image, [None, None, channels]), (height, width), self.resize)
            if self.spec.maximum == 255:
                return image
            return tf.cast(tf.round(tf.cast(image, tf.float32) * (self.spec.maximum / 255)), tf.uint8)

        return tf.map_fn(one, encoded, fn_output_signature=tf.TensorSpec(self.spec.shape, tf.uint8))


def inputs(model: keras.Model, spec: Spec) -> Structure:
    """Returns `tf.TensorSpec`s [None, ...] of what a model takes, in its structure; a single one is called `inputs`."""
    if not getattr(model, "inputs", None):
        return tf.TensorSpec((None, *spec.shape), spec.dtype, name="inputs")
    structure = keras_internals.input_structure(model)
    flat = keras.tree.flatten(structure)
    names = ["inputs"] if len(flat) == 1 else [_name(t.name) for t in flat]
    if len({name.lower() for name in names}) < len(names):
        raise UserError(f"the model has two inputs of one name ({', '.join(names)})", "give its Inputs names")
    specs = [tf.TensorSpec((None, *t.shape[1:]), t.dtype, name=name) for t, name in zip(flat, names)]
    return keras.tree.pack_sequence_as(structure, specs)


def trials(servable: Servable, examples: Structure) -> dict[str, dict[str, np.ndarray]]:
    """Returns arguments for each signature of `save`, by name; examples are [n, ...] in the model's structure."""
    flat = keras.tree.flatten(inputs(servable.model, servable.spec))
    plain = {spec.name: np.asarray(a) for spec, a in zip(flat, keras.tree.flatten(examples))}
    if servable.spec.columns:
        return {DEFAULT: _cells(servable.spec, len(next(iter(plain.values())))), TENSORS: plain}
    if servable.takes_pictures:
        full = np.round(plain["inputs"] * (255 / servable.spec.maximum)).astype(np.uint8)
        # PNGs, which are decoded to the same images again.
        return {DEFAULT: plain, ENCODED: {"images": np.array([tf.io.encode_png(image).numpy() for image in full])}}
    return {DEFAULT: plain}


def _cells(spec: Spec, count: int) -> dict[str, np.ndarray]:
    """Returns made cells [count] for each column of a table: a missing number and unknown texts are among them."""
    draw, cells = np.random.default_rng(0), {}
    for column in spec.columns:
        if column.kind == "number":
            values = column.mean + column.std * draw.normal(size=count)
            values[0] = np.nan  # a missing one
            cells[_name(column.name)] = values.astype(_type(column).as_numpy_dtype)
        else:
            texts = [text.encode() for text in (*column.vocabulary, "nothing like it")]
            cells[_name(column.name)] = np.array([texts[i] for i in draw.integers(0, len(texts), count)])
    return cells


def signature(function: tf.types.experimental.PolymorphicFunction) -> dict[str, object]:
    """Returns names, types and shapes of what a function takes and gives, for people."""
    concrete = function.get_concrete_function()
    plain = lambda spec: [spec.dtype.name, spec.shape.as_list() if spec.shape.rank is not None else None]
    return {
        "inputs": {spec.name: plain(spec) for spec in function.input_signature},
        "outputs": {name: plain(spec) for name, spec in concrete.structured_outputs.items()},
    }


def save(servable: Servable, path: str) -> dict[str, tf.types.experimental.PolymorphicFunction]:
    """Writes the SavedModel; returns its functions by signature."""
    module = tf.Module()
    # What a function uses and nothing here refers to would not be saved, such as the table of a TextVectorization.
    resource = tf.saved_model.experimental.TrackableResource
    tables = [part for part in tf.train.TrackableView(servable.model).descendants() if isinstance(part, resource)]
    module.kept = [*(v.value for v in servable.model.variables), *tables]
    structure = inputs(servable.model, servable.spec)
    flat, functions = keras.tree.flatten(structure), {}
    if servable.spec.columns:
        lookups = {}
        for column in servable.spec.columns:
            if column.kind == "category":  # to the place of a text in the vocabulary plus one, 0 for any other
                keys, places = tf.constant(column.vocabulary), tf.range(1, len(column.vocabulary) + 1)
                table = tf.lookup.KeyValueTensorInitializer(keys, places)
                lookups[column.name] = tf.lookup.StaticHashTable(table, 0)
        module.lookups = list(lookups.values())
        functions[DEFAULT] = _of_columns(servable, lookups, structure)
    plain = lambda *x: servable.answers(keras.tree.pack_sequence_as(structure, x))
    functions[TENSORS if servable.spec.columns else DEFAULT] = tf.function(plain, input_signature=flat, autograph=False)
    if servable.takes_pictures:
        encoded = lambda images: servable.answers(servable.decoded(images))
        spec = tf.TensorSpec([None], tf.string, name="images")
        functions[ENCODED] = tf.function(encoded, input_signature=[spec], autograph=False)
    for name, function in functions.items():
        setattr(module, name, function)
    tf.saved_model.save(module, path, signatures={k: f.get_concrete_function() for k, f in functions.items()})
    return functions


def _of_columns(
    servable: Servable, lookups: dict[str, tf.lookup.StaticHashTable], structure: Structure
) -> tf.types.experimental.PolymorphicFunction:
    """Returns the function that takes one tensor [n] for each column, with the cells as they stand in the table."""
    columns = servable.spec.columns
    names = [_name(column.name) for column in columns]
    if len({name.lower() for name in names}) < len(names):  # a graph tells names apart in lower case
        raise UserError(f"two columns have one name in a signature ({', '.join(names)})", "rename one of them")
    types = [_type(column) for column in columns]

    def call(*values: tf.Tensor) -> dict[str, tf.Tensor]:
        numbers, categories = [], []
        for column, value in zip(columns, values):
            if column.kind == "number":
                scaled = tf.cast((tf.cast(value, tf.float64) - column.mean) / column.std, tf.float32)
                numbers.append(tf.where(tf.math.is_nan(value), tf.zeros_like(scaled), scaled))
            else:
                categories.append(_places(lookups[column.name], value))
        encoded = {"numbers": numbers, "categories": categories}
        stacked = {key: tf.stack(tensors, 1) for key, tensors in encoded.items() if tensors}
        if not isinstance(structure, dict):
            return servable.answers(next(iter(stacked.values())))
        return servable.answers({key: tf.cast(stacked[key], structure[key].dtype) for key in structure})

    specs = [tf.TensorSpec([None], kind, name=name) for name, kind in zip(names, types)]
    return tf.function(call, input_signature=specs, autograph=False)


def _places(lookup: tf.lookup.StaticHashTable, value: tf.Tensor) -> tf.Tensor:
    """Returns the places of cells [n] in a vocabulary as the readers of tables do, which strip as Python does."""
    text = tf.strings.regex_replace(value, f"^{_SPACE}+|{_SPACE}+$", "")
    places = lookup.lookup(text)
    for spelled in (tf.strings.regex_replace(text, r"\.0$", ""), tf.strings.join([text, ".0"])):
        places = tf.where(places > 0, places, lookup.lookup(spelled))
    return places


def _type(column: Column) -> tf.DType:
    """Returns the type in which a client gives a column; float32 would round seconds since 1970 to minutes."""
    if column.kind != "number":
        return tf.string
    return tf.float64 if abs(column.mean) > _FINE * column.std else tf.float32


def _named(outputs: Structure) -> dict[str, tf.Tensor]:
    """Returns the outputs of a model by names for its clients; what is nested has all names on the way to it."""
    start = () if isinstance(outputs, dict) else ("outputs",)
    by_path = [(start + path, value) for path, value in keras.tree.flatten_with_path(outputs)]
    named = {_name("_".join(map(str, path))): value for path, value in by_path}
    if len(named) < len(by_path):
        what = f"two outputs of {', '.join(repr(path[0]) for path, _ in by_path)} have one name in a signature"
        raise UserError(what, "rename one of them")
    return named


def _name(text: str) -> str:
    """Returns a name that both an argument of a function and a placeholder of a graph can have."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", text)
    fits = name.isidentifier() and not name.startswith("_") and not keyword.iskeyword(name) and name != "self"
    return name if fits else f"named_{name}"
