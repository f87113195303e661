"""What an adversary gives to tfdist, and what may come of it.

Allowed is that it works, or that it ends with exactly one line: `tfdist: error: ...` and exit code 2, or
`tfdist: failed: ...` and 1 in mid-run. A traceback, a hang, a line that can change a terminal, or a file where none
belongs is a violation.
"""

import math
import os
import re
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import processes

LIMIT_S = 60
"""Nothing that ends by itself takes longer; on a machine of other people's, four times as long."""
_PATIENCE = 4
_NOISE = re.compile(r"[IWEF]\d{4} |\d{4}-\d\d-\d\d \d\d:\d\d|WARNING: All log messages before absl")
"""How lines of TensorFlow begin."""


def examples(count, **more):
    """Settings for so many examples: new ones each time, which a failure prints with all that repeats it."""
    unhurried = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(
        max_examples=count, deadline=None, database=None, print_blob=True, suppress_health_check=unhurried, **more
    )


def few(count):
    """Settings for `make test`: the same few examples each time."""
    return examples(count, derandomize=True)


def few_and_many(few_count, many_count, body, **strategies):
    """The test of a body with few examples, for `make test`, and with many, for `make test-all`."""
    return few(few_count)(given(**strategies)(body)), pytest.mark.whole(examples(many_count)(given(**strategies)(body)))


# -- what is given ----------------------------------------------------------------

SPECIAL = (
    *("", " ", "\n", "a\nb", "\t", "\x1b[2J\x1b[31m", "\u202egnp", "h\u00e9llo", "\U0001f525", "%s%n", "{0}", "$(id)"),
    *("0", "-1", "-0", "1", "2", "3.5", "1e3", "1e400", "-1e400", "nan", "NaN", "inf", "-inf", "0x10", "1_000",
      "1,000"),
    *(str(2**31), str(2**63), str(-(2**63) - 1), str(10**30), "9" * 5000, "x" * 300, "x" * 20000),
    *("None", "null", "True", "False", "true", "yes", "[]", "{}", "()", "[[]]", "[" * 3000, "{" * 100, "f(", "a=",
      "=b"),
    *(".", "..", "../..", "/", "/dev/null", "/dev/full", "/proc/self/mem", "~nobody", "a/b", "gs://x", "s3://x"),
    *("no.such:function", "json:nothing", "json:dumps", ":", "a:b:c", "auto", "all", "off", "none", "default"),
)  # fmt: skip
"""Texts that programs trip over."""


def texts(alphabet=None):
    """Texts of all kinds; without surrogates and NUL, which no command line and no variable can hold."""
    letters = alphabet or st.characters(blacklist_categories=("Cs",), blacklist_characters="\0")
    numbers = st.one_of(st.integers(), st.floats()).map(repr)
    return st.one_of(st.sampled_from(SPECIAL), st.text(letters, max_size=30), numbers)


@st.composite
def mutated(draw, specimen):
    """A text that is right but for a few places."""
    text = specimen
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        length = draw(st.integers(0, 3))
        put = draw(
            st.sampled_from(["", " ", ",", "=", "(", ")", "-", "%", ".", "0", "9", "e", "x", ":", "[", "]", "!"])
        )
        text = text[:at] + put + text[at + length :]
    return text


def values():
    """Anything that Python or JSON can write down, of any type."""
    plain = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([2**31, -(2**63) - 1, 2**64, 10**30, 10**400, 1e300, -0.0, math.inf, -math.inf, math.nan]),
        st.floats(),
        st.text(max_size=20),
        st.sampled_from([*SPECIAL, "\0", "\ud800"]),
    )
    return st.recursive(
        plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    )  # fmt: skip


# -- what comes of it -------------------------------------------------------------


def run(module, arguments, folder, tfds_dir, environ=None, paths=(), seconds=LIMIT_S * _PATIENCE):
    """Runs `python -m MODULE` in a folder, with nothing of this process' own environment that says who it is."""
    own = {k: os.environ[k] for k in ("PATH", "HOME", "TF_CPP_MIN_LOG_LEVEL") if k in os.environ}
    own["TFDS_DATA_DIR"] = str(tfds_dir)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    own["PYTHONPATH"] = os.pathsep.join([*map(str, paths), root])
    command = [sys.executable, "-m", module, *arguments]
    kept = dict(cwd=folder, env=own | (environ or {}), stdout=processes.PIPE, stderr=processes.PIPE, timeout=seconds)
    done = processes.run(command, **kept)
    done.stdout, done.stderr = (text.decode(errors="surrogateescape") for text in (done.stdout, done.stderr))
    return done


def judged(done, codes=(0, 1, 2)):
    """The one line of a command that has refused; empty where it has worked. Fails at anything else."""
    said = f"exit code {done.returncode} of {done.args}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert done.returncode in codes, said
    assert "Traceback (most recent call last)" not in done.stdout + done.stderr, said
    last = {0: "", 1: "tfdist: failed: ", 2: "tfdist: error: "}[done.returncode]
    lines = [line for line in done.stderr.split("\n") if line and not _NOISE.match(line)]
    if not last:
        return ""
    assert len([line for line in lines if line.startswith(last)]) == 1 and lines[-1].startswith(last), said
    if done.returncode == 2:
        assert all(line.startswith("tfdist: ") for line in lines), said
    is_one_line(lines[-1], said)
    return lines[-1]


def is_one_line(line, said=""):
    """Checks that a line can be read on a terminal, and does nothing to it."""
    assert line.isprintable(), f"not printable: {line!r}\n{said}"
    assert len(line) <= 6000, f"{len(line)} characters: {line[:300]!r}..."


def tree(folder):
    """All paths below a folder."""
    return {os.path.relpath(os.path.join(at, n), folder) for at, ds, fs in os.walk(folder) for n in (*ds, *fs)}
