"""Shared by all commands: flags in, exit codes and one line per error out. No TensorFlow."""

import atexit
import contextlib
import dataclasses
import difflib
import gc
import itertools
import multiprocessing
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from absl import app, flags, logging
from ml_collections import config_flags

from tfdist import __version__, config
from tfdist.config import cpu_kernels, field_syntax, runtime_options
from tfdist.config.commands import config_files, help_page, standard_streams
from tfdist.errors import TrainingError, UserError, one_line, shown

DEFAULT_CONFIG = str(config_files.files("config")["digits"])
EXIT_S = 25.0  # time limit for a process to end after a signal and its last message: platforms kill after 30 s
_BY_SIGNAL = (129, 130, 143)
_HELP_FULL = {"-helpfull", "--helpfull"}
OF_THE_ENVIRONMENT = tuple(runtime_options.HELP)


class _ConfigArgument(NamedTuple):
    """An argument that says which experiment, or what of it is changed."""

    place: int  # in the command line
    name: str  # without dashes: `config`, or a field such as `config.train.epochs`
    value: str
    separate: bool  # the value is the next argument


def _config_arguments(argv: Sequence[str]) -> Iterator[_ConfigArgument]:
    for i, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if argument.startswith("-") and name.lstrip("-").partition(".")[0] in ("config", "noconfig"):
            separate = not equals and i + 1 < len(argv) and not argv[i + 1].startswith("-")
            yield _ConfigArgument(i, name.lstrip("-"), argv[i + 1] if separate else value, separate)


def field(name: str) -> Any:
    """Returns the default of a field such as `config.train.epochs`, or a group of them."""
    owner: Any = config.Experiment()
    for part in name.split(".")[1:]:
        known = tuple(f.name for f in dataclasses.fields(owner)) if dataclasses.is_dataclass(owner) else ()
        if part not in known:
            suggested = field_syntax.suggest(config.current_name(part), known) if known else ""
            raise UserError(f"unknown config field --{name}{suggested}")
        owner = getattr(owner, part)
    return owner


def parse(argv: list[str], own: Sequence[str] = OF_THE_ENVIRONMENT) -> list[str]:
    """Parses the flags of a command that takes an experiment, and for `--help` has the other flags `own`."""
    helps = help_page.is_asked(argv)
    if helps:  # whatever else is on the command line may be why
        kept = [argv[one.place : one.place + 1 + one.separate] for one in _config_arguments(argv)]
        argv = sys.argv = [argv[0], *itertools.chain(*kept)]
    # A missing file or a misspelt field would be reported by absl and config_flags with a traceback.
    config_files.fill_in(argv)
    path = DEFAULT_CONFIG
    for one in _config_arguments(argv):
        if one.name == "config":
            path = one.value.partition(":")[0] or DEFAULT_CONFIG  # a colon is before what its get_config() gets
        elif one.name.startswith("config."):
            field(one.name)
    try:
        with config_files.guarded(path):
            # The definition itself reads the command line, so it belongs to what can fail.
            text = "Experiment: a Python file with get_config(), or a name."
            config_flags.DEFINE_config_file("config", DEFAULT_CONFIG, text)
            rest = _parse_flags(argv)
            getattr(flags.FLAGS.config, "name", None)  # config_flags keeps an OSError back until somebody looks
    except (UserError, SystemExit):
        raise
    except Exception as error:  # what is wrong with the file without a line of it that has failed: it has no get_config
        raise UserError(f"--config={path} cannot be used: {type(error).__name__}: {one_line(error, 300)}") from error
    if helps:
        _help(["config", *own], flags.FLAGS.config if len(argv) > 1 else None)
    return rest


def _help(names: Sequence[str], experiment: config.Experiment | None = None) -> NoReturn:
    """Prints the help of flags of these names and of those that the command itself defines."""
    defined = [flag.name for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])]
    print(help_page.page([*names, *defined], experiment))
    sys.exit(0)


def parse_own(argv: list[str], shared: Sequence[str] = ()) -> list[str]:
    """Parses the flags of a command that takes no experiment, each complaint a `UserError` of one line.

    For `--help` it has the flags `shared` with other commands, too.
    """
    if help_page.is_asked(argv):
        _help(shared)
    config_files.fill_in(argv)
    return _parse_flags(argv)


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        rest = flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        given = error.flagvalue  # in --flagfile, perhaps
        following = argv[argv.index(given) + 1 :][:1] if given in argv else []
        value = given.partition("=")[2] if "=" in given else "".join(word for word in following if word[:1] != "-")
        raise UserError(f"unknown flag --{error.flagname}: {_meant(error.flagname, value)}") from None
    except flags.Error as error:
        text = re.sub(r"Unable to parse value .*", "is a group of fields: set one of them", one_line(error))
        text = re.sub(r"invalid literal for int.*", "is no whole number: give one, such as 1", text)
        text = re.sub(r"could not convert string to float.*", "is no number: give one, such as 0.1", text)
        raise UserError(text) from None
    if len(rest) > 1:
        script = f", and tfdist run {rest[1]} trains a script" * rest[1].endswith(".py")
        raise UserError(f"unexpected argument {rest[1]!r}: flags are written --name=value{script}")
    return rest


def _meant(name: str, value: str) -> str:
    """Names the flag, or the field of an experiment, that a misspelt or shortened name stands for, with its value."""
    names = {flag: flag for flag in flags.FLAGS}
    if "config" in names:
        fields = {field.rpartition(".")[2]: field for field in reversed(config.flat(config.Experiment()))}
        names = {**fields, "lr": "config.optimizer.learning_rate", "model": "config.model.name", **names}
        gpus = dict.fromkeys(("gpus", "num_gpus"), "devices=" if "," in value else "devices=idle:")
        names |= {"data": "config.data.name", **gpus}
    near = difflib.get_close_matches(name, names, n=1)
    if not near:
        return "--help lists those that there are" + ", and those of a script stand behind it" * ("nnodes" in names)
    return f"did you mean --{names[near[0]]}{'=' * (bool(value) and '=' not in names[near[0]])}{value}?"


def main(
    run: Callable[[list[str]], int],
    flags_parser: Callable[[list[str]], list[str]] = parse,
    interrupted: str = "interrupted at once, nothing was saved",
) -> None:
    """Runs a command's body on what the parser leaves, with the design's exit codes and one line per error."""

    logging.set_verbosity(logging.WARNING)  # TensorFlow tells of every all-reduce at INFO
    # At its end the interpreter looks for cycles among all of TensorFlow's objects, for a second in which others wait.
    atexit.register(gc.freeze)
    cpu_kernels.ask_for()  # before a config file can import TensorFlow
    with standard_streams.secured():
        _guarded(run, flags_parser, interrupted)


def _guarded(run: Callable[[list[str]], int], flags_parser: Callable[[list[str]], list[str]], interrupted: str) -> None:
    def whole(argv: list[str]) -> int:
        code = run(argv)
        sys.stdout.flush()  # while a failure can still be told
        return code

    if "--version" in sys.argv[1:]:
        print(f"tfdist {__version__}")
        return
    try:
        app.run(whole, flags_parser=flags_parser)
    except SystemExit as end:
        if end.code in _BY_SIGNAL:
            _end_within_limit(end.code)
        # absl ends --helpfull with 1, which a script takes for a failure.
        raise SystemExit(0 if end.code == 1 and _HELP_FULL.intersection(sys.argv[1:]) else end.code) from None
    except UserError as error:
        print(f"tfdist: error: {shown(error)}", file=sys.stderr)
        sys.exit(2)
    except TrainingError as error:
        print(f"tfdist: failed: {shown(error)}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        # Whoever reads has had enough, as `head` does; nothing may be flushed into that pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        with contextlib.suppress(BrokenPipeError):
            print("tfdist: failed: standard output was closed before the end", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"tfdist: {interrupted}", file=sys.stderr)
        _end_within_limit(130)
        sys.exit(130)


def _end_within_limit(code: int) -> None:
    """Ends this process even if threads or processes that the user's code has started do not end."""

    def end() -> None:
        time.sleep(EXIT_S)
        with contextlib.suppress(Exception):
            for child in multiprocessing.active_children():
                child.kill()
            words = f"a thread or process that was started here has not ended within {EXIT_S:g} s: ended by force"
            if select.select([], [2], [], 1)[1]:  # nobody may read it
                os.write(2, f"tfdist: WARNING: {words}\n".encode())
        os._exit(code)

    threading.Thread(target=end, name="tfdist exit", daemon=True).start()


def clean_up_when_ended(words: str = "") -> None:
    """Makes SIGTERM and SIGHUP raise SystemExit with a shell's code, so that `finally` is run, and print `words`."""

    process = os.getpid()

    def end(number: int, frame: object) -> None:
        if os.getpid() != process:  # a forked child has inherited this, and nothing to clean up
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if words:
            print(f"tfdist: {words.format(signal.Signals(number).name)}", file=sys.stderr)
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without
