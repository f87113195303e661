"""Words that nobody can read do not end a run, and a result that nobody can read does not pass for success.

What was given on the command line is printed so that it turns no terminal over, and can still be pasted.
"""

import os
import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY
from support import processes

from tfdist.config import messages
from tfdist.errors import UserError
from tfdist.inference.prediction_rows import OutputFile

SAYS = (
    "from tfdist.config import messages; from tfdist.config.commands import command_line as c, standard_streams as s; "
)
FULL = "standard output cannot be written (No space left on device)"


def child(code, **streams):
    """A command whose body is `code`; returns its exit code and what it said on standard error."""
    command = f"{SAYS}c.main(lambda _: [{code}] and 0, c.parse_own)"
    kwargs = {"stdout": processes.PIPE, "stderr": processes.PIPE} | streams
    done = processes.run([sys.executable, "-c", command], text=True, **kwargs)
    return done.returncode, done.stderr


@pytest.fixture
def full():
    with open("/dev/full", "w") as file:
        yield file


@pytest.mark.whole
def test_a_training_goes_on_when_standard_output_is_full(tmp_path, tfds_dir):
    flags = ["--config.train.epochs=0", "--config.train.steps=2", "--config.model.name=mlp", "--notensorboard"]
    command = [sys.executable, "-m", "tfdist.train", *flags, "--workdir=out"]
    with open("/dev/full", "w") as file:
        env = os.environ | {"TFDS_DATA_DIR": str(tfds_dir), "PYTHONPATH": str(REPOSITORY)}
        done = processes.run(command, stdout=file, stderr=processes.PIPE, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"tfdist: WARNING: {FULL}: the run goes on without its words\n"
    assert (tmp_path / "out" / "result.json").exists()


@pytest.mark.parametrize("code", ["messages.logger.info('x')", "print('x')"])  # one of them is not flushed
def test_a_command_whose_words_are_its_result_fails(code, full):
    said = f"tfdist: failed: {FULL}: free or repair that disk, or send it elsewhere\n"
    assert child(code, stdout=full) == (1, said)


def test_words_that_the_encoding_has_not(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert child(r"print('\u00fc')") == (0, "")


def test_words_that_are_dispensable(full):
    code = "s.dispensable(), print('x' * 100_000), messages.logger.info('x')"
    assert child(code, stdout=full) == (0, f"tfdist: WARNING: {FULL}: the run goes on without its words\n")
    assert child(code, stdout=full, stderr=full)[0] == 0


def test_a_reader_that_has_gone():
    reading, writing = os.pipe()
    os.close(reading)
    code, said = child("s.dispensable(), print('x'), messages.logger.info('x')", stdout=writing)
    os.close(writing)
    assert code == 0 and said == f"tfdist: WARNING: {FULL}: the run goes on without its words\n".replace(
        "No space left on device", "Broken pipe"
    )


def test_an_error_that_nobody_can_read_keeps_its_exit_code(full):
    assert child("messages.logger.info('x'), 1 / 0", stderr=full)[0] == 1
    assert child("c.parse_own(['x', 'y'])", stderr=full)[0] == 2


def test_closed_streams_are_not_taken_by_files(tmp_path):
    """Nor does a line for nobody end a run, or go to the other stream."""
    code = (
        "import os, sys; os.close(0); os.close(1); os.close(2); sys.stdout = sys.stderr = None\n"
        "from tfdist.config import messages; from tfdist.config.commands import command_line as c\n"
        "def run(_):\n"
        f"    with open({str(tmp_path / 'number')!r}, 'w') as file:\n"
        "        messages.logger.info('x'); messages.aside.info('y'); os.write(2, b'of TensorFlow')\n"
        "        file.write(str(file.fileno()))\n"
        "c.main(run, c.parse_own)"
    )
    assert processes.run([sys.executable, "-c", code]).returncode == 0
    assert re.fullmatch(r"[1-9]?\d", text := (tmp_path / "number").read_text()) and int(text) > 2


def test_a_result_for_a_closed_standard_output_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "__stdout__", None)
    with pytest.raises(UserError, match=r"--output=- is standard output, which is closed: give the name of a file"):
        OutputFile("-").check()


ODD = ["plain", "a b", "", "it's", "\x1b[31mred", "two\nlines\\n'", "b\udcff", "\u202eright", "tüv"]


def test_a_line_for_a_shell():
    line = messages.shell(["printf", "%s\\0", *ODD])
    assert line.isprintable()
    said = subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout
    assert said.decode(errors="surrogateescape").split("\0")[:-1] == ODD
