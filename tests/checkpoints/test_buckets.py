"""Checkpoints and run folders in a bucket, on a real S3 server of this machine, with faults on the way there.

`gs://` is tried with a server that answers as Google's does, with the same faults.
"""

import asyncio
import functools
import json
import os
import pathlib
import signal
import types

import keras
import numpy as np
import pytest
from support import bucket_server, training_cases
from support.bucket_server import Broken
from support.covering import first

import tfdist
from tfdist.checkpoints import bucket_folder
from tfdist.checkpoints import files as files_lib
from tfdist.checkpoints.folder_lock import LOCK
from tfdist.cluster import env_vars
from tfdist.config import buckets
from tfdist.config.buckets import Bucket, BucketError, MissingError
from tfdist.errors import Interrupted, TrainingError, UserError
from tfdist.monitoring.recorder import fingerprint

ATTEMPTS = 4
EPOCHS, EXAMPLES, BATCH = 3, 60, 16


@pytest.fixture(scope="module")
def server():
    with bucket_server.serving() as serving:
        yield serving


@pytest.fixture(autouse=True)
def quick(server, monkeypatch, tmp_path):
    """Short waits, copies in a folder of the test, and a server that answers."""
    monkeypatch.setattr(buckets, "WAITS_S", (0.01,) * (ATTEMPTS - 1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    server.fault = lambda method, key: None
    yield
    server.fault = lambda method, key: None


@pytest.fixture(scope="module")
def google():
    with bucket_server.serving_google() as serving:
        yield serving


@pytest.fixture(params=["s3", "gs"])
def faulty(request, monkeypatch):
    """A server whose `fault` may be set."""
    if request.param == "s3":
        served = request.getfixturevalue("server")
        monkeypatch.setattr(served, "attempts", ATTEMPTS, raising=False)
        yield served
        return
    served = request.getfixturevalue("google")
    waits = types.SimpleNamespace(sleep=lambda seconds: asyncio.sleep(0.01))  # of gcsfs, else half a minute
    monkeypatch.setattr("gcsfs.retry.asyncio", waits)
    yield served
    served.fault = lambda method, key: None


@pytest.fixture
def place(faulty, tmp_path):
    """A folder in the bucket of that server."""
    return f"{faulty.scheme}://{bucket_server.BUCKET}/{tmp_path.name}/run"


@pytest.fixture(params=first(2, ["s3", "gs", "memory"]))
def url(request, tmp_path):
    if request.param == "gs":
        request.getfixturevalue("google")
    return f"{request.param}://{bucket_server.BUCKET}/{tmp_path.name}/run"


@pytest.fixture
def s3(tmp_path):
    return f"s3://{bucket_server.BUCKET}/{tmp_path.name}/run"


# -- objects ------------------------------------------------------------------


def test_objects_are_written_listed_copied_and_deleted(url, tmp_path):
    bucket, file = Bucket(url + "/"), tmp_path / "file"
    assert bucket.listing() == {}
    file.write_bytes(b"one")
    bucket.put(file, "a/one")
    bucket.put_bytes(b"2", "two")
    bucket.beside("run1").put_bytes(b"of another folder", "x")
    assert {name: entry.size for name, entry in bucket.listing().items()} == {"a/one": 3, "two": 1}
    assert list(bucket.listing("a")) == ["a/one"]
    before = bucket.listing()["two"].tag
    bucket.put_bytes(b"3", "two")
    assert bucket.listing()["two"].tag != before
    bucket.get("a/one", tmp_path / "b" / "got")
    assert (tmp_path / "b" / "got").read_bytes() == b"one"
    with pytest.raises(MissingError, match=r"run/three: (no such object|The specified key does not exist)"):
        bucket.get("three", tmp_path / "three")
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith("three")] == []
    with pytest.raises(FileNotFoundError):
        bucket.put(tmp_path / "three", "three")
    bucket.move(bucket.listing(), bucket.beside("run.1"))
    assert bucket.listing() == {}
    assert bucket.beside("run.1").get_bytes("two") == b"3"
    bucket.beside("run.1").delete(["a/one", "never there"])
    assert list(bucket.beside("run.1").listing()) == ["two"]


@pytest.mark.parametrize("kind", first(2, ["503", "hang up", "500"]))
def test_what_fails_is_tried_again_and_not_for_ever(kind, place, faulty):
    bucket = Bucket(place)
    faulty.fault = Broken(kind, ("PUT", "GET"), faulty.attempts - 1)
    bucket.put_bytes(b"content", "x")
    assert faulty.fault.hits == faulty.attempts - 1
    faulty.fault = Broken(kind, ("PUT", "GET"), faulty.attempts - 1)
    assert bucket.get_bytes("x") == b"content"
    faulty.fault = Broken(kind, ("PUT", "GET"))
    for ask in (lambda: bucket.put_bytes(b"other", "x"), lambda: bucket.get_bytes("x"), bucket.listing):
        faulty.fault.hits = 0
        with pytest.raises(BucketError) as error:
            ask()
        assert not isinstance(error.value, MissingError)
        assert place in str(error.value) and "\n" not in str(error.value) and "secret" not in str(error.value)
        # aiohttp, under gcsfs, asks once more by itself where a connection ends without an answer.
        assert faulty.fault.hits in (faulty.attempts, 2 * faulty.attempts * (kind == "hang up"))
    faulty.fault = lambda method, key: None
    assert bucket.get_bytes("x") == b"content"


def test_half_an_answer_is_none(place, faulty, tmp_path):
    bucket, content = Bucket(place), np.random.default_rng(1).bytes(300_000)
    bucket.put_bytes(content, "x")
    faulty.fault = Broken("half", ("GET",), 2)
    bucket.get("x", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == content and faulty.fault.hits == 2


def test_what_is_not_allowed_is_asked_for_once(place, faulty):
    faulty.fault = Broken("403", ("PUT",))
    with pytest.raises(BucketError, match="on purpose"):
        Bucket(place).put_bytes(b"", "x")
    assert faulty.fault.hits == 1


def test_a_full_disk_is_not_the_buckets_fault(place, faulty):
    Bucket(place).put_bytes(b"1", "x")
    with pytest.raises(OSError) as error:
        Bucket(place).get("x", pathlib.Path("/proc/nothing/x"))
    assert not isinstance(error.value, BucketError)


# -- tfdist.fit ---------------------------------------------------------------


def train(distribution, checkpoints=None, stop=None):
    keras.utils.set_random_seed(1)
    with distribution.scope():
        model = training_cases.compiled(training_cases.dense())
    more = {} if stop is None else {"should_stop": training_cases.StopAt(stop)}
    try:
        history = tfdist.fit(
            model, *training_cases.images(EXAMPLES), batch_size=BATCH, epochs=EPOCHS, distribution=distribution,
            steps_per_call=1, checkpoints=checkpoints, verbose=0, check_agreement="off", **more,
        ).history  # fmt: skip
    except Interrupted:
        return None
    return fingerprint(model)[0], history


@functools.cache
def undisturbed(distribution):
    return train(distribution)


def kept(url, **options):
    return tfdist.Checkpoints(url, **({"every": "1 step", "keep": 2} | options))


def names(url):
    """Names of the whole checkpoints in the bucket."""
    return sorted(n.partition("/")[0] for n in Bucket(url).listing() if n.endswith("manifest.json"))


@pytest.mark.parametrize("faulty", ["s3", pytest.param("gs", marks=pytest.mark.whole)], indirect=True)
@pytest.mark.parametrize("replicas", first(0, [1, 2]))
def test_stopped_again_and_again_with_faults_ends_with_the_same_bits(replicas, place, connect, faulty):
    distribution = connect(replicas)
    whole = undisturbed(distribution)
    kinds = {"PUT": ["503", "hang up", "500"], "GET": ["503", "half", "hang up"]}
    count = {"PUT": 0, "GET": 0}

    def every_third(method, key):
        if method not in count:
            return None
        count[method] += 1
        return kinds[method][count[method] // 3 % 3] if count[method] % 3 == 0 else None

    faulty.fault = every_third
    done, stops = None, 0
    while done is None:
        stops += 1
        assert stops < 9
        done = train(distribution, kept(place), stop=5 + stops % 2)
    assert stops > 2  # of which the last one was not
    assert done == whole
    assert min(count.values()) > 10
    assert names(place) == ["11", "12"]  # and older ones are gone
    assert {n.partition("/")[0] for n in Bucket(place).listing()} == {"11", "12", "latest"}
    assert Bucket(place).get_bytes("latest") == b"12\n"


@pytest.mark.parametrize("faulty", ["gs", pytest.param("s3", marks=pytest.mark.whole)], indirect=True)
def test_a_bucket_that_fails_is_as_a_broken_disk(place, connect, faulty, said):
    faulty.fault = Broken("503", ("PUT",), 5 * faulty.attempts)
    checkpoints = kept(place)
    assert train(connect(1), checkpoints) == undisturbed(connect(1))
    warnings = [line for line in said if line.startswith("WARNING")]
    assert len(warnings) == 1, said
    assert "the checkpoint after update 1 could not be written" in warnings[0]
    assert f"training goes on, there is none; look at {place}/1/" in warnings[0]
    assert "checkpoints are written again; 5 before update 6 were not" in said
    assert not checkpoints.failure and checkpoints.saved == 7 and names(place) == ["11", "12"]


@pytest.mark.whole
def test_a_bucket_that_fails_to_the_end_keeps_what_it_has(place, connect, faulty):
    train(connect(1), kept(place))
    faulty.fault = Broken("hang up", ("PUT",))
    checkpoints = kept(place, resume="never")
    assert train(connect(1), checkpoints) == undisturbed(connect(1))
    assert checkpoints.failure.startswith("the checkpoint after update 12 could not be written")
    assert names(place) == ["11", "12"]  # those of the run before


@pytest.mark.whole
def test_a_damaged_one_is_not_resumed_from_and_set_aside_in_the_bucket(place, connect, faulty, said):
    distribution = connect(1)
    assert train(distribution, kept(place, keep=3), stop=5) is None
    newest = max(names(place), key=int)
    flip(Bucket(place), f"{newest}/tensors.data-00000-of-00001")
    checkpoints = kept(place)
    assert train(distribution, checkpoints) == undisturbed(distribution)
    assert checkpoints.resumed_from == int(newest) - 1
    assert any(f"checkpoint {place}/{newest} is not used: tensors" in line for line in said)
    assert f"{place}/{newest} is now unused-{newest}" in said
    assert f"unused-{newest}/manifest.json" in Bucket(place).listing()


@pytest.mark.whole
def test_a_bucket_that_cannot_be_read_stops_the_run(place, connect, faulty):
    """It does not start anew, nor go on from an older checkpoint."""
    distribution = connect(1)
    assert train(distribution, kept(place), stop=5) is None
    faulty.fault = Broken("503", ("GET",), named="tensors")
    with pytest.raises(UserError, match=f"{place} cannot be read"):
        train(distribution, kept(place))
    assert len(names(place)) == 2


# -- checkpoints ----------------------------------------------------------------


def flip(bucket, name):
    """Turns one bit of an object."""
    content = bytearray(bucket.get_bytes(name))
    content[len(content) // 2] ^= 1
    bucket.put_bytes(bytes(content), name)


def save(url, *updates):
    """Writes checkpoints with little in them; returns the folder of the copy and its storage."""
    folder, kept_at = bucket_folder.checkpoints_at(url)
    kept_at.begin()
    for update in updates:
        tensors = lambda prefix, update=update: pathlib.Path(f"{prefix}.data").write_bytes(bytes([update]) * 100)
        files_lib.write(folder, update, {"update": update}, tensors, kept_at.publish)
    return folder, kept_at


def look(url):
    """The copy of another process."""
    folder, kept_at = bucket_folder.checkpoints_at(url)
    kept_at.begin()
    return folder, kept_at


def test_a_checkpoint_counts_when_its_manifest_is_there(place, faulty):
    save(place, 1, 2)
    faulty.fault = lambda method, key: "503" if method == "PUT" and "3/manifest" in key else None
    with pytest.raises(BucketError, match=rf"{place}/3/manifest\.json: .*"):
        save(place, 3)
    faulty.fault = lambda method, key: None
    assert any(n.startswith("3/tensors") for n in Bucket(place).listing())
    folder, kept_at = look(place)
    assert [path.name for path in files_lib.newest_first(folder)] == ["2", "1"]
    assert [path.name for path in (folder / "2").iterdir()] == ["manifest.json"]  # the rest comes when it is needed
    kept_at.fetch(folder / "2")
    assert files_lib.verify(folder / "2") and (folder / "2" / "tensors.data").read_bytes() == bytes([2]) * 100
    again = files_lib.write(folder, 2, {}, lambda prefix: None, kept_at.publish)
    assert again.name == "2.1"  # the one that is there stays whole
    kept_at.prune({"2.1"})
    assert {n.partition("/")[0] for n in Bucket(place).listing()} == {"2.1", "latest"}


def test_a_newer_checkpoint_without_its_manifest_is_named(place, said):
    """The one before it was taken without a word."""
    save(place, 1, 2, 3, 12)
    Bucket(place).delete(["1/manifest.json", "12/manifest.json"])
    folder, _ = look(place)
    assert [path.name for path in files_lib.newest_first(folder)] == ["3", "2"]
    assert said == [f"WARNING: checkpoint {place}/12 is not used: manifest.json, which is uploaded last, is missing"]


def test_damage_in_the_bucket_is_found_and_damage_on_the_way_is_not_kept(place, faulty):
    save(place, 1, 2)
    flip(Bucket(place), "1/tensors.data")
    folder, kept_at = look(place)
    kept_at.fetch(folder / "1")
    with pytest.raises(files_lib.DamagedError, match=r"tensors\.data has changed"):
        files_lib.verify(folder / "1")
    faulty.fault = Broken("flip", ("GET",), 1, named="2/tensors")
    kept_at.fetch(folder / "2")
    assert files_lib.verify(folder / "2") and faulty.fault.hits == 1
    (folder / "2" / "tensors.data").write_bytes(bytes(100))  # a copy that is not what was downloaded
    other = bucket_folder.BucketStorage(folder, Bucket(place))
    other.begin()
    other.fetch(folder / "2")
    assert files_lib.verify(folder / "2")
    moved = files_lib.set_aside(folder / "1")
    other.set_aside(folder / "1", moved)
    assert {n.partition("/")[0] for n in Bucket(place).listing()} == {"2", "unused-1", "latest"}
    assert "unused-1/manifest.json" in Bucket(place).listing()


# -- run folders --------------------------------------------------------------


def folder(url, **options):
    made = bucket_folder.opened(url, True, **options)
    made.create()
    return made


def test_a_run_folder_comes_back_elsewhere(url, monkeypatch, tmp_path):
    first = folder(url)
    first.write("experiment.json", {"name": "x"})
    first.append("history.jsonl", {"epoch": 1})
    (first.path / "tensorboard").mkdir()
    (first.path / "tensorboard" / "events").write_bytes(b"e")
    first.push()
    first.append("history.jsonl", {"epoch": 2})
    first.push()
    there = set(Bucket(url).listing())
    assert there == {".lock", "experiment.json", "history.jsonl", "tensorboard/events"}
    first.release()
    assert set(Bucket(url).listing()) == there - {".lock"}
    assert list(tmp_path.rglob("history.jsonl")) == []  # the copy has gone
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    second = folder(url)
    assert (second.earlier() == {"name": "x"} and second.holds_run is False) or second.holds_run
    assert (second.path / "history.jsonl").read_text() == '{"epoch": 1}\n{"epoch": 2}\n'
    second.remove("history.jsonl")
    assert "history.jsonl" not in Bucket(url).listing()
    second.release()


def test_what_a_killed_process_has_left_does_not_count(s3):
    killed = folder(s3)
    killed.write("experiment.json", {"name": "sent"})
    killed.push()
    killed.write("experiment.json", {"name": "never sent"})
    killed.append("history.jsonl", {"epoch": 1})
    killed.forget()  # as the system does
    again = folder(s3)
    assert again.earlier() == {"name": "sent"} and not (again.path / "history.jsonl").exists()
    again.release()


def test_the_second_run_on_this_machine_is_refused(s3):
    first = folder(s3)
    with pytest.raises(UserError, match=rf"--workdir={s3} is in use by another run \(process \d+ on "):
        folder(s3)
    first.release()
    folder(s3).release()


def test_the_second_run_on_another_machine_ends_the_first(s3, monkeypatch, tmp_path, said):
    first = folder(s3)
    first.write("experiment.json", {"name": "first"})
    first.push()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    second = folder(s3)
    assert any(line.startswith(f"{s3} was last taken by process ") for line in said)
    second.write("experiment.json", {"name": "second"})
    second.push()
    written = tmp_path / "written"
    written.mkdir()
    for name in ("tensors.data", "manifest.json"):
        (written / name).write_text("{}")
    with pytest.raises(BucketError, match=r"another run, process \d+ on elsewhere, has taken it"):
        first.storage.publish(written, "5")
    with pytest.raises(TrainingError, match=f"another run has taken {s3}"):
        first.append("history.jsonl", {})
    with pytest.raises(TrainingError, match="another run has taken it"):
        first.push()
    first.release()
    assert set(Bucket(s3).listing()) == {".lock", "experiment.json"}
    assert json.loads(Bucket(s3).get_bytes("experiment.json"))["name"] == "second"
    second.release()


@pytest.mark.parametrize("ends", ["killed", "failed"])
def test_a_launcher_holds_the_folder_for_one_worker_after_another(ends, s3, monkeypatch, tmp_path):
    launcher = bucket_folder.opened(s3, True)
    launcher.reserve()
    Bucket(s3).put_bytes(b"process 7 on elsewhere\n", LOCK)  # of a run that was killed long ago

    def worker():
        monkeypatch.setenv(env_vars.FOLDER_LOCK, str(launcher.lend()))
        return folder(s3)

    for _ in range(2):
        first = worker()
        first.write("experiment.json", {"name": "first"})
        first.push()
        first.forget() if ends == "killed" else first.release()
        with pytest.raises(UserError, match=rf"--workdir={s3} is in use by another run \(process {os.getpid()} on "):
            folder(s3)
    # A run on another machine, which no lock of this one keeps away, has taken it in between.
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
        elsewhere.setattr("platform.node", lambda: "elsewhere")
        second = folder(s3)
        second.write("experiment.json", {"name": "second"})
        second.push()
    with pytest.raises(UserError, match=rf"{s3} is in use by another run \(process {os.getpid()} on elsewhere\): wait"):
        worker()
    second.push()
    second.release()
    worker().release()
    launcher.release()
    assert LOCK not in Bucket(s3).listing() and not launcher.path.exists()


def test_an_earlier_run_is_set_aside_within_the_bucket(url):
    first = folder(url)
    first.write("experiment.json", {"name": "first"})
    first.write("result.json", {"status": "completed"})
    first.push()
    Bucket(url).put_bytes(b"{}", "checkpoints/5/manifest.json")
    first.release()
    second = folder(url)
    assert second.completed
    assert second.set_aside() == f"{url}.1"
    assert second.set_aside() is None and second.earlier() is None
    second.write("experiment.json", {"name": "second"})
    second.push()
    assert set(Bucket(url + ".1").listing()) == {"experiment.json", "result.json", "checkpoints/5/manifest.json"}
    assert set(Bucket(url).listing()) == {".lock", "experiment.json"}
    second.release()


def test_a_run_whose_setting_aside_fails_is_still_there(place, faulty):
    first = folder(place)
    first.write("result.json", {"status": "completed"})
    first.write("experiment.json", {"name": "first"})
    first.push()
    faulty.fault = Broken("503", ("PUT",), named="run.1/result")
    with pytest.raises(UserError, match=f"the earlier run in --workdir={place} cannot be set aside"):
        first.set_aside()
    faulty.fault = lambda method, key: None
    first.release()
    assert set(Bucket(place).listing()) == {"experiment.json", "result.json"}


def test_a_folder_that_was_deleted_is_made_again(s3, said):
    first = folder(s3)
    first.write("experiment.json", {"name": "first"})
    first.push()
    Bucket(s3).delete(Bucket(s3).listing())
    first.push()
    assert set(Bucket(s3).listing()) == {".lock", "experiment.json"}
    assert any("was deleted while this run went on" in line for line in said)
    first.release()


def test_results_that_cannot_be_brought_there_stay_here(place, faulty):
    first = folder(place)
    faulty.fault = Broken("hang up", ("PUT", "GET"))
    first.write("experiment.json", {"name": "first"})
    with pytest.raises(TrainingError, match=rf"{place}\S* cannot be written .*: the run's files are in|keys") as error:
        first.push()
    assert str(first.path) in str(error.value)
    first.release()
    assert (first.path / "experiment.json").exists()


def test_a_bucket_that_cannot_be_used_is_said_at_once(place, faulty):
    faulty.fault = Broken("403", ("PUT",))
    with pytest.raises(UserError, match=f"--workdir={place} cannot be written .*: check the network, your keys"):
        folder(place)
    faulty.fault = lambda method, key: None
    folder(place).release()  # nothing is locked
    nowhere = place.replace("://bucket", "://nobucket")
    with pytest.raises(UserError, match="bucket does not exist"):
        folder(nowhere)


def test_other_workers_do_not_look(s3, server):
    before = sum(server.requests.values())
    other = bucket_folder.BucketFolder(s3, writes=False, reads=False)
    other.create()
    other.push()
    other.release()
    assert not other.holds_run and sum(server.requests.values()) == before


# -- commands -----------------------------------------------------------------

FLAGS = [
    *("--config.model.name=mlp", "--config.model.options=dropout=0.1", "--config.train.epochs=2"),
    *("--config.checkpoint.every=10 steps", "--threads=1", "--progress=none"),
]


def result(url):
    return json.loads(Bucket(url).get_bytes("result.json"))


@pytest.mark.whole
def test_a_killed_run_goes_on_elsewhere_to_the_same_bits(place, run, faulty, tmp_path):
    assert run("tfdist.train", *FLAGS, "--workdir=local").returncode == 0
    expected = json.loads((tmp_path / "local/result.json").read_text())
    program = run("tfdist.train", *FLAGS, f"--workdir={place}", popen=True, **faulty.environ)

    def kill_at_the_third_checkpoint(method, key):
        if method == "PUT" and key.endswith("/30/manifest.json"):
            program.send_signal(signal.SIGKILL)
            return "hang up"
        return None

    faulty.fault = kill_at_the_third_checkpoint
    assert program.wait(120) == -signal.SIGKILL, program.communicate()
    program.communicate()
    faulty.fault = Broken("503", ("PUT", "GET"), 1)
    elsewhere = {"XDG_CACHE_HOME": str(tmp_path / "elsewhere"), **faulty.environ}
    again = run("tfdist.train", *FLAGS, f"--workdir={place}", **elsewhere)
    assert again.returncode == 0, again.stderr
    assert f"resuming after update 20 from {place}/checkpoints/20\n" in again.stdout
    assert f"results are in {place}/: report.html" in again.stdout
    found = result(place)
    assert found["resumed_from"] == 20
    for name in ("weights_sha256", "history", "evaluation", "updates"):
        assert found[name] == expected[name], name
    assert "secret" not in again.stdout + again.stderr
    there = Bucket(place).listing()
    assert {"report.html", "model.keras", "history.jsonl", "timeline.jsonl"} <= set(there) and ".lock" not in there
    lines = [json.loads(line) for line in Bucket(place).get_bytes("history.jsonl").splitlines()]
    assert [line.get("epoch") for line in lines] == [1, 2, None]
    assert list((tmp_path / "elsewhere").rglob("*.keras")) == []
    measured = run("tfdist.evaluate", f"--workdir={place}", "--output=measured.json", **elsewhere)
    assert measured.returncode == 0, measured.stderr
    assert json.loads((tmp_path / "measured.json").read_text())["evaluation"] == expected["evaluation"]


@pytest.mark.whole
def test_every_command_takes_a_run_in_a_bucket(s3, run, server, tmp_path):
    workdir, flags = f"--workdir={s3}", [*FLAGS, "--config.train.epochs=1"]

    def done(*arguments, code=0):
        program = run(*arguments, **server.environ)
        assert program.returncode == code, program.stderr + program.stdout
        return program.stdout + program.stderr

    planned = done("tfdist.train", *flags, workdir, "--dry_run")
    assert s3 in planned and Bucket(s3).listing() == {}
    command = ["tfdist.launch", "--nproc_per_node=2", "--", *flags, workdir]
    done(*command)
    assert result(s3)["workers"] == 2
    assert "the run in it set aside" in done("tfdist.train", *flags, workdir, "--dry_run")
    assert f"the earlier run in {s3} is now in {s3}.1\n" in done(*command)
    assert result(s3)["weights_sha256"] == result(f"{s3}.1")["weights_sha256"]
    assert len(names(f"{s3}/checkpoints")) == len(names(f"{s3}.1/checkpoints")) == 3
    done("tfdist.evaluate", workdir, "--output=measured.json")
    content = json.loads((tmp_path / "measured.json").read_text())
    assert content["evaluation"] == result(s3)["evaluation"] and content["model"] == f"{s3}/model.keras"
    for more in ([], ["--checkpoint=latest"], ["--checkpoint=20"]):
        done("tfdist.predict", workdir, f"--output=predicted{len(''.join(more))}.csv", *more)
    assert "s3://" in done("tfdist.predict", workdir, "--output=s3://bucket/x.csv", code=2)
    assert "there is no checkpoint" not in done("tfdist.export", workdir, "--output=exported")
    assert json.loads((tmp_path / "exported/export.json").read_text())["model"] == f"{s3}/model.keras"
    assert "--checkpoint=7 is not there" in done("tfdist.evaluate", workdir, "--checkpoint=7", code=2)
    assert f"--workdir={s3}.7 holds no run" in done("tfdist.evaluate", f"{workdir}.7", code=2)
    seen = run("tfdist.doctor", workdir, "--time_limit=100", **server.environ).stdout
    assert f"{s3} can be read" in seen and f"{s3}/checkpoints/30: after " in seen


@pytest.mark.whole
def test_results_that_cannot_be_written_end_with_exit_code_1(s3, run, server, tmp_path):
    server.fault = Broken("403", ("PUT",), named="model.keras")
    program = run("tfdist.train", *FLAGS, f"--workdir={s3}", XDG_CACHE_HOME=str(tmp_path / "kept"), **server.environ)
    assert program.returncode == 1
    assert f"{s3}/model.keras cannot be written" in program.stderr and "the run's files are in" in program.stderr
    assert "secret" not in program.stdout + program.stderr
    assert len(list((tmp_path / "kept").rglob("model.keras"))) == 1
    server.fault = lambda method, key: None
    assert run("tfdist.train", *FLAGS, f"--workdir={s3}", **server.environ).returncode == 0
    assert result(s3)["status"] == "completed" and result(s3)["resumed_from"] == 60
