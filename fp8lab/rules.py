"""What engines, environment and loss allow a plan: the half of preflight that needs no model.

Every rule says whose it is. NeMo RL's were read in its source (vllm/quantization/fp8.py, algorithms/grpo.py),
Transformer Engine's in common/recipe, vLLM's in quantization/utils and envs.py. A plan is never wrong by itself: sides
may differ on purpose, and an emulated engine takes anything. An `error` means that the named engine refuses, or that it
would quietly compute something else than the plan says.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8lab.operands import FP8, LinearPrecision
from fp8lab.precision import Fallback, PrecisionPlan
from fp8lab.scales import SCALE_RULES
from fp8lab.setting import HARDWARE, Problem, Setting

TE_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
DEEP_GEMM, E8M0 = "VLLM_USE_DEEP_GEMM", "VLLM_USE_DEEP_GEMM_E8M0"
MX = (1, 32)


def engine_problems(plan: PrecisionPlan, where: Setting) -> Iterator[Problem]:
    """Everything that this module knows of."""
    yield from _sides(plan)
    for rule in (_attention, _engines, _gpu, _environment, _loss, _nemo_rl, _adapters):
        yield from rule(plan, where)


def _pow2(precision: LinearPrecision) -> bool:
    return SCALE_RULES[precision.rule].pow2 is not None


def _sides(plan: PrecisionPlan) -> Iterator[Problem]:
    rollout, trainer = plan.rollout.linear, plan.trainer.linear
    if trainer.is_fp8 and not rollout.is_fp8:
        yield Problem(
            "warning",
            "plan",
            "FP8 training with a BF16 rollout",
            "FP8 on both sides, or in the rollout alone",
            "nobody ships this: the rollout is where FP8 saves most; take fp8-e2e or fp8-rollout",
        )
    if rollout.is_fp8 and not trainer.is_fp8:
        yield Problem(
            "note",
            "plan",
            "an FP8 rollout with BF16 training",
            "either",
            "the sides compute different policies: correct with importance sampling, watch the mismatch",
        )
    if not (rollout.is_fp8 and trainer.is_fp8):
        return
    for key in ("weight", "activation", "weight_block", "group", "weight_source"):
        a, b = getattr(rollout, key), getattr(trainer, key)
        if a != b:
            yield Problem(
                "error",
                f"plan.linear.{key}",
                f"{a} in the rollout, {b} in the trainer",
                "the same on both sides",
                "the sides hold different numbers for the same weights; set both alike",
            )
    if rollout.rule != trainer.rule:
        mixed = _pow2(rollout) != _pow2(trainer)
        yield Problem(
            "error" if mixed else "warning",
            "plan.linear.rule",
            f"{rollout.rule} in the rollout, {trainer.rule} in the trainer",
            "power-of-two scales on both sides or on none" if mixed else "the same rule gives the same bytes",
            "set both alike" if mixed else "last bits of scales differ, and a few codes: see scales.py",
        )
    if plan.rollout.fallback != plan.trainer.fallback:
        yield Problem(
            "note",
            "plan.fallback",
            f"other BF16 layers in the rollout ({plan.rollout}) than in the trainer ({plan.trainer})",
            "different layers, if meant",
            "those layers differ between the sides: look at report() and at the mismatch",
        )


def _attention(plan: PrecisionPlan, where: Setting) -> Iterator[Problem]:
    rollout, trainer = plan.rollout, plan.trainer
    if rollout.attention.is_fp8 and not rollout.linear.is_fp8:
        yield Problem(
            "error" if where.is_nemo_rl else "note",
            "plan.rollout.attention",
            "an FP8 KV cache over BF16 weights",
            "FP8 weights with it" if where.is_nemo_rl else "either",
            "NeMo RL refuses kv_cache_dtype=fp8 unless precision is fp8; take fp8-rollout-kv",
        )
    if rollout.attention.is_fp8 and trainer.linear.is_fp8:
        yield Problem(
            "note",
            "plan.rollout.attention",
            "an FP8 KV cache with FP8 training",
            "either",
            "no shipped recipe combines them: NeMo RL's KV recipe trains in BF16 (fp8-rollout-kv)",
        )
    if trainer.attention.is_fp8 and where.trainer != "native":
        yield Problem(
            "error",
            "plan.trainer.attention",
            str(trainer.attention),
            "bf16",
            "Transformer Engine's block recipe asserts that FP8 attention is off, and NeMo RL has no key for it",
        )
    if rollout.attention.is_fp8 and rollout.attention.scales == "per-token-head" and where.is_nemo_rl:
        yield Problem(
            "error",
            "plan.rollout.attention.scales",
            "per-token-head",
            "per-layer",
            "NeMo RL's trainer sends one scale each for q, k and v of a layer",
        )


def _engines(plan: PrecisionPlan, where: Setting) -> Iterator[Problem]:
    for side, engine in (("rollout", where.rollout), ("trainer", where.trainer)):
        linear = plan.side(side).linear
        if engine == "native" or not linear.is_fp8:
            continue
        mx = linear.weight_block == MX and linear.group == MX[1]
        if not mx and (linear.weight_block, linear.group) != ((128, 128), 128):
            yield Problem(
                "error",
                f"plan.{side}.linear.weight_block",
                f"{linear.weight_block} with activations in groups of {linear.group}",
                "128x128 with 128, or MX's 1x32 with 32",
                f"{engine} has no kernel for these blocks",
            )
        if mx and not _pow2(linear):
            yield Problem(
                "error",
                f"plan.{side}.linear.rule",
                f"{linear.rule} for 1x32 blocks",
                "a power-of-two rule",
                "MX scales are E8M0, powers of two: NeMo RL raises ValueError for is_mx without them",
            )
        if linear.weight != "e4m3" or linear.activation != "e4m3":
            yield Problem(
                "error",
                f"plan.{side}.linear",
                f"weight {linear.weight}, activation {linear.activation}",
                "e4m3 for both",
                f"{engine} has no FP8 GEMM for this pair",
            )
        if side == "trainer" and linear.gradient not in FP8:
            yield Problem(
                "error",
                "plan.trainer.linear.gradient",
                linear.gradient,
                "e4m3, or e5m2 (TE's HYBRID format)",
                f"{engine} runs all three GEMMs in FP8",
            )
        if side == "trainer" and engine == "dtensor":
            yield Problem(
                "error",
                "trainer",
                "dtensor with an FP8 trainer side",
                "megatron or transformer_engine",
                "NeMo RL trains in FP8 with Megatron alone; or train in BF16 (fp8-rollout)",
            )


def _gpu(plan: PrecisionPlan, where: Setting) -> Iterator[Problem]:
    gpu, sides = where.gpu, [s for s in ("rollout", "trainer") if plan.side(s).linear.is_fp8]
    if plan.rollout.attention.is_fp8 and "rollout" not in sides:
        sides.append("rollout")
    if gpu is None or not sides:
        return
    capability = ".".join(map(str, gpu.capability))
    found = f"{where.hardware} (compute capability {capability})"
    for side in sides:
        engine, linear = getattr(where, side), plan.side(side).linear
        if engine != "native" and not gpu.has_fp8:
            yield Problem(
                "error",
                f"hardware ({side})",
                f"{found}, which has no FP8 tensor cores",
                "compute capability 8.9 or more: " + ", ".join(n for n, g in HARDWARE.items() if g.has_fp8),
                "take another GPU, the plan bf16, or the native engine, which emulates",
            )
        elif engine != "native" and linear.weight_block == MX and gpu.capability < (10, 0):
            yield Problem(
                "error",
                f"plan.{side}.linear.weight_block",
                f"MX's 1x32 blocks on {found}",
                "compute capability 10.0 or more (Blackwell)",
                "take 128x128 blocks (fp8-rollout), or B200 or GB200",
            )
        elif engine in ("transformer_engine", "megatron") and linear.is_fp8 and linear.weight_block != MX:
            if gpu.capability < (9, 0):
                yield Problem(
                    "error",
                    "hardware (trainer)",
                    found,
                    "compute capability 9.0 (Hopper)",
                    "TE: 'FP8 block scaled GEMM requires Hopper and CUDA >= 12.9'; train in BF16 (fp8-rollout)",
                )
            elif gpu.capability >= (10, 0) and not _pow2(linear):
                yield Problem(
                    "error",
                    "plan.trainer.linear.rule",
                    f"{linear.rule} (float32 scales) on {found}",
                    "a power-of-two rule on Blackwell, where TE emulates block scaling through MXFP8",
                    "take fp8-pow2, or train in BF16 (fp8-rollout), as NeMo RL's documentation recommends",
                )
        if engine == "native":
            yield Problem(
                "note",
                side,
                "the native engine",
                "native",
                "FP8 is emulated unless its scaled_mm backend runs (Hopper): times then say nothing about FP8",
            )


def _environment(plan: PrecisionPlan, where: Setting) -> Iterator[Problem]:
    set_to = where.environment.get
    trainer, rollout = plan.trainer.linear, plan.rollout.linear
    if where.has_transformer_engine and trainer.is_fp8 and trainer.weight_block != MX:
        wanted = "0" if _pow2(trainer) else "1"
        if set_to(TE_SCALES, "0") != wanted:
            yield Problem(
                "error",
                TE_SCALES,
                repr(set_to(TE_SCALES, "not set, and 0 is the default")),
                f"{wanted!r}, since the plan's trainer has the rule {trainer.rule}",
                f"export {TE_SCALES}={wanted}; otherwise TE's scales are {'not ' * (wanted == '0')}powers of two, "
                "and nothing warns",
            )
    if where.rollout == "vllm" and rollout.is_fp8 and rollout.weight_block != MX and set_to(DEEP_GEMM, "1") != "0":
        wanted = "1" if _pow2(rollout) else "0"
        if set_to(E8M0, "1") != wanted:
            said = {DEEP_GEMM, E8M0} & set(where.environment)
            yield Problem(
                "error" if said else "warning",
                E8M0,
                repr(set_to(E8M0, "not set, and 1 is the default")),
                f"{wanted!r}, since the plan's rollout has the rule {rollout.rule}",
                f"export {E8M0}={wanted}, or {DEEP_GEMM}=0: DeepGEMM, where it is installed, takes its own scales",
            )


def _loss(plan: PrecisionPlan, where: Setting) -> Iterator[Problem]:
    fp8 = plan.rollout.linear.is_fp8 or plan.rollout.attention.is_fp8
    if fp8 and where.grpo is not None and where.grpo.importance_sampling == "none":
        yield Problem(
            "warning" if where.allow_uncorrected_fp8_rollout and not where.is_nemo_rl else "error",
            "grpo.importance_sampling",
            "'none' with an FP8 rollout",
            "'is', 'tis' or another correction",
            "samples of another policy bias the gradient (NeMo RL asserts this); allow_uncorrected_fp8_rollout=True "
            "says it is an ablation",
        )


def _nemo_rl(plan: PrecisionPlan, where: Setting) -> Iterator[Problem]:
    if not where.is_nemo_rl:
        return
    rules = (
        ("trainer", "dtensor", where.trainer == "dtensor", "megatron", "DTensor workers cannot calibrate KV scales"),
        ("asynchronous", "true", where.asynchronous, "false", "NeMo RL asserts it: scales travel with a refit"),
        ("pipeline_parallel", where.pipeline_parallel, where.pipeline_parallel > 1, "1", "calibration sees all layers"),
    )
    for key, found, broken, allowed, why in rules:
        if broken and plan.rollout.attention.is_fp8:
            yield Problem(
                "error",
                key,
                f"{found} with an FP8 KV cache",
                allowed,
                f"{why}; change it or take a plan without KV (fp8-rollout)",
            )
    if plan.trainer.linear.is_fp8 and plan.trainer.fallback != Fallback():
        yield Problem(
            "warning",
            "plan.trainer.fallback",
            f"BF16 layers in an FP8 trainer ({plan.trainer})",
            "none",
            "NeMo RL reads no key for it (first_last_layers_bf16 is ignored); the rollout's keys do not carry over",
        )
    if plan.rollout.linear.is_fp8 and _pow2(plan.rollout.linear) and plan.rollout.linear.weight_block != MX:
        yield Problem(
            "warning",
            "plan.rollout.linear.rule",
            plan.rollout.linear.rule,
            "float32 scales",
            "NeMo RL's pow2_activation_scaling_factors is 'under research' and unproven: test it first",
        )


def _adapters(plan: PrecisionPlan, where: Setting) -> Iterator[Problem]:
    if not where.lora:
        return
    if where.is_nemo_rl and plan.rollout.linear.is_fp8:
        yield Problem(
            "error",
            "lora",
            "LoRA with an FP8 rollout",
            "one of them",
            "NeMo RL does not support it (its unit test asserts so)",
        )
    else:
        yield Problem(
            "note",
            "lora",
            "LoRA adapters",
            "either",
            "they stay in high precision, converted before get_peft_model or after; refresh(model) after merging",
        )
