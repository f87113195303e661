"""What was given on the command line is printed so that it turns no terminal over, and can still be pasted."""

import subprocess

import pytest

from tfdist.config import messages

ODD = ["plain", "a b", "", "it's", "\x1b[31mred", "two\nlines\\n'", "b\udcff", "\u202eright", "tüv"]


def test_a_line_for_a_shell():
    line = messages.shell(["printf", "%s\\0", *ODD])
    assert line.isprintable()
    said = subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout
    assert said.decode(errors="surrogateescape").split("\0")[:-1] == ODD


@pytest.mark.parametrize(
    "words",
    [
        ["tfdist.launch", "--dry_run", "--nproc_per_node=1", "--", "--workdir=\x1b[31mred"],
        ["tfdist.compare", "--dry_run", "--strategies=mirrored", "--workdir=\x1b[31mred"],
        ["tfdist.sweep", "--dry_run", "--over=train.epochs=1,2", "--workdir=\x1b[31mred"],
    ],
    ids=lambda words: words[0],
)
def test_commands_that_a_dry_run_prints(words, run):
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert "\\x1b[31mred" in done.stdout and "\x1b" not in done.stdout
