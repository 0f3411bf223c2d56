"""The README's library example runs as it stands, and its files exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_library_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    error, differing = capsys.readouterr().out.strip().splitlines()
    assert 1.005 < float(error) < 1.1
    assert "trainer bf16, rollout e4m3" in differing


def test_links_and_named_files_exist():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / target).exists(), target
    files = re.search(r"## Files\n+```\n(.*?)```", README, flags=re.DOTALL)[1]
    inside = files.split("fp8lab/\n")[1]
    for name in set(re.findall(r"\b(\w+\.py)\b", inside)):
        assert any((ROOT / "fp8lab" / folder / name).is_file() for folder in ("", "rollout", "ui")), name
    shipped = {path.name for folder in ("", "rollout") for path in (ROOT / "fp8lab" / folder).glob("*.py")}
    shipped -= {"__init__.py", "__main__.py"}
    assert shipped <= set(re.findall(r"\b(\w+\.py)\b", inside))
