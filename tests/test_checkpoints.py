"""FP8 checkpoints: bytes on disk, transformers and compressed-tensors as independent readers, every refusal."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8lab import models
from fp8lab.checkpoints import export_fp8, import_fp8, read_fp8
from fp8lab.conversion import convert
from fp8lab.linear import float8_layers, quantize_weight
from fp8lab.names import linear_modules
from fp8lab.precision import BF16_LINEAR, Fallback, LinearPrecision, PrecisionPlan, SidePlan
from fp8lab.quantizers import BlockQuantizer, QuantizedTensor
from tests.references import SIZES, tiny_llama, tiny_moe, tokens

E2E = PrecisionPlan.preset("fp8-e2e")
RAGGED = dict(hidden_size=132, intermediate_size=300, head_dim=20)
"""Dimensions 132, 300, 80 and 40: blocks that end early on every side."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """(model, plan, folder): the shipped tiny Llama, its last layer in BF16, exported."""
    model, plan = models.load_model("tiny-llama"), E2E.with_bf16(last=1)
    folder = tmp_path_factory.mktemp("shipped") / "export"
    export_fp8(model, plan, folder, tokenizer=models.load_tokenizer("tiny-llama"))
    return model, plan, folder


@pytest.fixture
def copy(shipped, tmp_path):
    """A copy of the shipped model's export, to be damaged."""
    return shutil.copytree(shipped[2], tmp_path / "copy")


def quantized(folder):
    return {name: t for name, t in read_fp8(folder) if isinstance(t, QuantizedTensor)}


def settings_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def edit_settings(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def same(a, b):
    """Equal state dicts, bit for bit."""
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


# ---- export ---------------------------------------------------------------------------------------


def test_export_holds_the_bytes_of_float8_linear(shipped):
    model, plan, folder = shipped
    engine = models.load_model("tiny-llama")
    convert(engine, plan, side="rollout")
    stored = load_file(folder / "model.safetensors")
    used = {name: layer.quantized.packed for name, layer in float8_layers(engine) if layer.precision.is_fp8}
    assert len(used) == 3 * 7
    for name, packed in used.items():
        weight, scale = stored.pop(f"{name}.weight"), stored.pop(f"{name}.weight_scale_inv")
        assert weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
        assert torch.equal(weight.view(torch.uint8), packed.codes) and torch.equal(scale, packed.scale)
    masters = model.state_dict()
    assert all(t.dtype == torch.bfloat16 and torch.equal(t, masters[n].bfloat16()) for n, t in stored.items())
    assert len(stored) + len(used) == len(masters)


def test_config_says_what_is_fp8(shipped):
    _, _, folder = shipped
    last = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    assert settings_of(folder) == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [*(f"model.layers.3.{name}" for name in last), "lm_head"],
    }
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert {p.name for p in folder.iterdir()} >= {"generation_config.json", "tokenizer.json", "fp8lab.json"}
    note = json.loads((folder / "fp8lab.json").read_text())
    assert note["side"] == "rollout" and PrecisionPlan.from_dict(note["plan"]) == E2E.with_bf16(last=1)


@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_each_side_has_its_own_export(side, tmp_path):
    model = tiny_llama()
    plan = E2E.with_bf16(modules=["mlp.up_proj"], side="rollout").with_bf16(layers=[0], side="trainer")
    exported = export_fp8(model, plan, tmp_path / "out", side=side)
    expected = [d.name for d in plan.coverage(model) if d.side == side and d.precision.is_fp8]
    assert list(exported.fp8) == expected
    assert set(quantized(tmp_path / "out")) == {f"{name}.weight" for name in expected}
    assert set(exported.kept) == {name for name, _ in linear_modules(model)} - set(expected)
    assert settings_of(tmp_path / "out")["modules_to_not_convert"] == list(exported.kept)


def test_converted_model_exports_the_same_and_is_left_alone(shipped, tmp_path):
    model, plan, folder = shipped
    converted = models.load_model("tiny-llama")
    convert(converted, plan, side="trainer")
    export_fp8(converted, plan, tmp_path / "out")
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert same(converted, model) and len(list(float8_layers(converted))) == 4 * 7 + 1


def test_other_parameters_can_stay_float32(tmp_path):
    model = tiny_llama(attention_bias=True)
    export_fp8(model, E2E, tmp_path / "half")
    export_fp8(model, E2E, tmp_path / "full", dtype=torch.float32)
    for name in ("model.layers.0.self_attn.q_proj.bias", "model.embed_tokens.weight"):
        master = model.state_dict()[name]
        assert torch.equal(import_fp8(tmp_path / "full").model.state_dict()[name], master)
        assert torch.equal(import_fp8(tmp_path / "half").model.state_dict()[name], master.bfloat16().float())


def test_ragged_linears_are_named_in_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="no multiple of 128"):
        exported = export_fp8(tiny_llama(**RAGGED), E2E, tmp_path / "out")
    assert "model.layers.0.mlp.up_proj" in exported.ragged
    assert export_fp8(tiny_llama(), E2E, tmp_path / "small").ragged == ()  # 48 and 80 are one block each


# ---- import ---------------------------------------------------------------------------------------


def test_import_dequantizes_and_finds_the_plan(shipped):
    model, plan, folder = shipped
    imported = import_fp8(folder)
    weights, stored = imported.model.state_dict(), quantized(folder)
    assert imported.kind == "fp8" and {f"{name}.weight" for name in imported.fp8} == set(stored)
    for name, master in model.state_dict().items():
        expected = stored[name].dequantize() if name in stored else master.bfloat16().float()
        assert weights[name].dtype == torch.float32 and torch.equal(weights[name], expected)
    linear = LinearPrecision(weight_source="fp32")
    assert imported.plan.rollout == SidePlan(linear=linear, fallback=Fallback(layers=(3,))) == imported.plan.trainer
    assert imported.model.generation_config.eos_token_id == model.generation_config.eos_token_id


def test_imported_model_under_its_plan_is_the_exported_engine(shipped):
    model, plan, folder = shipped
    engine, imported = models.load_model("tiny-llama"), import_fp8(folder)
    convert(engine, plan, side="rollout")
    convert(imported.model, imported.plan, side="rollout")
    ids = tokens(shape=(2, 9))
    assert torch.equal(logits(engine, ids), logits(imported.model, ids))  # bit for bit: same bytes, same kernels


@pytest.mark.filterwarnings("ignore:.*no multiple of 128")
@pytest.mark.parametrize("sizes", [{}, RAGGED, dict(hidden_size=256, intermediate_size=128, head_dim=64)])
def test_round_trip_of_any_shape(sizes, tmp_path):
    model = tiny_llama(**sizes)
    export_fp8(model, E2E, tmp_path / "out")
    stored = quantized(tmp_path / "out")
    for name, linear in linear_modules(model):
        if name != "lm_head":
            assert quantize_weight(linear.weight, E2E.rollout.linear).packed.same_bytes(stored[f"{name}.weight"])
    imported = import_fp8(tmp_path / "out")
    assert imported.plan.rollout.fallback == Fallback()
    export_fp8(imported.model, imported.plan, tmp_path / "again")
    again = quantized(tmp_path / "again")
    assert again.keys() == stored.keys() and all(t.same_bytes(stored[name]) for name, t in again.items())


@pytest.mark.parametrize("source", ["bf16", "fp32"])
@pytest.mark.parametrize("rule", ["default", "pow2", "deepgemm", "nemo_rl"])
def test_requantizing_imported_weights(rule, source):
    """Codes and scales come back exactly; 1 / (448 / amax) scales within a last bit; pow2 blocks by value."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn((128 * 8, 128 * 8), generator=generator) * torch.randn((1024, 1), generator=generator).exp()
    first = quantize_weight(weight, LinearPrecision(rule=rule, weight_source=source)).packed
    again = "pow2" if rule == "pow2" else "default"
    second = quantize_weight(first.dequantize(), LinearPrecision(rule=again, weight_source="fp32")).packed
    if rule == "pow2":
        assert torch.equal(first.dequantize(), second.dequantize())
        assert set((first.scale / second.scale).unique().tolist()) <= {1.0, 2.0}
    else:
        assert torch.equal(first.codes, second.codes)
        steps = (first.scale.view(torch.int32) - second.scale.view(torch.int32)).abs().max()
        assert steps <= (1 if rule == "nemo_rl" else 0)


def test_pow2_plan_is_recognized(tmp_path):
    plan = PrecisionPlan.preset("fp8-e2e", rule="pow2").with_bf16(modules=["layers.1.mlp.up_proj", "q_proj"])
    export_fp8(tiny_llama(), plan, tmp_path / "out")
    found = import_fp8(tmp_path / "out").plan.rollout
    assert found.linear.rule == "pow2"
    wanted = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj")
    assert found.fallback == Fallback(modules=wanted)


def test_tied_embeddings_are_stored_once(tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    export_fp8(model, E2E, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in stored and "model.embed_tokens.weight" in stored
    imported = import_fp8(tmp_path / "out").model
    assert imported.lm_head.weight is imported.model.embed_tokens.weight


def test_sharded_checkpoint_with_scales_apart_from_weights(shipped, copy):
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    parts = {"a": {}, "b": {}}
    for name, tensor in tensors.items():
        parts["b" if name.endswith("scale_inv") else "a"][name] = tensor
    places = {}
    for part, held in parts.items():
        save_file(held, copy / f"model-{part}.safetensors", metadata={"format": "pt"})
        places |= dict.fromkeys(held, f"model-{part}.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert same(import_fp8(copy).model, import_fp8(shipped[2]).model)
    (copy / "model-b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-b.safetensors is missing"):
        import_fp8(copy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_other_dtypes_multiply_in_float32(dtype, copy):
    name = "model.layers.0.mlp.up_proj.weight"
    stored = load_file(copy / "model.safetensors")
    scale = stored[f"{name}_scale_inv"].to(dtype)
    edit_tensors(copy, lambda t: t.update({f"{name}_scale_inv": scale}))
    expected = stored[name].float() * scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(import_fp8(copy).model.get_parameter(name), expected)


def test_experts_are_stored_one_by_one_and_come_back(tmp_path):
    """DeepSeek and Qwen store experts one by one, each projection with its scales; transformers 5 fuses them."""
    model = tiny_moe()
    exported = export_fp8(model, E2E, tmp_path / "out")
    assert exported.kept == ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head")
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"} <= set(exported.fp8)
    imported, stored = import_fp8(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    experts = model.model.layers[1].mlp.experts
    for part, weight in (("up_proj", experts.gate_up_proj[2, 32:]), ("down_proj", experts.down_proj[2])):
        name = f"model.layers.1.mlp.experts.2.{part}"
        packed = BlockQuantizer((128, 128)).quantize(weight.detach().bfloat16().float())
        assert torch.equal(stored[f"{name}.weight"].view(torch.uint8), packed.codes)
        assert torch.equal(stored[f"{name}.weight_scale_inv"], packed.scale) and name in imported.fp8
    convert(model, E2E, side="rollout")
    convert(imported.model, imported.plan, side="rollout")
    ours, theirs = dict(float8_layers(model)), dict(float8_layers(imported.model))
    assert ours.keys() == theirs.keys()
    assert all(
        torch.equal(ours[n].quantized.values, theirs[n].quantized.values) for n in ours if ours[n].precision.is_fp8
    )
    export_fp8(imported.model, imported.plan, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(stored[n].view(torch.uint8), again[n].view(torch.uint8)) for n in stored if "experts" in n)


def test_experts_kept_in_bf16_and_single_fp8_experts_of_others(tmp_path):
    model = tiny_moe()
    exported = export_fp8(model, E2E.with_bf16(modules=["mlp.experts"]), tmp_path / "out")
    assert set(exported.kept) >= {"model.layers.0.mlp.experts", "model.layers.1.mlp.gate", "lm_head"}
    assert all("self_attn" in name for name in exported.fp8)
    plain, expert = import_fp8(tmp_path / "out"), "model.layers.1.mlp.experts.2.down_proj"
    weight = model.model.layers[1].mlp.experts.down_proj[2].detach()
    assert torch.equal(plain.model.model.layers[1].mlp.experts.down_proj[2], weight.bfloat16().float())
    packed = BlockQuantizer((128, 128)).quantize(weight)
    stored = {f"{expert}.weight": packed.codes.view(torch.float8_e4m3fn), f"{expert}.weight_scale_inv": packed.scale}
    edit_tensors(tmp_path / "out", lambda t: t.update(stored))
    imported = import_fp8(tmp_path / "out")
    assert expert in imported.fp8 and imported.plan == plain.plan
    assert torch.equal(imported.model.model.layers[1].mlp.experts.down_proj[2], packed.dequantize())


def test_fused_experts_the_format_cannot_hold(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    with pytest.raises(ValueError, match="experts is FP8 in part; .* all of it in FP8, or none"):
        export_fp8(tiny_moe(), E2E.with_bf16(modules=["experts.down_proj"]), tmp_path / "out")
    mixtral = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2))  # stores block_sparse_moe.experts.0.w1
    with pytest.raises(ValueError, match=r"mixtral checkpoints do not store experts as experts.0.gate_proj.weight"):
        export_fp8(mixtral, E2E, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert export_fp8(mixtral, E2E.with_bf16(modules=["mlp.experts"]), tmp_path / "out").fp8


# ---- transformers as the reader ---------------------------------------------------------------------


def load_with_transformers(folder, dtype):
    pytest.importorskip("accelerate", reason="transformers reads FP8 checkpoints only with accelerate installed")
    from transformers import AutoModelForCausalLM

    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    with models.quiet():
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU transformers keeps the weights in FP8")
class TestTransformers:
    """Without a GPU, transformers dequantizes: code * scale in float32, then a cast to the model's dtype."""

    def test_float32_logits_are_ours_bit_for_bit(self, shipped):
        ours, theirs = import_fp8(shipped[2]).model, load_with_transformers(shipped[2], torch.float32)
        assert same(ours, theirs)
        ids = tokens(shape=(2, 9))
        assert torch.equal(logits(ours, ids), logits(theirs, ids))

    def test_by_default_weights_are_rounded_to_bf16(self, shipped):
        ours, theirs = import_fp8(shipped[2]).model, load_with_transformers(shipped[2], "auto")
        assert same(ours.bfloat16(), theirs)

    def test_moe(self, tmp_path):
        export_fp8(tiny_moe(), E2E, tmp_path / "out")
        assert same(import_fp8(tmp_path / "out").model, load_with_transformers(tmp_path / "out", torch.float32))

    def test_tied_and_small(self, tmp_path):
        export_fp8(tiny_llama(tie_word_embeddings=True, attention_bias=True), E2E, tmp_path / "out")
        assert same(import_fp8(tmp_path / "out").model, load_with_transformers(tmp_path / "out", torch.float32))

    @pytest.mark.filterwarnings("ignore:.*no multiple of 128")
    def test_ragged_is_misread(self, tmp_path):
        """300 rows are blocks of 128, 128 and 44; transformers takes three of 100. Says so if that is repaired."""
        exported = export_fp8(tiny_llama(hidden_size=128, intermediate_size=300, head_dim=32), E2E, tmp_path / "out")
        ours, theirs = import_fp8(tmp_path / "out").model, load_with_transformers(tmp_path / "out", torch.float32)
        wrong = {n for n, p in ours.named_parameters() if not torch.equal(p, theirs.get_parameter(n))}
        assert wrong == {f"{name}.weight" for name in exported.ragged}


# ---- compressed-tensors as the writer ---------------------------------------------------------------


def compressed_checkpoint(model, folder, scale_dtype=torch.float32):
    """An FP8_BLOCK checkpoint by compressed-tensors' own functions; returns its own dequantized weights."""
    from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor as Compressor
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme("FP8_BLOCK", targets=["Linear"])
    tensors, expected = {}, {}
    linears = {name: linear for name, linear in linear_modules(model) if name != "lm_head"}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module not in linears:
            tensors[name] = expected[name] = tensor
            continue
        rows, cols = tensor.shape
        padded = torch.nn.functional.pad(tensor, (0, -cols % 128, 0, -rows % 128))
        blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale, _ = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), scheme.weights)
        state = {"weight": tensor, "weight_scale": scale.to(scale_dtype)}
        state = Compressor.compress(state, scheme)
        tensors |= {f"{module}.{key}": value for key, value in state.items()}
        state["weight_scale"] = state["weight_scale"].float()  # its own kernels multiply in the scale's dtype
        expected[name] = Compressor.decompress(state, scheme)["weight"]
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format="float-quantized",
        quantization_status="compressed",
    )
    model.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = json.loads(config.model_dump_json())
    (folder / "config.json").write_text(json.dumps(content))
    return expected


@pytest.mark.parametrize("sizes", [{}, RAGGED])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_compressed_tensors_block_checkpoint(sizes, scale_dtype, tmp_path):
    expected = compressed_checkpoint(tiny_llama(**sizes), tmp_path / "ct", scale_dtype)
    imported = import_fp8(tmp_path / "ct")
    assert imported.kind == "compressed-tensors" and len(imported.fp8) == 2 * 7
    assert all(torch.equal(t, expected[name]) for name, t in imported.model.state_dict().items())
    assert imported.plan.rollout == SidePlan(linear=LinearPrecision(weight_source="fp32"))


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("weights", "strategy", "channel"),
        ("weights", "strategy", "tensor"),
        ("weights", "num_bits", 4),
        ("weights", "type", "int"),
        ("weights", "block_structure", None),
        ("input_activations", "dynamic", False),
        ("input_activations", "group_size", 64),
    ],
)
def test_other_compressed_tensors_schemes_are_refused(group, key, value, tmp_path):
    compressed_checkpoint(tiny_llama(), tmp_path / "ct")
    groups = settings_of(tmp_path / "ct")["config_groups"]
    groups["group_0"][group][key] = value
    edit_settings(tmp_path / "ct", config_groups=groups)
    with pytest.raises(ValueError, match="supported: FP8_BLOCK"):
        import_fp8(tmp_path / "ct")
    groups["group_0"]["input_activations"] = None  # weight-only
    edit_settings(tmp_path / "ct", config_groups=groups)
    with pytest.raises(ValueError, match="supported: FP8_BLOCK"):
        import_fp8(tmp_path / "ct")
    edit_settings(tmp_path / "ct", config_groups={**groups, "group_1": groups["group_0"]})
    with pytest.raises(ValueError, match="one config group"):
        import_fp8(tmp_path / "ct")


# ---- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"activation": "bf16"}, "'activation': 'bf16'"),
        ({"weight": "bf16"}, "'weight': 'bf16'"),
        ({"weight": "e5m2"}, "'weight': 'e5m2'"),
        ({"weight_block": (1, 128)}, r"'weight_block': \(1, 128\)"),
        ({"group": 64}, "'group': 64"),
    ],
)
def test_plans_the_format_cannot_hold(changes, found, tmp_path):
    plan = dataclasses.replace(E2E, rollout=SidePlan(linear=LinearPrecision(**changes)))
    with pytest.raises(ValueError, match=f"q_proj has .*{found}.* allows .*e4m3"):
        export_fp8(tiny_llama(), plan, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_plans_with_nothing_to_export(tmp_path):
    rollout_only = PrecisionPlan.preset("fp8-rollout")
    for plan, side in ((PrecisionPlan.preset("bf16"), "rollout"), (rollout_only, "trainer")):
        with pytest.raises(ValueError, match="no FP8 linear"):
            export_fp8(tiny_llama(), plan, tmp_path / "out", side=side)
    with pytest.raises(ValueError, match="allowed: rollout, trainer"):
        export_fp8(tiny_llama(), E2E, tmp_path / "out", side="both")
    assert rollout_only.trainer.linear == BF16_LINEAR


def test_a_model_that_transformers_quantized_is_refused(tmp_path):
    model = tiny_llama()
    model.hf_quantizer = object()  # what from_pretrained leaves on a model whose weights stay FP8
    with pytest.raises(ValueError, match="load it with import_fp8"):
        export_fp8(model, E2E, tmp_path / "out")


def test_nan_weights_are_not_exported(tmp_path):
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj.weight holds 1 NaN"):
        export_fp8(model, E2E, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_only_exports_and_empty_folders_are_replaced(tmp_path):
    first, second, folder = tiny_llama(0), tiny_llama(1), tmp_path / "deep" / "out"
    folder.mkdir(parents=True)
    export_fp8(first, E2E, folder)
    export_fp8(second, E2E, folder)
    assert [p.name for p in folder.parent.iterdir()] == ["out"]
    stored = quantized(folder)["model.layers.0.mlp.up_proj.weight"]
    assert stored.same_bytes(quantize_weight(second.model.layers[0].mlp.up_proj.weight, E2E.rollout.linear).packed)
    (folder / "fp8lab.json").unlink()  # now it could be anyone's
    (tmp_path / "file").write_text("mine")
    for taken in (folder, tmp_path / "file"):
        with pytest.raises(FileExistsError, match="choose a new folder"):
            export_fp8(first, E2E, taken)


def test_failed_export_leaves_the_old_one(tmp_path):
    export_fp8(tiny_llama(0), E2E, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def full(*args, **kwargs):
        raise OSError("disk full")

    class Tokenizer:
        save_pretrained = full

    with pytest.raises(OSError, match="disk full"):
        export_fp8(tiny_llama(1), E2E, tmp_path / "out", tokenizer=Tokenizer())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'.*allowed: fp8, compressed-tensors"),
        ({"weight_block_size": None}, "block is None.*not per tensor"),
        ({"weight_block_size": [128]}, r"block is \[128\]"),
        ({"weight_block_size": [128, 0]}, r"block is \[128, 0\]"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'.*supported: dynamic"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'.*supported: e4m3"),
        ({"weight_block_size": [64, 128]}, r"expected a matrix and, in blocks \(64, 128\), scales"),
        ({"quant_method": "compressed-tensors"}, "one config group"),
    ],
)
def test_other_configs_are_refused(changes, message, copy):
    edit_settings(copy, **changes)
    with pytest.raises(ValueError, match=message):
        import_fp8(copy)


WEIGHT = "model.layers.1.mlp.down_proj.weight"
SCALE = f"{WEIGHT}_scale_inv"


def with_value(name, value):
    def change(tensors):
        flat = tensors[name].view(torch.uint8 if name == WEIGHT else torch.float32).flatten()
        flat[0] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(SCALE), "its scale .*down_proj.weight_scale_inv is missing"),
        (lambda t: t.pop(WEIGHT), "but not the weight it belongs to"),
        (lambda t: t.update({WEIGHT: t[WEIGHT].float()}), "is torch.float32 and its scale .* is there"),
        (lambda t: t.update({WEIGHT: t[WEIGHT].float().to(torch.float8_e5m2)}), "is torch.float8_e5m2"),
        (lambda t: t.update({SCALE: torch.ones(1)}), r"scales \(1,\).*scales \(1, 2\) \(none per tensor\)"),
        (lambda t: t.update({SCALE: torch.ones(2, 1)}), r"scales \(2, 1\)"),
        (lambda t: t.update({SCALE: torch.ones(1, 2, dtype=torch.uint8)}), "are torch.uint8; allowed: torch.float32"),
        (with_value(SCALE, float("nan")), "1 scales that are not positive and finite"),
        (with_value(SCALE, float("inf")), "1 scales that are not positive and finite"),
        (with_value(SCALE, -1.0), "1 scales that are not positive and finite"),
        (with_value(SCALE, 0.0), "1 scales that are not positive and finite"),
        (with_value(WEIGHT, 0xFF), "1 NaN codes"),
        (lambda t: t.pop("model.norm.weight"), r"1 missing or extra tensors, \['model.norm.weight'\]"),
        (lambda t: t.update({"model.extra.weight": torch.ones(2)}), "model.extra.weight"),
    ],
)
def test_damaged_tensors_are_refused(change, message, copy):
    edit_tensors(copy, change)
    with pytest.raises(ValueError, match=message):
        import_fp8(copy)


def test_files_that_are_no_checkpoint(copy, tmp_path):
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        import_fp8(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="use models.load_model"):
        import_fp8(models.resolve_model("tiny-llama"))
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="no complete safetensors file"):
        import_fp8(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors is missing"):
        import_fp8(copy)


def test_fp8_config_without_fp8_weights_is_refused(copy):
    def thaw(tensors):
        for name in [n for n in tensors if n.endswith("_scale_inv")]:
            del tensors[name]
            tensors[name.removesuffix("_scale_inv")] = tensors[name.removesuffix("_scale_inv")].float()

    edit_tensors(copy, thaw)
    with pytest.raises(ValueError, match="holds no FP8 weight"):
        import_fp8(copy)


def test_models_without_a_causal_head_are_refused(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "vit"}))
    with pytest.raises(ValueError, match="no causal language model"):
        import_fp8(copy)
