"""Prove without a browser that the lab works: JupyterLab answers, and a notebook runs to its end.

    .venv/bin/python -m fp8lab.labcheck NOTEBOOK…        (`make lab HEADLESS=1`)

Executing a notebook is not enough to know that it works: an exception inside an `Output` widget or
a thread leaves every cell green. So a notebook passes only when no cell raised, no `Output` widget
holds an error, no traceback reached stderr, and every code cell was executed. What is left out:
clicking on anything, which needs a browser (`tests/browser`).
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from fp8lab.bootstrap import LAB_OPTIONS, ROOT


def notebook_problems(notebook: dict) -> list[str]:
    """What went wrong in an executed notebook (as nbformat's dict), one entry each; [] when fine.

    Cell errors are nbclient's to raise; this finds the ones that Jupyter hides (see above).
    """
    problems = []
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code" or not "".join(cell["source"]).strip():
            continue
        if cell.get("execution_count") is None:
            problems.append(f"cell {number} was not executed")
        for output in cell["outputs"]:
            if output.get("name") == "stderr" and "Traceback" in "".join(output["text"]):
                problems.append(f"cell {number}, on stderr:\n{''.join(output['text'])}")
    widgets = notebook["metadata"].get("widgets", {})
    state = widgets.get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
    for model in state.values():
        for output in model["state"].get("outputs", ()):
            if output["output_type"] == "error":
                problems.append(f"in an Output widget: {output['ename']}: {output['evalue']}")
    return problems


def execute_notebook(path: Path, *, timeout: float = 600.0, fast: bool = True) -> dict:
    """Run the notebook at `path` top to bottom in a fresh kernel of this environment.

    `timeout` is seconds for one cell; `fast` sets FP8LAB_FAST=1 (tiny sizes). The file is not
    changed. Returns the executed notebook; raises RuntimeError naming the notebook and the cell
    or widget that failed, FileNotFoundError when there is no such file.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(Path(path).resolve().parent)}},
    )
    environment = {**os.environ, "FP8LAB_FAST": "1" if fast else "0"}
    try:
        client.execute(env=environment)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise RuntimeError(f"{path}: {error}") from error
    problems = notebook_problems(notebook)
    if problems:
        raise RuntimeError(f"{path}: " + "\n".join(problems))
    return notebook


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(url: str, token: str) -> bytes:
    """The body of `url` on this machine, past any proxy; raises OSError (URLError among them)."""
    request = urllib.request.Request(url, headers={"Authorization": f"token {token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        return answer.read()


def check_server(options: list[str], *, timeout: float = 180.0) -> str:
    """Start JupyterLab as `make lab` does, but without a browser; wait until it answers; stop it.

    Returns one line saying what answered. Raises RuntimeError with the end of the server's log when
    it ends early, or does not answer within `timeout` seconds.
    """
    token, port = secrets.token_hex(16), free_port()
    with tempfile.TemporaryDirectory() as folder:
        places = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
        environment = {**os.environ, "JUPYTER_TOKEN": token}
        environment.update({name: str(Path(folder, name.lower())) for name in places})
        command = [sys.executable, "-m", "jupyterlab", "notebooks", *LAB_OPTIONS, "--no-browser"]
        command += ["--allow-root", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
        log_path = Path(folder, "jupyterlab.log")
        start = time.monotonic()
        with log_path.open("wb") as log:
            server = subprocess.Popen(command + options, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            base = f"http://127.0.0.1:{port}"
            wait_for(f"{base}/api/status", token, server, timeout, log_path)
            page = get(f"{base}/lab", token).decode()
            if "jupyter-config-data" not in page:
                raise RuntimeError(f"{base}/lab answered, but not with JupyterLab's page")
            return f"JupyterLab answers after {time.monotonic() - start:.1f} s"
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def wait_for(url: str, token: str, server: subprocess.Popen, timeout: float, log_path: Path) -> None:
    """Poll `url` until it answers; RuntimeError with the log's end when it never does."""
    deadline = time.monotonic() + timeout
    reason = "no answer yet"
    while time.monotonic() < deadline and server.poll() is None:
        try:
            get(url, token)
            return
        except OSError as error:
            reason = str(error)
            time.sleep(0.25)
    tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-25:])
    state = "is still running" if server.poll() is None else f"ended with {server.returncode}"
    raise RuntimeError(f"JupyterLab {state} and {url} does not answer: {reason}\n{tail}")


def main(argv: list[str]) -> int:
    """Check the server, then run each notebook in `argv`; `--option`s go on to JupyterLab."""
    options = [word for word in argv if word.startswith("-")]
    notebooks = [ROOT / word for word in argv if not word.startswith("-")]
    try:
        for path in notebooks:
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing")
        print(check_server(options), flush=True)
        for path in notebooks:
            start = time.monotonic()
            executed = execute_notebook(path)
            cells = sum(cell["cell_type"] == "code" for cell in executed["cells"])
            print(f"{path.name}: {cells} code cells in {time.monotonic() - start:.1f} s", flush=True)
    except (RuntimeError, FileNotFoundError) as error:
        print(f"fp8lab: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
