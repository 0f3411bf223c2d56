"""Every notebook in notebooks/ runs to its end in a fresh kernel at tiny sizes, and is committed clean.

`labcheck.execute_notebook` fails on cell errors, on errors hidden in Output widgets, on tracebacks on stderr, and on
code cells that did not run. Nothing is written back.
"""

import re
from pathlib import Path

import nbformat
import pytest

from fp8lab.labcheck import execute_notebook, notebook_problems

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_to_the_end(path, tmp_path, monkeypatch):
    monkeypatch.setenv("FP8LAB_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    executed = execute_notebook(path, timeout=300)
    assert "widgets" in executed.metadata, "widget state is kept, or hidden errors could not be found"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert path.stat().st_size < 60_000
    assert notebook.metadata.kernelspec.name == "python3" and "widgets" not in notebook.metadata
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert 25 <= len(notebook.cells) <= 50
    assert all(re.fullmatch(r"[a-z0-9-]+", cell.id) for cell in notebook.cells), "ids are words, so they stay the same"
    lengths = [len(cell.source.splitlines()) for cell in code]
    assert max(lengths) <= 25 and sum(n <= 8 for n in lengths) > 0.8 * len(lengths)
    assert sum(cell.source.count("RunPanel(") for cell in code) <= 3


def test_a_hidden_error_is_a_problem():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", execution_count=1)])
    assert notebook_problems(notebook) == []
    notebook.cells[0].outputs = [nbformat.v4.new_output("stream", name="stderr", text="Traceback (most recent…")]
    assert "stderr" in notebook_problems(notebook)[0]
