"""An interpreter that has loaded TensorFlow and Keras, and forks itself so that no other needs to load them.

It has run no op and has no device and no thread of TensorFlow's, so a child can do all that a fresh interpreter can:
split the CPU, choose threads, connect. tfdist is not loaded: each child takes its own from its path.

Such a child differs from a fresh interpreter in this, and `asking.py` gives what would notice to a real one:

- strings have the same hashes in all children of a server;
- messages that TensorFlow writes while it is loaded are missing;
- `sys.modules` has TensorFlow in it from the beginning;
- its peak of memory begins with the server's.
"""

import builtins
import codecs
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import io
import logging
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
import types

from support import asking

PRELOADED = (
    *("tensorflow", "keras", "tensorflow_datasets", "absl.app", "absl.flags", "absl.logging", "psutil", "PIL.Image"),
    *("ml_collections.config_flags", "rich.console", "rich.live", "rich.progress", "rich.table", "rich.traceback"),
)
_PR_SET_PDEATHSIG = 1
_HIGH = 200
"""Descriptors are moved here first, so that none lies where another one is to be."""


class _Loaded:
    """What the interpreter was like before its first child."""

    def __init__(self):
        self.path = [path for path in sys.path[1:] if path != _home()]
        before = dict(os.environ)
        for name in PRELOADED:
            importlib.import_module(name)
        # Loaded when they are used first.
        import tensorflow_datasets as tfds

        _ = tfds.core.GeneratorBasedBuilder, tfds.features.FeaturesDict, tfds.decode.SkipDecoding
        self.set_by_loading = {k: v for k, v in os.environ.items() if before.get(k) != v}
        self.modules = {name.partition(".")[0] for name in sys.modules} - {"support", "__main__"}
        self.fds = {fd for fd in _open_fds() if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}")}
        self.c = ctypes.CDLL(None)

    def idle(self):
        """Whether nothing has been begun that a fork would tear."""
        import threading

        from tensorflow.python.eager import context

        return context.context()._context_handle is None and threading.active_count() == 1


def main(number):
    """Serves the process at the other end of a socket. Returns in children only: what their program comes to."""
    sock = socket.socket(fileno=number)
    sock.set_inheritable(False)
    # Ctrl-C in a terminal is for the tests. A child begins with this mask, so that none of its signals is lost
    # or comes before it is ready.
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    loaded = _Loaded()
    loaded.fds.discard(sock.fileno())
    gc.collect()
    gc.freeze()  # nothing of it has to be looked through again, and copied for that, in each child
    asking.send(sock, (loaded.modules, loaded.idle()))
    while True:
        request, fds = _serve(sock)
        server = _become(request, fds, loaded)
        if server is None:
            return _perform(request)
        sock = server  # this is no child, but its fork server


def _serve(sock):
    """Forks for each request; returns in the children."""
    while True:
        told, fds = asking.receive(sock)
        if told is None:
            os._exit(0)  # the process at the other end is gone, or does not need this any more
        request = asking.Request(**told)
        numbers, tell = os.pipe()
        ready, go = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                os.write(tell, str(child).encode())
                os._exit(0)
            os.close(go)
            os.read(ready, 1)
            if os.getppid() != request.parent:
                os._exit(0)
            for fd in (ready, numbers, tell):
                os.close(fd)
            sock.close()
            return request, fds
        os.waitpid(between, 0)
        child = int(os.read(numbers, 20))
        for fd in (numbers, tell, ready, *fds):
            os.close(fd)
        with open(f"/proc/{child}/stat", "rb") as stat:
            parent = int(stat.read().rpartition(b")")[2].split()[1])
        asking.send(sock, child if parent == request.parent else 0)
        os.close(go)


def _become(request, fds, loaded):
    """Makes a forked interpreter what a fresh one is before its program; in a server of its own, gives the socket."""
    _take(fds, request.fds, loaded.fds)
    os.chdir(request.cwd)
    with contextlib.suppress(PermissionError):  # the caller has begun a session since
        os.setpgid(0, request.group)
    if request.new_session:
        os.setsid()
    if request.ends_with_the_parent:
        loaded.c.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != request.parent:
            os._exit(1)
    if request.is_starter:
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            _keep_only({theirs.fileno(), *loaded.fds})
            for fd in range(3):
                os.dup2(os.open(os.devnull, os.O_RDWR), fd)
            os.setpgid(0, 0)
            return theirs
        theirs.close()
        _start_by(asking.Server(ours, request.environ, loaded.modules))
    # After the fork of the server above, which is not to be found by the environment.
    _set_environ(request.environ if request.is_starter else request.environ | loaded.set_by_loading, loaded.c)
    _show(request, loaded.c)
    _set_path(request, loaded.path)
    _set_streams(request.environ)
    _set_modules(request.environ)
    _set_signals(request)
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")  # as `site` does
    return None


def _start_by(server):
    """From now on `subprocess` asks the server first."""
    import inspect

    original = subprocess.Popen._execute_child
    signature = inspect.signature(original)

    def execute_child(self, *arguments):
        return asking.execute_child(lambda: server, original, signature, self, arguments)

    subprocess.Popen._execute_child = execute_child


def _take(fds, numbers, own):
    """Gives descriptors their numbers and closes all others."""
    import fcntl

    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for fd in fds]
    _keep_only({*high, *own})
    for fd, number in zip(high, numbers):
        os.dup2(fd, number)
        os.close(fd)


def _keep_only(keep):
    for fd in _open_fds():
        if fd not in keep:
            with contextlib.suppress(OSError):  # the one that lists them
                os.close(fd)


def _open_fds():
    return {int(name) for name in os.listdir("/proc/self/fd")}


def _set_environ(environ, c):
    os.environ.clear()
    c.clearenv()
    os.environ.update(environ)  # which copies them, so that nothing is left where the kernel shows them


def _show(request, c):
    """Puts the words and the environment where /proc tells of them; tests find processes so."""
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    begin, end, environ_begin, environ_end = map(int, fields[45:49])
    words = b"".join(os.fsencode(word) + b"\0" for word in request.words)
    environ = b"".join(os.fsencode(f"{k}={v}") + b"\0" for k, v in request.environ.items())
    for place, size, data in ((begin, end - begin, words), (environ_begin, environ_end - environ_begin, environ)):
        ctypes.memset(place, 0, size)
        ctypes.memmove(place, data, min(len(data), size))


def _set_path(request, rest):
    folder = {"-m": request.cwd, "-c": ""}.get(request.how)
    if folder is None:
        folder = os.path.dirname(os.path.realpath(request.words[1]))
    given = [os.path.abspath(path) for path in request.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [folder, *dict.fromkeys([*given, *rest])]
    importlib.invalidate_caches()
    sys.orig_argv = list(request.words)
    sys.argv = request.words[2 if request.how else 1 :]
    if request.how:
        sys.argv[0] = request.how


def _set_streams(environ):
    """As `create_stdio` of CPython's pylifecycle.c does."""
    old = sys.stderr
    encoding, _, errors = environ.get("PYTHONIOENCODING", "").partition(":")
    direct = bool(environ.get("PYTHONUNBUFFERED"))
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, f"__{name}__")
        buffer = open(fd, "wb" if fd else "rb", buffering=0 if fd and direct else -1, closefd=False)  # noqa: SIM115
        raw = buffer if fd and direct else buffer.raw
        raw.name = f"<{name}>"
        stream = io.TextIOWrapper(
            buffer,
            codecs.lookup(encoding).name if encoding else before.encoding,
            errors if errors and fd < 2 else before.errors,
            newline="\n",
            line_buffering=not direct and (raw.isatty() or fd == 2),
            write_through=direct,
        )
        if encoding and not errors and fd < 2:
            stream.reconfigure(errors="strict")
        stream.mode = "w" if fd else "r"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for reference in logging._handlerList:
        handler = reference()
        if getattr(handler, "stream", None) is old:
            handler.stream = sys.stderr


def _set_modules(environ):
    """What modules have read of the environment, and which ones no program has loaded."""
    random.seed()
    sys.modules["numpy"].random.seed()
    time.tzset()
    constants = sys.modules["tensorflow_datasets.core.constants"]
    constants.DATA_DIR = environ.get("TFDS_DATA_DIR", os.path.join(os.path.expanduser("~"), "tensorflow_datasets"))
    keras = sys.modules["keras.src.backend.config"]
    if "KERAS_HOME" not in environ and hasattr(keras, "_KERAS_DIR"):
        keras._KERAS_DIR = os.path.join(os.path.expanduser("~"), ".keras")
    # TensorFlow asks for the GPUs, aloud, as soon as an app has begun; with the app before the import, in the import.
    sys.modules["absl.app"]._init_callbacks.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "support"]:
        del sys.modules[name]
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins
    main.__annotations__ = {}
    main.__loader__ = importlib.machinery.BuiltinImporter
    sys.modules["__main__"] = main


def _set_signals(request):
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN if number in request.ignored else signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    if signal.SIGINT not in request.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.mask)


def _perform(request):
    """Runs the program; what it raises goes on to the end of the interpreter, which does with it as it always does."""
    main = sys.modules["__main__"]
    try:
        if request.how == "-m":
            runpy._run_module_as_main(request.words[2])
        elif request.how == "-c":
            exec(compile(request.words[2], "<string>", "exec"), main.__dict__)
        else:
            path = os.path.join(request.cwd, request.words[1])  # as it is written, dots and all
            main.__file__, main.__cached__ = path, None
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
            with open(path, "rb") as file:
                code = compile(file.read(), path, "exec")
            exec(code, main.__dict__)
    except BaseException as error:
        shown = error.__traceback__.tb_next  # without this frame
        hook = sys.excepthook

        def own(kind, value, _):
            hook(kind, value.with_traceback(shown), shown)

        sys.excepthook = own
        raise


def _home():
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
