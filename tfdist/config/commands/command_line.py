"""Shared by all commands: flags and files of flags in, exit codes and one line per error out. No TensorFlow."""

import ast
import atexit
import contextlib
import dataclasses
import difflib
import functools
import gc
import itertools
import multiprocessing
import os
import pathlib
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from absl import app, flags, logging
from ml_collections import config_flags

import tfdist
from tfdist import __version__, config
from tfdist.config import cpu_kernels, field_syntax, runtime_options
from tfdist.config.commands import help_page, standard_streams
from tfdist.errors import TrainingError, UserError, one_line, shown

_KINDS = {"config": ("configs", ".py"), "flagfile": ("flags", ".flags")}  # folder and ending, by flag


@functools.cache
def files(flag: str) -> Mapping[str, pathlib.Path]:
    """Returns the files that come with tfdist, by name: experiments for `config`, flag files for `flagfile`."""
    folder, ending = _KINDS[flag]
    package = pathlib.Path(tfdist.__file__).parent
    # Installed, the folders are inside the package; in a checkout beside it. A setup.cfg beside the package says
    # nothing: `pip install --target .` puts it beside that of another project.
    inside = package / folder
    parent = inside if inside.is_dir() else package.parent / folder
    return {path.stem: path for path in sorted(parent.glob(f"*{ending}"))}


def path_of(flag: str, value: str) -> str:
    """Returns the path for a value of `--config` or `--flagfile`; after a colon is what `get_config` is called with."""
    path, colon, rest = value.partition(":") if flag == "config" else (value, "", "")
    if os.path.isfile(path):
        return value
    known = files(flag)
    if path in known:
        return f"{known[path]}{colon}{rest}"
    kind = "a Python file with get_config()" if flag == "config" else "a file with a flag on each line"
    complaint = f"--{flag}={path} does not exist: give the path of {kind}"
    if re.fullmatch(r"\w+", path) and known:
        complaint += f", or one that comes with tfdist{field_syntax.suggest(path, tuple(known))}"
    raise UserError(complaint)


def fill_in(argv: list[str]) -> None:
    """Writes paths for the names of experiments and flag files, in place. Raises UserError: a file does not exist."""
    for i, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        flag = name.lstrip("-")
        if not name.startswith("-") or flag not in _KINDS:
            continue
        if equals:
            argv[i] = f"{name}={path_of(flag, value)}"
        elif i + 1 < len(argv):
            argv[i + 1] = path_of(flag, argv[i + 1])


def listing() -> str:
    """Returns a line for each experiment and flag file: what it is, and how it is asked for."""

    def first_line(path: pathlib.Path) -> str:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            text = ast.get_docstring(ast.parse(text)) or ""
        return text.lstrip("# ").splitlines()[0].rstrip(".:") if text.strip() else ""

    parts = []
    for flag, heading in (("config", "Experiments:"), ("flagfile", "Flag files:")):
        lines = (f"  --{flag}={name}\n      {first_line(path)}" for name, path in files(flag).items())
        parts.append("\n".join([heading, *lines]))
    return "\n\n".join(parts)


@contextlib.contextmanager
def guarded(path: str) -> Iterator[None]:
    """A context in which that file is run, and can neither end the process nor fail in more than one line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        failure, line = _in_file(error, path)
        if failure is None:
            raise
        at = f" ({path}:{line})" if line else ""
        if isinstance(failure, SystemExit):
            what = f"--config={path} ends the program with {failure.code!r}{at}: it must only return an Experiment"
            raise UserError(what) from None
        text = failure.msg if isinstance(failure, SyntaxError) else next(iter(str(failure).splitlines()), "")
        why = f"{type(failure).__name__}: {one_line(text, 300)}".rstrip(": ")
        raise UserError(f"--config={path} cannot be used: {why}{at}") from error


def _in_file(error: BaseException, path: str) -> tuple[BaseException | None, int | None]:
    """Returns the error that came out of the file, and its line there; (None, None) if it has not to do with it.

    config_flags and absl raise other errors in its place, whose text is a whole traceback.
    """
    here = os.path.realpath(path)
    chain: list[BaseException] = []  # from the error to the one that it was raised for, and so on
    behind: BaseException | None = error
    while behind is not None and behind not in chain:
        chain.append(behind)
        behind = behind.__cause__ or behind.__context__
    for failure in reversed(chain):
        if isinstance(failure, SyntaxError) and failure.filename and os.path.realpath(failure.filename) == here:
            return failure, failure.lineno
        frames = traceback.extract_tb(failure.__traceback__)
        lines = [f.lineno for f in frames if os.path.realpath(f.filename) == here]
        if lines:
            return failure, lines[-1]
    return None, None


DEFAULT_CONFIG = str(files("config")["digits"])
EXIT_S = 25.0  # time limit for a process to end after a signal and its last message: platforms kill after 30 s
_BY_SIGNAL = (129, 130, 143)
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
    fill_in(argv)
    path = DEFAULT_CONFIG
    for one in _config_arguments(argv):
        if one.name == "config":
            path = one.value.partition(":")[0] or DEFAULT_CONFIG  # a colon is before what its get_config() gets
        elif one.name.startswith("config."):
            field(one.name)
    try:
        with guarded(path):
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
    fill_in(argv)
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
        short = {"lr": "config.optimizer.learning_rate", "model": "config.model.name", "data": "config.data.name"}
        devices = {"virtual_devices": "replicas"} if "replicas" in names else {"replicas": "virtual_devices"}
        names = {**fields, **short, **devices, **names}
    near = difflib.get_close_matches(name, names, n=1)
    if not near:
        return "--help lists those that there are" + ", and those of a script stand behind it" * ("nnodes" in names)
    return f"did you mean --{names[near[0]]}{f'={value}' * bool(value)}?"


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
        raise
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
