"""What TensorFlow would give to the cores of a TPU: the experiments of the agreement table, traced for cores that are
not there. Nothing of it is run; that the same step gives Keras' numbers is in test_static_shapes.py.
"""

import collections
import contextlib
import json
import re
import subprocess

import keras
import pytest
import tensorflow as tf
from conftest import REPOSITORY
from support import tpu_cores, training_cases

import tfdist
from tfdist.data import sources
from tfdist.step import functions, step_calls
from tfdist.verification import equivalence_check
from tfdist.verification.replica_sync_check import ReplicaSyncCheck

FORBIDDEN = re.compile(
    "Timestamp|.*PyFunc.*|Print.*|StringFormat|.*String.*|LookupTable.*|HashTable.*|Iterator.*|Optional.*|"
    "Where|Unique.*|DynamicPartition|.*Summary.*|Save.*|Restore.*|RandomUniform|RandomStandardNormal|FakeParam"
)
"""Operations without a kernel for TPUs, or that end a compilation there."""
SHORT = {"uneven tail": 4, "batch norm, synchronized": 4}
"""What `make test` traces, and for how many cores."""
GROUPS = {"masked and plain": 2}
"""Losses with a denominator of their own beside others: their gradients travel by themselves."""


@pytest.fixture(scope="module")
def cores():
    """Distributions over so many cores, each made once."""
    made, before = {}, tf.config.get_soft_device_placement()
    for number in tpu_cores.MESHES:
        made[number] = tpu_cores.distribution(number)
    yield made.__getitem__
    tf.config.set_soft_device_placement(before)


class Prepared:
    """An experiment for these cores, up to its first call."""

    def __init__(self, case, distribution):
        keras.config.set_dtype_policy(case.precision)
        with distribution.scope():
            self.model = case.model()
        data = case.data(case.examples)
        self.source = data if isinstance(data, sources.Records) else sources.as_source(*data)
        self.layout = sources.layout_of(self.source, case.batch, distribution, case.accumulate, least=False)
        self.step = step_calls.step_of(self.model, distribution, self.source)

    def traced(self, kind, update):
        """Returns what TensorFlow makes of the call that has the batch of an update."""
        feed = sources.read(self.source, self.layout, True, 0)
        part = feed.next(update, 99)
        arguments = (part.feed, tf.constant(part.first), tf.constant(part.last))
        options = functions.TrainingOptions(norm=kind == "train")
        call = self.step.compiled(kind, self.layout, options, part.count)
        return tpu_cores.look(call.get_concrete_function(*arguments[: 2 if kind == "predict" else 3]))


def assert_fits(traced, examples):
    """Nothing in the cluster needs the host, shapes are known, and none of its values is as long as the data set."""
    assert not [op for op in traced.ops() if FORBIDDEN.fullmatch(op)]
    for kind in (tf.string, tf.float64):
        assert not [node.name for node in traced.cluster if kind.as_datatype_enum in tpu_cores.types(node)]
    shapes = [(node.op, node.name, tpu_cores.shapes(node)) for node in traced.cluster]
    assert not [node for node in shapes if any(shape is None or -1 in shape for shape in node[2])]
    assert not [node for node in shapes if any(shape[:1] == [examples] for shape in node[2])]


def rows():
    for case in training_cases.CASES:
        if case.precision == "mixed_float16":
            continue  # refused
        for number in (1, 4, 8):
            short = SHORT.get(case.name) == number
            yield pytest.param(case, number, id=f"{case}-{number}", marks=[] if short else [pytest.mark.whole])


@pytest.mark.parametrize("case, number", rows())
def test_a_training_is_traced_for_a_tpu(case, number, cores):
    distribution = cores(number)
    prepared = Prepared(case, distribution)
    calls = [prepared.traced("train", update) for update in (0, -(-case.examples // case.batch) - 1)]
    for call in calls:
        assert_fits(call, case.examples)
        assert call.loops_outside
        # One sum for each gradient and one for all numbers; synchronized BatchNorm has one each way besides.
        trained = len([v for v in prepared.model.trainable_variables if "unused" not in v.path])
        of_layers = 2 * sum(getattr(layer, "synchronized", False) for layer in prepared.model.layers) * case.accumulate
        most = trained * GROUPS.get(case.name, 1) + 1 + of_layers
        sums = call.ops()["CrossReplicaSum"]
        if number == 1:  # Keras' own synchronized BatchNorm sums over the one core, which changes nothing
            assert bool(sums) == bool(of_layers)
        elif case.name in GROUPS:
            assert trained + 1 < sums <= most
        elif case.name not in ("function as loss", "loss of loss objects", "metrics built late"):  # which gather rows
            assert sums == most


@pytest.mark.parametrize("kind", ["test", "predict"])
def test_measuring_and_predicting_are_traced_for_a_tpu(kind, cores):
    case = next(c for c in training_cases.CASES if c.name == "uneven tail")
    prepared = Prepared(case, cores(4))
    for update in (0, 2):
        traced = prepared.traced(kind, update)
        assert_fits(traced, case.examples)
        assert traced.ops()["CrossReplicaSum"] == (1 if kind == "test" else 0)


@pytest.mark.whole
def test_what_else_runs_in_replicas_is_traced_for_a_tpu(cores):
    """The comparison of replicas, the reset of metrics, and the check of 1 and 4 replicas."""
    case = next(c for c in training_cases.CASES if c.name == "metrics built late")
    prepared = Prepared(case, cores(4))
    sync = ReplicaSyncCheck(cores(4))
    for trace in (
        lambda: sync.check(prepared.model, ""),
        prepared.step.reset,
        lambda: equivalence_check.check_training(prepared.step, prepared.source, "on"),
    ):
        with contextlib.suppress(tf.errors.OpError, tfdist.TrainingError):  # traced, and nobody is there to run it
            trace()


FOR_TPUS = REPOSITORY / ".venv-tpu/bin/python"
MARKS = {"TPUReplicateMetadata", "TPUReplicatedInput", "TPUReplicatedOutput", "TPUCompilationResult", "NoOp"}
"""What says how a cluster is replicated, and is gone before it is compiled."""


@pytest.mark.topology
@pytest.mark.skipif(not FOR_TPUS.exists(), reason="no tensorflow-tpu: make topology-check")
def test_each_operation_has_a_kernel_for_tpus(cores):
    """By the kernels of tensorflow-tpu itself, which are there without a TPU."""
    found = collections.Counter()
    for case in training_cases.CASES:
        if case.precision != "mixed_float16":  # refused
            prepared = Prepared(case, cores(4))
            for kind in ("train", "test", "predict"):
                found += prepared.traced(kind, 0).ops()
            keras.backend.clear_session()
    asked = json.dumps(sorted({*found, "Timestamp"} - MARKS))
    child = REPOSITORY / "tests/support/tpu_kernels_child.py"
    done = subprocess.run([FOR_TPUS, child], input=asked, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    print(len(found), "kinds of operations:", done.stdout)
    assert json.loads(done.stdout)["missing"] == ["Timestamp"]  # which nothing has, and which is told from the others


def test_half_precision_of_another_kind_is_refused(cores):
    case = next(c for c in training_cases.CASES if c.name == "float16")
    keras.config.set_dtype_policy("mixed_float16")
    with cores(4).scope():
        model = case.model()
    with pytest.raises(tfdist.UserError, match=r"computes in float16, which strategy=tpu cannot: use mixed_bfloat16"):
        tfdist.fit(model, *case.data(24), distribution=cores(4), verbose=0)
    keras.config.set_dtype_policy("float32")
    case = next(c for c in training_cases.CASES if c.name == "even")
    with cores(4).scope():
        model = case.model()
    with pytest.raises(tfdist.UserError, match="reduce_dtype='float16' cannot be used with strategy=tpu: use bfloat16"):
        tfdist.fit(model, *case.data(24), distribution=cores(4), reduce_dtype="float16", verbose=0)


def test_the_look_sees_what_is_forbidden(cores):
    """A clock and a print in a layer are found, so that their absence elsewhere says something."""
    strategy = cores(4).strategy

    def one():
        return tf.cast(tf.timestamp(), tf.float32)

    def call():
        return strategy.experimental_local_results(strategy.run(one))

    traced = tpu_cores.look(tf.function(call, autograph=False).get_concrete_function())
    with pytest.raises(AssertionError):
        assert_fits(traced, 61)
    assert not traced.loops_outside
