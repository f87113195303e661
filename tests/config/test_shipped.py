"""Experiments and flag files by name, and what `--help`, `--list` and `--print_config` say of them."""

import dataclasses
import importlib.metadata
import json
import pathlib

import pytest

import tfdist
from tfdist.config import Experiment
from tfdist.config.commands import field_docs, shipped
from tfdist.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Lets tfdist believe that pip has put it there, with a config beside it."""

    class Listed(pathlib.PurePosixPath):
        def locate(self):
            return tmp_path / "bin" / self

    (tmp_path / "package" / "tfdist").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "share/tfdist/configs").mkdir(parents=True)
    (tmp_path / "share/tfdist/configs/mine.py").write_text('"""Mine.\n\nMore."""\n')
    names = ["../share/tfdist/configs/mine.py", "../share/tfdist/configs/gone.py", "tfdist/config/commands/shipped.py"]
    monkeypatch.setattr(tfdist, "__file__", str(tmp_path / "package/tfdist/__init__.py"))
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [Listed(n) for n in names])
    shipped.files.cache_clear()
    yield (tmp_path / "share/tfdist/configs/mine.py").resolve()
    shipped.files.cache_clear()


def test_all_of_the_checkout_have_a_name():
    assert {str(p) for p in shipped.files("config").values()} == {str(p) for p in (ROOT / "configs").glob("*.py")}
    assert set(shipped.files("flagfile")) == {p.stem for p in (ROOT / "flags").iterdir()}


def test_those_of_an_installed_package_are_found_beside_it(installed):
    assert shipped.files("config") == {"mine": installed} and shipped.files("flagfile") == {}
    assert shipped.path_of("config", "mine:base") == f"{installed}:base"
    assert "--config=mine\n      Mine\n" in shipped.listing()


def test_the_wheel_has_them():
    """As far as setup.cfg says so; `tests/test_docs.py` looks at what the pages name."""
    listed = (ROOT / "setup.cfg").read_text()
    assert "share/tfdist/configs = configs/*.py" in listed and "share/tfdist/flags = flags/*.flags" in listed


def test_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shipped.path_of("config", "digits") == str(ROOT / "configs/digits.py")
    (tmp_path / "digits").write_text("")
    assert shipped.path_of("config", "digits") == "digits"


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
    shipped.fill_in(words)
    at = {name: str(path) for name, path in (shipped.files("config") | shipped.files("flagfile")).items()}
    assert words == [
        *("train", "--config", at["digits_mlp"], f"-flagfile={at['cpu_2']}", "--workdir", "config"),
        *(f"--config={at['fine_tune']}:base", "--config"),
    ]


@pytest.mark.parametrize(
    "flag, value, message",
    [
        ("config", "digit_mlp", "or one that comes with tfdist: did you mean 'digits_mlp'? Known are cifar10_resnet, "),
        ("config", "digit_mlp:a", "--config=digit_mlp does not exist: give the path of a Python file with get_conf"),
        ("flagfile", "cpu", "--flagfile=cpu does not exist: give the path of a file with a flag on each line, or one"),
    ],
)
def test_a_name_that_nothing_has(flag, value, message):
    with pytest.raises(UserError) as caught:
        shipped.path_of(flag, value)
    assert message in str(caught.value)


def test_a_path_that_does_not_exist_is_no_name():
    with pytest.raises(
        UserError, match=r"^--config=configs/digit.py does not exist: give the path of .* get_config\(\)$"
    ):
        shipped.path_of("config", "configs/digit.py")


def test_every_field_has_a_meaning_and_the_page_is_current():
    documented = field_docs.fields(Experiment())
    assert [f.name for f in documented if not f.meaning.endswith((".", ")"))] == []
    groups = [g for g in dataclasses.asdict(Experiment()).values() if isinstance(g, dict)]
    assert len(documented) == sum(len(g) for g in groups) + 2, "name and seed are in no group"
    assert (ROOT / "docs/fields.md").read_text() == field_docs.as_markdown(), "run `make docs`"


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
    assert done.returncode == 0 and done.stdout == shipped.listing() + "\n"
