"""The notebook runs from top to bottom, and was committed as it ran."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")
pytest.importorskip("torch")

PATH = Path(__file__).parent.parent / "examples" / "notebook.ipynb"
# In a process of its own: a client keeps an event loop, which is not ours to leave open.
RUN = """
import sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": "."}}).execute()
nbformat.write(notebook, "ran.ipynb")
"""


def outputs_of(path: Path) -> list[dict[str, object]]:
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    return [output for cell in cells for output in cell.outputs]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_runs_from_top_to_bottom_and_draws(tmp_path: Path) -> None:
    folders = {name: str(tmp_path / name) for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "TORCHINDUCTOR_CACHE_DIR")}
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | folders | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    environment["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # Other tests may have asked for another.
    command = [sys.executable, "-c", RUN, str(PATH)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "image/png" in str(outputs_of(tmp_path / "ran.ipynb"))


def test_it_was_committed_with_its_plots_and_is_small() -> None:
    outputs = outputs_of(PATH)
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("image/png" in str(output) for output in outputs) >= 2
    assert PATH.stat().st_size < 300_000
