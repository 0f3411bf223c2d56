"""What every test shares: no hub, repeatable hypothesis runs, skips that say what is missing."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

# Before any test module imports transformers or datasets.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if (Path(sys.prefix) / "references").is_dir():  # `make test` puts them there
    os.environ.setdefault("FP8LAB_REFERENCES", str(Path(sys.prefix) / "references"))

from hypothesis import settings  # noqa: E402

from fp8lab.bootstrap import find_chromium  # noqa: E402

# Two shared cores make single examples slow at random, so no deadline; in CI a failure must be one
# that the next run finds again.
settings.register_profile("fp8lab", deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("fp8lab"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "fp8lab")


def _missing(mark):
    """Why a test with this mark cannot run here, or None."""
    if mark == "vllm" and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed in this environment (`make vllm` makes one that has it)"
    if mark == "browser" and not find_chromium():
        return "no Chromium on this machine (Debian: apt-get install chromium)"
    if mark == "gpu":
        import torch

        if not torch.cuda.is_available():
            return "no CUDA GPU: torch.cuda.is_available() is False"
    return None


def pytest_runtest_setup(item):
    for mark in ("vllm", "browser", "gpu"):
        if item.get_closest_marker(mark):
            reason = _missing(mark)
            if reason:
                pytest.skip(reason)


@pytest.fixture(scope="session")
def root():
    """The checkout's top folder."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def one_thread():
    """torch with one CPU thread: the same last bits on every machine, and no waiting for a busy second core."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
