"""Every notebook in notebooks/ runs to its end in a fresh kernel at tiny sizes, and is committed clean.

`labcheck.execute_notebook` fails on cell errors, on errors hidden in Output widgets, on tracebacks on stderr, and on
code cells that did not run. Nothing is written back. Time is counted in CPU seconds of the kernel (and of what it
started), since a machine that does other things as well has no meaningful wall time.
"""

import re
import sys
from pathlib import Path

import nbformat
import pytest

from fp8lab.labcheck import execute_notebook, notebook_problems

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BUDGET, WHOLE_BUDGET = 90, 480
"""CPU seconds for a notebook, and for the course."""
USED = {}


def children_seconds():
    """CPU seconds, user and system, of child processes that ended and were waited for."""
    resource = pytest.importorskip("resource", reason="Windows does not count the CPU seconds of child processes")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def require_budget(used, budget):
    worst = max(used, key=used.get)
    spent = sum(used.values())
    assert spent <= budget, f"{spent:.0f} CPU seconds, {budget} allowed; most in {worst}: {used[worst]:.0f}"


@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_to_the_end(path, tmp_path, monkeypatch):
    monkeypatch.setenv("FP8LAB_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = None if sys.platform == "win32" else children_seconds()
    executed = execute_notebook(path, timeout=300)
    assert "widgets" in executed.metadata, "widget state is kept, or hidden errors could not be found"
    if before is not None:
        USED[path.stem] = children_seconds() - before
        assert USED[path.stem] > 1, "importing torch alone takes longer: the kernel was not counted"
        require_budget({path.stem: USED[path.stem]}, BUDGET)


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
    checked = [cell for cell in code if "# <-" in cell.source and re.search(r"check_\w+\(", cell.source)]
    assert 2 <= len(checked) <= 4, "exercises: a line to change, and a checker"


def test_a_kernel_counts(tmp_path):
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("import time\nwhile time.process_time() < 3: pass")]
    )
    path = tmp_path / "busy.ipynb"
    nbformat.write(notebook, path)
    before = children_seconds()
    execute_notebook(path, timeout=60)
    used = children_seconds() - before
    assert 3 <= used < 30
    with pytest.raises(AssertionError, match="most in busy"):
        require_budget({"busy": used, "idle": 0.1}, 3)


def test_a_hidden_error_is_a_problem():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", execution_count=1)])
    assert notebook_problems(notebook) == []
    notebook.cells[0].outputs = [nbformat.v4.new_output("stream", name="stderr", text="Traceback (most recent…")]
    assert "stderr" in notebook_problems(notebook)[0]


@pytest.mark.notebook
def test_the_whole_course_is_within_its_budget():
    if missing := {path.stem for path in NOTEBOOKS} - set(USED):
        pytest.skip(f"needs every notebook run in this process; not measured: {', '.join(sorted(missing))}")
    require_budget(USED, WHOLE_BUDGET)
