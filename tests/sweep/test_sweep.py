"""`python -m tfdist.sweep`: what is asked for, how the runs are made, and what is shown of them."""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shlex
import threading

import optuna
import pytest
from support import many_commands, shipped
from support.covering import first

from tfdist.checkpoints import files, integrity
from tfdist.compare import trial
from tfdist.errors import UserError
from tfdist.sweep import results, runner, space

BASE = shipped.digits()


@pytest.mark.parametrize("text, fields", [
    ("optimizer.learning_rate=1e-3,1", {"optimizer.learning_rate": [0.001, 1.0]}),
    ("train.batch_size=32, 64;seed=1 ; ", {"train.batch_size": [32, 64], "seed": [1]}),
    ("config.data.shuffle=true,False", {"data.shuffle": [True, False]}),
    ("data.augment=flip,'flip, erase(0.2)',", {"data.augment": ["flip", "flip, erase(0.2)", ""]}),
    ("data.augment=crop(4, 2),color(0.1); seed=3", {"data.augment": ["crop(4, 2)", "color(0.1)"], "seed": [3]}),
    ("data.train_split='train[:90%]',train", {"data.train_split": ["train[:90%]", "train"]}),
    ("data.name=log:1:2", {"data.name": ["log:1:2"]}),
])  # fmt: skip
def test_what_is_asked_for(text, fields):
    assert space.parse(text) == fields
    for name, values in fields.items():
        assert all(type(v) is type(w) for v, w in zip(values, space.parse(text)[name]))


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "--over says which fields to change, and is empty"),
        ("train.batch_size", "is not understood at 'train.batch_size': write it like optimizer.learning_rate="),
        ("train.batch=3", "unknown config field --config.train.batch: did you mean 'batch_size'"),
        ("train=3", "train is a group of fields: name one of them"),
        ("seed=1,one", "seed must be an integer, got 'one'"),
        ("seed=1,1", "gives seed the value 1 twice"),
        ("seed=1; seed=2", "names seed twice"),
        ("data.shuffle=maybe", "data.shuffle must be True or False, got 'maybe'"),
        ("optimizer.learning_rate=fast", "must be a number, got 'fast'"),
        ("data.augment=crop(4", r"\) is missing in"),
        ("data.augment='flip", "' is missing in"),
        ("optimizer.learning_rate=0.1,-1", "with optimizer.learning_rate=-1.0: optimizer.learning_rate must not be "),
        ("seed=" + ",".join(map(str, range(1001))), "more than 1000 experiments"),
        ("optimizer.learning_rate=log:1e-4:1e-1",
         "learning_rate=... gives a range, which has no grid: say how many runs"),
        ("optimizer.learning_rate=log:0:1", "learning_rate=log:0:1 must be finite, with LOW < HIGH and LOW > 0: write"),
        ("optimizer.learning_rate=uniform:1:1", "uniform:1:1 must be finite, with LOW < HIGH: write"),
        ("optimizer.learning_rate=uniform:0:inf", "uniform:0:inf must be finite"),
        ("optimizer.learning_rate=log:1e-4", "must be a number, got 'log:1e-4'"),
        ("seed=uniform:0:1.5", "seed must be an integer, got '1.5'"),
    ],
)  # fmt: skip
def test_what_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        fields = space.parse(text)
        space.grid(fields)
        space.check(fields, BASE)


def test_ranges():
    fields = space.parse("optimizer.learning_rate=log:1e-4:1e-1; train.batch_size=uniform:16:64")
    assert list(fields.values()) == [space.Range(1e-4, 0.1, True), space.Range(16, 64, False)]
    space.check(fields, BASE)
    with pytest.raises(UserError, match=r"with optimizer.learning_rate=-1.0: optimizer.learning_rate must not"):
        space.check(space.parse("optimizer.learning_rate=uniform:-1:1"), BASE)


def test_samples():
    """They are the same in every order of trials, of the field's type, and as the folder's name says them."""
    fields = space.parse("optimizer.learning_rate=log:1e-4:1e-1; train.batch_size=uniform:16:64; seed=1,2")
    search = runner.Search(fields, BASE, trials=20, sampler="random")
    study = search.study()
    made = [search.ask(study, i)[1] for i in range(20)]
    assert [search.ask(study, i)[1] for i in reversed(range(20))] == made[::-1]
    rates, sizes, seeds = (sorted(c[name] for c in made) for name in fields)
    assert 1e-4 <= rates[0] < 1e-3 < 1e-2 < rates[-1] <= 0.1 and all(type(rate) is float for rate in rates)
    assert 16 <= sizes[0] < 32 < 48 < sizes[-1] <= 64 and all(type(size) is int for size in sizes)
    assert set(seeds) == {1, 2} and all(len(space.folder(c)) < 80 for c in made)


def test_all_combinations():
    made = space.grid(space.parse("train.batch_size=32,64; optimizer.learning_rate=1e-3,1e-2"))
    assert [tuple(c.values()) for c in made] == [(32, 0.001), (32, 0.01), (64, 0.001), (64, 0.01)]
    assert [space.experiment(c, BASE).train.batch_size for c in made] == [32, 32, 64, 64]
    assert (BASE.train.batch_size, BASE.optimizer.learning_rate) == (48, 0.05), "the base stays as it is"
    folders = [space.folder(c) for c in space.grid(space.parse("data.augment=flip(),'flip( )'"))]
    assert len(set(folders)) == 2 and all(re.fullmatch(r"[\w.+=-]+", name) for name in folders)
    assert len(space.folder({"data.options": "x" * 500})) < 200


def test_places_have_nothing_in_common():
    assert runner.places(1, ("0", "1"), (0, 1)) == [({}, ())]
    two = runner.places(2, ("0", "3", "4", "5", "7"), (0, 1))
    assert [(environ["CUDA_VISIBLE_DEVICES"], cores) for environ, cores in two] == [("0,3", ()), ("4,5", ())]
    assert runner.places(3, (), (0, 2, 4, 6)) == [({}, (0,)), ({}, (2,)), ({}, (4,))]
    with pytest.raises(UserError, match="--parallel=3 runs need devices of their own, found 2 GPUs"):
        runner.places(3, ("0", "1"), (0, 1, 2, 3))


def written(c, path, status="completed", epochs=(), **result):
    """A line for a shell that leaves what a run does."""
    experiment, there = space.experiment(c, BASE), path / space.folder(c)
    result = {"status": status, "evaluation": {"loss": 1.0 / experiment.train.batch_size}, **result}
    lines = [json.dumps({"epoch": i, "val_loss": loss}) for i, loss in enumerate(epochs, 1)]
    parts = {"experiment.json": json.dumps(dataclasses.asdict(experiment)), "result.json": json.dumps(result)}
    parts["history.jsonl"] = "".join(f"{line}\n" for line in lines)
    written = [f"printf %s {shlex.quote(text)} > {there}/{name}" for name, text in parts.items()]
    return " && ".join([f"mkdir -p {there}", f"echo once more >> {there}/starts", *written])


def made(path, values, line, parallel=1, cores=(0,), **search):
    """A sweep over batch sizes, or the fields in `values`, whose runs are lines for a shell."""
    fields = values if isinstance(values, dict) else {"train.batch_size": values}

    def command(c):
        return trial.Trial(
            space.title(c), "auto", 1, None, ("sh", "-c", line(c, path)), path / "logs" / space.folder(c)
        )

    return runner.Sweep("it", runner.Search(fields, BASE, **search), command, path, runner.places(parallel, (), cores))


@pytest.fixture
def sweep(tmp_path):
    """Runs a sweep as `made` describes it."""

    def run(values, line, **kwargs):
        return made(tmp_path / "sweep", values, line, **kwargs).run()

    run.path = tmp_path / "sweep"
    run.record = lambda: json.loads((run.path / "sweep.json").read_text())
    run.starts = lambda size: (run.path / f"train.batch_size={size}/starts").read_text().count("once")
    return run


def test_finished_runs_are_not_repeated(sweep, capsys):
    """Others are: one has failed, one was refused, one is new; and the table has all of them."""
    ends = {64: "echo 'tfdist: failed: no luck' >&2; exit 1", 128: "echo 'tfdist: error: too large' >&2; exit 2"}
    line = lambda c, path: ends.get(c["train.batch_size"]) or written(c, path)
    assert sweep([32, 64, 128], line) == 1
    told = [("completed", ""), ("failed", "no luck"), ("refused", "too large")]
    assert [(row["status"], row["reason"]) for row in sweep.record()["rows"]] == told
    assert "train.batch_size=64 failed: no luck." in capsys.readouterr().out
    assert sweep([32, 64, 16], written) == 0
    assert [sweep.starts(size) for size in (32, 64, 16)] == [1, 1, 1]
    out = capsys.readouterr().out
    assert "Best by loss: train.batch_size=64 (0.0156)." in out
    for name in ("sweep.md", "sweep.html"):
        assert (sweep.path / name).read_text().count("★") == 1
    assert re.search(r"\| 64 +\| ★ completed \| 0.0156 \|", (sweep.path / "sweep.md").read_text())


def test_a_finished_run_whose_result_was_changed_is_refused(sweep):
    """It would be ranked by a measure that it has not had."""
    listed = integrity.sealed({"status": "completed", "evaluation": {"loss": 0.5}})
    assert sweep([32], lambda c, folder: written(c, folder, **listed)) == 0
    path = sweep.path / "train.batch_size=32/result.json"
    path.write_text(path.read_text().replace("0.5", "0.1"))
    with pytest.raises(UserError, match=r"is damaged: result.json has changed: its checksum is wrong: copy it back"):
        sweep([32], written)


def test_the_result_of_another_run_and_a_changed_journal_rank_nothing(sweep):
    assert sweep([32, 64], written) == 0
    journal = sweep.path / "study.journal"
    journal.write_text(journal.read_text().replace("0.03125", "0.00001"))
    assert sweep([32, 64], written) == 0
    assert [row["evaluation"]["loss"] for row in sweep.record()["rows"]] == [1 / 32, 1 / 64]
    journal.write_bytes(journal.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"study.journal is damaged: remove it"):
        sweep([32, 64, 128], written)
    journal.unlink()
    assert sweep([32, 64], written) == 0 and (sweep.starts(32), sweep.starts(64)) == (1, 1)
    journal.unlink()
    listed = {"files": {"experiment.json": files.checksum(sweep.path / "train.batch_size=64/experiment.json")}}
    other = integrity.sealed({"status": "completed", "evaluation": {"loss": 0.1}, **listed})
    (sweep.path / "train.batch_size=32/result.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match=r"train.batch_size=32 is damaged: experiment.json"):
        sweep([32, 64], written)


def test_runs_on_other_data_are_not_ranked_together(sweep):
    facts = {32: 1, 64: 1, 16: 2}
    line = lambda c, path: written(c, path, facts={"checksum of all targets": facts[c["train.batch_size"]]})
    assert sweep([32, 64], line) == 0
    assert sweep([32, 64, 16], line) == 1
    assert [row["status"] for row in sweep.record()["rows"]] == ["completed", "completed", "refused"]
    assert "data or code have changed since train.batch_size=32" in sweep.record()["rows"][-1]["reason"]


@pytest.mark.parametrize(
    "field, values, changed, refused",
    first(10, [
        ("data.shuffle", [True, False], "checksum of all inputs", True),
        ("data.augment", ["", "flip"], "checksum of targets", True),
        ("data.augment", ["", "mixup(0.2)"], "checksum of targets", False),  # rows of shares
        ("data.image_size", ["8", "16"], "checksum of all inputs", False),  # which a resize changes
        ("data.image_size", ["8", "16"], "checksum of labels of the validation", True),
        ("data.train_split", ["train", "train[:50%]"], "a target", False),  # other rows
        ("data.train_split", ["train", "train[:50%]"], "a target of the validation", True),
        ("data.eval_split", ["test", "train"], "a target", True),
        ("data.eval_split", ["test", "train"], "a target of the validation", False),
        ("data.name", ["digits", "synthetic"], "a target", False),
        ("data.name", ["digits", "synthetic"], "the code of targets.py", True),
        ("train.precision", ["float32", "float64"], "the code of targets.py", True),
        ("model.options", ["units=8", "units=16"], "the code of targets.py", True),
        ("optimizer.name", ["sgd", "adam"], "a target", True),
        ("optimizer.name", ["sgd", "adam"], "the setup of the model (Keras", True),
        ("model.options", ["units=8", "units=16"], "the setup of the model (Keras", False),
        ("model.options", ["units=8", "units=16"], "a target", True),
        ("train.label_smoothing", [0.0, 0.1], "the setup of the model for its loss", False),
        ("train.label_smoothing", [0.0, 0.1], "checksum of targets", False),
        ("train.label_smoothing", [0.0, 0.1], "checksum of all inputs", True),
        ("train.class_weight", ["", "balanced"], "checksum of all weights", False),
        ("data.shuffle", [True, False], "shuffle", False),
        ("optimizer.layer_decay", [1.0, 0.9], "layer_decay", False),
        ("optimizer.layer_rates", ["", "dense=0.1"], "lr_multipliers", False),
    ]),
)  # fmt: skip
def test_what_another_field_of_the_data_may_change(field, values, changed, refused, sweep):
    line = lambda c, path: written(c, path, facts={changed: values.index(c[field])})
    assert sweep({field: values}, line) == int(refused)
    assert ["refused" in row["status"] for row in sweep.record()["rows"]] == [False, refused]


def test_a_metric_that_is_not_finite_ends_no_sweep(sweep):
    """The runs after it were not made, and the command said that runs measure other metrics."""
    of = {32: None, 64: 0.5, 16: None}
    line = lambda c, path: written(c, path, evaluation={"loss": 1.0, "spread": of[c["train.batch_size"]]})
    assert sweep([32, 64, 16], line, metric="max spread") == 0
    rows = sweep.record()["rows"]
    assert [row["reason"] for row in rows] == ["not finite: spread", "", "not finite: spread"]
    assert [row["evaluation"].get("spread") for row in rows] == [None, 0.5, None]


def test_another_experiment_in_the_folder_is_refused(sweep, monkeypatch):
    assert sweep([32], written) == 0
    monkeypatch.setattr(BASE, "seed", 7)
    with pytest.raises(UserError, match=r"holds another run \(config.seed is 0 there and 7 here\): choose another"):
        sweep([32], written)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_side_by_side_on_cores_of_their_own(sweep):
    """Each waits until the other is there."""
    cores = sorted(os.sched_getaffinity(0))[:2]

    def line(c, path):
        meet = path / "meet"
        if not meet.exists():
            os.mkfifo(meet)
        knock = f"echo here > {meet}" if c["train.batch_size"] == 32 else f"read word < {meet}"
        affinity = f"grep Cpus_allowed_list /proc/self/status > {path / space.folder(c)}/cores"
        return f"{written(c, path)} && {knock} && {affinity}"

    assert sweep([32, 64], line, parallel=2, cores=cores) == 0
    used = {(sweep.path / f"train.batch_size={size}/cores").read_text().split()[1] for size in (32, 64)}
    assert used == {str(core) for core in cores}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_an_end_on_the_way_ends_all_runs(sweep):
    """The first run to end has not measured what is asked for; the other one would wait for ever."""

    def line(c, path):
        hang, ready = path / "hang", path / "ready"
        if not hang.exists():
            os.mkfifo(hang)
            os.mkfifo(ready)
        if c["train.batch_size"] == 32:
            return f"echo $$ > {path}/process; echo here > {ready}; exec cat {hang}"
        return f"read word < {ready}; {written(c, path)}"

    with pytest.raises(UserError, match="--metric=f1: the runs measure loss: choose one of them"):
        sweep([32, 64, 16], line, parallel=2, metric="f1", cores=sorted(os.sched_getaffinity(0))[:2])
    record = sweep.record()
    assert record["status"] == "interrupted"
    assert [row["status"] for row in record["rows"]] == ["waiting", "completed", "waiting"]
    number = (sweep.path / "process").read_text().strip()
    assert not os.path.exists(f"/proc/{number}"), "no run outlives the sweep"


def test_a_run_worse_than_the_others_is_pruned(sweep):
    """After five others, as Optuna's median does; it would wait for ever."""

    def line(c, path):
        if c["train.batch_size"] < 64:
            return written(c, path, epochs=(0.5, 0.4))
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path / "hang")
        return f"{written(c, path, 'interrupted', epochs=(0.6, 0.7))} && exec cat {path / 'hang'}"

    sizes = [8, 16, 24, 32, 40, 64]
    assert sweep(sizes, line, prune=True) == 0
    row = sweep.record()["rows"][-1]
    assert (row["status"], row["reason"]) == ("pruned", "val_loss 0.7000 after epoch 2")
    assert re.search(r"\| 64 +\| pruned ", (sweep.path / "sweep.md").read_text())
    assert sweep(sizes, line, prune=True) == 0 and sweep.starts(64) == 1, "it is not begun again"
    assert sweep(sizes, written) == 0 and sweep.starts(64) == 2, "unless it is to be completed"


def test_the_study_goes_on_until_there_are_so_many_trials(sweep):
    assert sweep([32, 64], written, trials=2, sampler="random") == 0
    assert sweep([32, 64], written, trials=8, sampler="random", parallel=2, cores=sorted(os.sched_getaffinity(0))) == 0
    assert (sweep.starts(32), sweep.starts(64)) == (1, 1), "the same values are the same run"
    assert [row["status"] for row in sweep.record()["rows"]] == ["completed"] * 2


def test_processes_share_a_sweep(tmp_path):
    """Each is in a run until the other one is, too."""
    path = tmp_path / "sweep"

    def line(c, path):
        i = [8, 16, 32, 64].index(c["train.batch_size"])
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path / f"meet{i // 2}")
        knock = ("read word <", "echo here >")[i % 2]
        return f"{knock} {path}/meet{i // 2} && {written(c, path)}"

    codes = []
    both = [threading.Thread(target=lambda: codes.append(made(path, [8, 16, 32, 64], line).run())) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert codes == [0, 0]
    assert [(path / f"train.batch_size={size}/starts").read_text() for size in (8, 16, 32, 64)] == ["once more\n"] * 4


def test_what_a_dead_process_has_left_is_done(sweep):
    ends = lambda c, path: "exit 1" if c["train.batch_size"] == 64 else written(c, path)
    assert sweep([32, 64], ends) == 1
    backend = optuna.storages.journal.JournalFileBackend(str(sweep.path / "study.journal"))
    study = runner.Search({"train.batch_size": [32, 64]}, BASE).study(optuna.storages.JournalStorage(backend))
    study.enqueue_trial(values := {"train.batch_size": 64}, user_attrs={"values": values})
    study.ask()
    with open(sweep.path / "study.journal") as alive:
        fcntl.flock(alive, fcntl.LOCK_SH)
        assert sweep([32, 64], written) == 0
    assert [row["status"] for row in sweep.record()["rows"]] == ["completed", "running"]
    assert sweep.record()["status"] == "running"
    assert sweep([32, 64], written) == 0
    assert (sweep.record()["status"], sweep.starts(32), sweep.starts(64)) == ("completed", 1, 1)


def test_a_run_whose_folder_is_removed_is_done_again(sweep):
    assert sweep([32, 64], written) == 0
    (sweep.path / "train.batch_size=32").rename(sweep.path / "old")
    assert sweep([32, 64], written) == 0 and (sweep.starts(32), sweep.starts(64)) == (1, 1)


def test_which_is_best():
    row = lambda name, **evaluation: results.SweepRow(name, {}, name, "", evaluation=evaluation)
    rows = [row("a", loss=0.3, accuracy=0.5), row("b"), row("c", loss=0.2, accuracy=0.4)]
    order = lambda asked: [r.name for r in results.ranked(rows, results.metric_of(rows, asked))]
    assert (order(""), order("loss"), order("max loss")) == (["a", "c"], ["c", "a"], ["a", "c"])
    assert results.metric_of([rows[1]], "") is None and results.ranked(rows, None) == []


def test_losses_of_different_kinds_are_not_compared():
    """An absolute error of 0.5 is no worse than a squared one of 0.3."""
    values = [{"train.loss": loss} for loss in ("mean_absolute_error", "mean_squared_error")]
    row = lambda i, **evaluation: results.SweepRow(f"{i}", values[i], "", "", evaluation=evaluation)
    only, more = [row(0, loss=0.5), row(1, loss=0.3)], [row(0, loss=0.5, mae=0.5), row(1, loss=0.3, mae=0.6)]
    assert results.metric_of(only, "") is None
    assert results.closing(only, None) == [
        "No run is called the best: with another train.loss a loss is another quantity."
    ]
    assert [r.name for r in results.ranked(more, results.metric_of(more, ""))] == ["0", "1"]
    unclear = [row(0, loss=0.5, gain=1.0), row(1, loss=0.3, gain=2.0)]
    assert results.metric_of(unclear, "") is None and results.metric_of(unclear, "max gain") == ("gain", 1)
    assert results.metric_of(only, "loss") == ("loss", -1), "who asks for it gets it"


BAD = [
    (["--over="], "--over says which fields to change"),
    (["--over=seed=1,2", "--parallel=0"], "flag --parallel=0: 0 is not a positive integer"),
    (["--over=seed=1,2", "--strategy=horovod"], "--strategy=horovod needs several processes"),
    (["--over=seed=1,2", "--parallel=2", "--strategy=tpu"], "a TPU is used as a whole"),
    (["--over=seed=1,2", "--config.seed=3"], "--config.seed=3 and --over both say what seed is: give one"),
    (["--over=seed=1,2", "--parallel=4000"], "--parallel=4000 runs need devices of their own, found"),
    (["--over=seed=1,2", "--workdir=."], "--workdir=. holds no sweep but strange: choose another folder"),
    (["--over=seed=1,2", "--resume=never"], "unknown flag --resume"),
    (["--over=seed=1,2", "--trials=-1"], "flag --trials=-1: -1 is not a non-negative integer"),
    (["--over=seed=1,2", "--trials=3", "--sampler=grid"], "--sampler=grid runs all combinations"),
    (["--over=seed=1,2", "--sampler=tpe"], "--sampler=random and tpe need --trials=20, say"),
    (["--over=train.label_smoothing=0,0.1", "--prune"], "--over changes train.label_smoothing, so losses cannot be"),
]


def test_without_optuna(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nreal = u.find_spec\n"
        "u.find_spec = lambda n, p=None: real(n, p) if n != 'optuna' else None"
    )
    table = [
        (["--over=seed=1,2"], "a sweep needs the package optuna, which is not installed: pip install 'tfdist[sweep]'"),
        (["--over=sead=1,2"], "unknown config field --config.sead: did you mean 'seed'"),
    ]
    many_commands.refuses("tfdist.sweep", table, tmp_path, str(tmp_path))


def test_flags_that_are_refused(tmp_path):
    (tmp_path / "strange").write_text("")
    many_commands.refuses("tfdist.sweep", BAD, tmp_path)


def test_a_real_run(run, tmp_path, tfds_dir):
    """The commands are those of `tfdist.train`."""
    base = ["--config=digits_mlp", "--config.train.epochs=0", "--config.train.steps=9", "--strategy=default"]
    asked = [*base, "--over=optimizer.learning_rate=0.01; model.options='units=16','units=8'"]
    shown = run("tfdist.sweep", *asked, "--dry_run").stdout.splitlines()
    done = run("tfdist.sweep", *asked, TFDS_DATA_DIR=str(tfds_dir))
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/sweep-digits_mlp"
    first, row = json.loads((folder / "sweep.json").read_text())["rows"]
    assert (row["status"], row["updates"]) == ("completed", 9) and row["evaluation"]["accuracy"] > 0
    assert shown == [f"# {first['name']}", first["command"], f"# {row['name']}", row["command"]]
    assert "sweep.html" in done.stdout and "report.html" in (folder / "sweep.html").read_text()
    experiment = json.loads((tmp_path / row["folder"] / "experiment.json").read_text())
    assert (experiment["model"]["options"], experiment["train"]["steps"]) == ("units=8", 9)


@pytest.mark.whole
def test_real_runs_of_sampled_values(run, tmp_path):
    base = ["--config=digits_mlp", "--config.train.epochs=2", "--strategy=default", "--trials=2", "--prune"]
    asked = [*base, "--over=optimizer.learning_rate=log:1e-3:1e-1", "--metric=accuracy"]
    assert run("tfdist.sweep", *asked, "--dry_run").returncode == 2
    done = run("tfdist.sweep", *asked)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "runs/sweep-digits_mlp/sweep.json").read_text())["rows"]
    assert all(row["status"] == "completed" and row["evaluation"]["accuracy"] > 0 for row in rows) and len(rows) == 2
    assert not done.stderr, "Optuna says nothing of its own"
