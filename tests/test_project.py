"""Promises about the whole repository: environments, import cost, no network, notebooks, style."""

import ast
import json
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rattler import MatchSpec

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
SOURCES = sorted((ROOT / "fp8lab").rglob("*.py"))


def run_python(code, timeout=300):
    """Run `code` in a fresh interpreter at the checkout's top; its stdout, or a failed test."""
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout


def tracked_files():
    """Files that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    return [path for name in answer.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def normal(requirement):
    """A requirement that compares equal however it was spelled."""
    r = Requirement(requirement)
    return canonicalize_name(r.name), frozenset(r.extras), r.specifier, str(r.marker or "")


# ---- environments ----------------------------------------------------------------------------


def environment_yml():
    """(conda specs, pip lines) of environment.yml."""
    content = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert set(content) == {"name", "channels", "dependencies"}
    assert content["channels"] == ["conda-forge", "nodefaults"]
    pip = [entry["pip"] for entry in content["dependencies"] if isinstance(entry, dict)]
    assert len(pip) == 1
    return [entry for entry in content["dependencies"] if isinstance(entry, str)], pip[0]


def test_environment_yml_conda_part_is_python_and_pip():
    specs = [MatchSpec(text) for text in environment_yml()[0]]
    names = {getattr(spec.name, "normalized", str(spec.name)): spec for spec in specs}
    assert set(names) == {"python", "pip"}
    # The range of versions that pyproject.toml admits holds the one conda takes.
    version = str(names["python"].version).removeprefix("==").removesuffix(".*")
    assert Requirement(f"x{PROJECT['requires-python']}").specifier.contains(version)


def test_environment_yml_pip_part_equals_pyproject():
    lines = environment_yml()[1]
    assert lines[0] == "-e ."
    have = {normal(line) for line in lines[1:]}
    want = {normal(line) for line in PROJECT["dependencies"] + EXTRAS["lab"] + EXTRAS["gpu"]}
    assert have - want == set(), "in environment.yml, not in pyproject.toml"
    assert want - have == set(), "in pyproject.toml, not in environment.yml"
    assert len(lines) - 1 == len(have), "a requirement stands twice"


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_pins_of_an_extra_lie_within_the_core_bounds(extra):
    core = {canonicalize_name(r.name): r for r in map(Requirement, PROJECT["dependencies"])}
    for requirement in map(Requirement, EXTRAS[extra]):
        bound = core.get(canonicalize_name(requirement.name))
        for pin in requirement.specifier:
            if bound is not None and pin.operator == "==":
                assert bound.specifier.contains(pin.version), f"{requirement} outside {bound}"


def test_cpu_constraint_lies_within_the_core_bounds():
    lines = (ROOT / "tests/constraints-cpu.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    core = {r.name: r for r in map(Requirement, PROJECT["dependencies"])}
    assert [pin.name for pin in pins] == ["torch"]
    (pin,) = pins[0].specifier
    assert pin.operator == "==" and core["torch"].specifier.contains(pin.version)


# ---- importing -------------------------------------------------------------------------------


def test_importing_fp8lab_loads_no_heavy_package():
    loaded = run_python("""
        import sys, fp8lab
        print(" ".join({name.split(".")[0] for name in sys.modules}))
    """).split()
    heavy = {"torch", "numpy", "datasets", "numba", "transformers", "jupyterlab", "ipywidgets"}
    assert heavy & set(loaded) == set()


def test_importing_every_module_asks_no_network():
    imported = run_python("""
        import importlib, pkgutil, socket

        def refuse(*arguments, **keywords):
            raise AssertionError(f"network asked for: {arguments!r}")

        for name in ("connect", "connect_ex", "sendto"):
            setattr(socket.socket, name, refuse)
        socket.create_connection = socket.getaddrinfo = refuse
        import fp8lab

        def failed(name):
            raise

        for module in pkgutil.walk_packages(fp8lab.__path__, "fp8lab.", onerror=failed):
            # vllm_quantization is a plug-in of vLLM, imported where vLLM is: tests/vllm
            if not module.name.startswith(("fp8lab.ui", "fp8lab.__main__", "fp8lab.rollout.vllm_quantization")):
                importlib.import_module(module.name)
                print(module.name)
    """)
    assert "fp8lab.bootstrap" in imported.split()


@pytest.mark.parametrize("name", ["__init__", "__main__", "bootstrap"])
def test_set_up_needs_the_standard_library_only(name):
    tree = ast.parse((ROOT / f"fp8lab/{name}.py").read_text(), feature_version=(3, 7))
    for node in tree.body:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        for imported in names:
            assert imported.split(".")[0] in sys.stdlib_module_names, imported


# ---- notebooks -------------------------------------------------------------------------------


def notebook_faults(path):
    """What is wrong with a committed notebook, one line each."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    faults = []
    if any(cell["outputs"] for cell in code):
        faults.append("has outputs")
    if any(cell["execution_count"] is not None for cell in code):
        faults.append("has execution counts")
    if "widgets" in notebook["metadata"]:
        faults.append("has widget state")
    if notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
        faults.append("its kernelspec is not python3")
    if path.stat().st_size > 60 * 1024:
        faults.append(f"has {path.stat().st_size} bytes, more than 60 KB")
    ids = [cell.get("id") for cell in notebook["cells"]]
    if None in ids or len(set(ids)) < len(ids):
        faults.append("a cell has no id of its own")
    return faults


def test_notebooks_are_stripped_and_small():
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert "00_quickstart.ipynb" in [path.name for path in notebooks]
    faults = {path.name: notebook_faults(path) for path in notebooks}
    assert {name: lines for name, lines in faults.items() if lines} == {}


# ---- style -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff(command):
    answer = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_per_idea(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400, "a file of more than 400 lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            assert length <= 70, f"{node.name}, line {node.lineno}: {length} lines"


def test_large_files_live_in_data():
    large = [
        str(path.relative_to(ROOT))
        for path in tracked_files()
        if path.stat().st_size > 1_000_000 and path.relative_to(ROOT).parts[0] != "data"
    ]
    assert large == []
