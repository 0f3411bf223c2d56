"""The shipped task and checkpoints are what the data card says."""

import importlib.util
import json
import random
import re

import pytest
import torch

from fp8lab.tasks import data_dir, load_task

SPLITS = ("train", "validation", "test")
MODELS = ("tiny-llama", "tiny-qwen3-moe")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def task():
    return load_task("arithmetic")


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("fp8lab_data_build", data_dir() / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=MODELS)
def folder(request):
    return data_dir() / request.param


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


# ---- the task ---------------------------------------------------------------------------------


def test_splits_are_disjoint_and_complete(task):
    prompts = [set(getattr(task, split)["prompt"]) for split in SPLITS]
    assert [len(p) for p in prompts] == [18_000, 1_000, 1_000]
    assert set.union(*prompts) == {f"{a}{o}{b}=" for a in range(100) for o in "+-" for b in range(100)}
    assert sum(map(len, prompts)) == len(set.union(*prompts))


@pytest.mark.parametrize("split", SPLITS)
def test_every_answer_is_right(task, split):
    for row in getattr(task, split):
        a, op, b = re.fullmatch(r"(\d{1,2})([+-])(\d{1,2})=", row["prompt"]).groups()
        assert row["answer"] == str(int(a) + int(op + b)), row


def test_task_is_reproducible(build, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "update_card", lambda out: None)
    build.build("task", tmp_path, seed=0)
    assert [p.name for p in tmp_path.iterdir()] == ["arithmetic"]  # no scratch folder left
    for split in SPLITS:
        shipped = data_dir() / "arithmetic" / f"{split}.jsonl"
        assert (tmp_path / "arithmetic" / f"{split}.jsonl").read_bytes() == shipped.read_bytes()


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_training_repeats_to_the_byte(build, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(build, "update_card", lambda out: None)
    monkeypatch.setattr(build, "STEPS", 3)
    monkeypatch.setattr(build, "BATCH", 16)
    monkeypatch.setattr(build, "accuracy", lambda *arguments: {})
    weights = []
    for run in ("first", "second"):
        build.build(kind, tmp_path / run, seed=0)
        weights.append((tmp_path / run / build.MODELS[kind] / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_failed_build_leaves_the_old_part(build, tmp_path, monkeypatch):
    (tmp_path / "arithmetic").mkdir()
    (tmp_path / "arithmetic" / "train.jsonl").write_text("old")

    def fail(folder, splits):
        raise OSError("disk full")

    monkeypatch.setattr(build, "write_task", fail)
    with pytest.raises(OSError, match="disk full"):
        build.build("task", tmp_path, seed=0)
    assert (tmp_path / "arithmetic" / "train.jsonl").read_text() == "old"


def test_mistakes_are_wrong_plausible_and_spread(build):
    """Each is an integer of at most four characters; none is as likely as the right answer."""
    rng = random.Random(0)
    for a, op, b in [
        (47, "+", 38),
        (3, "-", 80),
        (5, "+", 0),
        (99, "+", 99),
        (0, "-", 0),
        (64, "-", 28),
    ]:
        right = str(build.right_answer(a, op, b))
        drawn = [build.mistake(a, op, b, rng) for _ in range(2_000)]
        assert right not in drawn
        assert all(re.fullmatch(r"-?\d{1,4}", answer) and len(answer) <= 4 for answer in drawn)
        top = max(map(drawn.count, set(drawn))) / len(drawn) * build.WRONG
        assert top < 1 - build.WRONG, (a, op, b, top)


# ---- the checkpoints --------------------------------------------------------------------------


def test_tokenizer_round_trip(tokenizer):
    for text in ("47+38=", "-85", "".join(map(chr, range(32, 127))) + "\n"):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text) and tokenizer.unk_token_id not in ids  # no <bos>, one id a character
        assert tokenizer.decode(ids) == text
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]
    specials = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert specials == (0, 1, 2) and tokenizer.padding_side == "left"
    assert tokenizer.decode([12, tokenizer.eos_token_id], skip_special_tokens=True) != ""


def test_every_weight_is_whole_blocks(model):
    """FP8's 128 x 128 blocks and the kernels' alignment rules both divide every linear weight."""
    matrices = {name: p.shape for name, p in model.named_parameters() if p.ndim >= 2 and "mlp.gate." not in name}
    assert all(side % 128 == 0 for shape in matrices.values() for side in shape[-2:]), matrices
    config = model.config
    assert config.vocab_size == 128 and not config.tie_word_embeddings
    assert (config.num_hidden_layers, config.head_dim, config.num_key_value_heads) == (4, 32, 4)
    if config.model_type == "qwen3_moe":
        assert (config.num_experts, config.num_experts_per_tok) == (8, 2)
        assert config.norm_topk_prob and not config.output_router_logits


def test_checkpoint_is_small_bfloat16(folder):
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert (folder / "model.safetensors").stat().st_size < 4 * 2**20
    record = json.loads((folder / "training.json").read_text())
    assert sum(w.numel() for w in weights.values()) == record["parameters"]


def test_recorded_accuracy_is_the_files_accuracy(build, folder, model, tokenizer):
    """Teacher-forced accuracy on validation, recomputed; the band is what makes RL possible."""
    recorded = json.loads((folder / "training.json").read_text())["accuracy"]
    triples = build.split_triples(seed=0)["validation"]
    measured = build.accuracy(model, triples, tokenizer.get_vocab())
    assert measured == pytest.approx(recorded["validation"], abs=2e-3)
    assert 0.27 <= measured["sampled"] <= 0.33
    assert measured["greedy"] > measured["sampled"] + 0.3
    assert abs(recorded["train"]["sampled"] - recorded["validation"]["sampled"]) < 0.03


def test_sampling_agrees_with_the_recorded_accuracy(folder, model, tokenizer, task):
    """An independent path: generate, left padding, real samples, the task's own reward."""
    recorded = json.loads((folder / "training.json").read_text())["accuracy"]["validation"]
    rows = task.validation[:500]
    inputs = tokenizer(rows["prompt"], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)

    def accuracy(**how):
        torch.manual_seed(0)
        tokens = model.generate(**inputs, max_new_tokens=6, **how)[:, inputs["input_ids"].shape[1] :]
        completions = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return sum(task.reward(rows["prompt"], completions, answer=rows["answer"])) / 500

    # four standard errors of 500 draws
    assert accuracy(do_sample=True, temperature=1.0, top_k=0) == pytest.approx(recorded["sampled"], abs=0.08)
    assert accuracy(do_sample=False) == pytest.approx(recorded["greedy"], abs=0.06)


def test_data_card_matches_the_records(build):
    card = (data_dir() / "README.md").read_text(encoding="utf-8")
    assert build.measured_table(data_dir()) in card
