"""Tries TensorFlow in a child process where it may abort: under flags of XLA's, or a limit of the address space.

TensorFlow ends its process then, in C++, and leaves nobody to say why. A trial takes seconds, and so is made only where
one of these variables or the limit is set. `python -m tfdist.distributed.tensorflow_trial on|off LIMIT` is the child.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Mapping

from tfdist.distributed import child_process
from tfdist.errors import UserError, one_line

_ALWAYS_READ = ("TF_XLA_FLAGS", "TF_JITRT_FLAGS")
"""Variables that TensorFlow reads when it starts; it reads XLA_FLAGS when XLA compiles for the first time."""
_OF_FLAGS = re.compile(r"[EF]\d{4} \S+ +\d+ (?:command_line_flags|parse_flags_from_env)\.cc:\d+\] ")
"""How a line of TensorFlow's begins that names a flag which it cannot read."""
_LIMIT_S = 120.0
"""Seconds until a child that does not end counts as one that cannot: with too little memory, threads may wait."""
_A_RUN = 1_500_000_000
"""Address space of a small run besides TensorFlow itself: Keras, the threads that read data, a model."""


def check(compiles: bool, environ: Mapping[str, str]) -> None:
    """Makes sure that TensorFlow can be started; does nothing where neither a variable nor a limit is set.

    Args:
      compiles: whether XLA will be used.
      environ: the variables of this process.

    Raises:
      UserError: it would end this process.
    """
    names = [name for name in (*_ALWAYS_READ, *(["XLA_FLAGS"] if compiles else [])) if environ.get(name)]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        limit = 0
    if not names and not limit:
        return
    reason = _tried(compiles, limit, environ)
    if not reason:
        return
    flag = _OF_FLAGS.match(reason)
    if names and (flag or not limit):
        reason = _OF_FLAGS.sub("", reason)
        guilty = [name for name in names if re.search(rf"\b{name}\b", reason)] or names
        given = " ".join(f"{name}={environ[name]}" for name in guilty)
        raise UserError(f"{given} cannot be used ({reason}): correct or unset {' and '.join(guilty)}")
    raise UserError(
        f"ulimit -v allows {limit / 1e9:.1f} GB of address space, too little for TensorFlow and a small model "
        f"({reason}): raise it, or run ulimit -v unlimited"
    )


def _tried(compiles: bool, limit: int, environ: Mapping[str, str]) -> str:
    """Returns why TensorFlow does not start in a child, or an empty string."""
    if limit and limit <= _A_RUN:
        return f"they take more than {_A_RUN / 1e9:.1f} GB"
    words = ["on" if compiles else "off", str(limit - _A_RUN if limit else 0)]
    quiet = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}  # what GPUs are for is not tried
    done = child_process.answer([sys.executable, "-m", __name__, *words], _LIMIT_S, {**environ, **quiet})
    if done is None:
        return f"TensorFlow does not start within {_LIMIT_S:g} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.splitlines()
    flags = filter(_OF_FLAGS.match, lines)
    errors = (line for line in reversed(lines) if re.search(r"Error\b|what\(\)", line))
    return one_line(next(flags, None) or next(errors, f"exit code {done.returncode}"), 300)


def main() -> None:
    """Starts TensorFlow with as much address space as it may have."""
    compiles, limit = sys.argv[1] == "on", int(sys.argv[2])
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    import tensorflow as tf

    tf.function(lambda x: x @ x, jit_compile=compiles)(tf.ones((2, 2)))


if __name__ == "__main__":
    main()
