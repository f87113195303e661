"""The model that is going to be exported: built from its run folder or loaded from a file, with examples for it."""

import dataclasses
from typing import TYPE_CHECKING

import keras
import numpy as np

from tfdist import config
from tfdist.checkpoints import training_state
from tfdist.config.messages import logger
from tfdist.data import spec_file
from tfdist.data.datasets import registry
from tfdist.data.spec import Spec, Structure
from tfdist.errors import UserError, one_line
from tfdist.export import saved_model
from tfdist.inference import compatibility, job, trained_model
from tfdist.keras_bridge import keras_internals
from tfdist.models import build as models

if TYPE_CHECKING:
    import tensorflow as tf

COUNT = 8  # how many examples a comparison takes


def made_examples(model: keras.Model, spec: Spec) -> Structure:
    """Returns inputs that are like none in particular, arrays [COUNT, ...] in the model's structure."""
    draw = np.random.default_rng(0)
    # Numbers that all embeddings know, of however many things.
    layers = keras_internals.flat_layers(model)
    known = [layer.input_dim for layer in layers if isinstance(layer, keras.layers.Embedding)]
    end = min([max(1, int(min(spec.maximum, 255))) + 1, *known])

    def one(tensor: "tf.TensorSpec") -> np.ndarray:
        shape = [COUNT, *(side or 4 for side in tensor.shape[1:])]
        kind = np.dtype(tensor.dtype.as_numpy_dtype)
        if np.issubdtype(kind, np.integer):
            return draw.integers(0, end, shape).astype(kind)
        return draw.normal(size=shape).astype(kind)

    return keras.tree.map_structure(one, saved_model.inputs(model, spec))


_CLASSIFYING = ("categoricalcrossentropy", "sparsecategoricalcrossentropy", "categoricalfocalcrossentropy")


@dataclasses.dataclass(frozen=True, slots=True)
class Original:
    """A model, and examples on which what is exported must agree with it."""

    model: keras.Model
    experiment: config.Experiment
    spec: Spec
    source: str  # where its weights are from
    examples: Structure  # inputs [COUNT, ...]
    examples_from: str  # the data set, or `made`
    arrays: list[np.ndarray] | None  # weights, where the model can be built again in another precision


def load(asked: trained_model.ModelRequest, experiment: config.Experiment) -> Original:
    """Builds or loads the model and gives it its weights; a file alone has a default experiment."""
    return _from_file(asked, experiment) if asked.model else _from_run(asked, experiment)


def _from_file(asked: trained_model.ModelRequest, experiment: config.Experiment) -> Original:
    model = trained_model.load(asked.path)
    if not model.inputs:
        raise UserError(f"--model={asked.path} does not tell what it takes", "give the --workdir of its run")
    tensor = keras.tree.flatten(model.inputs)[0]
    classifies = compatibility.loss_name(model) in _CLASSIFYING and isinstance(model.output_shape, tuple)
    classes = model.output_shape[-1] if classifies else None
    spec = Spec(tuple(tensor.shape[1:]), tensor.dtype, classes, 255.0)
    inputs = made_examples(model, spec)
    try:
        model(inputs, training=False)
    except Exception as error:  # whatever a layer raises that takes some values alone
        what = f"--model={asked.path} cannot be checked on made examples ({one_line(error, 200)})"
        raise UserError(what, "give the --workdir of its run") from error
    return Original(model, experiment, spec, str(asked.path), inputs, "made", None)


def _from_run(asked: trained_model.ModelRequest, experiment: config.Experiment) -> Original:
    recorded = spec_file.read(asked.path)
    loaded = None
    models.set_precision(experiment.train.precision)
    try:
        loaded = registry.load(experiment, False)
        spec = recorded or loaded.spec
        compatibility.check_data(experiment, loaded.spec, spec)
    except UserError as error:
        if recorded is None:
            raise
        logger.info(f"checked on made examples, since the data cannot be had: {error}")
        loaded, spec = None, recorded
    build = lambda: job.built(experiment, spec)
    source, arrays = trained_model.read_weights(asked, experiment, build)
    model = build()
    model.set_weights(arrays)
    training_state.refresh(model)
    inputs, origin = made_examples(model, spec), "made"
    if loaded is not None:
        first = loaded.eval.first_rows(COUNT)[0]
        inputs = keras.tree.map_structure(lambda array: np.asarray(array)[:COUNT], first)
        origin = f"{experiment.data.name}, {experiment.data.eval_split}"
    return Original(model, experiment, spec, source, inputs, origin, arrays)
