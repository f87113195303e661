"""`python -m tfdist.compare`: a real comparison with one strategy broken on purpose, and its parts one by one."""

import dataclasses
import json
import math
import os
import pathlib
import signal
import sys
import uuid

import keras
import matplotlib.image
import numpy as np
import pytest
from conftest import REPOSITORY
from support import many_commands, processes
from support.covering import first
from support.launchers import TIMEOUT_S, Launcher, marked
from support.nvidia_drivers import driver, printing  # noqa: F401  driver is a fixture

from tfdist import config
from tfdist.checkpoints import run_folder
from tfdist.compare import results, runner, trial
from tfdist.config.runtime_options import Environment
from tfdist.errors import TrainingError, UserError
from tfdist.train import __main__ as train
from tfdist.verification import weight_distance

TINY = ["--config.model.name=mlp", "--config.train.epochs=0", "--config.train.steps=20", "--config.optimizer.warmup=0%"]

BROKEN = '''
"""Sums over the first replica alone under mirrored, which keeps replicas alike: their own comparison sees nothing."""
import dataclasses, importlib.abc, importlib.util, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "tfdist.distributed.connect":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            whole = module.mirrored
            def mirrored(*a):
                import tensorflow as tf
                made = whole(*a)
                def first(tensor):
                    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
                    return tf.where(replica == 0, tensor, tf.zeros_like(tensor))
                return dataclasses.replace(made, all_sum=lambda tensors: made.all_sum([first(t) for t in tensors]))
            module.mirrored = mirrored
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
'''


def environ(tfds_dir, *paths, **more):
    kept = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "TF_CONFIG")}
    path = os.pathsep.join([*map(str, paths), str(REPOSITORY)])
    return kept | {"TFDS_DATA_DIR": str(tfds_dir), "PYTHONPATH": path} | more


@dataclasses.dataclass
class Compared:
    code: int
    out: str
    err: str
    folder: pathlib.Path

    @property
    def record(self):
        return json.loads((self.folder / "compare.json").read_text())

    def row(self, name):
        return next(row for row in self.record["rows"] if row["name"] == name)


@pytest.fixture(scope="module", params=first(1, ["horovod", "multi_worker,horovod"]))
def compared(request, tmp_path_factory, tfds_dir):
    """Strategies, mirrored with its sum taken out. Its output goes to no terminal, in ASCII."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "broken").mkdir()
    (folder / "broken" / "sitecustomize.py").write_text(BROKEN)
    strategies = f"--strategies=mirrored,{request.param},tpu"
    command = [sys.executable, "-m", "tfdist.compare", strategies, "--replicas=2"]
    env = environ(tfds_dir, folder / "broken", PYTHONIOENCODING="ascii", HOROVOD_RANK="0", RANK="0", WORLD_SIZE="2")
    done = processes.run([*command, *TINY], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    return Compared(done.returncode, done.stdout, done.stderr, folder / "runs" / "compare-digits")


def test_a_sum_that_is_not_taken_is_found_and_its_variable_named(compared):
    assert compared.code == 1, compared.out + compared.err
    row = compared.row("mirrored 2")
    assert row["weights"] == "different" and row["distance"] > 1e-2 and row["check_distance"] > 1e-3
    assert row["variable"] in ("dense/kernel", "head/kernel") and row["largest"] > 1e-3
    said = " ".join(compared.out.split())
    assert "mirrored 2 ends with OTHER WEIGHTS: " in said and f"most of it in {row['variable']}, up to" in said
    assert "in float64, too, " in said and "It does not train the same model: do not use it." in said
    assert not any("Use mirrored" in line for line in compared.record["verdict"])


@pytest.mark.whole
@pytest.mark.parametrize("broken, options, verdict", [
    (True, "--config.model.options=dropout=0.2", "different"), (False, "--config.model.options=dropout=0.2", "checked"),
    (True, "--config.model.sync_batch_norm=False", "different"),
    (False, "--config.model.sync_batch_norm=False", "checked"),
])  # fmt: skip
def test_no_layer_that_may_differ_excuses_a_sum_that_is_not_taken(broken, options, verdict, tmp_path, tfds_dir):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(BROKEN if broken else "")
    model = "mlp" if "dropout" in options else "cnn"
    few = ["--config.train.steps=6", "--config.train.batch_size=47"]
    short = [f"--config.model.name={model}", *TINY[1:], options, *few]
    command = [sys.executable, "-m", "tfdist.compare", "--strategies=mirrored", "--replicas=2", *short]
    env = environ(tfds_dir, tmp_path / "broken")
    done = processes.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == int(broken), done.stdout + done.stderr
    row = json.loads((tmp_path / "runs/compare-digits/compare.json").read_text())["rows"][1]
    assert row["weights"] == verdict and (row["check_distance"] > 1e-3) == broken, row


def test_the_others_end_with_the_same(compared):
    for row in compared.record["rows"][2:-1]:
        assert row["status"] == "completed", row["reason"]
        assert row["weights"] in ("same", "identical") and row["distance"] < 1e-6 and row["check_distance"] is None
        assert abs(row["evaluation_difference"]["loss"]) < 1e-5
        assert row["examples_per_second"] > 0 and row["seconds_to_first_update"] > 0
        assert row["efficiency"] == pytest.approx(row["speedup"] / 2)
    environment = json.loads((compared.folder / "horovod-2" / "environment.json").read_text())
    assert (environment["replicas"], environment["workers"]) == (2, 2)


def test_the_reference_runs_unasked_and_what_cannot_run_is_a_row(compared):
    rows = compared.record["rows"]
    names = [row["name"] for row in rows]
    assert names[:2] == ["default 1", "mirrored 2"] and names[-2:] == ["horovod 2", "tpu"]
    assert rows[0]["weights"] == "reference" and rows[0]["efficiency"] == 1
    assert rows[-1]["status"] == "unavailable" and "--strategy=tpu cannot run here: " in rows[-1]["reason"]
    assert compared.record["status"] == "completed" and compared.record["experiment"]["config.train.steps"] == "20"


def test_what_is_printed(compared):
    assert compared.err == ""
    lines = compared.out.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("tfdist: "))
    assert lines[0].startswith("tfdist: comparing digits on ") and "\x1b" not in compared.out
    assert lines[-1] == "tfdist: results are in runs/compare-digits/: compare.json, compare.md, compare.png"
    assert "| mirrored 2 | DIFFERENT |" in (compared.folder / "compare.md").read_text()
    assert matplotlib.image.imread(compared.folder / "compare.png").shape[1] > 1000


@pytest.fixture
def folders(tmp_path, tfds_dir, monkeypatch, capsys):
    """Trains in this process; returns the run folder."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_dir))

    def make(name, replicas, options=""):
        keras.utils.clear_session()
        e = config.Experiment()
        e.model.name, e.model.options = "mlp", options
        e.train.epochs, e.train.steps, e.optimizer.warmup, e.checkpoint.every = 0, 4, "0%", "1000 steps"
        strategy = dict(strategy="mirrored", virtual_devices=replicas) if replicas > 1 else dict(strategy="default")
        train.train_and_evaluate(e, Environment(**strategy, workdir=str(tmp_path / name), progress="none"))
        return tmp_path / name

    return make


@pytest.mark.whole
def test_distances_have_names_and_are_of_all_weights(folders):
    one, two, other = folders("one", 1), folders("two", 2), folders("other", 1, options="depth=2")
    found = weight_distance.difference(one, two)
    assert 0 < found.distance < 1e-6
    assert found.variable in {f"{layer}/{name}" for layer in ("dense", "head") for name in ("kernel", "bias")}
    a, b = (keras.saving.load_model(folder / "model.keras").get_weights() for folder in (one, two))
    flat = [np.concatenate([np.ravel(w).astype("f8") for w in weights]) for weights in (a, b)]
    assert found.distance == pytest.approx(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[0]), rel=1e-9)
    assert weight_distance.difference(one, one).distance == 0
    with pytest.raises(ValueError, match="the models are not the same: "):
        weight_distance.difference(one, other)
    with pytest.raises(ValueError, match="empty has no checkpoint"):
        weight_distance.difference(one, one.parent / "empty")


# From here on without training: rows that are made up.


def row(name, rate=100.0, weights="same", **fields):
    strategy, _, replicas = name.partition(" ")
    fields = dict(status="completed", threads=1, jit="off", distance=3e-7, variable="dense/kernel") | fields
    return results.Row(
        name, strategy, int(replicas), command="", folder="", examples_per_second=rate, weights=weights, **fields
    )


ONE = row("default 1", weights="reference", distance=None, variable="", evaluation={"loss": 0.5, "accuracy": 0.9})


def apart(distance):
    return weight_distance.Difference(distance, "conv2d/kernel", 0.1, 2.0)


def test_efficiency_is_by_replica_and_only_between_likes():
    two = results.rated(row("mirrored 2", 180.0), ONE, cores=2)
    assert (two.speedup, two.efficiency, two.oversubscribed) == (1.8, 0.9, False)
    assert results.rated(row("mirrored 4", 180.0), ONE, cores=2).oversubscribed
    assert not results.rated(row("mirrored 4", 180.0), ONE, cores=None).oversubscribed
    for other in (row("mirrored 2", jit="on"), row("default 1", threads=2)):
        assert results.rated(other, ONE, 2).efficiency is None
    changed = results.rated(row("mirrored 2", evaluation={"loss": 0.4, "accuracy": None}), ONE, 2)
    assert changed.evaluation_difference == pytest.approx({"loss": -0.1, "accuracy": math.nan}, nan_ok=True)
    assert results.judged(changed, ONE, apart(0.0), 1e-2).why.endswith("accuracy (nan apart)")


def test_what_a_distance_means():
    two = row("mirrored 2", weights="", evaluation={"loss": 0.5}, evaluation_difference={"loss": 1e-6})
    judge = lambda distance, of=two: results.judged(of, ONE, apart(distance), 1e-5).weights
    assert (judge(1e-6), judge(1e-3)) == ("same", "different")
    assert judge(float("nan")) == "different"
    same_bits = dataclasses.replace(two, weights_sha256=ONE.weights_sha256)
    assert judge(0.0, of=same_bits) == "identical"
    for name, by, verdict in [("loss", 0.01, "different"), ("auc", 4e-4, "same"), ("auc", -0.4, "different")]:
        assert judge(1e-6, of=dataclasses.replace(two, evaluation_difference={name: by})) == verdict
    # Weights that hardly move, or large ones that are frozen, hide what is trained.
    losses = [(0.7, math.nan), (0.700001, math.nan), (0.7002, math.nan), (0.7, 0.6), (0.7,)]
    other = [results.other_loss(loss, losses[0], 1e-4) for loss in losses]
    assert [bool(why) for why in other] == [False, False, True, True, False]
    assert other[2] == "the loss of epoch 1 is 0.7002 and not 0.7"
    slow = dataclasses.replace(two, loss=(0.7002,))
    judged = results.judged(slow, dataclasses.replace(ONE, loss=(0.7,)), apart(1e-7), 1e-5)
    assert (judged.weights, judged.why) == ("different", "the loss of epoch 1 is 0.7002 and not 0.7")
    wrong = results.checked(judged, apart(1e-8), 1e-6, 31, loss=other[2])
    assert results.verdict([ONE, wrong])[0].startswith("mirrored 2 is WRONG: in float64, too, the loss of epoch 1")
    assert results.checked(judged, apart(1e-8), 1e-6, 31).weights == "checked"
    assert (
        weight_distance.tolerance("float32", "bfloat16") == 1e-2
        and weight_distance.tolerance("float64", "float32") == 1e-11
    )


def test_with_shards_nothing_but_the_same_bits_will_do():
    bits = dict(weights="", weights_sha256="d666", loss=(0.5, 0.25), evaluation={"loss": 0.2})
    one = dataclasses.replace(ONE, weights_sha256="d666", loss=(0.5, 0.25), evaluation={"loss": 0.2})
    judge = lambda distance=0.0, **more: results.judged(
        row("mirrored 2", **{**bits, **more}), one, apart(distance), 0.0
    )
    assert judge().weights == "identical"
    other = judge(1e-9, weights_sha256="a493")
    assert (other.weights, other.why) == ("different", "with train.virtual_replicas all bits must be the same")
    assert judge(loss=(0.5, 0.2500001)).why.startswith("the weights are the same to the last bit, and the losses")
    assert judge(evaluation_difference={"loss": 1e-9}).weights == "different"
    assert "ends with OTHER WEIGHTS" in results.verdict([one, other])[0]


def test_rounding_that_has_grown_is_told_from_a_wrong_sum():
    differs = results.judged(row("mirrored 2"), ONE, apart(0.05), 1e-5)
    grown = results.checked(differs, apart(1e-13), weight_distance.CHECK_TOLERANCE, 31)
    wrong = results.checked(differs, apart(1e-2), weight_distance.CHECK_TOLERANCE, 31)
    assert (grown.weights, wrong.weights) == ("checked", "different")
    assert results.exit_code([ONE, grown]) == 0 and results.exit_code([ONE, wrong]) == 1
    assert results.verdict([ONE, grown])[0] == (
        "mirrored 2 trains the same model, with weights 5e-02 apart: in float64, without random layers and with "
        "BatchNorm synchronized, the first 31 updates agree to 1e-13."
    )
    assert "weights nan apart" in results.verdict([ONE, dataclasses.replace(grown, distance=None)])[0]
    few = weight_distance.check_flags(updates=20, warms_up=False)
    assert few["config.train.steps"] == "20" and few["config.train.precision"] == "float64"
    assert few["config.optimizer.schedule"] == "constant" and few["config.optimizer.warmup"] == "0"
    assert weight_distance.check_flags(updates=10**6, warms_up=True)["config.train.steps"] == "100"


def rows(*others):
    return [ONE, *(results.rated(other, ONE, 4) for other in others)]


@pytest.mark.parametrize(
    "others, sentences",
    [
        ([row("mirrored 2", 190.0), row("horovod 2", 195.0)],
         ["All end with the same weights, 3e-07 of their norm apart at most (dense/kernel, mirrored 2).",
          "Use mirrored 2: 1.90 times the speed of default 1, efficiency 0.95."]),
        ([row("mirrored 2", 150.0), row("horovod 2", 195.0)], ["Use horovod 2: 1.95 times"]),
        ([row("mirrored 2", 190.0, "different", largest=0.1, scale=2.0, why="5e-02 is more than 1e-05")],
         [("mirrored 2 ends with OTHER WEIGHTS: 3.0e-07 of their norm apart, most of it in dense/kernel, up "
           "to 0.1 where weights are up to 2"),
          "Use default on one device: nothing that trains the same model is faster here."]),
        ([row("mirrored 2", 190.0, "different", why="the same weights are evaluated to another loss (1.0e-02 apart)")],
         ["mirrored 2 is WRONG: the same weights are evaluated to another loss"]),
        ([row("mirrored 2", 190.0, "different", distance=None)],
         ["mirrored 2 ends with OTHER WEIGHTS, which are not finite"]),
        ([row("mirrored 2", 190.0, "checked", why="they agree"), row("horovod 2", 90.0)],
         ["The same weights as default 1: horovod 2",
          "mirrored 2 trains the same model, with weights 3e-07 apart: they agree.", "Use mirrored 2: 1.90 times"]),
        ([row("mirrored 2", 190.0, "identical", distance=0.0)], ["All end with the same weights, to the last bit."]),
        ([row("mirrored 2", None, "", status="failed", reason="it was killed by SIGKILL")],
         ["Nothing ran besides default 1: there is nothing to compare.",
          "mirrored 2 failed: it was killed by SIGKILL"]),
        ([row("mirrored 2", 190.0, others_busy=1.5), row("horovod 2", steady_seconds=0.034)],
         [("The speeds are rough: other programs kept up to 1.5 cores busy, and that of horovod 2 rests on "
           "0.034 s (more train.epochs help).")]),
        ([row("mirrored 2", 190.0, flops_share=0.4)],
         ["Use mirrored 2: 1.90 times the speed of default 1, efficiency 0.95, 40% of what the devices can do."]),
    ],
)  # fmt: skip
def test_the_verdict(others, sentences):
    lines = results.verdict(rows(*others))
    assert len(lines) == len(set(lines)) and len(lines) <= 6
    for sentence in sentences:
        assert any(line.startswith(sentence) for line in lines), lines


def test_exit_codes():
    assert results.exit_code(rows(row("mirrored 2"), row("horovod 2", weights="checked"))) == 0
    unavailable = row("horovod 2", None, "", status="unavailable")
    assert results.exit_code(rows(row("mirrored 2"), unavailable)) == 0
    assert results.exit_code(rows(unavailable)) == 2
    assert results.exit_code(rows(row("mirrored 2"), row("horovod 2", None, "", status="failed"))) == 1


# The runs as processes.

CPU, GPUS = trial.Hardware(4), trial.Hardware(8, ("0", "2", "3"))


def settings(strategies, replicas, threads, machine):
    return trial.Settings(strategies, replicas, threads, "auto", "none", 60.0, machine)


def test_commands_on_gpus():
    trials = trial.plan(settings(("mirrored", "multi_worker"), (2, 4), None, GPUS), pathlib.Path("w"), [])
    assert [t.name for t in trials] == ["default 1", "mirrored 2", "mirrored 4", "multi_worker 2", "multi_worker 4"]
    assert [t.environ["CUDA_VISIBLE_DEVICES"] for t in trials[:2]] == ["0", "0,2"]
    assert [t.unavailable for t in trials] == ["", "", "it needs 4 GPUs, found 3", "", "it needs 4 GPUs, found 3"]
    assert trials[1].shell().startswith("env CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,2 ")
    assert not any("--threads" in t.shell() or "--virtual_devices" in t.shell() for t in trials)
    assert GPUS.default_replicas(1) == (2, 3) and trial.Hardware(8, ("0",)).default_replicas(1) == (1,)


def one(folder, code, name="default 1"):
    return trial.Trial(name, "default", 1, 1, (sys.executable, "-c", code), folder / "run")


@pytest.mark.parametrize("code, status, reason", [
    ("pass", "completed", ""),
    ("print('[0] tfdist: error: no such thing: do this'); exit(2)", "unavailable", "no such thing: do this"),
    ("print('[0]<stderr>:tfdist: error: not here'); print('Process 0 exit'); exit(1)", "unavailable", "not here"),
    ("print('[1]<stdout>:tfdist: failed: worker 1'); print('later'); exit(1)", "failed", "worker 1"),
    ("raise ZeroDivisionError('once')", "failed", "ZeroDivisionError: once"),
    ("import os; os.kill(os.getpid(), 9)", "failed", "it was killed by SIGKILL"),
    ("print('so long'); exit(3)", "failed", "it ended with exit code 3: so long"),
    ("exit(3)", "failed", "it ended with exit code 3"),
])  # fmt: skip
def test_how_a_run_ends(code, status, reason, tmp_path):
    outcome = trial.run(one(tmp_path, code), TIMEOUT_S)
    assert (outcome.status, outcome.reason) == (status, reason)


def test_a_program_that_is_missing(tmp_path):
    outcome = trial.run(dataclasses.replace(one(tmp_path, ""), command=("/nowhere/horovodrun",)), TIMEOUT_S)
    assert (outcome.status, outcome.reason) == (
        "failed",
        "/nowhere/horovodrun cannot be started: No such file or directory",
    )


def test_a_run_that_hangs_ends_with_all_that_it_started(tmp_path):
    mark = uuid.uuid4().hex
    child = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    code = f"""
import signal, subprocess, sys
started = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE, start_new_session=True)
started.stdout.readline()
open({str(tmp_path / "up")!r}, "x").close()
signal.pause()
"""

    def tick(seconds):
        if (tmp_path / "up").exists():
            raise KeyboardInterrupt

    marked_trial = dataclasses.replace(one(tmp_path, code), environ={"TEST_MARK": mark})
    with pytest.raises(KeyboardInterrupt):
        trial.run(marked_trial, TIMEOUT_S, tick)
    assert not marked(mark)
    outcome = trial.run(one(tmp_path, "import signal; signal.pause()"), 0.2)
    assert (outcome.status, outcome.reason) == ("failed", "it was not over after 0.2 s (--time_limit)")


@pytest.mark.parametrize("outcome, error", [
    (trial.Outcome("unavailable", 1.0, "no such data"),
     (UserError, "the experiment does not run on one device: no such data")),
    (trial.Outcome("failed", 1.0, "lost"), (TrainingError, "the reference, default 1, has failed: lost")),
])  # fmt: skip
def test_nothing_is_compared_with_a_reference_that_does_not_run(outcome, error, tmp_path, monkeypatch, capsys):
    def run(*arguments):
        assert (tmp_path / "compare.json").exists(), "killed now, it must be known for a comparison's folder"
        return outcome

    monkeypatch.setattr(trial, "run", run)
    wanted = settings(("mirrored",), (2,), 1, CPU)
    with pytest.raises(error[0], match=error[1]):
        runner.Comparison(wanted, config.Experiment(), lambda changed: [], run_folder.RunFolder(str(tmp_path))).run()
    assert json.loads((tmp_path / "compare.json").read_text())["status"] == "failed"


# The command.

BAD = [
    (["--strategies=mirored"], "unknown strategy 'mirored' in --strategies: did you mean 'mirrored'?"),
    (["--strategies=auto"], "unknown strategy 'auto' in --strategies: known are default, mirrored, mul"),
    (["--strategies="], "--strategies names none: give some of default,mirrored,multi_worker,horovod,tpu"),
    (["--replicas=0"], "--replicas must be integers of at least 1, such as 2,4: got '0'"),
    (["--replicas=2,x"], "--replicas must be integers of at least 1, such as 2,4: got 'x'"),
    (["--time_limit=0"], "--time_limit must be a positive number of seconds, got 0.0"),
    (["--config.model.name=cn"], "unknown model.name 'cn': did you mean 'cnn'?"),
    (["--config.checkpoint.keep=2"],
     "--config.checkpoint.keep is not for a comparison, whose runs save once, at their end: leave it out"),
    (["--strategy=mirrored"], "unknown flag --strategy: did you mean --strategies=mirrored?"),
    (["--virtual_devices=2"], "unknown flag --virtual_devices: did you mean --replicas=2?"),
    (["--workdir=full"], "--workdir=full holds no comparison but precious.txt: choose another folder"),
    (["--workdir=file"], "--workdir=file cannot be written (File exists): choose another folder"),
]  # fmt: skip


def test_bad_input(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("mine")
    (tmp_path / "file").write_text("")
    many_commands.refuses("tfdist.compare", BAD, tmp_path)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious.txt"]


def test_dry_run_gives_commands_that_hold_the_whole_experiment(run, tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise AssertionError")
    config_file = f"--config={REPOSITORY}/configs/digits_mlp.py"
    flags = [config_file, "--config.train.epochs", "2", "--noconfig.data.shuffle", "--jit=on", "--threads=2"]
    done = run("tfdist.compare", "--dry_run", "--strategies=mirrored", "--replicas=3", *flags, path=str(tmp_path))
    assert done.returncode == 0, done.stderr
    first, reference, second, mirrored = done.stdout.splitlines()
    assert (first, second) == ("# default 1", "# mirrored 3")
    for line in (reference, mirrored):
        assert f" {config_file} --config.train.epochs=2 --config.data.shuffle=False " in line
        assert " --jit=on --progress=none " in line and " --threads=2 " in line
    assert mirrored.endswith(" --virtual_devices=3") and "--workdir=runs/compare-digits_mlp/mirrored-3 " in mirrored
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.whole)]
)
def test_a_signal_ends_all_and_says_what_was_finished(number, code, tmp_path, tfds_dir):
    earlier = tmp_path / "w" / "compare.json"
    earlier.parent.mkdir()
    earlier.write_text("{}")
    mark = uuid.uuid4().hex
    flags = ["--strategies=mirrored", "--replicas=2", "--workdir=w", *TINY]
    started = Launcher(flags, environ(tfds_dir, TEST_MARK=mark), tmp_path, "tfdist.compare")
    started.until("default 1 (1 of 2) ...")
    started.signal(number)
    assert started.end() == code
    assert "tfdist: stopped; nothing was finished" in started.out
    assert json.loads(earlier.read_text())["status"] == "interrupted"
    assert (tmp_path / "w.1" / "compare.json").read_text() == "{}"
    assert not marked(mark)
