"""One JupyterLab in fast mode and one Chromium for all browser tests; a page and a kernel for each, ended after it."""

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def address(root, tmp_path_factory):
    """(base URL, token) of a JupyterLab on a copy of notebooks/."""
    import lab

    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(root / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns("runs", ".ipynb*"))
    env = {"FP8LAB_FAST": "1", "FP8LAB_HOME": str(folder / "runs")}
    with lab.jupyter_lab(folder / "notebooks", env=env) as found:
        yield found


@pytest.fixture(scope="session")
def browser():
    """Chromium."""
    import lab

    with lab.chromium() as found:
        yield found


@pytest.fixture
def shots():
    """Where screenshots go: $FP8LAB_SHOTS, or `screenshots` here (git ignores it)."""
    folder = Path(os.environ.get("FP8LAB_SHOTS") or Path(__file__).parent / "screenshots").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def open_notebook(address, browser, shots):
    """Opens a notebook by its name; when the test is over, no request may have left the machine, and no console error
    may have been seen."""
    import lab

    opened = []

    def opener(name):
        opened.append(lab.Notebook(browser, address, f"{name}.ipynb", shots))
        return opened[-1]

    yield opener
    for notebook in opened:
        notebook.close()
        assert notebook.blocked == [], "something asked for the network"
        assert notebook.errors == [], "the browser's console shows errors"
