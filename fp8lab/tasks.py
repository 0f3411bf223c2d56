"""Tasks: what the policy is asked, and how a program decides whether it was right.

Reinforcement learning with verifiable rewards needs no reward model. A task is three datasets of
questions with known answers, and a function that grades:

    reward(prompts, completions, **columns) -> list[float]

This is TRL's shape (`GRPOTrainer(reward_funcs=...)`), so a reward written here moves there as is;
`columns` are the dataset's other columns, one entry a completion.

`load_task` knows four sources. `arithmetic` is the course's own (`data/README.md`), read from JSON
lines into memory with no hub call and no cache; a folder of yours works the same way. `gsm8k` and
`hub:...` download. `reasoning-gym:...` generates puzzles. `prompt_batch` says which prompts a step
gets: a pure function of (seed, step), so a killed and resumed run sees what it would have seen.

Splits are `datasets.Dataset`s. Where that package is missing (a GPU machine that only runs
`gpu-check`), local and generated tasks are `Rows`, which answer alike to what a run asks of them.

Left out: multi-turn tasks and tools, weighted mixtures, graders that execute code; `verifiers` and
NeMo RL's environments have those.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset

RewardFunction = Callable[..., list[float]]
SPLITS = ("train", "validation", "test")
ALLOWED = (
    "'arithmetic', 'gsm8k', 'hub:<owner>/<name>[:<config>]', 'reasoning-gym:<dataset>', "
    "or a folder with train, validation and test as .jsonl or .parquet"
)
MATH_PROMPT = "{question}\nThink step by step. End with the final answer after '####'.\n"


class Rows:
    """Rows in memory, indexed as a `datasets.Dataset` is: by number (a row), by slice or a list of
    numbers (columns), by name (a column)."""

    def __init__(self, columns: Mapping[str, list[Any]]) -> None:
        self._columns = dict(columns)

    @classmethod
    def from_dict(cls, columns: Mapping[str, list[Any]]) -> Rows:
        """Columns, as long as each other."""
        return cls(columns)

    @classmethod
    def from_list(cls, rows: Sequence[Mapping[str, Any]]) -> Rows:
        """Rows; the first one names the columns, None is what a row lacks."""
        return cls({name: [row.get(name) for row in rows] for name in (rows[0] if rows else ())})

    @property
    def column_names(self) -> list[str]:
        """In the file's order."""
        return list(self._columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), ()))

    def __getitem__(self, key: str | int | slice | Sequence[int]) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        if isinstance(key, Sequence):
            return {name: [values[i] for i in key] for name, values in self._columns.items()}
        return {name: values[key] for name, values in self._columns.items()}


@dataclass(frozen=True, kw_only=True, repr=False)
class Task:
    """Questions in three splits, and a grader."""

    name: str
    """What `load_task` was given."""
    train: Dataset | Rows
    """Questions to learn from; columns `prompt`, `answer` (strings) and any the reward wants."""
    validation: Dataset | Rows
    """Questions for curves and choices."""
    test: Dataset | Rows
    """Questions looked at once, at the end."""
    reward: RewardFunction
    """`reward(prompts, completions, **columns) -> list[float]`, one number a completion."""

    def __post_init__(self) -> None:
        for split in SPLITS:
            dataset = getattr(self, split)
            if not {"prompt", "answer"} <= set(dataset.column_names) or len(dataset) == 0:
                found = f"{len(dataset)} rows with columns {dataset.column_names}"
                raise ValueError(
                    f"task {self.name!r}, split {split!r}: found {found}; needed are rows with the "
                    "columns 'prompt' and 'answer'. Rename or fill them in the file."
                )

    def __repr__(self) -> str:
        sizes = "/".join(str(len(getattr(self, split))) for split in SPLITS)
        reward = getattr(self.reward, "__name__", self.reward)
        return f"Task({self.name!r}, prompts={sizes}, reward={reward})"


# ---- rewards ----------------------------------------------------------------------------------


def _text(completion: Any) -> str:
    """A string, or the last of TRL's conversational messages; anything else counts as empty."""
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        completion = completion[-1].get("content")
    return completion if isinstance(completion, str) else ""


def _pairs(completions: Sequence, column: Sequence, name: str = "answer") -> list[tuple[str, Any]]:
    if isinstance(column, str) or len(completions) != len(column):
        found = "one string" if isinstance(column, str) else str(len(column))
        raise ValueError(
            f"found {len(completions)} completions and {found} for column {name!r}; a reward needs "
            "one entry a completion. Repeat each prompt's columns num_generations times."
        )
    return [(_text(c), value) for c, value in zip(completions, column, strict=True)]


def exact_answer(prompts: Sequence, completions: Sequence, answer: Sequence, **_) -> list[float]:
    """1.0 where the completion, stripped of white space, is the answer to the letter, else 0.0
    (also if empty or no text). Raises ValueError if there is not one answer a completion."""
    return [float(text.strip() == str(a).strip() != "") for text, a in _pairs(completions, answer)]


_NUMBER = r"(?:(?<![\d)])-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"  # in "20-5" the 5 is not negative
_MARKED = re.compile(rf"####\s*({_NUMBER})")


def _number(text: str) -> Decimal | None:
    found = _MARKED.findall(text) or re.findall(_NUMBER, text)
    return Decimal(re.sub(r"[,$]", "", found[-1])) if found else None


def number_after_marks(prompts, completions, answer: Sequence, **_) -> list[float]:
    """1.0 where the number after the last ``####`` (GSM8K's mark), or else the last number, is the
    answer's as a decimal ("1,234.0" is "1234"); else 0.0. Raises as `exact_answer` does."""
    pairs = [(_number(text), _number(str(gold))) for text, gold in _pairs(completions, answer)]
    return [float(number is not None and number == gold) for number, gold in pairs]


def math_verify_reward(prompts, completions, answer: Sequence, **_) -> list[float]:
    """1.0 where math-verify finds the completion's answer equal to the gold one.

    Its time limit uses SIGALRM and raises ValueError outside a POSIX system's main thread, as in a
    notebook's worker thread. There it is switched off; a hostile expression can take long. A gold
    answer it cannot read is compared to the letter. Raises ImportError without math-verify."""
    math_verify = _extra("math_verify", "math-verify")
    can_alarm = os.name == "posix" and threading.current_thread() is threading.main_thread()
    limit = 5 if can_alarm else None  # seconds an expression

    def grade(text: str, gold: str) -> float:
        parse = functools.partial(math_verify.parse, parsing_timeout=limit)
        reference = parse(gold) or parse(f"${gold}$")
        if not reference:
            return float(text.strip() == gold.strip() != "")
        return float(math_verify.verify(reference, parse(text), timeout_seconds=limit))

    return [grade(text, str(gold)) for text, gold in _pairs(completions, answer)]


def _extra(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"{package} does not import ({error}). It is optional: pip install 'fp8lab[tasks]'"
        raise ImportError(message) from error


# ---- sources ----------------------------------------------------------------------------------


def data_dir() -> Path:
    """The course's data: environment variable `FP8LAB_DATA`, else `data/` beside the package.
    Raises FileNotFoundError if that is no folder (a wheel carries no data)."""
    setting = os.environ.get("FP8LAB_DATA")
    beside = Path(__file__).resolve().parent.parent / "data"
    folder = Path(setting).expanduser() if setting else beside
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no data folder at {folder} (FP8LAB_DATA is {setting!r}); it holds the task and the "
            "tiny models. Set FP8LAB_DATA to a clone's data/, or run python data/build.py --out DIR"
        )
    return folder


def _table() -> type[Dataset] | type[Rows]:
    try:
        from datasets import Dataset
    except ImportError:
        return Rows
    return Dataset


def _read_rows(folder: Path, split: str) -> Dataset | Rows:
    """One split, in memory. `load_dataset` would write a cache and may ask the hub."""
    lines, parquet = folder / f"{split}.jsonl", folder / f"{split}.parquet"
    if lines.is_file():
        rows = []
        for number, line in enumerate(lines.read_text(encoding="utf-8").split("\n"), start=1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except json.JSONDecodeError as error:
                message = f"{lines}, line {number}: {error}; each line must be one JSON object"
                raise ValueError(message) from error
        return _table().from_list(rows)
    if parquet.is_file():
        import pyarrow.parquet

        return _table().from_dict(pyarrow.parquet.read_table(parquet).to_pydict())
    there = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else "no such folder"
    raise FileNotFoundError(
        f"found neither {lines} nor {parquet.name} (there: {there}); needed are train, validation "
        "and test as .jsonl or .parquet. Arithmetic's are built by python data/build.py --only task"
    )


def _from_hub(name: str, repository: str, config: str | None) -> Task:
    """A hub dataset in GSM8K's layout; the answer is what stands after the last ``####``, if any.
    Without a validation split, the end of train (500 rows, at most a tenth) becomes it."""
    from datasets import load_dataset

    parts = load_dataset(repository, config)
    columns = next(iter(parts.values())).column_names
    question = next((c for c in ("question", "problem", "prompt") if c in columns), None)
    answer = next((c for c in ("answer", "solution") if c in columns), None)
    if question is None or answer is None or not {"train", "test"} <= set(parts):
        raise ValueError(
            f"{repository}: found splits {sorted(parts)} with columns {columns}; needed are train "
            "and test with question (or problem, prompt) and answer (or solution). Write it to a "
            "folder of .jsonl files with 'prompt' and 'answer' and pass the folder."
        )

    def rename(row: dict[str, Any]) -> dict[str, str]:
        final = str(row[answer]).rsplit("####", 1)[-1].strip()
        return {"prompt": MATH_PROMPT.format(question=row[question]), "answer": final}

    marked = "####" in str(parts["train"][0][answer])
    splits = {split: parts[split].map(rename, remove_columns=columns) for split in parts}
    if "validation" not in splits:
        rows = splits["train"]
        cut = len(rows) - min(500, len(rows) // 10)
        splits["train"], splits["validation"] = rows.take(cut), rows.skip(cut)
    reward = number_after_marks if marked else math_verify_reward
    return Task(name=name, reward=reward, **{split: splits[split] for split in SPLITS})


def _from_reasoning_gym(name: str, dataset: str) -> Task:
    """2,000 / 200 / 200 puzzles of one generated sequence, less those that occurred in an earlier
    split. The reward finds the puzzle by column `index`: its metadata would not survive a table."""
    gym = _extra("reasoning_gym", "reasoning-gym")
    try:
        source = gym.create_dataset(dataset, size=2_400, seed=0)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}; see reasoning_gym.factory.DATASETS") from error
    rows = [
        {"prompt": puzzle["question"] + "\n", "answer": str(puzzle["answer"]), "index": i}
        for i, puzzle in enumerate(source)
    ]
    splits, seen = {}, set()
    for split, part in zip(SPLITS, (rows[:2_000], rows[2_000:2_200], rows[2_200:]), strict=True):
        splits[split] = _table().from_list([row for row in part if row["prompt"] not in seen])
        seen |= {row["prompt"] for row in part}

    def reasoning_gym_score(prompts, completions, index, **_) -> list[float]:
        """The dataset's own score (0 to 1) of the last <answer>...</answer>, else of everything."""
        pairs = [
            (re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL) or [text], source[i])
            for text, i in _pairs(completions, index, "index")
        ]
        return [float(source.score_answer(found[-1].strip(), puzzle)) for found, puzzle in pairs]

    return Task(name=name, reward=reasoning_gym_score, **splits)


def load_task(name: str | os.PathLike[str]) -> Task:
    """A task by name.

    `arithmetic`; `gsm8k`; `hub:<owner>/<name>[:<config>]` (GSM8K's layout; downloads);
    `reasoning-gym:<dataset>` (extra `tasks`); or a folder with train, validation and test as .jsonl
    or .parquet, columns `prompt` and `answer`, graded by `exact_answer` (for another grader:
    `dataclasses.replace(task, reward=...)`). Raises ValueError for an unknown name or bad columns,
    FileNotFoundError for missing files, ImportError for a missing extra."""
    text, folder = os.fspath(name), Path(name).expanduser()
    is_path = not isinstance(name, str) or "/" in name or os.sep in name
    kind, _, rest = text.partition(":")
    if text == "gsm8k":
        return _from_hub(text, "openai/gsm8k", "main")
    if kind == "hub" and rest:
        repository, _, config = rest.partition(":")
        return _from_hub(text, repository, config or None)
    if kind == "reasoning-gym" and rest:
        return _from_reasoning_gym(text, rest)
    if text == "arithmetic":
        folder = data_dir() / text
    elif not text or not (folder.is_dir() or is_path):
        message = f"unknown task {text!r}; allowed: {ALLOWED}"
        raise ValueError(f"{message}. Pick one, or check the folder's spelling.")
    splits = {split: _read_rows(folder, split) for split in SPLITS}
    return Task(name=text, reward=exact_answer, **splits)


# ---- which prompts a step gets ----------------------------------------------------------------


def prompt_batch(dataset: Dataset | Rows, size: int, seed: int, step: int) -> dict[str, list[Any]]:
    """The `size` rows step `step` (from 0) trains on, as columns; depends on (seed, step) alone.

    Sampling is without replacement within an epoch of ``len(dataset) // size`` steps, each in a
    fresh order. The ``len(dataset) % size`` rows left over are dropped (others each time): no batch
    straddles epochs or holds a row twice. ValueError for a size off 1..len(dataset), or seed or
    step < 0."""
    rows = len(dataset)
    if not 1 <= size <= rows:
        raise ValueError(
            f"found size={size} for {rows} rows; allowed is 1 to {rows}. Ask for fewer prompts a "
            "step, or for more generations of each (num_generations)."
        )
    if seed < 0 or step < 0:
        raise ValueError(f"found seed={seed}, step={step}; both must be 0 or more")
    epoch, position = divmod(step, rows // size)
    order = np.random.default_rng(np.random.SeedSequence([seed, epoch])).permutation(rows)
    return dataset[order[position * size : (position + 1) * size].tolist()]
