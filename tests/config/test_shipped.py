"""Commands, experiments and flag files by name; what `--help`, `--list` and `--print_config` say; bad config files."""

import configparser
import dataclasses
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import pytest
from absl import flags
from support.refusals import refused

from tfdist.__main__ import COMMANDS, listing
from tfdist.config import Experiment
from tfdist.config.commands import command_line, help_page
from tfdist.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def test_all_of_the_checkout_have_a_name():
    assert {str(p) for p in command_line.files("config").values()} == {str(p) for p in (ROOT / "configs").glob("*.py")}
    assert set(command_line.files("flagfile")) == {p.stem for p in (ROOT / "flags").iterdir()}


@pytest.mark.whole
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
    words = ["train", "--config", "digits_mlp", "-flagfile=cpu_2", "--workdir", "config"]
    words += ["--config=fine_tune:base", "--config"]
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


def test_the_commands_are_those_of_the_page_and_of_the_wheel():
    rows = re.findall(r"^\| `python -m tfdist\.(\w+)` \| ([^|`]+) \|", (ROOT / "docs/commands.md").read_text(), re.M)
    assert dict(rows) == COMMANDS
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    scripts = re.findall(r"^(\S+) = ", setup["options.entry_points"]["console_scripts"], re.M)
    assert scripts == ["tfdist"]
    modules = {p.parent.name for p in ROOT.glob("tfdist/*/__main__.py")} | {"evaluate", "predict"}
    assert modules == set(COMMANDS)


def test_a_command_by_its_name_is_that_of_the_module(run):
    assert run("tfdist", "launch", "--help").stdout == run("tfdist.launch", "--help").stdout


def test_it_lists_them_without_tensorflow(run, tmp_path):
    (tmp_path / "poison").mkdir()
    (tmp_path / "poison/tensorflow.py").write_text("raise AssertionError")
    for asked in ([], ["--help"]):
        done = run("tfdist", *asked, path=str(tmp_path / "poison"))
        assert (done.returncode, done.stdout) == (0, listing() + "\n"), done.stderr
    assert all(f"  tfdist {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("argument, message", [
    ("trian", "unknown command 'trian': did you mean 'train'?"),
    ("--devices=all", "unknown command '--devices=all': known are run, "),
])  # fmt: skip
def test_anything_else_is_refused(argument, message, run):
    done = run("tfdist", argument)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr


FILES = {
    "exits": ("import sys\ndef get_config():\n    sys.exit(0)\n", "ends the program with 0 (./exits.py:3)"),
    "values": (
        "def own():\n    raise ValueError('a\\nb')\ndef get_config():\n    return own()\n",
        "cannot be used: ValueError: a (./values.py:2)",
    ),
    "library": (
        "import json\ndef get_config():\n    return json.loads('{')\n",
        "cannot be used: JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) "
        "(./library.py:3)",
    ),
    "opens": (
        "def get_config():\n    return open('missing.txt')\n",
        "cannot be used: FileNotFoundError: [Errno 2] No such file or directory: 'missing.txt'",
    ),
    "imports": (
        "\nimport not_there\n",
        "cannot be used: ModuleNotFoundError: No module named 'not_there' (./imports.py:",
    ),
    "syntax": ("\n\ndef get_config(:\n", "cannot be used: SyntaxError: invalid syntax (./syntax.py:3)"),
    "zeros": ("a\0b", "source code string cannot contain null bytes"),
    "endless": ("def get_config():\n    return get_config()\n", "maximum recursion depth exceeded (./endless.py:2)"),
    "empty": ("", "cannot be used: AttributeError: module 'config_config' has no attribute 'get_config'"),
}


@pytest.fixture
def parsed(tmp_path, monkeypatch):
    """Parses a command line in the folder of the files, as if it were the first of the process."""
    monkeypatch.chdir(tmp_path)

    def forget():
        flags.FLAGS.remove_flag_values([name for name in flags.FLAGS if name.partition(".")[0] == "config"])
        flags.FLAGS.unparse_flags()
        sys.modules.pop("config_config", None)

    def parse(*arguments):
        forget()
        monkeypatch.setattr(sys, "argv", ["train", *arguments])
        command_line.parse(sys.argv)
        return flags.FLAGS.config

    yield parse
    forget()


@pytest.mark.parametrize("override", [[], ["--config.train.epochs=3"]])
@pytest.mark.parametrize("name", FILES)
def test_a_failure_is_one_line_with_its_place(name, override, parsed, tmp_path):
    text, said = FILES[name]
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(UserError) as error:
        parsed(f"--config=./{name}.py", *override)
    assert str(error.value).startswith(f"--config=./{name}.py ") and said in str(error.value)
    assert "\n" not in str(error.value) and "Traceback" not in str(error.value)


def test_a_file_with_an_argument(parsed, tmp_path):
    (tmp_path / "sized.py").write_text("def get_config(size):\n    return int(size) / 0\n")
    with pytest.raises(UserError, match=r"--config=sized.py cannot be used: ZeroDivisionError: .* \(sized.py:2\)"):
        parsed("--config", "sized.py:3")


def test_other_complaints_are_not_the_files(parsed, tmp_path):
    (tmp_path / "good.py").write_text(
        "import tfdist.config as c\ndef get_config():\n    return c.Experiment(name='g')\n"
    )
    assert parsed("--config=good.py", "--config.train.epochs=3").train.epochs == 3
    with pytest.raises(UserError, match=r"flag --config.train.epochs=many: invalid literal for int"):
        parsed("--config=good.py", "--config.train.epochs=many")


def test_a_command_whose_config_ends_it(run, tmp_path):
    (tmp_path / "exits.py").write_text(FILES["exits"][0])
    done = run("tfdist.train", "--config=exits.py")
    line = "tfdist: error: --config=exits.py ends the program with 0 (exits.py:3): it must only return an Experiment\n"
    assert (done.returncode, done.stderr) == (2, line)
