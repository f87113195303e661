"""`python -m tfdist`: the commands, each with a line."""

import configparser
import pathlib
import re

import pytest

from tfdist.__main__ import COMMANDS, listing

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


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
