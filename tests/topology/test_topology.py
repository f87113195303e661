"""What `--dry_run --topology` says and refuses, where no compiler is needed to know it."""

import re
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import training_cases

from tfdist import config
from tfdist.data import sources
from tfdist.distributed import child_process
from tfdist.errors import TrainingError, UserError
from tfdist.topology import compiler, known, program
from tfdist.train import ahead_of_time

L = keras.layers
TPU = (
    "%all-reduce.9 = (f32[1]{0:T(128)}, bf16[3,3,1,8]{3,2,1,0:T(1,128)S(1)}, /*index=5*/pred[7]{0}) all-reduce(%b, %c)"
)
STARTED = "%all-reduce-start.1 = f32[18]{0} all-reduce-start(%wrapped), replica_groups={{0,1}}, to_apply=%region"
DONE = "%all-reduce-done.1 = f32[18]{0} all-reduce-done(%all-reduce-start.1), metadata={}"


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """A folder for environments, of which there is none."""
    monkeypatch.setenv(compiler.PLACE, str(tmp_path / "compilers"))
    return tmp_path / "compilers"


def model(synchronized=True):
    layers = [L.Conv2D(4, 3), L.BatchNormalization(synchronized=synchronized), L.Flatten(), L.Dense(5)]
    return training_cases.compiled(keras.Sequential([keras.Input((4, 4, 1)), *layers]))


def exported(made, replicas, batch, data=None, **options):
    source = sources.Arrays(data or training_cases.images(batch))
    return program.export(made, source, program.distribution(replicas, "TPU", "a test"), batch, **options)


def test_a_program_has_the_updates_all_reduces_and_returns_what_it_writes():
    made = model()
    one = exported(made, 4, 24)
    # Forward and backward of BatchNorm, each of 6 gradients, and the sums of losses and counts.
    assert len(re.findall(r"stablehlo\.all_reduce", one.text)) == 2 + len(made.trainable_variables) + 1
    assert "dense<[[0, 1, 2, 3]]>" in one.text and "mhlo.copy" not in one.text
    assert one.rows == 6 and [tuple(s.shape) for s in one.specs] == [(1, 6, 4, 4, 1), (1, 6), (1,)]
    written = {id(one.variables[argument - len(one.specs)]) for argument, _ in one.aliases}
    slots = [v for v in made.optimizer.variables if v is not made.optimizer.learning_rate]
    assert written >= {id(v) for v in [*made.variables, *slots]}
    assert id(made.optimizer.learning_rate.value) not in written
    assert [result for _, result in one.aliases] == list(range(one.results, one.results + len(one.aliases)))


def test_a_program_of_one_replica_exchanges_nothing_and_an_uneven_batch_has_filler():
    assert "all_reduce" not in exported(model(), 1, 24).text
    uneven = exported(model(), 4, 22, accumulate=2)
    assert uneven.rows == 6 and tuple(uneven.specs[0].shape) == (2, 3, 4, 4, 1)  # 11 rows over 4 replicas, twice


def test_constants_of_booleans_have_a_byte_for_each():
    """By a byte for eight of them, as TensorFlow writes them, newer compilers refuse a program."""
    mask = np.tril(np.ones((16, 13), bool))
    packed = np.packbits(mask, bitorder="little").tobytes().hex().upper()
    line = '%0 = stablehlo.constant dense<"0x{}"> : tensor<16x13xi1>'
    as_bytes = line.format(mask.tobytes().hex())
    assert program._PACKED.sub(program._unpacked, line.format(packed)) == as_bytes
    assert program._PACKED.sub(program._unpacked, as_bytes) == as_bytes


def test_what_xla_cannot_compile_is_named():
    words = keras.Input((1,), dtype="int32", name="number")
    length = L.Lambda(lambda x: tf.cast(tf.strings.length(tf.strings.as_string(x)), "float32"), name="as_text")
    made = keras.Model(words, L.Dense(3)(length(words)))
    made.compile("sgd", "mse")
    data = np.ones((8, 1), "int32"), np.ones((8, 3), "float32")
    with pytest.raises(UserError, match=r"layer 'as_text' takes text, and replicas compute with numbers in static"):
        exported(made, 1, 8, data)


def test_a_step_of_ones_own_is_refused():
    class Own(keras.Model):
        def train_step(self, data):
            return {}

    inputs = keras.Input((4, 4, 1))
    made = training_cases.compiled(Own(inputs, L.Dense(5)(L.Flatten()(inputs))))
    with pytest.raises(UserError, match="--topology cannot compile Own, which has its own train_step"):
        exported(made, 1, 8)


def test_the_compilers_report_is_understood():
    assert compiler.all_reduces([TPU, STARTED, DONE]) == (2, 4 + 2 * 72 + 7 + 4 * 18)
    memory = {"argument": 100, "output": 80, "alias": 70, "temp": 30, "generated_code": 5}
    answer = {
        "seconds": 2.0, "device": "x", "memory": memory, "peak": 0, "flops": 3e9, "traffic": 0.0, "all_reduces": [TPU],
    }  # fmt: skip
    result = compiler.understood(answer, known.find("v5e-8"))
    assert result.needs == 100 + 30 + 10 + 5
    said = "\n".join(ahead_of_time.lines(result, 6, known.find("v5e-8")))
    assert "v5e-8: 8 x TPU v5e, 6 rows on each" in said and "in 2.0 s, 3.0 GFLOP per update and device" in said
    assert "0.1 kB of 17.2 GB per device" in said and "1 all-reduce of 0.2 kB per update" in said


def test_a_compiler_that_runs_out_of_memory_says_what_it_needs():
    error = "XlaRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.50G of 15.75G hbm."
    result = compiler.understood({"error": error}, known.find("v5e-8"))
    assert result.needs == int(21.5 * 2**30) > known.find("v5e-8").memory
    with pytest.raises(UserError, match="the compiler for v5e-8 cannot compile this update: ValueError: no"):
        compiler.understood({"error": "ValueError: no"}, known.find("v5e-8"))


def test_what_does_not_fit_is_refused():
    train, spec = config.Train(batch_size=1024, accumulate=2), known.find("v5e-8")
    ahead_of_time.check_fits(int(spec.memory), spec, train)
    with pytest.raises(UserError) as refused:
        ahead_of_time.check_fits(21_500_000_000, spec, train)
    assert str(refused.value) == (
        "an update with train.batch_size=1024 and train.accumulate=2 needs 21.5 GB of each TPU v5e of v5e-8, which has "
        "17.2 GB: lower train.batch_size, raise train.accumulate, or use a smaller model"
    )


def test_topologies_by_name():
    assert known.find("v5p-8").replicas == 4 and known.find("v6e-8").shape == "v6e:2x4"
    gpus = known.find("a100-40x4")
    assert gpus.replicas == 4 and "device_memory_size: 42298834944" in gpus.target and "major: 8" in gpus.target
    for name in ("v5e-16", "h100x9", "h100", "h100x0", "z"):
        with pytest.raises(UserError, match=f"unknown --topology={name}: .*nown are v5e-1, v5e-4"):
            known.find(name)


def test_without_the_compilers_the_line_says_how_to_get_them(nowhere):
    with pytest.raises(UserError, match="--topology=h100x2 needs the compilers for cuda, which are not installed"):
        compiler.compiled(program.Program("", 1, [], [], 1, []), known.find("h100x2"))


def test_an_installation_that_fails_leaves_nothing_and_the_next_one_begins_anew(nowhere, monkeypatch):
    ran = []

    def run(*arguments):
        ran.append(arguments)
        compiler.folder("tpu").mkdir(parents=True, exist_ok=True)
        return int("install" in arguments and len(ran) < 4)

    monkeypatch.setattr(compiler, "_run", run)
    with pytest.raises(UserError, match="pip cannot install the compilers for tpu: they need Linux"):
        compiler.install("tpu")
    assert not compiler.is_there("tpu")
    assert "are in" in compiler.install("tpu") and compiler.is_there("tpu")
    assert "are already in" in compiler.install("tpu")
    assert "--require-hashes" in ran[1] and str(nowhere) in str(compiler.python("tpu", "a test"))


def test_what_installations_refuse(nowhere, monkeypatch):
    nowhere.write_text("")
    monkeypatch.setenv(compiler.PLACE, str(nowhere))
    with pytest.raises(UserError, match=r"cannot be written .* set TFDIST_TOPOLOGY to another folder"):
        compiler.install("tpu")


def test_a_compiler_that_ends_without_an_answer(monkeypatch):
    monkeypatch.setattr(compiler, "python", lambda kind, asker: "/bin/python")
    done = subprocess.CompletedProcess([], -11, "", "noise\nSegmentation fault\n")
    monkeypatch.setattr(child_process, "answer", lambda *arguments, **options: done)
    with pytest.raises(TrainingError, match=r"ended without an answer \(exit code -11: Segmentation fault\)"):
        compiler.compiled(program.Program("", 1, [], [], 1, []), known.find("v5e-1"))
