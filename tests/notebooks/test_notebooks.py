"""The notebooks, executed from the first cell to the last by a real kernel, on the CPU."""

import pathlib

import nbclient
import nbformat
import pytest

NOTEBOOKS = pathlib.Path(__file__).resolve().parent.parent.parent / "notebooks"


def executed(name, folder, monkeypatch, tfds_dir):
    """Returns what each code cell showed, as text."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_dir))
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parent))
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)  # which the connecting of these tests has set
    notebook = nbformat.read(NOTEBOOKS / name, 4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    return [shown(cell) for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell):
    parts = []
    for output in cell.outputs:
        parts.append(output.get("text") or str(output.get("data", {}).get("text/plain", "")))
        assert output.get("name") != "stderr", output
    return "".join(parts)


@pytest.mark.whole
def test_first_steps(tmp_path, monkeypatch, tfds_dir):
    said = executed("first_steps.ipynb", tmp_path, monkeypatch, tfds_dir)
    assert said[0].endswith("<Distribution mirrored: 2 replicas, here on CPU:0, CPU:1>")
    assert said[1].endswith("<Loaded: 1,437 examples to train, 360 to evaluate, [8, 8, 1] uint8, 10 classes>")
    assert any("relative distance of all weights: " in text for text in said)
    assert not any("INFO" in text or "WARNING" in text for text in said)
    assert (tmp_path / "digits.keras").exists() and any((tmp_path / "checkpoints").iterdir())


@pytest.mark.whole
@pytest.mark.parametrize("name", ["colab_gpu.ipynb", "colab_tpu.ipynb"])
def test_colab_without_its_hardware(name, tmp_path, monkeypatch, tfds_dir):
    said = executed(name, tmp_path, monkeypatch, tfds_dir)
    assert "\n<Distribution default: 1 replica, here on CPU:0> because 1 CPU here" in said[1], "below what connect says"
    assert "tfdist: completed" in "".join(said)
    assert (tmp_path / "tfdist_runs/digits_mlp/report.html").exists()


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda p: p.name)
def test_they_are_kept_without_output(path):
    notebook = nbformat.read(path, 4)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
