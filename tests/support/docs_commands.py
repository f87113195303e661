"""Runs the commands that README.md and docs/ show, as `make docs-test` does, with an installed tfdist.

A fenced block without a language is run as a shell reads it, in a folder that the blocks of a page share. What a
comment above the block says, which nobody sees who reads the page:

    <!-- commands: not run, since REASON -->       it needs machines or devices that are not everywhere
    <!-- commands: side by side -->                each line in a shell of its own, all at the same time
    <!-- commands: exit codes 0 124 -->            what the block may end with; 0 if nothing is said

A block below `<!-- file: train.py -->` is written to that file of the folder, before the commands.

No TensorFlow, and nothing of tfdist is imported here.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGES = ("README.md", "docs/several_machines.md", *(f"docs/{p.name}" for p in sorted(ROOT.glob("docs/*.md"))))
"""The first of them builds Horovod, which others use."""
WORDS = {"python", "tfdist", "pip", "make", "timeout", "export", "horovodrun", "mpirun", "srun", "sbatch"}
WORDS |= {"tensorboard"}
"""What a line begins with that is a command."""
_BLOCK = re.compile(r"(?:^<!-- commands: (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```", re.S | re.M)
_FILE = re.compile(r"^<!-- file: ([\w.]+) -->\n```\w*\n(.*?)^```", re.S | re.M)
_MARK = re.compile(r"(?P<not_run>not run, since .+)|(?P<together>side by side)|exit codes (?P<codes>\d+(?: \d+)*)")
LIMIT_S = 900


@dataclasses.dataclass
class Block:
    """Commands of a page."""

    page: str
    line: int
    text: str
    not_run: str = ""
    together: bool = False
    codes: tuple = (0,)

    @property
    def where(self):
        return f"{self.page}:{self.line}"


def blocks(page, text):
    """The blocks of commands of a page; what a command prints is none.

    Raises ValueError where a block is both, or a mark is not understood or marks nothing.
    """
    found = []
    for match in _BLOCK.finditer(text):
        line = text[: match.start("text")].count("\n") + 1
        lines = match["text"].replace("\\\n", " ").splitlines()
        words = [re.sub(r"^(?:[A-Z_]+=\S+ )*", "", one).split(" ")[0] for one in lines]
        commands = [word in WORDS for word in words]
        if match["language"] or not any(commands):
            if match["mark"]:
                raise ValueError(f"{page}:{line}: the mark above is of no commands")
            continue
        if not all(commands):
            raise ValueError(f"{page}:{line}: {lines[commands.index(False)]!r} is no command that is known, see WORDS")
        block = Block(page, line, match["text"])
        if match["mark"]:
            mark = _MARK.fullmatch(match["mark"])
            if not mark:
                raise ValueError(f"{page}:{line}: <!-- commands: {match['mark']} --> is not understood")
            block.not_run, block.together = mark["not_run"] or "", bool(mark["together"])
            block.codes = tuple(map(int, (mark["codes"] or "0").split()))
        found.append(block)
    if text.count("<!-- commands:") != len([m for m in _BLOCK.finditer(text) if m["mark"]]):
        raise ValueError(f"{page}: a mark is not on the line above a block")
    return found


def run(block, folder, environ):
    """Runs a block; returns what is wrong, or nothing."""
    scripts = block.text.replace("\\\n", " ").splitlines() if block.together else [block.text]
    allowed = "|".join(map(str, block.codes))
    checked = f"trap 'code=$?; case $code in ({allowed}) ;; (*) exit $code ;; esac' ERR\n"
    with tempfile.TemporaryFile("w+") as log:
        given = dict(cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        shells = [subprocess.Popen(["bash", "-c", f"{checked}{script}\nwait"], **given) for script in scripts]
        wrong = _waited(shells, block.codes)
        log.seek(0)
        return "\n".join([*wrong, log.read()[-4000:]]) if wrong else ""


def _waited(shells, codes):
    """Waits for the shells; returns what is wrong with their ends."""
    end = time.monotonic() + LIMIT_S
    try:
        ends = [shell.wait(max(0.0, end - time.monotonic())) for shell in shells]
        return [f"exit code {code}" for code in ends if code not in codes]
    except subprocess.TimeoutExpired:
        return [f"not over after {LIMIT_S} s"]
    finally:
        for shell in shells:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()


def main():
    """Entry point of `make docs-test`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, type=pathlib.Path, help="folder of the python that has tfdist")
    parser.add_argument("pages", nargs="*", default=list(dict.fromkeys(PAGES)))
    asked = parser.parse_args()
    programs = asked.bin.absolute()  # it is called from other folders
    with tempfile.TemporaryDirectory() as home:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        environ = kept | {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": home}
        where = subprocess.check_output(
            [programs / "python", "-c", "import tfdist; print(tfdist.__file__)"], cwd=home, env=environ, text=True
        ).strip()
        if pathlib.Path(where).is_relative_to(ROOT / "tfdist"):
            sys.exit(f"{where} is that of the checkout: install the wheel")
        failed = 0
        for page in asked.pages:
            folder = pathlib.Path(home, page.replace("/", "_"))
            folder.mkdir()
            for name, program in _FILE.findall((ROOT / page).read_text()):
                (folder / name).write_text(program)
            for block in blocks(page, (ROOT / page).read_text()):
                if block.not_run:
                    print(f"{block.where}: {block.not_run}", flush=True)
                    continue
                start = time.monotonic()
                wrong = run(block, folder, environ)
                failed += bool(wrong)
                print(f"{block.where}: {'FAILED' if wrong else 'ok'} ({time.monotonic() - start:.0f} s)", flush=True)
                if wrong:
                    print(f"{block.text}{wrong}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
