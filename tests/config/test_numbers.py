"""Numbers that are none, and numbers that no run could count: refused where they are parsed."""

import math

import pytest

from tfdist import config
from tfdist.cluster import discovery
from tfdist.config import field_syntax, runtime_options, schedule, validation
from tfdist.data.loaded import Loaded
from tfdist.data.sources import Arrays
from tfdist.data.spec import Spec
from tfdist.errors import UserError
from tfdist.models import objective


def refused(change, *arguments, **kwargs):
    with pytest.raises(UserError) as error:
        change(*arguments, **kwargs)
    assert "\n" not in str(error.value) and len(str(error.value)) < 250
    return str(error.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "field", ["learning_rate", "weight_decay", "clip_norm", "layer_decay", "ema_momentum", "label_smoothing"]
)
def test_no_number(field, value):
    e = config.Experiment()
    group = "train" if field == "label_smoothing" else "optimizer"
    setattr(getattr(e, group), field, value)
    assert refused(validation.validate, e) == f"{group}.{field} must be a finite number, got {value}"


@pytest.mark.parametrize(
    "value, shown",
    [(10**30 - 1, str(10**30 - 1)), (-(10**5000), "one with more than 40 digits")],
    ids=["30 digits", "5000 digits"],
)
@pytest.mark.parametrize("name", ["train.epochs", "eval.batch_size", "checkpoint.keep", "seed", "optimizer.clip_norm"])
def test_too_many(name, value, shown):
    e = config.Experiment()
    group, _, field = name.rpartition(".")
    setattr(getattr(e, group) if group else e, field, value)
    assert refused(validation.validate, e) == f"{name} must be at most 1,000,000,000,000, got {shown}"


@pytest.mark.parametrize(
    "text, name", [("a=1e400", "a"), ("a=-1e999", "a"), ("a=(1, [2.0, 1e400])", "a"), ("b={1: 1e400}", "b")]
)
def test_options_that_are_infinite(text, name):
    assert refused(field_syntax.options, "model.options", text).startswith(f"{name} in model.options must be a finite")


@pytest.mark.parametrize("text", ["a=" + "[" * 5000, "a=" + "-" * 100_000 + "1", "a={[]: 1}"])
def test_options_that_are_too_deep(text):
    with pytest.raises(UserError, match="is not understood: write name=value"):
        field_syntax.options("model.options", text)


@pytest.mark.parametrize("text", ["9" * 400, "9999999999999 epochs", "9" * 400 + " seconds", "9" * 400 + "%"])
def test_durations_beyond_all_counting(text):
    e = config.Experiment()
    e.optimizer.warmup = text.replace("seconds", "steps")
    assert " is more than 1,000,000,000,000: write less" in refused(schedule.make, e, 100, 1)
    if "%" not in text:
        assert " is more than 1,000,000,000,000: write less" in refused(schedule.interval, "checkpoint.every", text)


def test_a_run_of_too_many_updates():
    e = config.Experiment()
    e.train.epochs = 10**12
    assert "are 5,000,000,000,000 updates of 32 examples, more than 1,000," in refused(schedule.make, e, 144, 1)


@pytest.mark.parametrize("field", ["threads", "virtual_devices"])
def test_threads_that_would_take_all_memory(field):
    assert refused(runtime_options.PlacementOptions, **{field: 99_999}) == f"--{field} must be at most 1024, got 99999"
    runtime_options.PlacementOptions(**{field: 1024})


def test_a_tf_config_of_brackets():
    assert "TF_CONFIG is not a JSON object" in refused(discovery.read_tf_config, {"TF_CONFIG": "[" * 100_000})


@pytest.mark.parametrize("text", ["0=0, 1=0.0", "no=0, yes=0"])
def test_weights_that_leave_no_class(text):
    import numpy as np

    arrays = Arrays((np.zeros((4, 1), "float32"), np.array([0, 1, 1, 0])))
    data = Loaded(arrays, arrays, 4, Spec((1,), "float32", 2, 1.0, ("no", "yes")))
    assert refused(objective.class_weights, text, data) == (
        f"train.class_weight={text!r} gives every class the weight 0: leave some to be learned"
    )
    assert objective.class_weights("0=0", data) == {0: 0.0}, "the other one weighs 1"
