"""BatchNormalization on several replicas: with the statistics of the global batch, or of each replica's rows."""

from __future__ import annotations

import keras

from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals


def synchronize_batch_norm(model: keras.Model) -> keras.Model:
    """Synchronizes all BatchNormalization layers of a model, as PyTorch's `convert_sync_batchnorm` does.

    Each then normalizes with mean and variance of the global batch, so that training gives the same on any number of
    replicas. Layers inside of other layers and models are included; weights and statistics stay as they are.

    ```python
    with distribution.scope():
        model = tfdist.synchronize_batch_norm(keras.applications.MobileNetV2(weights=None, classes=10))
        model.compile("adam", "sparse_categorical_crossentropy")
    ```

    Args:
      model: any Keras model or layer, compiled or not; changed in place.

    Returns:
      The same model.

    Raises:
      UserError: `model` is no Keras layer.
    """
    if not isinstance(model, keras.Layer):
        raise UserError(f"synchronize_batch_norm takes a Keras model or layer, got {type(model).__name__}")
    for layer in batch_norms(model):
        layer.synchronized = True  # read when the layer is called
    if isinstance(model, keras.Model):
        model.train_function = None  # Keras' own fit would go on with the one that it has traced
    return model


def batch_norms(model: keras.Layer) -> list[keras.layers.BatchNormalization]:
    """Returns the BatchNormalization layers of a model, those inside of others included."""
    layers = keras_internals.flat_layers(model)
    return [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]


def normalizing_alone(model: keras.Layer) -> list[keras.layers.BatchNormalization]:
    """Returns the layers that normalize, while they train, with the rows of their own replica."""
    return [layer for layer in batch_norms(model) if layer.trainable and not layer.synchronized]
