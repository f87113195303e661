"""A person's config file: whatever it does is one line with its place, exit code 2."""

import os
import sys

import pytest
from absl import flags

from tfdist.config.commands import command_line
from tfdist.errors import UserError

FILES = {
    "exits": ("import sys\ndef get_config():\n    sys.exit(0)\n", "ends the program with 0 (./exits.py:3)"),
    "says": ("import sys\nsys.exit('bye')\n", "ends the program with 'bye' (./says.py:2)"),
    "leaves": ("import os\ndef get_config():\n    os._exit(0)\n", "ends the program with 0 (./leaves.py:3)"),
    "types": (
        "def get_config():\n    return {} + 1\n",
        "cannot be used: TypeError: unsupported operand type(s) for +: 'dict' and 'int' (./types.py:2)",
    ),
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
        "cannot be used: FileNotFoundError: [Errno 2] No such file or directory: 'missing.txt' (./opens.py:2)",
    ),
    "asserts": ("def get_config():\n    assert False\n", "cannot be used: AssertionError (./asserts.py:2)"),
    "imports": (
        "\nimport not_there\n",
        "cannot be used: ModuleNotFoundError: No module named 'not_there' (./imports.py:2)",
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
    end = os._exit
    with pytest.raises(UserError) as error:
        parsed(f"--config=./{name}.py", *override)
    assert str(error.value).startswith(f"--config=./{name}.py ") and said in str(error.value)
    assert "\n" not in str(error.value) and "Traceback" not in str(error.value)
    assert os._exit is end


def test_a_file_with_an_argument(parsed, tmp_path):
    (tmp_path / "sized.py").write_text("def get_config(size):\n    return int(size) / 0\n")
    with pytest.raises(UserError, match=r"--config=sized.py cannot be used: ZeroDivisionError: .* \(sized.py:2\)"):
        parsed("--config", "sized.py:3")


def test_other_complaints_are_not_the_files(parsed, tmp_path):
    (tmp_path / "good.py").write_text(
        "import tfdist.config as c\ndef get_config():\n    return c.Experiment(name='g')\n"
    )
    assert parsed("--config=good.py", "--config.train.epochs=3").train.epochs == 3
    with pytest.raises(UserError, match=r"flag --config.train.epochs=many: is not an integer"):
        parsed("--config=good.py", "--config.train.epochs=many")


def test_a_command_whose_config_ends_it(run, tmp_path):
    (tmp_path / "leaves.py").write_text(FILES["leaves"][0])
    done = run("tfdist.train", "--config=leaves.py")
    line = (
        "tfdist: error: --config=leaves.py ends the program with 0 (leaves.py:3): it must only return an Experiment\n"
    )
    assert (done.returncode, done.stderr) == (2, line)
