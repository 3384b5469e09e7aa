"""The notebooks from top to bottom, as a reader runs them, on two devices of the CPU."""

import os
import time
from pathlib import Path

import pytest
from runs import ROOT

MINUTES = 10.0  # twice what each may take on two quiet cores: others may work beside it


@pytest.mark.notebook
@pytest.mark.parametrize("name", ["adaptive_tp_in_ten_minutes", "train_your_own"])
@pytest.mark.timeout(1200)
def test_a_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path, monkeypatch):
    import nbformat  # of the extra `notebooks`
    from nbclient import NotebookClient

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv(
        "PAT_JAX_CACHE", str(tmp_path / "cache" / "xla")
    )  # compiles, as a reader's does
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # optimized as for users
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4)
    nbformat.validate(notebook)
    folder = {"metadata": {"path": str(tmp_path)}}
    start = time.monotonic()
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=folder).execute()
    seconds = time.monotonic() - start
    print(f"{name}: {seconds:.0f} s")
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [one for one in outputs if "image/svg+xml" in one.get("data", {})]
    told = "".join(one.get("text", "") for one in outputs)
    assert len(pictures) >= 2 and "Traceback" not in told
    assert (tmp_path / "runs").is_dir()
    assert seconds < 60 * MINUTES
