"""Which tests run in one process, one after the other, when several processes share a run: `make test -n 3`.

Those of a file do, since they share what is slow to set up. The largest tables would leave one process to work alone at
the end of `make test-all`, so they are divided into parts. All cells of a program or case of the engine's are in one
part: they share what one device ends with.
"""

import collections
import datetime
import pathlib
import re
import subprocess
import zlib

from xdist.scheduler import LoadScopeScheduling

PARTS = 6
LARGE = 120
"""More tests than these in a file are divided; in `make test` no file has as many of those below."""
DIVIDED = re.compile(
    r"tests/(trainer/test_(keras_surface|agreement)|step/test_(static_shapes|shards)"
    r"|distributed/test_fault_moments)\.py"
)


def parts(nodeids):
    """Returns a function that names the part in which a test is, of all that are to be run."""
    sizes = collections.Counter(nodeid.partition("::")[0] for nodeid in nodeids)

    def part(nodeid):
        file, _, test = nodeid.partition("::")
        if not DIVIDED.fullmatch(file) or sizes[file] <= LARGE:
            return file
        case = test if "distributed" in file else re.split("[@-]", test.partition("[")[2])[0]
        return f"{file}, part {zlib.crc32(case.encode()) % PARTS}"

    return part


class ByPart(LoadScopeScheduling):
    """Gives a process a file, or a part of one, at a time."""

    _part = None

    def _split_scope(self, nodeid):
        self._part = self._part or parts(self.collection)
        return self._part(nodeid)


def select(nodeids, number, parts_in_all):
    """Returns the nodeids of part `number` (from 1) of `parts_in_all`, about equal in their number of tests.

    Tests that share a process stay together, so the split does not depend on how many processes run it.
    """
    scope = parts(nodeids)
    sizes = collections.Counter(map(scope, nodeids))
    loads, chosen = [0] * parts_in_all, {}
    for name, size in sorted(sizes.items(), key=lambda entry: (-entry[1], entry[0])):
        chosen[name] = loads.index(min(loads))
        loads[chosen[name]] += size
    return [nodeid for nodeid in nodeids if chosen[scope(nodeid)] == number - 1]


def record(root, part, passed, now=None):
    """Appends to `.test-parts` which part of the tests passed or failed on which commit."""
    git = lambda *words: subprocess.run(["git", "-C", root, *words], capture_output=True, text=True).stdout.strip()
    commit = git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    when = (now or datetime.datetime.now()).isoformat(" ", "minutes")
    with (pathlib.Path(root) / ".test-parts").open("a") as file:
        file.write(f"{commit} part {part} {'passed' if passed else 'failed'} {when}\n")
