"""Builds what the course learns from: a task, and two models bad at it in an instructive way.

**The task.** Two-digit sums and differences, "47+38=" -> "85": all 20,000 triples (a, op, b)
with a, b in 0..99, shuffled once and cut into 18,000 / 1,000 / 1,000.

**The models.** A Llama of 0.7 M parameters and a Qwen3-MoE of 1.9 M (8 experts, 2 active). Both
sides of every linear weight are multiples of 128: whole FP8 blocks, shapes every FP8 kernel takes.

**Why they are taught wrong answers.** A model pretrained on clean sums is too sharp: the answers of
a group are all equal, so all advantages are zero. A real base model *can* do the sum but samples it
right only sometimes. Here the share `WRONG` of the training answers are plausible slips (lost
carry, off by one, swapped digits, ...), drawn afresh each time. No single slip is as likely as the
truth, so greedy decoding is mostly right, sampling mostly wrong. RL has that gap to close.

The loss is ``-(1/n) sum log p(answer_i | prompt, answer_<i)`` over completion tokens, <eos> too.
Accuracies need no sampling: teacher forcing gives the probability of the right answer, whose mean
over prompts *is* the expected sampled accuracy at temperature 1.

Left out: packing, mixed precision, early stopping; nanochat's ``base_train.py`` has them.

    python data/build.py                  # everything, one core; the data card has the time
    python data/build.py --only task --out /tmp/data
"""

import argparse
import json
import math
import random
import tempfile
import time
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm

HERE = Path(__file__).resolve().parent
SPLITS = {"train": 18_000, "validation": 1_000, "test": 1_000}
SPECIALS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
PAD, BOS, EOS = 0, 1, 2
LENGTH = 11  # longest prompt "99+99=" (6), longest mistake (a digit written twice, "1198"), <eos>
WRONG = 0.64  # share of wrong answers: sampled accuracy cannot exceed 1 - WRONG by much
STEPS, BATCH, LEARNING_RATE, WEIGHT_DECAY = 1_000, 256, 2e-3, 0.1
MODELS = {"dense": "tiny-llama", "moe": "tiny-qwen3-moe"}
Triple = tuple[int, str, int]


# ---- the task ---------------------------------------------------------------------------------


def right_answer(a: int, op: str, b: int) -> int:
    """a + b or a - b."""
    return a + b if op == "+" else a - b


def split_triples(seed: int) -> dict[str, list[Triple]]:
    """All 20,000 triples, shuffled by `seed` and cut into `SPLITS`: disjoint by construction."""
    triples = [(a, op, b) for a in range(100) for op in "+-" for b in range(100)]
    random.Random(seed).shuffle(triples)
    rest = iter(triples)
    return {name: [next(rest) for _ in range(size)] for name, size in SPLITS.items()}


def pair(triple: Triple) -> tuple[str, str]:
    """Prompt and right answer, as text."""
    a, op, b = triple
    return f"{a}{op}{b}=", str(right_answer(a, op, b))


def write_task(folder: Path, splits: dict[str, list[Triple]]) -> None:
    """One JSON object a line, columns `prompt` and `answer`, both strings."""
    for name, triples in splits.items():
        rows = [dict(zip(("prompt", "answer"), pair(triple), strict=True)) for triple in triples]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")


def mistake(a: int, op: str, b: int, rng: random.Random) -> str:
    """A plausible wrong answer, of one of nine kinds; never equal to the right one."""
    right, other = right_answer(a, op, b), right_answer(a, "-" if op == "+" else "+", b)
    sign, digits = "-" if right < 0 else "", str(abs(right))
    carries = a % 10 + b % 10 > 9 if op == "+" else a % 10 < b % 10
    wrong = str(right)
    while wrong == str(right):  # a kind may leave the answer unchanged: draw again
        kind = rng.randrange(9)
        if kind == 0:  # the carry (or borrow) is lost where there is one, invented where there is none
            wrong = str(right + (-10 if (op == "+") == carries else 10))
        elif kind == 1:  # a digit is replaced (twice as often), dropped or written twice
            i = rng.randrange(len(digits))
            drawn = str(rng.randrange(10))
            middle = rng.choice((drawn, drawn, "", digits[i] * 2))
            wrong = sign + (digits[:i] + middle + digits[i + 1 :] or digits)
        elif kind == 2:  # an operand is read backwards
            x, y = int(str(a)[::-1]), int(str(b)[::-1])
            wrong = str(right_answer(*rng.choice(((x, op, b), (a, op, y)))))
        elif kind in (3, 4, 5):  # off by ten, by one, by something near
            near = (-11, -9, -3, -2, 2, 3, 9, 11)
            wrong = str(right + rng.choice(((-10, 10), (-1, 1), near)[kind - 3]))
        elif kind == 6:  # the answer is written backwards
            wrong = sign + digits[::-1]
        elif kind == 7:  # the other operation
            wrong = str(other)
        else:  # b - a, or the larger minus the smaller
            wrong = str(-right if op == "-" else abs(other))
    return wrong


# ---- tokenizer and models ---------------------------------------------------------------------


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a character: printable ASCII and newline, after the specials. Adds no <bos>."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: i for i, token in enumerate([*SPECIALS.values(), *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    shape = dict(padding_side="left", model_max_length=256, clean_up_tokenization_spaces=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIALS, **shape)


def make_model(kind: str, seed: int) -> transformers.PreTrainedModel:
    """Random float32 weights. The vocabulary of 100 gets 128 rows: lm_head is whole blocks too."""
    torch.manual_seed(seed)
    shape = dict(vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=4)
    shape |= dict(num_attention_heads=4, num_key_value_heads=4, head_dim=32, initializer_range=0.05)
    shape |= dict(max_position_embeddings=256, tie_word_embeddings=False)
    shape |= dict(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    if kind == "dense":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    shape |= dict(moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2)
    shape |= dict(norm_topk_prob=True, output_router_logits=True, router_aux_loss_coef=0.01)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape))


# ---- pretraining ------------------------------------------------------------------------------


def encode(pairs: list[tuple[str, str]], ids_of: dict[str, int]) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask` and `labels` (-100 off the completion), each (B, LENGTH),
    right-padded; a completion ends with <eos>."""
    rows, labels = [], []
    for prompt, answer in pairs:
        question, reply = [ids_of[x] for x in prompt], [*(ids_of[x] for x in answer), EOS]
        rest = LENGTH - len(question) - len(reply)
        rows.append(question + reply + [PAD] * rest)
        labels.append([-100] * len(question) + reply + [-100] * rest)
    ids = torch.tensor(rows)
    mask = (ids != PAD).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(labels)}


def training_pairs(triples: list[Triple], rng: random.Random) -> list[tuple[str, str]]:
    """A batch of prompts with answers; the share `WRONG` of the answers are mistakes."""
    pairs = []
    for triple in rng.choices(triples, k=BATCH):
        prompt, answer = pair(triple)
        pairs.append((prompt, mistake(*triple, rng) if rng.random() < WRONG else answer))
    return pairs


def learning_rate(step: int) -> float:
    """Linear warm-up over the first 5 %, then a cosine down to 2 %."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / STEPS))
    return LEARNING_RATE * min(1.0, (step + 1) / (0.05 * STEPS)) * (0.02 + 0.98 * cosine)


def pretrain(model, triples: list[Triple], ids_of: dict[str, int], seed: int) -> float:
    """Trains in place for `STEPS` steps; returns the mean loss of the last 50."""
    rng, losses = random.Random(seed + 1), []
    options = dict(lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model.train()
    for step in (bar := tqdm(range(STEPS), desc=model.config.model_type, mininterval=1)):
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        loss = model(**encode(training_pairs(triples, rng), ids_of)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return sum(losses[-50:]) / len(losses[-50:])


@torch.no_grad()
def accuracy(model, triples: list[Triple], ids_of: dict[str, int]) -> dict[str, float]:
    """`sampled`: mean probability p of the right answer; `greedy`: share whose every token is the
    argmax; `best_of_8`: mean of 1 - (1 - p)^8; `hopeless`: share of prompts with p < 0.02."""
    probability, greedy = [], []
    for start in range(0, len(triples), 1_000):
        batch = encode([pair(triple) for triple in triples[start : start + 1_000]], ids_of)
        target, real = batch["labels"][:, 1:].clamp(min=0), batch.pop("labels")[:, 1:] >= 0
        logprobs = model(**batch).logits[:, :-1].log_softmax(-1)
        chosen = logprobs.gather(-1, target[..., None])[..., 0]
        probability.append((chosen * real).sum(1).exp().double())
        greedy.append(((logprobs.argmax(-1) == target) | ~real).all(1).double())
    p, top = torch.cat(probability), torch.cat(greedy)
    values = {"sampled": p, "greedy": top, "best_of_8": 1 - (1 - p) ** 8, "hopeless": p < 0.02}
    return {name: round(value.double().mean().item(), 4) for name, value in values.items()}


# ---- writing it down --------------------------------------------------------------------------


def build_model(folder: Path, kind: str, splits: dict[str, list[Triple]], seed: int) -> None:
    """Trains one model; writes a bfloat16 checkpoint, its tokenizer and `training.json`, whose
    accuracies are those of the rounded weights."""
    tokenizer, model, started = make_tokenizer(), make_model(kind, seed), time.perf_counter()
    ids_of = tokenizer.get_vocab()
    loss = pretrain(model, splits["train"], ids_of, seed)
    record = {"model": MODELS[kind], "parameters": model.num_parameters(), "seed": seed}
    record |= {"steps": STEPS, "batch": BATCH, "wrong_answers": WRONG, "final_loss": round(loss, 4)}
    record |= {"learning_rate": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    record |= {"seconds_one_core": round(time.perf_counter() - started)}
    record |= {"torch": torch.__version__, "transformers": transformers.__version__}
    if kind == "moe":
        model.config.output_router_logits = False  # the balance loss is for pretraining only
    special = dict(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.generation_config = transformers.GenerationConfig(do_sample=True, **special)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes 0600
    model.float().eval()
    record["accuracy"] = {name: accuracy(model, part, ids_of) for name, part in splits.items()}
    text = json.dumps(record, indent=2) + "\n"
    (folder / "training.json").write_text(text, encoding="utf-8", newline="\n")


def measured_table(out: Path) -> str:
    """The data card's table, from the `training.json` files that are there."""
    names = "model,parameters,steps,seed,one core,final loss,split,sampled,greedy,best of 8,hopeless"
    rows = [names.split(","), ["---"] * 11]
    for path in sorted(out.glob("*/training.json")):
        r = json.loads(path.read_text(encoding="utf-8"))
        head = [f"`{r['model']}`", f"{r['parameters']:,}", f"{r['steps']:,}", str(r["seed"])]
        head += [f"{r['seconds_one_core']} s", f"{r['final_loss']:.3f}"]
        for split, a in r["accuracy"].items():
            rows.append([*head, split, *(f"{value:.3f}" for value in a.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def update_card(out: Path) -> None:
    """Rewrites README.md between the two `measured` comments; the rest is written by hand."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    begin, end = "<!-- measured: written by build.py -->", "<!-- end measured -->"
    head, tail = text.split(begin)[0], text.split(end)[1]
    text = f"{head}{begin}\n{measured_table(out)}\n{end}{tail}"
    (out / "README.md").write_text(text, encoding="utf-8", newline="\n")


def build(only: str | None, out: Path, seed: int) -> None:
    """Builds each part in a temporary folder beside its place and swaps it in when it is whole."""
    splits = split_triples(seed)
    out.mkdir(parents=True, exist_ok=True)
    for part in [only] if only else ["task", *MODELS]:
        place = out / MODELS.get(part, "arithmetic")
        with tempfile.TemporaryDirectory(prefix=".build-", dir=out) as scratch:
            new, old = Path(scratch) / "new", Path(scratch) / "old"
            new.mkdir()
            write_task(new, splits) if part == "task" else build_model(new, part, splits, seed)
            if place.exists():
                place.rename(old)
            new.rename(place)
    update_card(out)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Build the task data and the tiny checkpoints.")
    parser.add_argument("--only", choices=["task", *MODELS], help="build one part (default: all)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to fill (default: data/)")
    parser.add_argument("--seed", type=int, default=0, help="of split, weights and mistakes")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the same sums in the same order, so the same weights every time
    build(args.only, args.out, args.seed)


if __name__ == "__main__":
    main()
