"""`python -m tfdist.sweep`: what is asked for, how the runs are made, and what is shown of them."""

import dataclasses
import json
import os
import re
import shlex

import pytest
from conftest import REPOSITORY
from support import many_commands

from tfdist import config
from tfdist.checkpoints import integrity
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.compare import trial
from tfdist.errors import UserError
from tfdist.sweep import grid, results, runner

BASE = config.Experiment()


@pytest.mark.parametrize(
    "text, fields",
    [
        ("optimizer.learning_rate=1e-3,1", {"optimizer.learning_rate": [0.001, 1.0]}),
        ("train.batch_size=32, 64;seed=1 ; ", {"train.batch_size": [32, 64], "seed": [1]}),
        ("config.data.shuffle=true,False", {"data.shuffle": [True, False]}),
        ("data.augment=flip,'flip, erase(0.2)',", {"data.augment": ["flip", "flip, erase(0.2)", ""]}),
        ("data.augment=crop(4, 2),color(0.1); seed=3", {"data.augment": ["crop(4, 2)", "color(0.1)"], "seed": [3]}),
        ("data.train_split='train[:90%]',train", {"data.train_split": ["train[:90%]", "train"]}),
    ],
)
def test_what_is_asked_for(text, fields):
    assert grid.parse(text, BASE) == fields
    for name, values in fields.items():
        assert all(type(v) is type(w) for v, w in zip(values, grid.parse(text, BASE)[name]))


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "--over says which fields to change, and is empty"),
        ("train.batch_size", "is not understood at 'train.batch_size': write it like optimizer.learning_rate="),
        ("train.batch=3", "there is no field 'train.batch': did you mean 'batch_size'"),
        ("train=3", "train is a group of fields: name one of them"),
        ("name=a,b", "says only what runs are called"),
        ("seed=1,one", "seed must be a whole number, got 'one'"),
        ("seed=1,1", "gives seed the value 1 twice"),
        ("seed=1; seed=2", "names seed twice"),
        ("data.shuffle=maybe", "data.shuffle must be True or False, got 'maybe'"),
        ("optimizer.learning_rate=fast", "must be a number, got 'fast'"),
        ("data.augment=crop(4", r"\) is missing in"),
        ("data.augment='flip", "' is missing in"),
        ("optimizer.learning_rate=0.1,-1", "with optimizer.learning_rate=-1.0: optimizer.learning_rate must be posit"),
        ("seed=" + ",".join(map(str, range(1001))), "more than 1000 experiments"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        grid.combinations(grid.parse(text, BASE), BASE)


def test_all_combinations():
    made = grid.combinations(grid.parse("train.batch_size=32,64; optimizer.learning_rate=1e-3,1e-2", BASE), BASE)
    assert [tuple(c.values.values()) for c in made] == [(32, 0.001), (32, 0.01), (64, 0.001), (64, 0.01)]
    assert [c.experiment.train.batch_size for c in made] == [32, 32, 64, 64]
    assert made[0].flags() == ["--config.train.batch_size=32", "--config.optimizer.learning_rate=0.001"]
    assert (BASE.train.batch_size, BASE.optimizer.learning_rate) == (48, 0.05), "the base stays as it is"
    folders = [c.folder for c in grid.combinations(grid.parse("data.augment=flip(),'flip( )'", BASE), BASE)]
    assert len(set(folders)) == 2 and all(re.fullmatch(r"[\w.+=-]+", name) for name in folders)
    assert len(grid.Combination({"data.options": "x" * 500}, BASE).folder) < 200


def test_places_have_nothing_in_common():
    assert runner.places(1, ("0", "1"), (0, 1)) == [runner.DevicePlace()]
    two = runner.places(2, ("0", "3", "4", "5", "7"), (0, 1))
    assert [p.gpus for p in two] == [("0", "3"), ("4", "5")] and two[1].environ()["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert [p.cores for p in runner.places(3, (), (0, 2, 4, 6))] == [(0,), (2,), (4,)]
    with pytest.raises(UserError, match="--parallel=3 runs need devices of their own, found 2 GPUs"):
        runner.places(3, ("0", "1"), (0, 1, 2, 3))


def written(c, folder, status="completed", **result):
    """A line for a shell that leaves what a run does."""
    result = {"status": status, "evaluation": {"loss": 1.0 / c.experiment.train.batch_size}, **result}
    there = folder.path / c.folder
    parts = {"experiment.json": dataclasses.asdict(c.experiment), "result.json": result}
    lines = [f"printf %s {shlex.quote(json.dumps(text))} > {there}/{name}" for name, text in parts.items()]
    return " && ".join([f"mkdir -p {there}", f"echo once more >> {there}/starts", *lines])


@pytest.fixture
def sweep(tmp_path):
    """Makes a sweep over batch sizes whose runs are lines for a shell."""

    def make(values, line, parallel=1, metric="", cores=(0,)):
        combinations = grid.combinations({"train.batch_size": values}, BASE)
        folder = RunFolder(str(tmp_path / "sweep"))
        folder.create()
        trials = [
            trial.Trial(c.name, "auto", 1, None, ("sh", "-c", line(c, folder)), folder.path / runner.LOGS / c.folder)
            for c in combinations
        ]
        try:
            return runner.Sweep("it", trials, combinations, folder, metric, runner.places(parallel, (), cores)).run()
        finally:
            folder.release()

    make.path = tmp_path / "sweep"
    return make


def test_finished_runs_are_not_repeated(sweep, capsys):
    """Others are: one has failed, one was refused, one is new; and the table has all of them."""
    ends = {64: "echo 'tfdist: failed: no luck' >&2; exit 1", 128: "echo 'tfdist: error: too large' >&2; exit 2"}
    line = lambda c, folder: ends.get(c.experiment.train.batch_size) or written(c, folder)
    assert sweep([32, 64, 128], line) == 1
    record = json.loads((sweep.path / "sweep.json").read_text())
    told = [("completed", ""), ("failed", "no luck"), ("refused", "too large")]
    assert [(row["status"], row["reason"]) for row in record["rows"]] == told
    assert "train.batch_size=64 failed: no luck." in capsys.readouterr().out
    assert sweep([32, 64, 16], written) == 0
    starts = lambda size: (sweep.path / f"train.batch_size={size}/starts").read_text().count("once")
    assert [starts(size) for size in (32, 64, 16)] == [1, 1, 1]
    out = capsys.readouterr().out
    assert "Best by loss: train.batch_size=64 (0.0156)." in out
    for name in ("sweep.md", "sweep.html"):
        assert (sweep.path / name).read_text().count("★") == 1
    assert "| 64 | ★ completed | 0.0156 |" in (sweep.path / "sweep.md").read_text()


def test_another_experiment_in_the_folder_is_refused(sweep, monkeypatch):
    assert sweep([32], written) == 0
    monkeypatch.setattr(BASE, "seed", 7)
    with pytest.raises(
        UserError, match=r"holds a run with --config.seed=0, and this sweep has 7: choose another --wor"
    ):
        sweep([32], written)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_finished_run_whose_result_was_changed_is_refused(sweep):
    """It would be ranked by a measure that it has not had."""
    listed = integrity.sealed({"status": "completed", "evaluation": {"loss": 0.5}})
    assert sweep([32], lambda c, folder: written(c, folder, **listed)) == 0
    path = sweep.path / "train.batch_size=32/result.json"
    path.write_text(path.read_text().replace("0.5", "0.1"))
    with pytest.raises(
        UserError, match=r"is damaged: result.json has changed: its checksum is wrong: copy it back, or "
    ):
        sweep([32], written)


def test_side_by_side_on_cores_of_their_own(sweep):
    """Each waits until the other is there."""
    cores = sorted(os.sched_getaffinity(0))[:2]

    def line(c, folder):
        meet = folder.path / "meet"
        if not meet.exists():
            os.mkfifo(meet)
        knock = f"echo here > {meet}" if c.experiment.train.batch_size == 32 else f"read word < {meet}"
        affinity = f"grep Cpus_allowed_list /proc/self/status > {folder.path / c.folder}/cores"
        return f"{written(c, folder)} && {knock} && {affinity}"

    assert sweep([32, 64], line, parallel=2, cores=cores) == 0
    used = {(sweep.path / f"train.batch_size={size}/cores").read_text().split()[1] for size in (32, 64)}
    assert used == {str(core) for core in cores}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_an_end_on_the_way_ends_all_runs(sweep):
    """The first run to end has not measured what is asked for; the other one would wait for ever."""

    def line(c, folder):
        hang, ready = folder.path / "hang", folder.path / "ready"
        if not hang.exists():
            os.mkfifo(hang)
            os.mkfifo(ready)
        if c.experiment.train.batch_size == 32:
            return f"echo $$ > {folder.path}/process; echo here > {ready}; exec cat {hang}"
        return f"read word < {ready}; {written(c, folder)}"

    with pytest.raises(UserError, match="--metric=f1: the runs measure loss: choose one of them"):
        sweep([32, 64, 16], line, parallel=2, metric="f1", cores=sorted(os.sched_getaffinity(0))[:2])
    record = json.loads((sweep.path / "sweep.json").read_text())
    assert record["status"] == "interrupted" and record["rows"][1]["status"] == "completed"
    number = (sweep.path / "process").read_text().strip()
    assert not os.path.exists(f"/proc/{number}"), "no run outlives the sweep"


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
    assert results.closing(only, None, None) == [
        "No run is called the best: with another train.loss a loss is another quantity."
    ]
    assert [r.name for r in results.ranked(more, results.metric_of(more, ""))] == ["0", "1"]
    unclear = [row(0, loss=0.5, gain=1.0), row(1, loss=0.3, gain=2.0)]
    assert results.metric_of(unclear, "") is None and results.metric_of(unclear, "max gain") == ("gain", 1)
    assert results.metric_of(only, "loss") == ("loss", -1), "who asks for it gets it"


BAD = [
    (["--over="], "--over says which fields to change"),
    (["--over=seed=1,2", "--parallel=0"], "--parallel must be at least 1, got 0"),
    (["--over=seed=1,2", "--strategy=horovod"], "--strategy=horovod needs several processes"),
    (["--over=seed=1,2", "--parallel=2", "--strategy=tpu"], "a TPU is used as a whole"),
    (["--over=seed=1,2", "--config.seed=3"], "--config.seed=3 and --over both say what seed is: give one"),
    (["--over=seed=1,2", "--parallel=4000"], "--parallel=4000 runs need devices of their own, found"),
    (["--over=seed=1,2", "--workdir=."], "--workdir=. holds no sweep but strange: choose another folder"),
    (["--over=seed=1,2", "--resume=never"], "Unknown command line flag 'resume'"),
]


def test_flags_that_are_refused(tmp_path):
    (tmp_path / "strange").write_text("")
    ends = many_commands.run("tfdist.sweep", [flags for flags, _ in BAD], tmp_path, {}, str(REPOSITORY))
    for done, (_, message) in zip(ends, BAD, strict=True):
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done


def test_a_real_run(run, tmp_path, tfds_dir):
    """The commands are those of `tfdist.train`."""
    base = ["--config=digits_mlp", "--config.train.epochs=0", "--config.train.steps=9", "--strategy=default"]
    asked = [*base, "--over=optimizer.learning_rate=0.01; model.options='units=8'"]
    shown = run("tfdist.sweep", *asked, "--dry_run").stdout.splitlines()
    done = run("tfdist.sweep", *asked, TFDS_DATA_DIR=str(tfds_dir))
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/sweep-digits_mlp"
    (row,) = json.loads((folder / "sweep.json").read_text())["rows"]
    assert (row["status"], row["updates"]) == ("completed", 9) and row["evaluation"]["accuracy"] > 0
    assert shown == [f"# {row['name']}", row["command"]]
    assert "sweep.html" in done.stdout and "report.html" in (folder / "sweep.html").read_text()
    experiment = json.loads((tmp_path / row["folder"] / "experiment.json").read_text())
    assert (experiment["model"]["options"], experiment["train"]["steps"]) == ("units=8", 9)
