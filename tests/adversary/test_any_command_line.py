"""Command lines and configs that nobody would write: each works, or is refused in one line.

Values are of any type, empty, huge, negative, no numbers, in any script, or right but for a character.
"""

import dataclasses
import functools
import os
import re
import tempfile

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from support import adversary

from tfdist import config
from tfdist.config import runtime_options
from tfdist.errors import UserError, shown

SPECIMENS = {
    "name": ["digits", "a-b.c"],
    "seed": ["7"],
    "data.name": [
        "digits", "synthetic", "csv:t.csv", "image_folder:.", "tfrecord:*.tfrecord", "webdataset:{0..3}.tar",
        "text:*.txt", "numpy:a.npz", "parquet:t",
    ],
    "data.train_split": ["train[:100]", "train[10%:20%]"],
    "data.eval_split": ["test[:50]", "train[-5%:]"],
    "data.cache": config.CHOICES["data.cache"],
    "data.options": ["examples=100, classes=5", "examples=0"],
    "data.image_size": ["8", "16x12"],
    "data.resize": config.CHOICES["data.resize"],
    "data.augment": ["flip, crop(4), color(0.4), mixup(0.2)", "randaugment(2, 9)", "cutout(3)"],
    "data.on_error": config.CHOICES["data.on_error"],
    "model.name": ["mlp", "cnn", "conv_bn", "vit", "gpt", "table_mlp", "resnet_cifar"],
    "model.options": ["dropout=0.1, units=64", "width=8", "depth=1"],
    "model.freeze": ["conv*, !head", "*"],
    "optimizer.name": config.OPTIMIZERS,
    "optimizer.learning_rate": ["0.01", "1e-30"],
    "optimizer.schedule": tuple(config.SCHEDULES),
    "optimizer.schedule_options": ["end=0.01", "boundaries=30% 60% 80%, factor=0.1", "factor=0.94, every=2 epochs"],
    "optimizer.warmup": ["5%", "100 steps", "1 epoch", "5000 examples", "0%"],
    "optimizer.decay_exclude": ["bias, gamma, beta, embedding*"],
    "optimizer.layer_rates": ["head*=10, block1_*=0.1"],
    "optimizer.reduce_dtype": config.CHOICES["optimizer.reduce_dtype"],
    "optimizer.scale_learning_rate": config.CHOICES["optimizer.scale_learning_rate"],
    "optimizer.options": ["momentum=0.9, nesterov=True", "beta_1=0.8"],
    "train.precision": config.CHOICES["train.precision"],
    "train.loss": ["categorical_focal_crossentropy(gamma=3.0)", "mse"],
    "train.metrics": ["accuracy, TopKCategoricalAccuracy(k=3)", "mae"],
    "train.callbacks": ["EarlyStopping(patience=3)", "TerminateOnNaN"],
    "train.class_weight": ["balanced", "0=3.0, 2=0.2"],
    "train.monitor": ["val_accuracy", "min val_loss"],
    "train.on_nonfinite": config.CHOICES["train.on_nonfinite"],
    "eval.every": ["1 epoch", "30 steps"],
    "checkpoint.every": ["5 minutes", "100 steps", "off"],
    "checkpoint.best": ["val_accuracy", "max loss"],
    "--devices": ["all", "none", "0,3", "idle:2"],
    "--profile": ["2:3"],
    "--strategy": runtime_options.STRATEGIES,
    "--resume": runtime_options.RESUME,
    "--virtual_devices": ["2", "3"],
}  # fmt: skip
"""Values that fit, of the fields and flags whose type does not tell."""
TINY = ("--config.model.name=mlp", "--config.train.epochs=0", "--config.train.steps=2", "--dry_run")
"""What comes first, so that what is drawn by chance and fits is over soon; a drawn value of the same flag wins."""
NEVER = re.compile(r"https?:|^/(?!dev|proc)")
"""Values that would leave the folder of the test."""


def leaves(group, above=""):
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{above}{field.name}.")
        else:
            yield above + field.name


FIELDS = sorted(leaves(config.Experiment()))
FLAGS = sorted(f.name for f in dataclasses.fields(runtime_options.Environment) if f.name != "workdir")


def given_to(name):
    """Texts for a field or flag."""
    fits = SPECIMENS.get(name)
    if not fits:
        return adversary.texts()
    # What fits is drawn often, so that what is checked late is met, too.
    return st.one_of(
        st.sampled_from(fits),
        st.sampled_from(fits).flatmap(adversary.mutated),
        adversary.texts(),
        st.sampled_from(fits),
    )


def written(name):
    """A field or flag as words."""
    flag = name if name.startswith("--") else f"--config.{name}"
    return given_to(name).filter(lambda text: not NEVER.search(text)).map(lambda text: f"{flag}={text}")


ARGUMENT = st.one_of(
    st.sampled_from(FIELDS).flatmap(written),
    st.sampled_from(FIELDS).flatmap(written),
    st.sampled_from([f"--{name}" for name in FLAGS]).flatmap(written),
    adversary.texts().filter(lambda text: not text.startswith("--config=")),
    adversary.mutated("--config.train.epochs=3"),
)
LINES = st.lists(ARGUMENT, min_size=1, max_size=4)


def ends_well(tfds_dir, arguments):
    """Runs it, without training, in a folder of its own, in which it leaves nothing."""
    with tempfile.TemporaryDirectory() as folder:
        line = adversary.judged(adversary.run("tfdist.train", [*TINY, *arguments], folder, tfds_dir))
        leaves_nothing(folder, [a.partition("data_dir=")[2] for a in arguments])
    event("refused" if line else "works")


def leaves_nothing(folder, but):
    """A dry run writes nothing but the data where the data shall be."""
    allowed = tuple(os.path.normpath(str(path)).strip() for path in but if path)
    left = [path for path in adversary.tree(folder) if not (allowed and path.startswith(allowed))]
    assert not left, left


test_a_few_command_lines, test_any_command_line = adversary.few_and_many(2, 350, ends_well, arguments=LINES)

# -- configs ------------------------------------------------------------------------

CONFIG = """\
from tfdist import config
nan, inf = float("nan"), float("inf")
def get_config():
    c = config.Experiment(model=config.Model(name="mlp"))
    c.train.epochs, c.train.steps = 0, 2
{}    return c
"""
GROUPS = ("data", "model", "optimizer", "train", "eval", "checkpoint")
SETTINGS = st.lists(
    st.tuples(st.sampled_from([*FIELDS, *FIELDS, *GROUPS]), adversary.values()).filter(
        lambda setting: not (isinstance(setting[1], str) and NEVER.search(setting[1]))
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.whole
@adversary.examples(150)
@given(given_settings=SETTINGS)
def test_any_config(tfds_dir, given_settings):
    """A config may set anything to anything, and command lines come on top."""
    lines = "".join(f"    c.{name} = {value!r}\n" for name, value in given_settings)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/any.py"
        with open(path, "w") as file:
            file.write(CONFIG.format(lines))
        line = adversary.judged(adversary.run("tfdist.train", [f"--config={path}", "--dry_run"], folder, tfds_dir))
        leaves_nothing(folder, ["any.py", "__pycache__", *(v for name, v in given_settings if name == "data.data_dir")])
    event("refused" if line else "works")


@adversary.few(20)
@given(given_settings=SETTINGS)
def test_any_experiment_in_this_process(given_settings):
    """What a call passes is checked like what a file says; without TensorFlow, and cheaply."""
    from tfdist.train.__main__ import _check

    experiment = config.Experiment()
    try:
        for name, value in given_settings:
            *owners, last = name.split(".")
            owner = experiment
            for part in owners:
                owner = getattr(owner, part)
            setattr(owner, last, value)
    except AttributeError:  # a group has become something else
        return
    try:
        _check(experiment, runtime_options.Environment())
    except UserError as error:
        adversary.is_one_line(shown(error))


# -- other commands --------------------------------------------------------------------

OTHERS = {
    "launch": ["--dry_run"], "evaluate": [], "predict": [], "export": [], "compare": ["--dry_run"],
    "doctor": ["--time_limit=5", "--devices=none"],
}  # fmt: skip
"""Commands, and what keeps them from doing much; `horovod_build` would compile for minutes."""
NOT_DRAWN = {"flagfile", "config", "time_limit", "help", "helpfull", "nnodes"}
"""Flags that make a command wait for others, as it should."""


@functools.cache
def flags_of(command):
    listed = adversary.run(f"tfdist.{command}", ["--help"], os.getcwd(), "/nowhere").stdout
    found = set(re.findall(r"^\s+(?:-\w, )?--(?:\[no\])?(\w+)", listed, re.MULTILINE)) - NOT_DRAWN
    assert len(found) > 3, listed
    return sorted(found)


@st.composite
def lines_of_others(draw):
    """A command, and words for it."""
    command = draw(st.sampled_from(sorted(OTHERS)))
    words = st.sampled_from([f"--{name}" for name in flags_of(command)]).flatmap(written)
    if command not in ("launch", "export"):
        words = st.one_of(words, words, st.sampled_from(FIELDS).flatmap(written))
    return command, draw(st.lists(words, min_size=1, max_size=3))


@pytest.mark.whole
@adversary.examples(100)
@given(line=lines_of_others())
def test_any_line_of_another_command(tfds_dir, line):
    command, arguments = line
    with tempfile.TemporaryDirectory() as folder:
        done = adversary.run(f"tfdist.{command}", [*OTHERS[command], *arguments], folder, tfds_dir)
    if command == "doctor":  # which ends with 1 or 2 where it has found something, and lists it
        assert done.returncode in (0, 1, 2) and "Traceback" not in done.stdout + done.stderr, done.stderr
    else:
        event("refused" if adversary.judged(done) else "works")
