"""Memory that processes of one host have in common, without a file that somebody would have to remove. Linux only.

It belongs to no file system (memfd), so nothing is left behind by a process that is killed. Others of the same user
find it by its place in the `/proc` of the process that made it.
"""

import contextlib
import io
import os
import uuid
from typing import BinaryIO, TypeAlias

Note: TypeAlias = dict[str, str | int]  # location of memory, as JSON can hold it

_MEMORY = "/memfd:tfdist "


class Offer(io.FileIO):
    """Memory that others can open until this is closed; what they have mapped by then stays. Raises OSError."""

    def __init__(self, name: str):
        # At its beginning, to tell it from what another container may have at the same place.
        self._token = uuid.uuid4().hex.encode()
        super().__init__(os.memfd_create(f"tfdist {name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b")
        try:
            self.write(self._token)
        except OSError:
            self.close()
            raise

    def note(self) -> Note:
        """Returns where it is; its size must not change any more."""
        size = os.fstat(self.fileno()).st_size
        return {"process": os.getpid(), "file": self.fileno(), "token": self._token.decode(), "size": size}


def opened(note: Note, writing: bool = False) -> BinaryIO | None:
    """Opens what a process of this host offers; None if it cannot be seen from here."""
    token, path = str(note["token"]).encode(), f"/proc/{note['process']}/fd/{note['file']}"
    with contextlib.ExitStack() as unless_it_is_that, contextlib.suppress(OSError):
        # In another container that is another process. What it has there may be a pipe, which would wait to be read.
        if not os.readlink(path).startswith(_MEMORY):
            return None
        file = unless_it_is_that.enter_context(open(path, "r+b" if writing else "rb", buffering=0))
        if file.read(len(token)) == token and os.fstat(file.fileno()).st_size == note["size"]:
            unless_it_is_that.pop_all()
            return file
    return None
