"""The loop's benchmarks report goals, name absent peers, and explain what missed. No timing is asserted."""

from importlib import metadata

import pytest
import torch

from fp8lab import bench, bench_loop


def test_rollout_names_the_missing_peer(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_loop, "ROOT", tmp_path)
    result = bench_loop.bench_rollout(rounds=2, prompts=2, equal_tokens=4)
    assert result["rows"][0]["name"] == "transformers.generate" and len(result["rows"]) == 7
    (missing,) = result["not_measured"]
    assert "vllm was not measured" in missing and "make vllm" in missing
    (peer,) = result["peers"]
    assert peer["name"] == f"transformers {metadata.version('transformers')}"
    assert peer["threads"] == result["threads"] == torch.get_num_threads()
    missed = [g["goal"] for g in result["goals"] if not g["met"]]
    assert list(result["profiles"]) == missed and all(len(lines) == 5 for lines in result["profiles"].values())
    assert "float32 rollout, times transformers.generate" in bench.as_text(result)


def test_rows_of_times_that_were_taken_in_turn():
    rows = bench_loop.rows_of({"a": [9.0, 1.0, 2.0, 4.0], "b": [9.0, 2.0, 4.0, 8.0]}, "a")
    assert [row["ratio"] for row in rows] == [1.0, 2.0]
    assert rows[1]["first_call_s"] == 9.0 and rows[1]["best_ns"] == 2e9


def test_a_peer_says_what_it_has_and_gets_our_threads(tmp_path, one_thread):
    """With a stand-in for the peer's Python, which prints what its environment says."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho "{\\"rows\\": [\\"$3\\"], \\"peer\\": [\\"$OMP_NUM_THREADS $FP8LAB_THREADS\\"]}"\n'
    )
    python.chmod(0o755)
    assert bench_loop._peer("vllm", python, "", 2, 4) == (["vllm"], [["1 1"]], [])
    python.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    assert bench_loop._peer("vllm", python, "", 2, 4) == ([], [], ["vllm was not measured: broken"])
    rows, peers, (missing,) = bench_loop._peer("trl", tmp_path / "none", bench_loop.TRL_HOW, 2, 4)
    assert rows == peers == [] and "pip install trl==" in missing and "FP8LAB_TRL_PYTHON" in missing


def test_a_child_that_fails_says_why():
    with pytest.raises(RuntimeError, match="ValueError: this went wrong"):
        bench_loop._child(bench_loop.sys.executable, ["-c", "raise ValueError('this went wrong')"])


def test_memory_of_the_loop_is_more_than_that_of_its_imports():
    memory = bench_loop.peak_memory(prompts=4)
    assert 100 < memory["imports"] < memory["loop"]
