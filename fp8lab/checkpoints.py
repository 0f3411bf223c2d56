"""Hugging Face FP8 checkpoints: export a model under a plan, import what others wrote.

    config.json          quantization_config: quant_method, weight_block_size, modules_to_not_convert
    X.weight             float8_e4m3fn, (N, K): the codes
    X.weight_scale_inv   float32, (ceil(N/128), ceil(K/128)): despite its name it multiplies, w = code * scale

This is DeepSeek-V3's format (`quant_method: fp8`), which transformers, vLLM and SGLang read. An export holds the bytes
a `Float8Linear` of that side multiplies with. The rest is BF16, as in published checkpoints: BF16 linears and lm_head
lose nothing, norms, embeddings and biases of float32 masters are rounded (`dtype=torch.float32` keeps them).
Compressed-tensors' FP8_BLOCK (LLM Compressor) has other names, `weight_scale` and `config_groups`; it is only read.

Not in the format: the scale rule of activations (engines choose: VLLM_USE_DEEP_GEMM_E8M0), gradients, the other side.
Fused experts are stored one by one, `experts.{e}.gate_proj.weight`, as DeepSeek's and Qwen's are; families that store
them otherwise (Mixtral) keep them in BF16 or are refused. vLLM joins q/k/v and gate/up: FP8 or BF16 together, rows in
multiples of 128. transformers (5.19, 5.24) takes rows / ceil(rows / 128) for the block and misreads `ragged` linears: a
dimension above 128 that is no multiple of it. Exporting them warns. Without a GPU it dequantizes, with accelerate.

Imported weights quantize to the same codes again, and to the same scales if these were amax / 448; scales from another
formula may move by one last bit, and a `pow2` block may take half the scale and doubled codes, the same values.
`Imported.plan` has `weight_source="fp32"` for this: rounding to BF16 first moves scales by up to 0.4 %, unless the
checkpoint was made from BF16 weights.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8lab.experts import projections, quantize_experts
from fp8lab.linear import quantize_weight
from fp8lab.models import named_weights, quiet
from fp8lab.names import expert_tensors, layer_index, linear_modules
from fp8lab.precision import Fallback, LinearPrecision, PrecisionPlan, Side, SidePlan
from fp8lab.quantizers import QuantizedTensor

MARKER = "fp8lab.json"
"""An export's note of its plan and side; a folder that has it may be replaced by another export."""
EXPRESSIBLE = {"weight": "e4m3", "activation": "e4m3", "weight_block": (128, 128), "group": 128}
SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What `export_fp8` wrote."""

    folder: Path
    fp8: tuple[str, ...] = field(repr=False)
    """Linears and fused expert tensors that are FP8."""
    kept: tuple[str, ...] = field(repr=False)
    """modules_to_not_convert: linears, routers and fused experts in high precision."""
    ragged: tuple[str, ...]
    """FP8 modules that transformers would misread (see the module's text)."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A checkpoint that `import_fp8` read."""

    model: nn.Module = field(repr=False)
    """float32, on the CPU; its FP8 weights are dequantized."""
    plan: PrecisionPlan
    """Both sides as the checkpoint has its linears; `weight_source` is fp32 (see the module's text)."""
    kind: str
    """The checkpoint's quant_method: `fp8` or `compressed-tensors`."""
    fp8: tuple[str, ...] = field(repr=False)
    """Modules that were FP8, by their names in the checkpoint (single experts and lm_head too, if they were)."""


def export_fp8(
    model: nn.Module,
    plan: PrecisionPlan,
    folder: str | Path,
    *,
    side: Side = "rollout",
    tokenizer: Any = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Exported:
    """Write one side of `plan` as a `quant_method: fp8` checkpoint; the model, converted or not, is left as it is.

    The folder appears complete or not at all. tokenizer: anything with `save_pretrained`. dtype: of all other
    parameters (buffers keep theirs). Raises ValueError for a plan or weights that the format cannot hold,
    FileExistsError for a folder that holds something else than an earlier export.
    """
    folder = Path(folder)
    if folder.exists() and not (folder / MARKER).is_file() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and no export wrote it; choose a new folder")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("transformers loaded this model from a quantized checkpoint; load it with import_fp8 instead")
    plan.side(side)  # ValueError for an unknown side
    fp8 = {d.name: d.precision for d in plan.coverage(model) if d.side == side and d.precision.is_fp8}
    _require_expressible(fp8)
    _require_single_experts(model, set(fp8))
    kept, ragged = _kept_and_ragged(model, set(fp8))
    if ragged:
        found = f"{len(ragged)} FP8 linears have a dimension above 128 that is no multiple of 128, first {ragged[0]}"
        fix = "transformers misreads their scales, vLLM may refuse them; keep them in BF16 (plan.with_bf16)"
        warnings.warn(f"{found}: {fix}", stacklevel=2)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (folder.with_name(f".{folder.name}.{kind}-{os.getpid()}") for kind in ("tmp", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with quiet():
            model.save_pretrained(temporary, state_dict=_stored_tensors(model, fp8, dtype))
        config = json.loads((temporary / "config.json").read_text(encoding="utf-8"))
        settings = {**SETTINGS, "modules_to_not_convert": list(kept)}
        config |= {"dtype": str(dtype).removeprefix("torch."), "quantization_config": settings}
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (temporary / MARKER).write_text(json.dumps({"side": side, "plan": plan.to_dict()}, indent=1), encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        if folder.exists():
            os.replace(folder, old)
        os.replace(temporary, folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(folder=folder, fp8=tuple(fp8), kept=kept, ragged=ragged)


def import_fp8(folder: str | Path) -> Imported:
    """Read a DeepSeek-style or compressed-tensors FP8_BLOCK checkpoint, sharded or not.

    Raises FileNotFoundError for missing files and ValueError for anything that is not such a checkpoint: another
    method, per-tensor scales, a missing, misshapen or non-positive scale, NaN codes, other tensors than the model's.
    """
    layout, tensors, fp8, pow2 = _layout(Path(folder)), {}, [], True
    for name, tensor in read_fp8(folder):
        if isinstance(tensor, QuantizedTensor):
            fp8.append(name.removesuffix(".weight"))
            pow2 = pow2 and bool((torch.frexp(tensor.scale).mantissa == 0.5).all())
            tensor = tensor.dequantize()
        tensors[name] = tensor
    if not fp8:
        raise ValueError(f"{folder} says quant_method {layout.kind!r} but holds no FP8 weight")
    model, rule = _build(Path(folder), tensors), "pow2" if pow2 else "default"
    linear = LinearPrecision(weight_block=layout.block, group=layout.block[1], rule=rule, weight_source="fp32")
    sides = SidePlan(linear=linear, fallback=_fallback(model, set(fp8)))
    plan = PrecisionPlan(name="imported", rollout=sides, trainer=sides)
    return Imported(model=model, plan=plan, kind=layout.kind, fp8=tuple(fp8))


def read_fp8(folder: str | Path) -> Iterator[tuple[str, torch.Tensor | QuantizedTensor]]:
    """(name, tensor) of a checkpoint, one at a time, FP8 weights as QuantizedTensor; raises as `import_fp8` does."""
    layout = _layout(Path(folder))
    with ExitStack() as stack:
        files = _open(Path(folder), stack)
        for name, file in files.items():
            stem, _, last = name.rpartition(".")
            if last == layout.suffix:
                if f"{stem}.weight" not in files:
                    raise ValueError(f"{folder} holds {name} but not the weight it belongs to")
                continue
            tensor, scale = file.get_tensor(name), f"{stem}.{layout.suffix}"
            scaled = last == "weight" and scale in files
            if scaled != (tensor.dtype == torch.float8_e4m3fn):
                what = f"{name} is {tensor.dtype} and its scale {scale} is {'there' if scaled else 'missing'}"
                raise ValueError(f"{what}; torch.float8_e4m3fn weights have scales, other tensors have none")
            yield name, _quantized(name, tensor, files[scale].get_tensor(scale), layout) if scaled else tensor


def _require_expressible(fp8: dict[str, LinearPrecision]) -> None:
    if not fp8:
        raise ValueError("the plan has no FP8 linear on this side; use model.save_pretrained")
    for name, precision in fp8.items():
        if wrong := {key: getattr(precision, key) for key, v in EXPRESSIBLE.items() if getattr(precision, key) != v}:
            raise ValueError(f"{name} has {wrong}; a `quant_method: fp8` checkpoint allows {EXPRESSIBLE}, or all BF16")


def _require_single_experts(model: nn.Module, fp8: set[str]) -> None:
    """ValueError if fused experts are FP8 in part, or this family's checkpoints do not hold experts one by one."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    steps = get_checkpoint_conversion_mapping(model.config.model_type) or []
    stored = tuple(pattern for step in steps for pattern in step.source_patterns)
    for name, module, _ in expert_tensors(model):
        parent, _, tensor = name.rpartition(".")
        partly = {f"{parent}.{key}" in fp8 for key, p in module.named_parameters(recurse=False) if p.ndim == 3}
        if len(partly) == 2:
            raise ValueError(f"{parent} is FP8 in part; a `quant_method: fp8` checkpoint has all of it in FP8, or none")
        single = all(any(s.endswith(f"experts.*.{part}.weight") for s in stored) for part in projections(tensor))
        if name in fp8 and not single:
            found = f"{parent} is FP8, and {model.config.model_type} checkpoints do not store experts as"
            fix = f"plan.with_bf16(modules=['{'.'.join(parent.split('.')[-2:])}']) keeps them in BF16"
            raise ValueError(f"{found} experts.0.{projections(tensor)[0]}.weight; {fix}")


def _stored_tensors(model: nn.Module, fp8: dict[str, LinearPrecision], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The state dict to save; tied tensors stay one tensor, so that save_pretrained drops the duplicate."""
    tensors, shared = {}, {}
    experts = {name for name, _, _ in expert_tensors(model)}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in named_weights(model).items():
        module = name.removesuffix(".weight")
        if module in fp8:
            parent, _, key = name.rpartition(".")
            fused = name in experts
            packed = (
                quantize_experts(key, tensor, fp8[name]) if fused else quantize_weight(tensor, fp8[module])
            ).packed
            if packed.nonfinite:
                raise ValueError(f"{name} holds {packed.nonfinite} NaN or infinite elements; nothing was written")
            for stem, index in _matrices(parent, key, packed.codes.shape[0]) if fused else [(module, ...)]:
                tensors[f"{stem}.weight"] = packed.codes[index].view(torch.float8_e4m3fn)
                tensors[f"{stem}.weight_scale_inv"] = packed.scale[index]
        else:
            place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
            tensors[name] = shared.setdefault(place, tensor.to(dtype if name in parameters else tensor.dtype))
    return tensors


def _matrices(parent: str, tensor: str, experts: int) -> list[tuple[str, tuple[int, int]]]:
    """(name in a checkpoint, place in the codes of quantize_experts) of every matrix of a fused expert tensor."""
    return [(f"{parent}.{e}.{part}", (e, i)) for e in range(experts) for i, part in enumerate(projections(tensor))]


def _kept_and_ragged(model: nn.Module, fp8: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modules with a matrix (or fused experts) of their own that is not FP8, save embeddings; and `Exported.ragged`."""
    experts = {name: parameter for name, _, parameter in expert_tensors(model) if name in fp8}
    whole = {name.rpartition(".")[0] for name in experts} | fp8
    modules = ((name, m) for name, m in model.named_modules() if name not in whole and not isinstance(m, nn.Embedding))
    kept = tuple(name for name, m in modules if any(p.ndim >= 2 for p in m.parameters(recurse=False)))
    shapes = {name: linear.weight.shape for name, linear in linear_modules(model) if name in fp8}
    for name, p in experts.items():
        shapes[name] = (p.shape[1] // len(projections(name.rpartition(".")[2])), p.shape[2])
    return kept, tuple(name for name, shape in shapes.items() if any(d > 128 and d % 128 for d in shape))


class _Layout(NamedTuple):
    """How a checkpoint, by its config.json, names its scales (last part of the name) and blocks its weights."""

    kind: str
    suffix: str
    block: tuple[int, int]


def _layout(folder: Path) -> _Layout:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; give the folder of a checkpoint")
    settings = json.loads(path.read_text(encoding="utf-8")).get("quantization_config")
    if settings is None:
        raise ValueError(f"{path} has no quantization_config: not a quantized checkpoint; use models.load_model")
    method = settings.get("quant_method")
    if method not in ("fp8", "compressed-tensors"):
        raise ValueError(f"quant_method is {method!r} in {path}; allowed: fp8, compressed-tensors (FP8_BLOCK)")
    block = settings.get("weight_block_size") if method == "fp8" else _compressed_block(settings)
    if not (isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)):
        raise ValueError(f"the weight block is {block!r} in {path}; supported: [128, 128] and the like, not per tensor")
    for key in ("fmt", "activation_scheme"):
        if method == "fp8" and settings.get(key, SETTINGS[key]) != SETTINGS[key]:
            raise ValueError(f"{key} is {settings[key]!r} in {path}; supported: {SETTINGS[key]}")
    return _Layout(method, "weight_scale_inv" if method == "fp8" else "weight_scale", (block[0], block[1]))


def _compressed_block(settings: dict[str, Any]) -> Any:
    """The block of a compressed-tensors config that is FP8_BLOCK; ValueError for any other scheme."""
    groups = list((settings.get("config_groups") or {}).values())
    if len(groups) != 1 or settings.get("kv_cache_scheme"):
        raise ValueError("supported compressed-tensors checkpoints have one config group and no kv_cache_scheme")
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations") or {}
    found = [weights.get(key) for key in ("num_bits", "type", "strategy")]
    found += [inputs.get(key) for key in ("num_bits", "type", "strategy", "dynamic")]
    block = weights.get("block_structure")
    if found != [8, "float", "block", 8, "float", "group", True] or not block or inputs.get("group_size") != block[-1]:
        supported = "FP8_BLOCK: 8-bit float, block weights (not tensor or channel), dynamic groups of a block's width"
        raise ValueError(f"compressed-tensors weights {weights}, input_activations {inputs}; supported: {supported}")
    return block


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> open safetensors file that holds it; `stack` closes them."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index.is_file() else ()
    files = {}
    for path in sorted({folder / file for file in listed or ("model.safetensors",)}):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: a checkpoint has one model.safetensors, or all of its index")
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"{path} is no complete safetensors file: {error}") from error
        files |= dict.fromkeys(file.keys(), file)
    return files


def _quantized(name: str, weight: torch.Tensor, scale: torch.Tensor, layout: _Layout) -> QuantizedTensor:
    grid = tuple(-(-d // b) for d, b in zip(weight.shape, layout.block, strict=False))
    if weight.ndim != 2 or tuple(scale.shape) != grid:
        found = f"{name} has shape {tuple(weight.shape)} and scales {tuple(scale.shape)}"
        raise ValueError(f"{found}; expected a matrix and, in blocks {layout.block}, scales {grid} (none per tensor)")
    if scale.dtype not in SCALE_DTYPES:
        raise ValueError(f"the scales of {name} are {scale.dtype}; allowed: {', '.join(map(str, SCALE_DTYPES))}")
    scale, codes = scale.float(), weight.view(torch.uint8)
    lost = int((~(scale.isfinite() & (scale > 0))).sum()), int(((codes & 0x7F) == 0x7F).sum())
    if any(lost):
        raise ValueError(f"{name} has {lost[0]} scales that are not positive and finite, and {lost[1]} NaN codes")
    return QuantizedTensor(codes=codes, scale=scale, block=layout.block, format="e4m3", rule=layout.kind)


def _build(folder: Path, tensors: dict[str, torch.Tensor]) -> nn.Module:
    """The float32 model of a folder's config with these weights, which have the checkpoint's names."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(folder)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{folder} is a {config.model_type}, for which transformers has no causal language model")
    del config.quantization_config  # the weights are dequantized: transformers must not look for scales
    options = {"dtype": torch.float32, "attn_implementation": "sdpa", "output_loading_info": True, "config": config}
    with quiet():
        model, info = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(None, state_dict=tensors, **options)
    if wrong := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        raise ValueError(f"{folder} does not fit its config.json: {len(wrong)} missing or extra tensors, {wrong[:3]}")
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _fallback(model: nn.Module, fp8: set[str]) -> Fallback:
    """The decoder layers that hold no FP8 linear, and the other linears that are not FP8."""
    everything = PrecisionPlan(rollout=SidePlan(linear=LinearPrecision()))
    names = [d.name for d in everything.coverage(model) if d.precision.is_fp8]
    experts = (name.rsplit(".", 1) for name, _, _ in expert_tensors(model))  # in the checkpoint one matrix an expert
    fp8 = fp8 | {f"{a}.{b}" for a, b in experts if f"{a}.0.{b.replace('gate_up', 'gate')}" in fp8}
    some = {layer_index(name) for name in names if name in fp8}
    modules = tuple(name for name in names if name not in fp8 and layer_index(name) in some)
    return Fallback(layers=tuple(sorted({layer_index(name) for name in names} - some)), modules=modules)
