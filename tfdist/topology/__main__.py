"""Installs compilers for TPUs, GPUs: `python -m tfdist.topology --install=tpu`.

`python -m tfdist.train --dry_run --topology=v5e-8` uses them.

Exit codes: 0 done; 1 what was installed does not run; 2 it cannot be installed
here; 130 interrupted.
"""

from absl import flags

from tfdist.config.commands import command_line
from tfdist.config.messages import logger
from tfdist.errors import UserError
from tfdist.topology import compiler


def _run(argv: list[str]) -> int:
    values = flags.FLAGS
    if not values.install:
        raise UserError("nothing was asked for", "give --install=tpu or --install=cuda")
    logger.info(compiler.install(values.install))
    return 0


def main() -> None:
    what = "Make the environment of the compilers for TPUs or for NVIDIA GPUs."
    flags.DEFINE_enum("install", None, compiler.KINDS, what)
    command_line.main(_run, command_line.parse_own, "interrupted, the next --install begins anew")


if __name__ == "__main__":
    main()
