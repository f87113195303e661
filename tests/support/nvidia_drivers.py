"""What tests of GPUs share: a real executable named nvidia-smi that answers as drivers do. There is no GPU here."""

import os
import stat

import pytest

FOUR = """\
0, GPU-aaa, 90, 16000, 12000, 4000, 550.1, Tesla T4
1, GPU-bbb, 0, 16000, 10, 15990, 550.1, Tesla T4
2, GPU-ccc, 50, 16000, 8000, 8000, 550.1, Tesla T4
3, GPU-ddd, 5, 16000, 10, 15990, 550.1, Tesla T4
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Puts an `nvidia-smi` with the given shell body first on PATH."""

    def install(body):
        path = tmp_path / "bin" / "nvidia-smi"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
        return path.parent

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


def printing(text, code=0):
    return f"cat <<'END'\n{text.rstrip()}\nEND\nexit {code}"
