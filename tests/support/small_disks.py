"""Small file systems, where the user may mount one."""

import os

import pytest

from support import processes


@pytest.fixture
def mounted():
    """Mounts one with these options on a new folder, which it returns."""
    folders = []

    def mount(folder, options):
        if os.geteuid():
            pytest.skip("only root can mount a small file system")
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        made = processes.run(words, stdout=processes.PIPE, stderr=processes.STDOUT)
        if made.returncode:
            pytest.skip(f"this kernel forbids mounts: {made.stdout.decode().strip()}")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        processes.run(["umount", "-l", str(folder)], check=True)
