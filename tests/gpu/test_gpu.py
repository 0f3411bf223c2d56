"""On a machine with a Hopper GPU: its whole check, `python -m fp8lab gpu-check`, as a test."""

import pytest

from fp8lab.backends import support
from fp8lab.gpucheck import gpu_check

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_the_fp8_kernels_of_this_gpu(tmp_path):
    usable, reason = support()["scaled_mm"]
    if not usable:
        pytest.skip(f"no GPU for it: {reason}")
    report = gpu_check(tmp_path)
    assert report["ok"], (tmp_path / "gpu-check.md").read_text(encoding="utf-8")
