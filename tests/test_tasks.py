"""Tasks: sources, graders and the prompt order."""

import json
import subprocess
import sys
import threading
import types

import pytest

from fp8lab import tasks
from fp8lab.tasks import (
    exact_answer,
    load_task,
    math_verify_reward,
    number_after_marks,
    prompt_batch,
)

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(10)]


def write(folder, rows=ROWS, splits=tasks.SPLITS):
    for split in splits:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return folder


# ---- sources ----------------------------------------------------------------------------------


def test_import_is_cheap():
    code = (
        "import sys, fp8lab.tasks;"
        "print([m for m in ('datasets', 'torch', 'transformers', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_arithmetic_loads_without_network_or_cache(monkeypatch, tmp_path):
    def refuse(*arguments, **keywords):
        raise AssertionError("a local task touched the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    task = load_task("arithmetic")
    assert (len(task.train), len(task.validation), len(task.test)) == (18_000, 1_000, 1_000)
    assert task.train.column_names == ["prompt", "answer"]
    assert task.train.cache_files == []
    assert repr(task) == "Task('arithmetic', prompts=18000/1000/1000, reward=exact_answer)"
    batch = prompt_batch(task.train, 4, seed=0, step=0)
    assert task.reward(batch["prompt"], batch["answer"], answer=batch["answer"]) == [1.0] * 4


def test_folder_of_jsonl_and_of_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    task = load_task(write(tmp_path))
    assert task.train[3] == {"prompt": "3+1=", "answer": "4"}
    (tmp_path / "test.jsonl").unlink()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:2]), tmp_path / "test.parquet")
    assert load_task(str(tmp_path)).test["answer"][:] == ["1", "2"]


@pytest.fixture
def without_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)


def test_without_datasets_the_rows_and_their_order_are_the_same(without_datasets, monkeypatch):
    rows = load_task("arithmetic")
    monkeypatch.undo()
    task = load_task("arithmetic")
    assert isinstance(rows.train, tasks.Rows) and not isinstance(task.train, tasks.Rows)
    assert repr(rows) == repr(task) and rows.train.column_names == task.train.column_names
    for split in tasks.SPLITS:
        mine, theirs = getattr(rows, split), getattr(task, split)
        assert mine[:] == theirs[:] and mine[7:3:-2] == theirs[7:3:-2] and mine[[5, 0, -1]] == theirs[[5, 0, -1]]
        assert mine[3] == theirs[3] and mine["answer"] == theirs["answer"][:]
    for step in (0, 187, 188):
        assert prompt_batch(rows.train, 96, seed=3, step=step) == prompt_batch(task.train, 96, seed=3, step=step)


def test_without_datasets_columns_are_the_first_rows(without_datasets, tmp_path):
    import pyarrow
    import pyarrow.parquet

    uneven = [{"prompt": "1+1=", "answer": "2"}, {"answer": "3", "level": 1}]
    task = load_task(write(tmp_path, rows=uneven))
    assert task.train[:] == {"prompt": ["1+1=", None], "answer": ["2", "3"]}
    with pytest.raises(ValueError, match="found 0 rows"):
        load_task(write(tmp_path, rows=[]))
    for split in tasks.SPLITS:
        (tmp_path / f"{split}.jsonl").unlink()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / f"{split}.parquet")
    assert load_task(tmp_path).test[9] == {"prompt": "9+1=", "answer": "10"}


def test_missing_files_name_what_is_there(tmp_path):
    write(tmp_path, splits=("train", "test"))
    with pytest.raises(FileNotFoundError, match=r"validation.*test\.jsonl.*train\.jsonl"):
        load_task(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_task(str(tmp_path / "nowhere"))


def test_bad_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match="columns.*'prompt' and 'answer'"):
        load_task(write(tmp_path, rows=[{"question": "?", "answer": "1"}]))
    with pytest.raises(ValueError, match="found 0 rows"):
        load_task(write(tmp_path, rows=[]))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{oops\n')
    with pytest.raises(ValueError, match="line 2"):
        load_task(tmp_path)


@pytest.mark.parametrize("name", ["aritmetic", "hub:", "reasoning-gym", ""])
def test_unknown_name_lists_what_is_allowed(name):
    with pytest.raises(ValueError, match="unknown task.*arithmetic.*gsm8k.*reasoning-gym"):
        load_task(name)


def test_missing_extra_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'fp8lab\[tasks\]'"):
        load_task("reasoning-gym:chain_sum")


def test_data_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("FP8LAB_DATA", str(tmp_path))
    assert tasks.data_dir() == tmp_path
    monkeypatch.setenv("FP8LAB_DATA", str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError, match="FP8LAB_DATA.*build.py"):
        tasks.data_dir()
    monkeypatch.delenv("FP8LAB_DATA")
    assert (tasks.data_dir() / "arithmetic").is_dir()


def test_gsm8k_layout_is_mapped(monkeypatch):
    import datasets

    rows = [{"question": f"Q{i}?", "answer": f"think 7\n#### {i}"} for i in range(40)]
    parts = datasets.DatasetDict(train=datasets.Dataset.from_list(rows), test=datasets.Dataset.from_list(rows[:5]))
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a: asked.append(a) or parts)
    task = load_task("gsm8k")
    assert asked == [("openai/gsm8k", "main")]
    assert (len(task.train), len(task.validation), len(task.test)) == (36, 4, 5)
    assert task.validation[0]["answer"] == "36" and "Q36?" in task.validation[0]["prompt"]
    assert task.reward is number_after_marks
    load_task("hub:some/set:part")
    assert asked[-1] == ("some/set", "part")


def test_hub_dataset_of_another_layout_is_refused(monkeypatch):
    import datasets

    parts = datasets.DatasetDict(train=datasets.Dataset.from_list([{"text": "x"}]))
    monkeypatch.setattr(datasets, "load_dataset", lambda *a: parts)
    with pytest.raises(ValueError, match=r"columns \['text'\].*needed"):
        load_task("hub:some/set")


def test_reasoning_gym_with_the_real_package():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym (extra `tasks`) is not installed")
    task = load_task("reasoning-gym:chain_sum")
    assert not set(task.train["prompt"]) & set(task.test["prompt"])
    row = prompt_batch(task.test, 2, seed=0, step=0)
    answers = [f"so <answer>{row['answer'][0]}</answer>", "no"]
    assert task.reward(row["prompt"], answers, answer=row["answer"], index=row["index"])[0] == 1.0
    with pytest.raises(ValueError, match="nope"):
        load_task("reasoning-gym:nope")


# ---- rewards ----------------------------------------------------------------------------------

BAD = ["", "   ", None, 85, b"85", [], [{"role": "assistant"}], [None]]


@pytest.mark.parametrize("reward", [exact_answer, number_after_marks])
def test_bad_completions_earn_nothing(reward):
    assert reward(["?"] * len(BAD), BAD, answer=["85"] * len(BAD)) == [0.0] * len(BAD)
    assert reward([], [], answer=[]) == []


def test_exact_answer():
    completions = ["85", " 85\n", "085", "85.", "-85", "8 5", [{"role": "a", "content": "85"}]]
    rewards = exact_answer([""] * 7, completions, answer=["85"] * 7, level=[1] * 7)
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert exact_answer([""], [""], answer=[""]) == [0.0]  # nothing is never an answer


@pytest.mark.parametrize("answer", [["85"], "85", []])
def test_one_answer_a_completion(answer):
    with pytest.raises(ValueError, match="one entry a completion"):
        exact_answer(["", ""], ["85", "85"], answer=answer)


@pytest.mark.parametrize(
    "text, gold, expected",
    [
        ("so 3 and 4. #### 42", "42", 1.0),
        ("#### 42 because 7", "42", 1.0),
        ("#### 41 no, #### 42", "42", 1.0),
        ("it is 42.", "42", 1.0),
        ("$1,234.00", "1234", 1.0),
        ("####  $5", "5", 1.0),
        ("50-8=42", "42", 1.0),
        ("50-42", "42", 1.0),
        ("= -42", "42", 0.0),
        ("= -42", "-42", 1.0),
        (".5", "0.50", 1.0),
        ("42", "no number", 0.0),
        ("none", "none", 0.0),
        ("#### forty 42", "42", 1.0),
        ("42 then 43", "42", 0.0),
        ("1,,2", "12", 1.0),
    ],
)
def test_number_after_marks(text, gold, expected):
    assert number_after_marks([""], [text], answer=[gold]) == [expected]


def test_math_verify_knows_its_thread(monkeypatch):
    """math-verify raises ValueError in a worker thread unless both limits are None."""
    limits = []

    def parse(text, parsing_timeout=5):
        limits.append(parsing_timeout)
        return [text] if text else []

    def verify(gold, answer, timeout_seconds=5):
        limits.append(timeout_seconds)
        return gold == answer

    fake = types.SimpleNamespace(parse=parse, verify=verify)
    monkeypatch.setitem(sys.modules, "math_verify", fake)
    assert math_verify_reward([""] * 2, ["1", None], answer=["1", "1"]) == [1.0, 0.0]
    assert set(limits) == ({5} if sys.platform != "win32" else {None})
    limits.clear()
    rewards = []
    worker = threading.Thread(target=lambda: rewards.extend(math_verify_reward([""], ["1"], answer=["1"])))
    worker.start()
    worker.join()
    assert rewards == [1.0] and set(limits) == {None}


def test_math_verify_with_the_real_package():
    pytest.importorskip("math_verify", reason="math-verify (extra `tasks`) is not installed")
    completions = [r"so $\frac{1}{2}$", r"\boxed{3}", "", None]
    answers = ["0.5", "3", "1", "1"]
    rewards = []

    def grade():
        rewards.append(math_verify_reward([""] * 4, completions, answer=answers))

    grade()
    worker = threading.Thread(target=grade)
    worker.start()
    worker.join()
    assert rewards == [[1.0, 1.0, 0.0, 0.0]] * 2


# ---- which prompts a step gets ----------------------------------------------------------------


@pytest.fixture(scope="module")
def ten():
    import datasets

    return datasets.Dataset.from_list(ROWS)


def test_prompt_batch_depends_on_seed_and_step_only(ten):
    forward = [prompt_batch(ten, 3, seed=7, step=s) for s in range(12)]
    backward = [prompt_batch(ten, 3, seed=7, step=s) for s in reversed(range(12))][::-1]
    assert forward == backward
    assert forward != [prompt_batch(ten, 3, seed=8, step=s) for s in range(12)]
    assert set(forward[0]) == {"prompt", "answer"} and len(forward[0]["prompt"]) == 3


def test_prompt_batch_epochs(ten):
    """Three batches of 3 to an epoch of 10 rows; the tenth, another one each time, is dropped."""
    epochs = [sum((prompt_batch(ten, 3, seed=0, step=3 * e + s)["prompt"] for s in range(3)), []) for e in range(8)]
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    everything = {row["prompt"] for row in ROWS}
    assert len({(everything - set(epoch)).pop() for epoch in epochs}) > 1
    assert len({tuple(epoch) for epoch in epochs}) == 8


def test_prompt_batch_pins_its_order(ten):
    """The order is part of a run's identity: a change here breaks resuming older runs."""
    assert prompt_batch(ten, 4, seed=0, step=5)["answer"] == PINNED


PINNED = ["6", "7", "8", "5"]


@pytest.mark.parametrize("size", [0, -1, 11])
def test_prompt_batch_size_is_checked(ten, size):
    with pytest.raises(ValueError, match=f"size={size}.*1 to 10"):
        prompt_batch(ten, size, seed=0, step=0)


@pytest.mark.parametrize("seed, step", [(-1, 0), (0, -1)])
def test_prompt_batch_wants_counts(ten, seed, step):
    with pytest.raises(ValueError, match="0 or more"):
        prompt_batch(ten, 1, seed=seed, step=step)


def test_prompt_batch_whole_dataset(ten):
    assert sorted(prompt_batch(ten, 10, seed=1, step=4)["prompt"]) == sorted(r["prompt"] for r in ROWS)
