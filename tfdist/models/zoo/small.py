"""Small networks for images, for the columns of a table, and for tokens: what the examples and many tests train."""

import keras

from tfdist.data.spec import Spec
from tfdist.errors import UserError
from tfdist.models.zoo import layers


def cnn(spec: Spec, channels: tuple[int, ...] = (64, 128), units: int = 128) -> keras.Model:
    """Convolutions with BatchNorm, one pooling, a hidden layer: for small images. Returns logits.

    Everything in it is smooth. With ReLU and max pooling, two runs that differ in the last bit of a sum are 5 % apart
    after 900 updates; with GELU and mean pooling they stay within 1e-6, so that strategies can be compared to the end.
    """
    layers.needs_image("cnn", spec, smallest=2)
    stack: list[keras.Layer] = [layers.scaled(spec)]
    for width in channels:
        stack += [*_convolution(width), keras.layers.Activation("gelu")]
    stack += [keras.layers.AveragePooling2D(2), keras.layers.Flatten(), keras.layers.Dense(units, activation="gelu")]
    return keras.Sequential([_input(spec), *stack, layers.logits(spec)])


def mlp(spec: Spec, units: int = 32, depth: int = 1, dropout: float = 0.0) -> keras.Model:
    """Flatten and `depth` hidden layers of `units`. Returns logits."""
    if spec.columns:
        raise UserError("model.name='mlp' takes one kind of input, and a table has columns", "use model.name=table_mlp")
    stack: list[keras.Layer] = [layers.scaled(spec), keras.layers.Flatten()]
    for _ in range(depth):
        stack += [keras.layers.Dense(units, activation="relu")]
        stack += [keras.layers.Dropout(dropout)] if dropout else []
    return keras.Sequential([_input(spec), *stack, layers.logits(spec)])


def conv_bn(spec: Spec, channels: tuple[int, ...] = (32, 64, 128)) -> keras.Model:
    """Blocks of two convolutions with BatchNorm and ReLU, then pooling. Returns logits."""
    layers.needs_image("conv_bn", spec, smallest=2 ** len(channels))
    stack: list[keras.Layer] = [layers.scaled(spec)]
    for width in channels:
        for _ in range(2):
            stack += [*_convolution(width), keras.layers.ReLU()]
        stack += [keras.layers.MaxPooling2D()]
    return keras.Sequential([_input(spec), *stack, keras.layers.GlobalAveragePooling2D(), layers.logits(spec)])


def _convolution(width: int) -> list[keras.Layer]:
    return [
        keras.layers.Conv2D(width, 3, padding="same", use_bias=False),
        # Keras' momentum of 0.99 lags a hundred updates behind, a tenth of a short run.
        keras.layers.BatchNormalization(momentum=0.9),
    ]


def _input(spec: Spec) -> keras.KerasTensor:
    if spec.dtype in ("object", "string"):
        what = f"this model takes numbers, and the data has inputs of {spec.dtype}"
        raise UserError(what, "use a model of your own that begins with a TextVectorization")
    return keras.Input(spec.shape, dtype=spec.dtype)


def table_mlp(
    spec: Spec, units: int = 128, depth: int = 2, dropout: float = 0.0, embedding: int = 0, outputs: int = 1
) -> keras.Model:
    """Numbers as they are and a vector for each category, through `depth` hidden layers of `units`.

    "Entity Embeddings of Categorical Variables" (Guo and Berkhahn, 2016). Takes {"numbers": float32 [n, k],
    "categories": int32 [n, c]}, as far as the table has them; returns logits [n, classes], or [n, outputs].

    Args:
      embedding: length of a category's vector; 0 for half its number of texts, at most 50.
      outputs: numbers to predict where the targets are not classes.
    """
    numbers = [c for c in spec.columns if c.kind == "number"]
    categories = [c for c in spec.columns if c.kind == "category"]
    if not spec.columns:
        raise UserError("model.name='table_mlp' needs the columns of a table", "use data.name=csv:/path")
    if outputs != 1 and spec.classes is not None:
        raise UserError(f"model.options: outputs={outputs} is for numbers to predict, and the targets are classes")
    inputs, pieces = {}, []
    if numbers:
        inputs["numbers"] = keras.Input((len(numbers),), dtype="float32", name="numbers")
        pieces.append(inputs["numbers"])
    if categories:
        inputs["categories"] = keras.Input((len(categories),), dtype="int32", name="categories")
    for place, column in enumerate(categories):
        texts = len(column.vocabulary) + 1
        length = embedding or min(50, (texts + 1) // 2)
        # By number: a column may have any name, a layer may not.
        vectors = keras.layers.Embedding(texts, length, name=f"category{place + 1}")
        pieces.append(vectors(inputs["categories"][:, place]))
    x = keras.layers.Concatenate(name="row")(pieces) if len(pieces) > 1 else pieces[0]
    for number in range(1, depth + 1):
        x = keras.layers.Dense(units, "gelu", kernel_initializer="he_normal", name=f"dense{number}")(x)
        x = layers.dropped(x, dropout, f"dropout{number}")
    head = layers.output(outputs) if spec.classes is None else layers.logits(spec)
    return keras.Model(inputs, head(x))


BYTES = 256


def gpt(
    spec: Spec,
    width: int = 128,
    heads: int = 4,
    depth: int = 4,
    dropout: float = 0.0,
    tied: bool = True,
    vocabulary: int = 0,
) -> keras.Model:
    """A causal transformer, normalized before each branch (GPT-2; Radford et al., 2019): [n, length] to logits.

    There is no mask: padding stands at the end, where nothing before it looks, and must weigh nothing in the loss.

    Args:
      width: length of a token's vector; a multiple of `heads`.
      dropout: rate after the embeddings, in the attention and after each branch.
      tied: the head has the weights of the embedding (Press and Wolf, 2017); otherwise its own.
      vocabulary: tokens; 0 for the 256 bytes, or as many as the data has if that is more.
    """
    if len(spec.shape) != 1:
        raise UserError(f"model.name='gpt' needs sequences, the data has shape {list(spec.shape)}")
    if not spec.dtype.startswith(("int", "uint")):
        raise UserError(f"model.name='gpt' needs sequences of integers, the data has {spec.dtype}")
    layers.divides(width, heads)
    length, needed = spec.shape[0], max(int(spec.maximum) + 1, spec.classes or 0)
    if vocabulary and vocabulary < needed:
        raise UserError(f"model.options: vocabulary={vocabulary} is too small for the data, which needs {needed}")
    vocabulary = vocabulary or max(BYTES, needed)
    normal = lambda scale=1.0: keras.initializers.RandomNormal(stddev=0.02 * scale)
    tokens = keras.Input((length,), dtype="int32", name="tokens")
    if tied:
        embedding = keras.layers.ReversibleEmbedding(
            vocabulary, width, embeddings_initializer=normal(), reverse_dtype=layers.full_precision(), name="embedding"
        )
    else:
        embedding = keras.layers.Embedding(vocabulary, width, embeddings_initializer=normal(), name="embedding")
    # Positions as Keras operations, so that the saved model needs nothing of tfdist.
    places = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    positions = keras.layers.Embedding(length, width, embeddings_initializer=normal(), name="positions")
    x = keras.layers.Add(name="embedded")([embedding(tokens), positions(places)])
    x = layers.dropped(x, dropout, "embedded_dropout")
    for block in range(1, depth + 1):
        name = f"block{block}"
        y = keras.layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm1")(x)
        y = layers.attention(heads, width, dropout, normal(), f"{name}_attention")(y, y, use_causal_mask=True)
        x = keras.layers.Add(name=f"{name}_add1")([x, layers.dropped(y, dropout, f"{name}_dropout1")])
        y = keras.layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm2")(x)
        y = keras.layers.Dense(4 * width, "gelu", kernel_initializer=normal(), name=f"{name}_dense1")(y)
        # What is added to x 2 * depth times starts smaller by the root of that (GPT-2).
        small = normal((2 * depth) ** -0.5)
        y = keras.layers.Dense(width, kernel_initializer=small, name=f"{name}_dense2")(y)
        x = keras.layers.Add(name=f"{name}_add2")([x, layers.dropped(y, dropout, f"{name}_dropout2")])
    x = keras.layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    return keras.Model(tokens, embedding(x, reverse=True) if tied else layers.output(vocabulary)(x))
