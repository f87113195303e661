"""The hosts of `make chaos`: network namespaces, if the kernel and the user permit it."""

import contextlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator

from support.network_hosts import MORE, Hosts


class Network(Hosts):
    """Hosts whose links can be cut and mended."""

    def plug(self, name: str) -> None:
        self._ip("-n", self._spaces[name], "link", "set", "eth0", "up")


@contextlib.contextmanager
def network(folder: pathlib.Path) -> Iterator[Network | None]:
    """Makes the hosts, and removes them afterwards; None where that cannot be."""
    made = Network(folder, MORE)
    try:
        made.make()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no link is cut, since there are no network namespaces: {error}", file=sys.stderr)
        yield None
    else:
        yield made
    finally:
        made.remove()
