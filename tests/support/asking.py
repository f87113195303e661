"""Which commands a forked interpreter can run as a fresh one would, and how one is asked for. No TensorFlow.

A request goes from the process that wants a child, here the caller, over a socket to a fork server of its own
(`fork_server.py`). What cannot be told apart from a fresh interpreter is taken; for everything else `find` gives None
and the caller starts a real one.
"""

import ctypes
import dataclasses
import itertools
import os
import pathlib
import pickle
import re
import signal
import socket
import struct
import sys
import threading

EARLY = re.compile(
    "(ABSL|BLIS|CUDA|DNNL|GLIBC|GOMP|GOTO|GRPC|HDF5|JAX|KERAS|KMP|LANG|LC|LD|MALLOC|MKL|ML|MPL|NUMEXPR|NPY|NVIDIA|OMP"
    "|ONEDNN|OPENBLAS|PROTOCOL|SSL|TF|TF2|TFDS|TPU|TZ|XDG|XLA)(_|$)|LANGUAGE$|PYTHON|MALLOC|NUMPY"
)
"""Variables that Python, TensorFlow, Keras and what they stand on may read while they are loaded."""
LATE = re.compile(
    "(CUDA_DEVICE_ORDER|CUDA_VISIBLE_DEVICES|TF_CONFIG|TFDS_DATA_DIR|PYTHON(PATH|UNBUFFERED|IOENCODING))$"
)
"""Of those the ones that are read afterwards, or that a child of the server is given as if it had read them."""
STARTERS = ("tfdist.compare", "tfdist.launch", "tfdist.sweep")
"""Commands that do not load TensorFlow and start others that do: they get a fork server of their own."""
NEVER = ("tfdist.doctor",)
"""Commands whose subject is what they and their children load."""
ROOM = {"words": 30_000, "environ": 100_000}
"""Bytes that the server keeps free for what /proc tells of a child."""
_WITH_THE_PARENT = "end_with_the_parent.<locals>."
_PR_SET_CHILD_SUBREAPER = 36
_HEAD = struct.Struct("!I")


@dataclasses.dataclass
class Request:
    """A child as its parent wants it. The descriptors themselves travel beside it, in the order of `fds`."""

    words: list
    environ: dict
    cwd: str
    fds: list
    """Numbers that the child shall know the descriptors by."""
    parent: int
    group: int
    new_session: bool
    ends_with_the_parent: bool
    ignored: list
    mask: list

    @property
    def how(self):
        """`-m`, `-c`, or nothing for a script."""
        return self.words[1] if self.words[1] in ("-m", "-c") else ""

    @property
    def is_starter(self):
        several = self.words[2:3] in (["tfdist"], ["tfdist.run"]) and "--nproc_per_node" in " ".join(self.words)
        return self.how == "-m" and (several or self.words[2] in STARTERS)


def send(sock, value, fds=()):
    """Sends a value without classes of this module, which a child does not know under its name any more."""
    data = pickle.dumps(value)
    if fds:
        socket.send_fds(sock, [_HEAD.pack(len(data))], fds)
        sock.sendall(data)
    else:
        sock.sendall(_HEAD.pack(len(data)) + data)


def receive(sock):
    """What was sent and the descriptors with it; None when the other side is gone."""
    head, fds, _, _ = socket.recv_fds(sock, _HEAD.size, 250, socket.MSG_WAITALL)
    if len(head) < _HEAD.size:
        return None, []
    data, size = bytearray(), _HEAD.unpack(head)[0]
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            return None, fds
        data += part
    return pickle.loads(data), fds


class Server:
    """The caller's side of a fork server that is a child of it.

    Args:
      environ: what the server was started with.
      loaded: names of modules that a child would not look for any more.
      binds: whether the children shall end with the caller, however it ends.
    """

    def __init__(self, sock, environ, loaded, binds=False):
        self.pid = os.getpid()
        self.loaded = loaded
        self._sock, self._lock = sock, threading.Lock()
        self._binds = binds
        self._early = early(environ)
        self._home = environ.get("HOME")
        self._state = _inherited()

    def find(self, popen, signature_arguments):
        """The request that these arguments of `Popen._execute_child` come to, or None if a real one is needed."""
        a = signature_arguments
        words = a["args"]
        if os.getpid() != self.pid or not isinstance(words, list | tuple) or len(words) < 2:
            return None
        words = [os.fspath(word) for word in words]
        if not all(isinstance(word, str) for word in words) or words[0] != sys.executable:
            return None
        preexec = a["preexec_fn"]
        with_parent = getattr(preexec, "__qualname__", "").startswith(_WITH_THE_PARENT)
        plain = (
            not a["shell"] and a["executable"] in (None, words[0]) and a["close_fds"] and a["restore_signals"]
            and (preexec is None or with_parent) and a["umask"] == -1 and a.get("process_group") in (None, -1)
            and a["uid"] is a["gid"] is a["gids"] is None
        )  # fmt: skip
        environ = {os.fsdecode(k): os.fsdecode(v) for k, v in (_environ() if a["env"] is None else a["env"]).items()}
        cwd = os.path.abspath(os.fsdecode(a["cwd"] or "."))
        if not plain or not os.path.isdir(cwd) or not self._environ_fits(environ) or _inherited() != self._state:
            return None
        # Other flags are for a fresh interpreter.
        how = words[1] if words[1] in ("-m", "-c") and len(words) > 2 else ""
        script = os.path.join(cwd, words[1])
        if not how and (words[1].startswith("-") or not words[1].endswith(".py") or not os.path.isfile(script)):
            return None
        if how == "-m" and (words[2] in NEVER or words[2].partition(".")[0] in self.loaded):
            return None
        first = cwd if how else os.path.dirname(os.path.realpath(script))
        if any(self.loaded & _modules(folder) for folder in (first, *_paths(environ, cwd))):
            return None
        if sum(len(os.fsencode(word)) + 1 for word in words) > ROOM["words"]:
            return None
        if sum(len(os.fsencode(k + v)) + 2 for k, v in environ.items()) > ROOM["environ"]:
            return None
        return Request(
            words=words, environ=environ, cwd=cwd,
            fds=[0, 1, 2, *sorted(map(int, a["pass_fds"]))], parent=os.getpid(), group=os.getpgid(0),
            new_session=bool(a["start_new_session"]), ends_with_the_parent=with_parent or self._binds,
            ignored=[int(n) for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN],
            mask=[int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        )  # fmt: skip

    def fork(self, request, fds):
        """Starts the child; its number, or None if the kernel has not made it a child of this process."""
        prctl = ctypes.CDLL(None).prctl
        # An exception out of a signal handler between question and answer would leave the answer to the next one.
        with self._lock:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            # The server forks a child that forks ours and ends; so ours is an orphan, and comes to the nearest
            # process above that asks for such. Then it is a child of this process like any other, with a number
            # to wait for and to signal.
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                send(self._sock, vars(request), fds)
                answer, _ = receive(self._sock)
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if answer is None:
            raise RuntimeError("the fork server of the tests is gone")
        return answer or None

    def _environ_fits(self, environ):
        home = environ.get("HOME")
        if home != self._home and (not home or os.path.exists(os.path.join(home, ".keras", "keras.json"))):
            return False  # Keras reads it while it is loaded
        return early(environ) == self._early


def early(environ):
    """The variables that must be as they were when the server was started."""
    return {k: v for k, v in environ.items() if EARLY.match(k) and not LATE.match(k)}


def execute_child(server, original, signature, popen, arguments):
    """`Popen._execute_child`, by the server if it can; `server` is called only where words are of Python."""
    bound = signature.bind(popen, *arguments).arguments
    words = bound["args"]
    python = isinstance(words, list | tuple) and bool(words) and words[0] == sys.executable
    found = server() if python else None
    request = found.find(popen, bound) if found else None
    pid = None
    if request:
        own = (bound["p2cread"], bound["c2pwrite"], bound["errwrite"])
        pid = found.fork(request, [*(n if fd == -1 else fd for n, fd in enumerate(own)), *request.fds[3:]])
    popen.forked = pid is not None
    if pid is None:
        return original(popen, *arguments)
    popen.pid = pid
    popen._child_created = True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    return popen._close_pipe_fds(*(bound[name] for name in pipes))


def _environ():
    """The environment as C has it: readline, say, sets variables there that `os.environ` does not know."""
    lines = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    return dict(line.split(b"=", 1) for line in itertools.takewhile(bool, lines))


def _paths(environ, cwd):
    return [os.path.join(cwd, path) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _modules(folder):
    """Names of modules and packages in a folder."""
    try:
        entries = list(pathlib.Path(folder).iterdir())
    except OSError:
        return set()
    found = {entry.name.partition(".")[0] for entry in entries if entry.suffix in (".py", ".so", ".pyc", ".pth")}
    return found | {entry.name for entry in entries if (entry / "__init__.py").exists()}


def _inherited():
    """What a child has from its parent beyond a request: limits, processors, niceness, the mask for new files."""
    import resource

    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    with open("/proc/self/status") as status:
        mask = next((line for line in status if line.startswith("Umask")), "")
    spaces = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt", "pid", "uts", "user")}
    return limits, os.sched_getaffinity(0), os.nice(0), mask, spaces
