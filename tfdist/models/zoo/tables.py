"""A network for the columns of a table."""

from __future__ import annotations

import keras

from tfdist.data.spec import Spec
from tfdist.errors import UserError
from tfdist.models.zoo import layers


def table_mlp(
    spec: Spec, units: int = 128, depth: int = 2, dropout: float = 0.0, embedding: int = 0, outputs: int = 1
) -> keras.Model:
    """Numbers as they are and a vector for each category, through `depth` hidden layers of `units`.

    "Entity Embeddings of Categorical Variables" (Guo and Berkhahn, 2016).

    Args:
      embedding: length of a category's vector; 0 for half its number of texts, at most 50.
      outputs: numbers to predict where the targets are not classes.

    Returns:
      A model of {"numbers": float32 [n, k], "categories": int32 [n, c]}, as far as the table has them; its outputs are
      logits [n, classes], or [n, outputs].
    """
    numbers = [c for c in spec.columns if c.kind == "number"]
    categories = [c for c in spec.columns if c.kind == "category"]
    if not spec.columns:
        raise UserError("model.name='table_mlp' needs the columns of a table: use data.name=csv:/path")
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
        x = keras.layers.Dropout(dropout, name=f"dropout{number}")(x) if dropout else x
    head = layers.output(outputs) if spec.classes is None else layers.logits(spec)
    return keras.Model(inputs, head(x))
