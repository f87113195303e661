"""Run folders that somebody has tampered with: resumed, evaluated and reported, or refused in one line.

Each file may hold any bytes, be cut off, hold JSON of another shape, be another run's, a pipe, a folder, a link to
itself, or as long as all disks of the world; checksums may have been made anew to fit.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import tempfile

import keras
import pytest
from conftest import REPOSITORY
from hypothesis import event, given
from hypothesis import strategies as st
from support import adversary

from tfdist import config
from tfdist.checkpoints import files, integrity, resume, training_run
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.config import schedule
from tfdist.config.runtime_options import ResumeOptions
from tfdist.data import spec_file
from tfdist.doctor import checkpoints as doctor
from tfdist.errors import TrainingError, UserError, shown
from tfdist.inference import trained_model
from tfdist.monitoring.recorder import Recorder
from tfdist.monitoring.report import page

OLD = REPOSITORY / "tests/checkpoints/run_folder_0.1.0"
FILES = {
    name: sorted(str(path.relative_to(OLD / name)) for path in (OLD / name).rglob("*") if path.is_file())
    for name in ("completed", "interrupted")
}
MISSING = ["experiment.mark", "accumulate.json", ".lock", "model.keras", "checkpoints", "checkpoints/9", "tensorboard"]
"""Names that an adversary may add."""


@st.composite
def changed_json(draw, path):
    """The JSON of a file with one place in it altered."""
    try:
        content = json.loads((OLD / path).read_bytes())
        assert isinstance(content, dict)
    except (ValueError, AssertionError):  # JSON lines, or none at all
        return json.dumps(draw(adversary.values())).encode()
    holders = [content]
    for holder in holders:
        inner = holder.values() if isinstance(holder, dict) else holder
        holders += [value for value in inner if isinstance(value, dict | list) and value]
    holder = draw(st.sampled_from(holders))
    key = draw(st.sampled_from(list(holder) if isinstance(holder, dict) else list(range(len(holder)))))
    if draw(st.integers(0, 4)):
        holder[key] = draw(adversary.values())
    else:
        del holder[key]
    return json.dumps(content).encode()


@st.composite
def tamperings(draw):
    """Which run, and what is put in the place of some of its files: bytes, or the name of something else."""
    run = draw(st.sampled_from(sorted(FILES)))
    other = {"completed": "interrupted", "interrupted": "completed"}[run]
    changes = {}
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from([*FILES[run], *FILES[run], *MISSING]))
        there = (OLD / run / name).read_bytes() if name in FILES[run] else b""
        how = [
            st.binary(max_size=100),
            st.integers(0, len(there)).map(lambda at, there=there: there[:at]),
            st.integers(0, max(len(there) - 1, 0)).map(lambda at, t=there: t[:at] + bytes([255]) + t[at + 1 :]),
            adversary.values().map(lambda value: json.dumps(value).encode()),
            st.sampled_from(["pipe", "folder", "link", "endless", "missing"]),
            st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b'"' + b"x" * 10**6, b"\n" * 10**5, b"1" * 5000]),
        ]
        if name in FILES[run]:
            how += [changed_json(f"{run}/{name}")] * 3
        if name in FILES[other]:
            how.append(st.just((OLD / other / name).read_bytes()))
        changes[name] = draw(st.one_of(how))
    return run, changes, draw(st.booleans())


@contextlib.contextmanager
def tampered(run, changes, forge):
    with tempfile.TemporaryDirectory() as home:
        folder = pathlib.Path(shutil.copytree(OLD / run, f"{home}/run"))
        for name, content in changes.items():
            path = folder / name
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
            if not path.parent.is_dir():
                continue  # an earlier change has made something else of it
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif content == "pipe":
                os.mkfifo(path)
            elif content == "folder":
                path.mkdir()
            elif content == "link":
                path.symlink_to(path.name)
            elif content == "endless":
                with open(path, "wb") as file:
                    file.truncate(1 << 42)
        if forge:
            for manifest in folder.glob("checkpoints/*/manifest.json"):
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    forged(manifest)
        yield folder


def forged(manifest):
    """Makes the checksums fit what is there."""
    if not manifest.is_file() or manifest.stat().st_size > 10**6:
        return
    content = json.loads(manifest.read_bytes())
    for name, about in content["files"].items():
        path = manifest.parent / name
        if path.is_file() and path.stat().st_size < 10**6:
            data = path.read_bytes()
            about |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write_bytes(files._manifest_bytes(content["files"], content["experiment"], content["format"]))


def refused(work, *arguments):
    """Does it; it may end in one line."""
    try:
        work(*arguments)
    except (UserError, TrainingError) as error:
        adversary.is_one_line(shown(error))
        event("refused")


def readers(folder):
    """All that reads a run folder, in this process, but for the model and the tensors."""
    asked = trained_model.ModelRequest(str(folder), "", "", config.Experiment(), {})
    refused(trained_model.read_experiment, asked)
    with contextlib.suppress(UserError):
        for path in files.newest_first(folder / "checkpoints"):
            refused(resume.load, path, files.Disk())
    with contextlib.suppress(UserError):
        for finding in doctor.examine(folder / "checkpoints"):
            adversary.is_one_line(shown(finding.problem))
    doctor.newest_size(folder / "checkpoints")
    refused(resume.continues, RunFolder(str(folder)), ResumeOptions(), 0, False)
    fields = config.flat(config.Experiment())
    refused(lambda: resume.choose(folder / "checkpoints", {}, fields, True))
    refused(spec_file.read, folder)
    run = RunFolder(str(folder))
    refused(run.could_be_created)
    refused(run.create)
    assert run.completed in (True, False)
    run.earlier()
    assert resume.read_accumulate(run) >= 1
    refused(run.cut, "history.jsonl", lambda line: True)
    refused(run.append, "history.jsonl", {"a": 1})
    run.release()
    page.render(folder)
    for path in folder.glob("checkpoints/[0-9]*"):
        refused(go_on, path)


def go_on(path):
    """Gives the callback that records a run its state, which is then written and reported."""
    try:
        state = files.read_state(path)
    except files.DamagedError:
        return
    recorder = Recorder(RunFolder(str(path.parent.parent)), schedule.make(config.Experiment(), 1000, 1))
    training_run.restore_callbacks(keras.callbacks.CallbackList([recorder]), state["callbacks"])
    json.dumps(recorder.get_state())
    recorder.segments.record(recorder.updates, "completed")


def read_all(tampering):
    with tampered(*tampering) as folder:
        readers(folder)


test_some_folders, test_any_folder = adversary.few_and_many(4, 1500, read_all, tampering=tamperings())

# -- values of a finished run in which one bit is another ------------------------

VALUED = ("experiment.json", "data.json", "result.json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with the checksums of this version, and the state of its newest checkpoint."""
    folder = pathlib.Path(shutil.copytree(OLD / "completed", tmp_path_factory.mktemp("finished") / "run"))
    result = json.loads((folder / "result.json").read_bytes())
    listed = {name: files.checksum(folder / name) for name in VALUED[:2]}
    (folder / "result.json").write_text(json.dumps(integrity.sealed(result | {"files": listed}), indent=2))
    state = files.read_state(files.newest_first(folder / "checkpoints")[0])
    return folder, state | {"data_sha256": spec_file.digest(spec_file.read(folder))}


def values(folder, state):
    """What later commands take from a folder, by way of `model.keras` or of a checkpoint."""
    asked = trained_model.ModelRequest(str(folder), "", "latest" if state else "", config.Experiment(), {})
    fields = config.flat(dataclasses.asdict(trained_model.read_experiment(asked)))
    if state:
        integrity.check_state(folder, state, "checkpoint")
        harmless = {name for name in fields if name.startswith(resume.HARMLESS)}
        return {name: fields[name] for name in fields.keys() - harmless}, spec_file.read(folder), None
    return fields, spec_file.read(folder), integrity.read_result(folder)


def flipped_bit(finished, name, place, bit, by_checkpoint):
    folder, state = finished
    state = state if by_checkpoint else None
    whole, expected = (folder / name).read_bytes(), values(folder, state)
    raw = bytearray(whole)
    raw[place % len(raw)] ^= 1 << bit
    try:
        (folder / name).write_bytes(raw)
        assert values(folder, state) == expected
        event("the same values")
    except UserError as error:
        adversary.is_one_line(shown(error))
        event("refused")
    finally:
        (folder / name).write_bytes(whole)


test_some_bits_change_no_value, test_no_bit_changes_a_value = adversary.few_and_many(
    30, 1500, flipped_bit, name=st.sampled_from(VALUED), place=st.integers(0, 10**6), bit=st.integers(0, 7),
    by_checkpoint=st.booleans(),
)  # fmt: skip


@pytest.mark.whole
@adversary.examples(40)
@given(tampering=tamperings(), command=st.sampled_from(["resume", "evaluate", "predict", "doctor"]))
def test_any_folder_with_the_commands(tfds_dir, tampering, command):
    """From the outside, and nothing is written beside the folder."""
    with tampered(*tampering) as folder:
        same = config.flat(json.loads((OLD / "interrupted/experiment.json").read_bytes()))
        words = {
            "resume": ["tfdist.train", "--progress=none", "--notensorboard", *(f"--{k}={v}" for k, v in same.items())],
            "evaluate": ["tfdist.evaluate"],
            "predict": ["tfdist.predict", "--output=run/out.csv"],
            "doctor": ["tfdist.doctor", "--time_limit=20"],
        }[command]
        run = adversary.run(words[0], ["--workdir=run", *words[1:]], folder.parent, tfds_dir)
        if command == "doctor":  # which lists what it finds, and ends with 1 for that
            assert run.returncode in (0, 1, 2) and "Traceback" not in run.stdout + run.stderr, run.stderr
        else:
            adversary.judged(run)
        beside = {path.name for path in folder.parent.iterdir()}
        assert all(name == "run" or name.startswith("run.") for name in beside), beside
