"""How a run of each strategy is started as a command, and what it ends with when nothing disturbs it."""

import functools
import json
import os
import sys

from support import network_hosts

HOROVODRUN = os.path.join(os.path.dirname(sys.executable), "horovodrun")
TRAIN = [sys.executable, "-m", "tfdist.train"]
LAUNCH = [sys.executable, "-m", "tfdist.launch"]
WAYS = {
    "default": [*TRAIN, "--strategy=default"],
    "mirrored": [*TRAIN, "--strategy=mirrored", "--virtual_devices=2"],
    "multi_worker": [*LAUNCH, "--nproc_per_node=2", "--", "--strategy=multi_worker"],
    "horovod": [HOROVODRUN, "--gloo", "-np", "2", *TRAIN, "--strategy=horovod"],
}
"""Commands, without the flags of the experiment."""


def result(folder):
    """`result.json` of the run in `folder`."""
    return json.loads((folder / "run/result.json").read_text())


def ends(flags, tmp_path_factory, tfds_dir):
    """Returns a function that tells what a run with these flags ends with, by the name of a way; each runs once."""

    @functools.cache
    def of(way):
        folder = tmp_path_factory.mktemp(way)
        program = network_hosts.Program([*WAYS[way], *flags], network_hosts.clean(tfds_dir), folder)
        assert program.end() == 0, program.text
        return result(folder)

    return of
