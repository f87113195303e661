"""Runs a script or module as Python does, with tfdist behind Keras' methods of a model."""

import contextlib
import io
import logging
import os
import pathlib
import runpy
import sys
import traceback
import types
from types import FrameType

from absl import flags

from tfdist.config import messages, runtime_options, user_functions
from tfdist.config.runtime_options import Environment, PlacementOptions
from tfdist.distributed import connect
from tfdist.distributed.distribution import Distribution
from tfdist.errors import PeerError, TrainingError, UserError
from tfdist.run import Program
from tfdist.run.kept_fits import KeptFits
from tfdist.trainer import keras_patch, worker_session

_NOT_DISTRIBUTED = (
    "WARNING: the script has ended and called neither fit, evaluate, predict nor their relatives of a Keras model: a "
    "loop of its own over GradientTape or strategy.run is not distributed"
)


def run(program: Program, environment: Environment, values: flags.FlagValues) -> int:
    """Connects, runs the program under the strategy to its end, as the flags ask for, and returns its exit code."""
    messages.handler.stream = "stderr"
    logging.root.handlers.clear()  # of absl's, or the script's logging.basicConfig would do nothing
    where = {name: getattr(environment, name) for name in runtime_options.names(PlacementOptions)}
    distribution = connect.connect(**where)

    def work() -> int:
        with contextlib.ExitStack() as stack:
            kept = None
            if environment.workdir:
                settings = {f"--{name}": str(values[name].value) for name in ("virtual_replicas", "sync_batch_norm")}
                kept = stack.enter_context(KeptFits(distribution, environment, values.checkpoint_every, settings))
            patch = keras_patch.KerasPatch(
                distribution,
                values.sync_batch_norm == "on",
                values.virtual_replicas,
                environment.check_agreement,
                kept.call if kept else None,
            )
            keras_patch.install(patch)
            if values.show == "chief" and not distribution.is_chief:
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            user_functions.note_files()
            code = _executed(program, distribution)
            if kept:
                kept.finish(code)
            if code:
                return code
            if not patch.calls:
                messages.logger.info(_NOT_DISTRIBUTED)
            _warn_of_shared_files(distribution)
        return 0

    return worker_session.reporting_failures(distribution.peers, work)


def _executed(program: Program, distribution: Distribution) -> int:
    """Runs the program as `__main__`; returns its exit code and shows its traceback, without frames of tfdist."""
    own = {flag.name for flag in flags.FLAGS.get_flags_for_module(sys.argv[0])}
    for name in {*own, *runtime_options.HELP} & {*flags.FLAGS}:  # the script may define some with the same names
        delattr(flags.FLAGS, name)
    sys.argv = [program.name, *program.arguments]
    sys.path[0] = "" if program.is_module else os.path.dirname(os.path.abspath(program.name))
    try:
        if program.is_module:
            runpy.run_module(program.name, run_name="__main__", alter_sys=True)
        else:
            # `runpy.run_path` would take the module away before threads and exit handlers have ended.
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            main.__file__ = os.path.abspath(program.name)
            with io.open_code(os.path.abspath(program.name)) as file:
                exec(compile(file.read(), program.name, "exec"), vars(main))
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            code = (end.code or 0) & 0xFF
        else:
            print(end.code, file=sys.stderr)
            code = 1
        if code:
            distribution.peers.fail(f"the script has ended with exit code {code}", code)
        return code
    except (UserError, TrainingError) as error:
        lines = [(f, line) for f, line in traceback.walk_tb(error.__traceback__) if _of_program(f, program)]
        if isinstance(error, PeerError) or not lines:
            raise
        place = f"{os.path.basename(lines[-1][0].f_code.co_filename)}, line {lines[-1][1]}"
        if isinstance(error, UserError):
            raise UserError(f"{place}: {error.what}", error.fix) from error
        raise TrainingError(f"{place}: {error}") from error
    except Exception as error:
        if any(word in str(error) for word in ("Collective", "Horovod")) and distribution.peers.verdict():
            raise distribution.peers.error() from error  # another worker has gone
        trace = error.__traceback__
        while trace and not _of_program(trace.tb_frame, program):
            trace = trace.tb_next
        if trace is None and isinstance(error, ImportError):
            raise UserError(f"-m {program.name} cannot be run: {error}", "name a module that Python finds") from None
        traceback.print_exception(type(error), error, trace or error.__traceback__)
        distribution.peers.fail(f"the script has failed: {type(error).__name__}: {error}")
        return 1


def _of_program(frame: FrameType, program: Program) -> bool:
    """Whether a frame is of the program, and not of what has started it."""
    own = program.is_module or frame.f_code.co_filename == program.name
    return own and frame.f_globals.get("__name__") == "__main__"


def _warn_of_shared_files(distribution: Distribution) -> None:
    """Warns of files that several workers of one host have written, each over what the others wrote."""
    peers = distribution.peers
    mine = sorted(path for path in user_functions.WRITTEN if "__pycache__" not in pathlib.Path(path).parts)
    first, *others = peers.gather("the files that the script has written", mine)
    shared = [path for path in first if any(path in theirs for theirs in others)]
    if shared and distribution.is_chief:
        more = f" and {len(shared) - 5} more" if len(shared) > 5 else ""
        messages.logger.info(
            f"WARNING: several workers have written {', '.join(shared[:5])}{more} in the working directory, "
            "and the last one counts: give each worker a name of its own, or write what is the same on all"
        )
