"""Experiments and flag files by name, and what `--help`, `--list` and `--print_config` say of them."""

import dataclasses
import json
import os
import pathlib
import runpy
import shutil
import subprocess
import sys

import pytest
from support.refusals import refused

from tfdist.config import Experiment
from tfdist.config.commands import command_line, help_page
from tfdist.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def test_all_of_the_checkout_have_a_name():
    assert {str(p) for p in command_line.files("config").values()} == {str(p) for p in (ROOT / "configs").glob("*.py")}
    assert set(command_line.files("flagfile")) == {p.stem for p in (ROOT / "flags").iterdir()}


def test_an_installation_into_any_folder_has_them(tmp_path):
    """`pip install --target DIR` and `PYTHONPATH=DIR`, as images and functions in the cloud have it.

    The folder is that of another project, with a setup.cfg and a folder configs/ of its own.
    """
    source, target, empty = tmp_path / "source", tmp_path / "target", tmp_path / "empty"
    empty.mkdir()
    (target / "configs").mkdir(parents=True)
    (target / "setup.cfg").write_text("[metadata]\nname = another\n")
    (target / "configs/digits.py").write_text("")
    for folder in ("tfdist", "configs", "flags"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ask = "import tfdist; from tfdist.config.commands import command_line as s; print(tfdist.__file__)\n"
    ask += "for flag in ('config', 'flagfile'): print(*sorted(map(str, s.files(flag).values())))"
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run([sys.executable, "-c", ask], cwd=empty, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = [str(target / "tfdist/__init__.py")]
    for folder in ("configs", "flags"):
        files = sorted(p.name for p in (ROOT / folder).iterdir() if p.suffix in (".py", ".flags"))
        expected.append(" ".join(str(target / "tfdist" / folder / name) for name in files))
    assert done.stdout.splitlines() == expected


def test_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command_line.path_of("config", "digits") == str(ROOT / "configs/digits.py")
    (tmp_path / "digits").write_text("")
    assert command_line.path_of("config", "digits") == "digits"


def test_both_ways_to_write_a_flag():
    words = [
        "train",
        "--config",
        "digits_mlp",
        "-flagfile=cpu_2",
        "--workdir",
        "config",
        "--config=fine_tune:base",
        "--config",
    ]
    command_line.fill_in(words)
    at = {name: str(path) for name, path in (command_line.files("config") | command_line.files("flagfile")).items()}
    assert words == [
        *("train", "--config", at["digits_mlp"], f"-flagfile={at['cpu_2']}", "--workdir", "config"),
        *(f"--config={at['fine_tune']}:base", "--config"),
    ]


@pytest.mark.parametrize("flag, value, message", [
    ("config", "digit_mlp", "or one that comes with tfdist: did you mean 'digits_mlp'? Known are cifar10_resnet, "),
    ("config", "digit_mlp:a", "--config=digit_mlp does not exist: give the path of a Python file with get_conf"),
    ("flagfile", "cpu", "--flagfile=cpu does not exist: give the path of a file with a flag on each line, or one"),
])  # fmt: skip
def test_a_name_that_nothing_has(flag, value, message):
    with pytest.raises(UserError) as caught:
        command_line.path_of(flag, value)
    assert message in str(caught.value)


def test_a_path_that_does_not_exist_is_no_name():
    with refused(r"^--config=configs/digit.py does not exist: give the path of .* get_config\(\)$"):
        command_line.path_of("config", "configs/digit.py")


def test_every_field_has_a_meaning_and_the_page_is_current():
    documented = help_page.fields(Experiment())
    assert [f.name for f in documented if not f.meaning.endswith((".", ")"))] == []
    groups = [g for g in dataclasses.asdict(Experiment()).values() if isinstance(g, dict)]
    assert len(documented) == sum(len(g) for g in groups) + 2, "name and seed are in no group"
    as_markdown = runpy.run_path(str(ROOT / "docs/make_fields.py"))["as_markdown"]
    assert (ROOT / "docs/fields.md").read_text() == as_markdown(), "run `make docs`"


def test_by_name_from_another_folder(run, tmp_path):
    poison = tmp_path / "poison"
    poison.mkdir()
    (poison / "tensorflow.py").write_text("raise AssertionError")
    words = ["--config=digits_mlp", "--config.train.epochs=3"]
    done = run("tfdist.train", *words, "--print_config", path=str(poison))
    printed = json.loads(done.stdout)
    assert (done.returncode, printed["name"], printed["train"]["epochs"]) == (0, "digits_mlp", 3), done.stderr
    done = run("tfdist.train", *words, "--help", "--devices=nonsense", path=str(poison), COLUMNS="80")
    assert done.returncode == 0 and "  --config.train.epochs: int, 3\n" in done.stdout, done.stderr
    assert done.stdout.index("  --config: ") < done.stdout.index("  --strategy: ") < done.stdout.index("  --jit: ")
    assert str(ROOT) not in done.stdout and max(map(len, done.stdout.splitlines())) <= 80
    done = run("tfdist.train", "--list", path=str(poison))
    assert done.returncode == 0 and done.stdout == command_line.listing() + "\n"
