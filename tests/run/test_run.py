"""`tfdist run`: scripts that know nothing of tfdist, in processes of their own."""

import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys

import pytest
from support.covering import first

REPOSITORY = pathlib.Path(__file__).parent.parent.parent

TRAIN = """
import argparse, os, signal, sys
import keras, numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--threads", default="none")
parser.add_argument("--width", type=int, default=4)
arguments = parser.parse_args()

class Kill(keras.callbacks.Callback):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def get_state(self):
        return {}

    def set_state(self, state):
        pass

    def on_train_batch_end(self, batch, logs=None):
        if os.environ.get("KILL") == f"{self.call}:{int(self.model.optimizer.iterations)}":
            os.kill(os.getpid(), signal.SIGKILL)

def count_files(worker):
    # The chief counts what it does to files, another worker, which leaves them alone, all that Python audits.
    if worker != int(os.environ.get("RANK", 0)):
        return []
    last = int(os.environ.get("LAST", 0))

    def hook(event, _):
        if worker or event == "open" or event.startswith("os."):
            moments.append(event)
            if len(moments) == last:
                os.kill(os.getpid(), signal.SIGKILL)

    moments = []
    sys.addaudithook(hook)
    return moments

def main():
    moments = count_files(int(os.environ.get("COUNTED", -1)))
    keras.utils.set_random_seed(3)
    x, y = np.random.normal(size=(40, 5)), np.random.normal(size=(40, 1))
    x *= 1 + list({"several", "words", "in", "a", "set"}).index("a")  # as in vocabularies that are made of sets
    model = keras.Sequential([keras.layers.Dense(arguments.width, "tanh"), keras.layers.Dropout(0.0),
                              keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    for call in (1, 2, 3):
        noise = np.random.normal(size=y.shape) * 0.1
        stop = keras.callbacks.EarlyStopping("loss", patience=50)
        options = dict(epochs=arguments.epochs, batch_size=12, verbose=0, callbacks=[stop, Kill(call)])
        history = model.fit(x, y + noise, **options)
        print("history", call, history.history)
    print("evaluate", model.evaluate(x, y, verbose=0), int(model.optimizer.iterations))
    print("weights", [float(np.square(w).sum()) for w in model.get_weights()])
    if moments:
        open("count", "w").write(str(len(moments)))

if __name__ == "__main__":
    print(sys.argv[1:], sys.path[0] == os.path.dirname(os.path.abspath(__file__)), arguments.threads)
    main()
"""


@pytest.fixture
def script(tmp_path, run):
    """Runs a script with `tfdist run`, or with Python alone."""
    (tmp_path / "train.py").write_text(TRAIN)

    def start(*flags, program=("train.py",), alone=False, **environ):
        environ |= {"PYTHONHASHSEED": "0"} if alone else {}
        return run(*([] if alone else ["tfdist", "run", *flags]), *program, **environ)

    return start


def numbers(text):
    """The numbers that a script has printed, to 6 digits."""
    lines = [line for line in text.splitlines() if re.match(r"(history|evaluate|weights) ", line)]
    return [f"{float(number):.5g}" for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", "\n".join(lines))]


def reported(folder):
    """Status of the script, and of each call of fit with its epochs and updates."""
    result = json.loads((folder / "result.json").read_text())
    assert (folder / "report.html").read_text().count("<section") == 1 + len(result["calls"])
    return result["status"], [(call["status"], call["epochs"], call["updates"]) for call in result["calls"]]


def test_sets_of_text_have_one_order_in_all_processes(tmp_path):
    """Workers made vocabularies of their own, and each trained on the others' numbers without a word."""
    (tmp_path / "words.py").write_text("print(list(map(str, map(hash, 'some words'.split()))), __import__('sys').argv)")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environ["PYTHONPATH"] = str(REPOSITORY)
    said = []
    for command in (["-m", "tfdist", "run"], ["-u", "-m", "tfdist.run", "--show=all"]):
        command = [sys.executable, *command, "words.py", "--flag", "a b"]
        said.append(subprocess.run(command, cwd=tmp_path, env=environ, text=True, capture_output=True).stdout)
    assert said[0] == said[1] and said[0].endswith("['words.py', '--flag', 'a b']\n")


def test_a_script_runs_as_by_python(script, tmp_path):
    """Its own flags, of which one has the name of one of the command's, and the numbers of one device on two."""
    (tmp_path / "python.py").write_text(
        "import runpy, sys; sys.argv.pop(0); runpy.run_path('train.py', None, '__main__')"
    )
    done = [
        script(flag, program=("train.py", "--threads=mine")) for flag in ("--strategy=default", "--virtual_devices=2")
    ]
    assert [one.returncode for one in done] == [0, 0], done[1].stderr
    assert all("['--threads=mine'] True mine" in one.stdout for one in done)
    assert "strategy mirrored" in done[1].stderr
    assert len(numbers(done[0].stdout)) > 10 and numbers(done[0].stdout) == numbers(done[1].stdout)


@pytest.mark.parametrize("program, code, stdout, stderr", [
    ("import sys; print(__name__); sys.exit(7)", 7, "__main__", ""),
    ("import sys; sys.exit('no data')", 1, "", "no data"),
    ("import neighbor; print(neighbor.VALUE)", 0, "42", "WARNING: the script has ended and called neither fit"),
    ("def f():\n    raise KeyError('k')\nf()", 1, "", "KeyError: 'k'"),
    ("import keras\nm = keras.Sequential([keras.layers.Dense(1)])\n\nm.fit([[1.0]], [[1.0]])", 2, "",
     "tfdist: error: own.py, line 4: "),
    ("from absl import app, flags\nflags.DEFINE_string('workdir', 'w', '')\n"
     "app.run(lambda argv: print(flags.FLAGS.workdir, argv[1:]))", 0, "w ['rest']", ""),
])  # fmt: skip
def test_ends_as_the_script_does(program, code, stdout, stderr, script, tmp_path):
    (tmp_path / "own.py").write_text(program)
    (tmp_path / "neighbor.py").write_text("VALUE = 42")
    done = script("--strategy=default", program=("own.py", "rest"))
    assert done.returncode == code and stdout in done.stdout and stderr in done.stderr, done.stderr
    assert "tfdist/run" not in done.stderr and "absl/app.py" not in done.stderr.partition("neither")[0]


@pytest.mark.parametrize("code, status, calls", first(1, [
    ("m.evaluate(x, x, verbose=0)", "completed", []),
    ("m.fit(x, x, verbose=0); m.fit(x, x, epochs=2, callbacks=[l(on_epoch_end=lambda *a: 1 / 0)])", "failed",
     [("completed", 1, 1), ("failed", 0, 1)]),
]))  # fmt: skip
def test_the_report_of_a_script_that_only_evaluates_or_fails(code, status, calls, script, tmp_path):
    text = "import keras, numpy\nm, x, l = keras.Sequential([keras.layers.Dense(2)]), numpy.ones((3, 2)), "
    (tmp_path / "own.py").write_text(f"{text}keras.callbacks.LambdaCallback\nm.compile('sgd', 'mse')\n{code}\n")
    done = script("--virtual_devices=2", "--workdir=kept", program=("own.py",))
    assert done.returncode == (status == "failed"), done.stderr
    assert reported(tmp_path / "kept") == (status, calls)


@pytest.mark.parametrize("arguments, message", first(3, [
    (["trian.py"], "there is no script 'trian.py': did you mean 'train.py'?"),
    (["-m", "trian"], "-m trian cannot be run: No module named trian: name a module that Python finds"),
    (["--strateg=default", "train.py"], "unknown flag --strateg: did you mean --strategy=default?"),
    (["--epochs=3", "train.py"], "unknown flag --epochs: --help lists those that there are, and those of a scr"),
    ([], "there is no script to run: write tfdist run [flags] SCRIPT"),
    (["--nproc_per_node=2", "--strategy=horovod", "train.py"], "start it with horovodrun"),
    (["--resume=never", "train.py"], "--resume is about what --workdir keeps: give --workdir"),
    (["--nnodes=1:2", "train.py"], "whenever a machine comes or leaves: give --workdir to continue"),
    (["--resume=require", "--workdir=new", "train.py"], "--resume=require, and new holds no call of fit: check"),
    (["--workdir=s3://bucket/run", "train.py"], "is a bucket, which keeps no calls of fit"),
]))  # fmt: skip
def test_what_cannot_run_is_refused_in_one_line(arguments, message, script):
    done = script(*arguments, program=())
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.faults
@pytest.mark.parametrize("where", [["--strategy=default"], ["--virtual_devices=2"]])
def test_continues_after_kills_bit_for_bit(where, script, tmp_path):
    """Of three calls the second is killed in its middle, and the third at its end."""
    undisturbed = script(*where, "--workdir=undisturbed")
    flags = [*where, "--workdir=killed", "--checkpoint_every=1 steps"]
    for kill in ("2:11", "3:24"):
        assert script(*flags, KILL=kill).returncode == -9
    last = script(*flags)
    assert last.returncode == 0, last.stderr
    assert last.stdout == undisturbed.stdout
    assert "resuming after update" in last.stderr
    again = script(*flags)
    assert again.stdout == undisturbed.stdout
    for folder in "undisturbed", "killed":
        assert reported(tmp_path / folder) == ("completed", [("completed", 2, 8)] * 3)


@pytest.mark.faults
def test_continues_on_other_devices(script, tmp_path):
    """There, BatchNormalization is not what `tfdist run` made of it before."""
    text = TRAIN.replace("keras.layers.Dropout(0.0)", "keras.layers.BatchNormalization()")
    (tmp_path / "normalized.py").write_text(text)
    flags, program = ["--workdir=kept", "--checkpoint_every=1 steps"], ("normalized.py",)
    assert script("--virtual_devices=2", *flags, program=program, KILL="2:11").returncode == -9
    last = script("--strategy=default", *flags, program=program)
    assert last.returncode == 0 and "fits/0002" in last.stderr, last.stderr
    assert numbers(last.stdout) == numbers(script("--strategy=default", program=program).stdout)


@pytest.mark.whole
@pytest.mark.faults
@pytest.mark.parametrize("where, worker", [
    (["--strategy=default"], 0), (["--virtual_devices=2"], 0), (["--nproc_per_node=2"], 0), (["--nproc_per_node=2"], 1)
])  # fmt: skip
def test_continues_after_kills_at_random_moments(where, worker, script, tmp_path):
    """A moment is one of the openings, renamings and removals of files, in mid-checkpoint too: 30 kills in all."""
    flags = [*where, "--checkpoint_every=1 steps"]
    # The first start checks the model, and has moments which later ones do not have.
    for folder in "checked", "undisturbed":
        undisturbed = script(*flags, f"--workdir={folder}", COUNTED=str(worker))
        assert undisturbed.returncode == 0, undisturbed.stderr
    moments = int((tmp_path / "count").read_text())
    for moment in random.Random(worker).sample(range(1, moments * 9 // 10), 8 if "nproc" not in where[0] else 7):
        killed = script(*flags, f"--workdir={moment}", COUNTED=str(worker), LAST=str(moment))
        assert killed.returncode, moment
        last = script(*flags, f"--workdir={moment}")
        assert last.stdout == undisturbed.stdout, (moment, last.stderr)
        assert reported(tmp_path / str(moment)) == ("completed", [("completed", 2, 8)] * 3)


@pytest.mark.faults
def test_a_call_that_has_changed_is_not_continued(script):
    flags = ["--strategy=default", "--workdir=kept"]
    assert script(*flags).returncode == 0
    changed = script(*flags, program=("train.py", "--epochs=3"))
    assert changed.returncode == 2
    assert (
        "call 1 of fit cannot continue: arguments was [] and is ['--epochs=3']: undo the change"
        in changed.stderr.splitlines()[-1]
    )
    assert script(*flags, "--resume=never", program=("train.py", "--width=5")).returncode == 0


@pytest.mark.faults
@pytest.mark.parametrize("before, after, complaint", [
    ("'tanh'", "'relu'", "call 1 of fit cannot continue: "),
    ("optimizer='sgd'", "optimizer=keras.optimizers.SGD(0.3)", "call 1 of fit cannot continue: optimizer was "),
    ("y * 1.0", "y * 2.0", "call 1 of fit cannot continue: the code of here/own.py has changed: undo the change"),
    ("FACTOR = 1", "FACTOR = 2", "cannot continue: the code of elsewhere/distant.py has changed: undo the change"),
    ("# a", "# b", ""),
])  # fmt: skip
def test_a_changed_script_does_not_get_the_earlier_result(before, after, complaint, script, tmp_path):
    text = """
import sys; sys.path.append("elsewhere")
import keras, numpy as np, distant
x = np.ones((8, 2))
def loss(y, p): return keras.ops.abs(p - y * 1.0)  # a
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, 'tanh')])  # without a seed, other weights
model.compile(loss=loss, optimizer='sgd')
model.fit(x, x, verbose=0)
"""
    for folder in "elsewhere", "here":
        (tmp_path / folder).mkdir()
    for old, new, code, line in (("", "", 0, ""), (before, after, 2 if complaint else 0, complaint)):
        (tmp_path / "elsewhere" / "distant.py").write_text("FACTOR = 1".replace(old, new))
        (tmp_path / "here" / "own.py").write_text(text.replace(old, new))
        done = script("--strategy=default", "--workdir=kept", program=("here/own.py",))
        assert done.returncode == code and line in done.stderr, done.stderr
    resumed = script("--strategy=default", "--workdir=kept", "--resume_changed", program=("here/own.py",))
    assert resumed.returncode == 0 and ("WARNING: call 1 of fit continues though" in resumed.stderr) == bool(complaint)
    (tmp_path / "kept/fits/0001").rename(tmp_path / "kept/fits/0002")
    assert "call 1 is missing: copy it back" in script("--workdir=kept", program=("here/own.py",)).stderr


@pytest.mark.faults
@pytest.mark.parametrize(
    "read", ["json.load(open('settings.json'))", "json.loads(pathlib.Path('settings.json').read_text())"]
)
def test_settings_that_the_script_reads_from_a_file_are_part_of_it(read, script, tmp_path):
    """However the value gets into the model: by an attribute, a global, a schedule that does not tell it."""
    (tmp_path / "own.py").write_text(f"""
import json, pathlib, keras, numpy as np
V = {read}["rate"]
class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step): return V
x = np.random.default_rng(0).normal(size=(64, 3))
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
model.compile(keras.optimizers.SGD(Schedule()), "mse")
json.dump(model.fit(x, x[:, :1], verbose=0).history, open("history.json", "w"))
json.load(open("history.json"))
""")
    for rate, code in ((0.1, 0), (0.1, 0), (0.2, 2)):
        (tmp_path / "settings.json").write_text(json.dumps({"rate": rate}))
        done = script("--strategy=default", "--workdir=kept", program=("own.py",))
        assert done.returncode == code, done.stderr
    assert "call 1 of fit cannot continue: the code of settings.json has changed: undo the change" in done.stderr


@pytest.mark.faults
def test_a_full_disk_ends_no_script(script, tmp_path):
    """The second call ended it, and what the first had trained was in no file yet."""
    (tmp_path / "own.py").write_text("""
import resource, keras, numpy as np
model, x = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]), np.ones((8, 3))
model.compile("sgd", "mse")
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
for call in range(2):
    model.fit(x, x[:, :2], epochs=2, verbose=0)
print("trained", int(model.optimizer.iterations))""")
    done = script("--strategy=default", "--workdir=kept", program=("own.py",))
    assert (done.returncode, done.stdout) == (0, "trained 4\n"), done.stderr
    assert "after a kill, call 2 of fit is made again" in done.stderr


@pytest.mark.faults
def test_what_the_script_reads_from_elsewhere_is_compared(script, tmp_path):
    """Trainings with settings of two kinds were mixed, since the code was the same."""
    (tmp_path / "own.py").write_text("""
import os, keras, numpy as np
n = {"x": 1, "v": 1, "start": 1, "patience": 9, "delta": 1, "alpha": 1, "rate": 1} | eval(os.environ["NEW"])
class Mine(keras.Model):
    def __init__(self, alpha):
        super().__init__()
        self.alpha, self.dense = alpha, keras.layers.Dense(2)
    def call(self, x):
        return self.dense(x) * self.alpha
keras.utils.set_random_seed(1)
x, v, model = np.ones((5000, 2), "float32"), np.ones((500, 2), "float32"), Mine(n["alpha"])
x[1234], v[77] = n["x"], n["v"]
model(x)
model.set_weights([w * n["start"] for w in model.get_weights()])
model.compile("sgd", keras.losses.Huber(n["delta"]))
stop, factor = keras.callbacks.EarlyStopping(patience=n["patience"]), n["rate"]
rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * factor)
model.fit(x, x, batch_size=1000, validation_data=(v, v), verbose=0, callbacks=[stop, rates])
""")
    said = []
    for new in ({}, {}, *({name: 2} for name in ("x", "v", "start", "patience", "delta", "alpha", "rate"))):
        done = script("--strategy=default", "--workdir=kept", program=("own.py",), NEW=str(new))
        part = r"the (content of \w+|starting state of the model|setup of the \w+).* has changed: undo"
        said += re.findall(part, done.stderr) or [done.returncode]
    data, setup = "content of ", "setup of the "
    assert said == [0, 0, f"{data}x", f"{data}validation_data", "starting state of the model", f"{setup}callbacks",
                    f"{setup}model", f"{setup}model", f"{setup}callbacks"]  # fmt: skip


@pytest.mark.faults
def test_what_functions_hold_is_compared(script, tmp_path):
    """Defaults, a partial, a helper and the object of a bound method changed the loss or the rate without a word."""
    (tmp_path / "own.py").write_text("""
import functools, os, keras, numpy as np
n = {"default": 1, "helped": 1, "part": 1, "metric": 1, "bound": 1} | eval(os.environ["NEW"])
def helper(value, by=n["helped"]):
    return value * by
class Rates:
    def __init__(self):
        self._factor = n["bound"]
    def of(self, epoch, rate):
        return rate * self._factor
def loss(y, y_pred, by=n["default"], times=1):
    return helper(by) * times * keras.ops.mean(keras.ops.abs(y - y_pred), -1)
def measured(y, y_pred, by=n["metric"]):
    return by * keras.ops.mean(keras.ops.abs(y - y_pred), -1)
keras.utils.set_random_seed(1)
x, model = np.ones((50, 2), "float32"), keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
model.compile("sgd", functools.partial(loss, times=n["part"]), metrics=[measured])
model.fit(x, x, verbose=0, callbacks=[keras.callbacks.LearningRateScheduler(Rates().of)])
""")
    said = []
    for new in ({}, {}, *({name: 2} for name in ("default", "helped", "part", "metric", "bound"))):
        done = script("--strategy=default", "--workdir=kept", program=("own.py",), NEW=str(new))
        said += re.findall(r"the setup of the (\w+).* has changed: undo", done.stderr) or [done.returncode]
    assert said == [0, 0, *["model"] * 4, "callbacks"]


@pytest.mark.faults
def test_a_finished_call_has_stopped_again_and_needs_its_record(script, tmp_path):
    """`stop_training` was False after a restart; and a call without its record was taken for one that is new.

    Keras changes the sign of the callback's `min_delta` in the first call, so that the second had another set-up.
    """
    (tmp_path / "own.py").write_text("""
import keras, numpy as np
x, model = np.ones((8, 2)), keras.Sequential([keras.layers.Dense(2)])
model.compile("sgd", "mse")
stop = keras.callbacks.EarlyStopping("loss", min_delta=9, patience=1)
for _ in range(2):
    model.fit(x, x, epochs=9, verbose=0, callbacks=[stop])
print(model.stop_training)
""")
    flags, program = ("--strategy=default", "--workdir=kept"), ("own.py",)
    assert [script(*flags, program=program).stdout for _ in range(2)] == ["True\n"] * 2
    record = tmp_path / "kept" / "fits" / "0001" / "call.json"
    other = re.sub(
        r'(?<="MT19937", \[)\d', lambda digit: str(int(digit[0]) ^ 1), record.read_text()
    )  # of the generators
    for damage in (lambda: record.write_text(other), lambda: os.truncate(record, 100), record.unlink):
        damage()
        done = script(*flags, program=program)
        assert done.returncode == 2 and "fits/0001/call.json is missing or damaged: put it back, or" in done.stderr


@pytest.mark.faults
def test_a_fit_within_a_callback_moves_no_seed(script, tmp_path):
    """A call that is restored does not call its callbacks again, and later ones had another order."""
    (tmp_path / "own.py").write_text("""
import os, signal, keras, numpy as np
keras.utils.set_random_seed(1)
x = np.random.RandomState(0).randn(40, 2)
def made():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
class Probe(keras.callbacks.Callback):
    get_state, set_state = lambda self: {}, lambda self, state: None
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            made().fit(x, x[:, :1], epochs=1, verbose=0)
        elif "KILL" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
model = made()
for callbacks in [Probe()], []:
    history = model.fit(x, x[:, :1], epochs=3, batch_size=8, verbose=0, callbacks=callbacks).history
print(history)
""")
    flags = "--strategy=default", "--workdir=kept", "--checkpoint_every=1 steps"
    undisturbed = script(flags[0], program=("own.py",))
    assert script(*flags, program=("own.py",), KILL="1").returncode
    done = script(*flags, program=("own.py",))
    assert done.returncode == 0 and done.stdout == undisturbed.stdout and done.stdout, done.stderr


@pytest.mark.faults
def test_an_unchanged_script_with_odd_parts_continues(script, tmp_path):
    """Modules that are loaded on demand, sets, a layer with a random seed, data that train again with other bits."""
    (tmp_path / "later.py").write_text("VALUE = 1")
    (tmp_path / "own.py").write_text("""
import os, signal, keras, numpy as np, tensorflow as tf
x = np.ones((8, 4, 4, 1), "float32"); words = {"a", "b"}
def loss(y, p): return keras.ops.mean(keras.ops.abs(y - p), -1) * len(words)
model = keras.Sequential([keras.layers.RandomCrop(4, 4), keras.layers.Flatten(), keras.layers.Dense(1)])
model.compile("sgd", loss)
if not os.path.exists("prepared"):
    import later
    open("prepared", "w").close()
for call in (1, 2):
    data = tf.data.Dataset.from_tensor_slices((x, x[:, 0, 0])).shuffle(8).batch(2)
    model.fit(data, epochs=2, verbose=0)
    if call == 2 and "KILL" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
print("done")
""")
    flags, program = ("--strategy=default", "--workdir=kept"), ("own.py",)
    assert script(*flags, program=program, KILL="1").returncode == -9
    again = script(*flags, program=program)
    assert again.stdout == "done\n", again.stderr


@pytest.mark.faults
@pytest.mark.parametrize("name", ["best.weights.h5", "ck_{epoch:02d}.weights.h5"])
def test_a_file_that_two_calls_write_is_not_loaded_for_the_earlier_one(name, script, tmp_path):
    """The first returned at once after a kill, and the script loaded what the second had written."""
    saves = f"Kill(call), keras.callbacks.ModelCheckpoint('{name}', save_weights_only=True)]"
    load = f"        if call == 2: model.load_weights('{name.format(epoch=2)}')\n        noise ="
    text = TRAIN.replace("Kill(call)]", saves).replace("        noise =", load)
    (tmp_path / "train.py").write_text(text)
    first = script("--strategy=default", "--workdir=kept", KILL="2:13")
    assert first.returncode == -9
    assert first.stderr.count(f"WARNING: call 2 of fit writes {name}, as an earlier one does") == 1
    again = script("--strategy=default", "--workdir=kept")
    assert again.returncode == 2
    said = again.stderr.splitlines()[-1]
    assert f"call 1 of fit wrote {name.format(epoch=1)}" in said and ", which has changed since" in said


@pytest.mark.faults
@pytest.mark.parametrize("draws", ["np.random.shuffle(self.order)", "pass", "a layer"])
def test_data_that_draw_at_random_are_trained_on_again(draws, script, tmp_path):
    """An interrupted call went on with the numbers of another order."""
    data = """
class Data(keras.utils.PyDataset):
    order = np.arange(40)
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return x[rows := self.order[10 * i : 10 * i + 10]], y[rows] NOISE
    def on_epoch_end(self):
        DRAWS
"""
    if draws == "pass":
        data = data.replace("on_epoch_end", "no_name").replace(" NOISE", " + np.random.normal(size=(10, 1))")
    data = data.replace("DRAWS", draws).replace(" NOISE", "")
    text = TRAIN.replace("model.fit(x, y + noise,", "model.fit(Data(),").replace("batch_size=12,", "shuffle=False,")
    text = text.replace("def main():", f"{data}\ndef main():\n    global x, y")
    said = "Data has an on_epoch_end"
    if draws == "a layer":
        layer = """
class Noise(keras.layers.Layer):
    def call(self, inputs):
        noise = lambda a: a + np.random.normal(size=a.shape).astype("float32")
        return tf.ensure_shape(tf.numpy_function(noise, [inputs], tf.float32), inputs.shape)
"""
        text = TRAIN.replace("keras.layers.Dropout(0.0)", "Noise()").replace(
            "np\n", f"np, tensorflow as tf\n{layer}", 1
        )
        said = "its training step writes, or draws from, what no layer holds (PyFunc)"
    (tmp_path / "train.py").write_text(text)
    whole = script("--strategy=default")
    flags = ("--strategy=default", "--workdir=kept", "--checkpoint_every=1 steps")
    assert script(*flags, KILL="1:6").returncode == -9
    again = script(*flags)
    assert again.stdout == whole.stdout and f"its start, with the same result: {said}" in again.stderr


@pytest.mark.faults
@pytest.mark.parametrize("seeds", ["keras.utils.set_random_seed(s)", "pass", "pass  # objects"])
def test_a_script_that_leaves_out_what_it_finds_continues_where_it_was(seeds, script, tmp_path):
    """The first call after a kill got the result of the first one before it, of another member, without a word."""
    text = """
import os, signal
import keras, numpy as np
x = np.random.default_rng(1).normal(size=(12, 3))
class Kill(keras.callbacks.Callback):
    get_state, set_state = dict, lambda self, state: None
    def __init__(self, member):
        super().__init__()
        self.member = member
    def on_train_batch_end(self, batch, logs=None):
        if os.environ.get("KILL") == f"{self.member}:{int(self.model.optimizer.iterations)}":
            os.kill(os.getpid(), signal.SIGKILL)
def train():
    SEEDS
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "gelu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(x, x[:, :1], batch_size=4, epochs=3, verbose=0, callbacks=[Kill(s)])
    return model
for s in range(4):
    if not os.path.exists(name := f"{s}.weights.h5"):
        model = train()
        if os.environ.get("KILL") == str(s):
            os.kill(os.getpid(), signal.SIGKILL)
        model.save_weights(name)
        print("weights", s, [float(w.sum()) for w in model.get_weights()])
""".replace("SEEDS", seeds)
    if seeds == "pass":  # the number is an argument, and no variable of a loop
        text = text.replace("for s in range(4):", "def member(s):").replace("train()", "train(s)")
        text += "list(map(member, range(4)))\n"
    elif "objects" in seeds:  # it is in what an object holds, and no argument
        text = text.replace("for s in range(4):", "def member(self):\n    s = self.s").replace("train()", "train(self)")
        text = text.replace("def train(self):", "def train(self):\n    s = self.s").replace(
            "os, signal", "os, signal, types"
        )
        text += "list(map(member, [types.SimpleNamespace(s=s) for s in range(4)]))\n"
    (tmp_path / "own.py").write_text(text)
    flags = ("--strategy=default", "--workdir=kept", "--checkpoint_every=1 steps")
    starts = [script(*flags, program=("own.py",), KILL=kill) for kill in ("2:5", "2", "3:4", "none")]
    assert [start.returncode for start in starts] == [-9, -9, -9, 0], starts[-1].stderr
    assert len(list((tmp_path / "kept/fits").glob("*/call.json"))) == 4
    resumed = [re.findall("from kept/fits/0*([0-9]+)/", start.stderr) for start in starts]
    assert resumed == [[], ["3"], ["3"], ["4"]]
    told = [line for start in starts for line in start.stdout.splitlines() if line.startswith("weights")]
    assert len({*told}) == 4
    if "pass" not in seeds:
        for path in tmp_path.glob("*.h5"):
            path.unlink()
        whole = script("--strategy=default", program=("own.py",))
        assert [line for line in whole.stdout.splitlines() if line.startswith("weights")] == told


@pytest.mark.faults
def test_what_only_the_script_knows_of_a_finished_call_is_made_again(script, tmp_path):
    """A callback's own attributes, a generator that later calls go on with, files that callbacks go on with or write
    under another name in each start, and variables and generators outside of the model."""
    (tmp_path / "own.py").write_text("""
import os, signal, sys
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(1)
class Best(keras.callbacks.Callback):
    best = np.inf
    def on_epoch_end(self, epoch, logs):
        self.best = min(self.best, logs["loss"])
def batches(draw=np.random.default_rng(2)):
    for _ in range(3):
        x = draw.normal(size=(4, 3))
        yield x, x.sum(1, keepdims=True)
model, best = keras.Sequential([keras.layers.Dense(1)]), Best()
model.compile("sgd", "mse")
x = np.random.normal(size=(12, 3))
logs = [keras.callbacks.CSVLogger("rows.csv", append=True)]
logs += [keras.callbacks.BackupAndRestore("backup", delete_checkpoint=False)]
print("history", model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[best, *logs]).history)
print("history", model.fit(batches(), verbose=0).history)
class Counting(keras.Sequential):
    def train_step(self, data):
        seen.assign_add(1.0)
        return super().train_step(data)
seen, counting = tf.Variable(0.0), Counting([keras.layers.Dense(1)])
counting.compile("sgd", "mse")
for _ in range(2):  # of which the second traces nothing
    counting.fit(x, x[:, :1], verbose=0)
weights = f"{os.getpid()}.weights.h5"
model.fit(x, x[:, :1], verbose=0, callbacks=[keras.callbacks.ModelCheckpoint(weights, save_weights_only=True)])
class Noisy(keras.Sequential):
    def train_step(self, data):
        return super().train_step((data[0] + keras.random.normal((4, 3), seed=noise), data[1]))
class Kill(keras.callbacks.Callback):
    get_state, set_state = dict, lambda self, state: None
    def on_epoch_end(self, epoch, logs):
        if "KILL" in os.environ and epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
noise, noisy = keras.random.SeedGenerator(3), Noisy([keras.layers.Dense(1)])
noisy.compile("sgd", "mse")
print("history", noisy.fit(x, x[:, :1], batch_size=4, epochs=3, verbose=0, callbacks=[Kill()]).history)
model.load_weights(weights)
print("history", seen.numpy(), model.fit(batches(), verbose=0).history)
print("weights", best.best, [float(w.sum()) for w in model.get_weights()])
""")
    whole, rows = script("--strategy=default", program=("own.py",)), (tmp_path / "rows.csv").read_text()
    (tmp_path / "rows.csv").unlink()
    shutil.rmtree(tmp_path / "backup")
    flags = ("--strategy=default", "--workdir=kept", "--checkpoint_every=1 steps")
    assert script(*flags, program=("own.py",), KILL="1").returncode == -9
    again = script(*flags, program=("own.py",))
    assert again.returncode == 0 and again.stdout == whole.stdout, again.stderr
    assert (tmp_path / "rows.csv").read_text() == rows
    assert "call 1 of fit trains again from its start, with the same result: Best is a callback" in again.stderr
    assert "call 2 of fit trains again from its start, with the same result: x is a generator" in again.stderr
    assert "call 3 of fit trains again from its start, with the same result: its training step writes" in again.stderr
    assert "call 4 of fit trains again from its start, with the same result: its training step writes" in again.stderr
    assert "call 6 of fit trains again from its start, with the same result: its training step writes" in again.stderr


@pytest.mark.faults
@pytest.mark.parametrize("which", ["{0, 1}", "{0}", "{1}"])
def test_an_error_that_a_script_catches_ends_workers_on_which_it_was_not_raised(which, script, tmp_path):
    (tmp_path / "caught.py").write_text(f"""
import os, keras, numpy as np
class Raises(keras.callbacks.Callback):
    chief_only = False
    def on_train_batch_end(self, batch, logs=None):
        if batch and int(os.environ["RANK"]) in {which}:
            raise ValueError("of this worker")
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
for callbacks in [Raises()], []:
    try:
        model.fit(np.ones((32, 4)), np.ones((32, 1)), batch_size=8, verbose=0, callbacks=callbacks)
    except ValueError:
        print("caught")
print("done", int(model.optimizer.iterations))
""")
    done = script("--nproc_per_node=2", "--show=all", program=("caught.py",))
    if which == "{0, 1}":
        assert (done.returncode, done.stdout.count("caught"), done.stdout.count("done 6")) == (0, 2, 2), done.stderr
    else:
        assert done.returncode == 1 and f"lost worker {which[1]}" in done.stderr and "done" not in done.stdout
        assert "it stopped: of this worker" in done.stderr


@pytest.mark.faults
@pytest.mark.parametrize("units, rate", [("1", "RANK / 2"), ("8 + RANK", "0")])
def test_workers_whose_scripts_create_other_variables_are_told(units, rate, script, tmp_path):
    """The advice was --strategy=mirrored, or there was a traceback of a collective that had another type."""
    (tmp_path / "other.py").write_text(f"""
import os, keras, numpy as np
RANK = int(os.environ["RANK"])
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense({units}), keras.layers.Dropout({rate})])
model.compile("sgd", "mse")
model.fit(np.ones((32, 4)), np.ones((32, 1)), batch_size=8, verbose=0)
""")
    done = script("--nproc_per_node=2", program=("other.py",))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "another creates another variable: run the same script with the same arguments" in done.stderr


@pytest.mark.whole
def test_a_metric_that_never_resets_is_named_by_all_workers(script, tmp_path):
    """Each decided by itself whether its copy was suspect, and one summed other rows than the other."""
    (tmp_path / "total.py").write_text("""
import keras, numpy as np
class Total(keras.metrics.Sum):
    def update_state(self, y, p, sample_weight=None):
        return super().update_state(keras.ops.abs(y - p))
    def reset_state(self):
        pass
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=[Total(name="total")])
draw = np.random.RandomState(0).rand
model.fit(draw(53, 4), draw(53, 1), batch_size=8, shuffle=False)
""")
    done = script("--nproc_per_node=2", program=("total.py",))
    assert done.returncode == 2 and "metric 'total' differs" in done.stderr and "leave it out" in done.stderr


@pytest.mark.faults
def test_two_workers_train_as_one_and_name_files_that_both_write(script, tmp_path):
    own = "tempfile.mkdtemp() + '/own.keras'"  # a folder of each worker's own, as KerasTuner has
    more = f"""
    open("notes.txt", "w").close()
    for path in "m.keras", {own}:
        for best_only in True, False:
            saves = keras.callbacks.ModelCheckpoint(path, "loss", save_best_only=best_only)
            model.fit(x, y, verbose=0, callbacks=[saves])
            keras.models.load_model(path)
        model.save(path)
        assert keras.models.load_model(path).count_params() == model.count_params()
    assert tf.distribute.get_strategy().extended.should_checkpoint
    resolver = tf.distribute.get_strategy().cluster_resolver
    assert ("WANDB_MODE" in os.environ) == ("MLFLOW_TRACKING_URI" in os.environ) == bool(resolver and resolver.task_id)
    print("weights\""""
    text = TRAIN.replace('\n    print("weights"', more).replace("import argparse", "import tempfile, argparse")
    text = text.replace("import keras,", "import tensorflow as tf, keras,")
    (tmp_path / "train.py").write_text(text)
    alone, both = script("--strategy=default"), script("--nproc_per_node=2", "--workdir=kept")
    assert both.returncode == 0, both.stderr
    assert reported(tmp_path / "kept") == ("completed", [("completed", 2, 8)] * 3 + [("completed", 1, 2)] * 4)
    assert numbers(both.stdout.replace("[0] ", "")) == numbers(alone.stdout)
    assert "[1] history" not in both.stdout and (tmp_path / "m.keras").exists()
    assert "several workers have written notes.txt in the working directory" in both.stderr


@pytest.mark.faults
def test_a_model_that_a_callback_makes_is_each_workers_own(script, tmp_path):
    """Callbacks of several workers are called outside of the scope, in which a variable would wait for all of them."""
    (tmp_path / "makes.py").write_text("""
import os, keras, numpy as np
keras.utils.set_random_seed(1)
class Makes(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.save("saved.keras")
        self.loaded = keras.models.load_model("saved.keras")
        print("predicted", self.loaded.predict(x, verbose=0).sum().round(4))
        print("loss", round(self.loaded.fit(x, y, shuffle=False, verbose=0).history["loss"][0], 4))
x = np.random.normal(size=(40, 4)).astype("float32")
y = x[:, :1]
model, makes = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), Makes()
model.compile("sgd", "mse")
model.fit(x, y, epochs=2, shuffle=False, verbose=0, callbacks=[makes])
print("evaluated", np.round(makes.loaded.evaluate(x, y, verbose=0), 4))
""")
    plain = script(program=("makes.py",), alone=True)
    done = script("--nproc_per_node=2", program=("makes.py",))
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    assert [line for line in lines if line.startswith(("predicted", "loss", "evaluated"))] == plain.stdout.splitlines()
    assert len(plain.stdout.splitlines()) == 5
