"""BatchNormalization on several replicas: with the statistics of the global batch, or of each replica's rows."""

import contextlib
from collections.abc import Callable

import keras
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals, layer_state


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
    for layer in keras_internals.batch_norms(model):
        layer.synchronized = True  # read when the layer is called
    if isinstance(model, keras.Model):
        model.train_function = None  # Keras' own fit would go on with the one that it has traced
    return model


def normalizing_alone(model: keras.Layer) -> list[keras.layers.BatchNormalization]:
    """Returns the layers that normalize, while they train, with the rows of their own replica."""
    return [layer for layer in keras_internals.batch_norms(model) if layer.trainable and not layer.synchronized]


SMALLEST_EPSILON = 1.001e-5  # cuDNN takes no smaller one


def fused(model: keras.Model | None) -> contextlib.AbstractContextManager[None]:
    """Lets BatchNormalization layers of a model use the fused op, while it is traced, where that computes the same."""
    layers = keras_internals.batch_norms(model) if model else []
    calls = [(layer, _call(layer)) for layer in layers if _can_fuse(layer)]
    return keras_internals.replaced("call", calls) if calls else contextlib.nullcontext()


def _can_fuse(layer: keras.Layer) -> bool:
    """Exact class only: a subclass may compute something else. Images with channels last only."""
    return (
        type(layer) is keras.layers.BatchNormalization
        and layer.built
        and layer.input_spec.ndim == 4
        and layer.axis in (-1, 3)
        and layer.epsilon >= SMALLEST_EPSILON
        and not layer.synchronized
        and not getattr(layer, "renorm", False)  # older Keras has none
        and "call" not in vars(layer)
    )


def _call(layer: keras.layers.BatchNormalization) -> Callable[..., tf.Tensor]:
    composed = layer.call

    def call(inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None) -> tf.Tensor:
        if not training or not layer.trainable or mask is not None or inputs.dtype != tf.float32:
            return composed(inputs, training=training, mask=mask)
        channels = inputs.shape[-1]
        outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=inputs,
            scale=tf.convert_to_tensor(layer.gamma.value) if layer.scale else tf.ones([channels]),
            offset=tf.convert_to_tensor(layer.beta.value) if layer.center else tf.zeros([channels]),
            mean=tf.zeros([0]),
            variance=tf.zeros([0]),
            epsilon=layer.epsilon,
            is_training=True,
        )
        # It gives the unbiased variance (n - 1), and Keras keeps the biased one.
        count = tf.cast(tf.size(inputs) // channels, tf.float32)
        for average, value in ((layer.moving_mean, mean), (layer.moving_variance, variance * ((count - 1) / count))):
            average.assign(average.value * layer.momentum + value * (1 - layer.momentum))
        return outputs

    return call


def synchronized(model: keras.Model, replicas: int) -> contextlib.AbstractContextManager[None]:
    """Lets the synchronized layers of a model share their sums, within it, while it is traced for several replicas."""
    layers = keras_internals.batch_norms(model) if replicas > 1 else []
    moments = [(layer, _moments(layer)) for layer in layers if layer.synchronized]
    return keras_internals.replaced(keras_internals.MOMENTS, moments) if moments else contextlib.nullcontext()


def _inside(layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor | None:
    """Returns which values of the inputs count, in a shape that broadcasts to theirs; None for all."""
    inside = None if mask is None else tf.cast(mask, tf.bool)[..., None]
    real = layer_state.traced.real
    if real is None:
        return inside
    if inputs.shape[0] != real.shape[0]:
        raise UserError(
            f"layer {layer.name!r} normalizes other rows ({inputs.shape[0]}) than those of a batch that is filled up "
            f"({real.shape[0]})",
            "make the batch size and the examples of an epoch divisible by the number of replicas",
        )
    real = tf.reshape(real, [-1, *[1] * (inputs.shape.rank - 1)])
    return real if inside is None else tf.logical_and(inside, real)


def _all_sum(own: tf.Tensor) -> tf.Tensor:
    """Returns the sum over all replicas, whose gradients are those of one loss.

    In a step of the user's own, each replica differentiates its own mean, and its gradient is weighed by its share
    later. So what other replicas' losses give to a replica must be in the unit of its own here.
    """
    add = tf.distribute.get_replica_context().all_reduce
    if layer_state.traced.share is None:
        return add(tf.distribute.ReduceOp.SUM, own)
    share = tf.cast(layer_state.traced.share, own.dtype)
    own = _with_gradient_times(own, tf.math.divide_no_nan(tf.ones_like(share), share))
    return _with_gradient_times(add(tf.distribute.ReduceOp.SUM, own), share)


@tf.custom_gradient
def _with_gradient_times(tensor: tf.Tensor, factor: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    return tf.identity(tensor), lambda gradient: (tf.math.multiply_no_nan(gradient, factor), None)


def _moments(layer: keras.layers.BatchNormalization) -> Callable:
    def moments(inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns mean and variance of all replicas' rows, [channels] each."""
        axis = layer.axis % inputs.shape.rank
        axes = [i for i in range(inputs.shape.rank) if i != axis]
        broadcast = [inputs.shape[i] if i == axis else 1 for i in range(inputs.shape.rank)]
        # Sums of squares of values far from zero would leave few digits for the variance.
        shift = tf.stop_gradient(tf.cast(layer.moving_mean.value, inputs.dtype))
        values = inputs - tf.reshape(shift, broadcast)
        inside = _inside(layer, inputs, mask)
        if inside is None:
            count = tf.cast(tf.size(inputs) // inputs.shape[axis], inputs.dtype)
        else:
            inside = tf.broadcast_to(inside, tf.shape(inputs))
            values = tf.where(inside, values, tf.zeros_like(values))
            count = tf.reduce_sum(tf.cast(inside, inputs.dtype)) / inputs.shape[axis]
        present, real = layer_state.traced.present, layer_state.traced.real
        some = tf.cast(True if real is None else tf.reduce_any(real), inputs.dtype)
        own = tf.concat([tf.reduce_sum(values, axes), tf.reduce_sum(tf.square(values), axes), [count, some]], 0)
        if present is not None:
            own = tf.where(present, own, tf.zeros_like(own))
        total = _all_sum(own)
        sums, squares, rows, some = tf.split(total, [inputs.shape[axis], inputs.shape[axis], 1, 1])
        mean = tf.math.divide_no_nan(sums, rows)
        variance = tf.maximum(tf.math.divide_no_nan(squares, rows) - tf.square(mean), 0.0)
        mean += tf.where(rows > 0, shift, tf.zeros_like(shift))  # of no rows, and of masked ones alone, 0 as in Keras
        if layer_state.traced.parts == 1:
            return mean, variance
        # A micro-batch of fewer rows than there are micro-batches leaves the averages where they are.
        variance = tf.where(some > 0, variance, tf.cast(layer.moving_variance.value, variance.dtype))
        return tf.where(some > 0, mean, shift), variance

    return moments
