"""VLLMEngine: rollouts by the real vLLM, in this process, under the rollout side of a plan.

NativeEngine runs the trainer's own code, so its gap to the trainer is next to nothing by construction. vLLM is another
engine: paged attention, fused layers, its own kernels and sampler. Its gap at equal weights and precision is the one
that real training has.

    CPU   really run. FP8 linears are emulated inside vLLM by the trainer's own quantizer (vllm_quantization.py), on
          float32 weights; attention and KV cache stay float32: vLLM's FP8 cache needs AVX-512 or AMX there.
    GPU   written, never run. vLLM's own block FP8 (vllm_gpu.py) with codes and scales quantized by us.

A refit hands vLLM weights under a checkpoint's names: `reload_weights` unpacks, loads and packs layer by layer, while
`model.load_weights` corrupts them. Then it resets the prefix cache, or blocks cached under old weights would be used.
All is checked before, as vLLM itself warns at most of a missing weight. Log-probs are `processed`: of the distribution
that was sampled from, after temperature, top-k and top-p.

All that touches vLLM is in the vllm*.py files; vllm_process.py says which versions. Left out: vLLM in other processes
or on other machines, CUDA graphs, LoRA without merging.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import nn

from fp8lab import diagnostics
from fp8lab.attention_scales import AttentionScales
from fp8lab.conversion import require_plan
from fp8lab.linear import float8_layers
from fp8lab.models import load_model, load_tokenizer, merged, named_weights, quiet, resolve_model
from fp8lab.names import expert_tensors, num_decoder_layers
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout import vllm_gpu
from fp8lab.rollout.engine import (
    GenerationStopped,
    Rollout,
    encode_prompts,
    eos_tokens,
    pack_rollout,
    require_finite,
    require_weights,
    vocabulary_size,
)
from fp8lab.rollout.sampling import SamplingParams
from fp8lab.rollout.vllm_process import LIVE, make_room, process_unchanged, start_vllm


class VLLMEngine:
    """Samples with vLLM under the rollout side of a plan.

    model: a folder, a model shipped in data/ or a hub name, or a float32 model object, which is written to a temporary
    folder; ValueError if a weight is not finite. plan: None runs the CPU build in float32 with vLLM's own kernels.
    tokenizer: needed with a model object. device: `cpu`, `gpu` or `auto`. max_batch_size: most sequences decoded
    together. options go on to vllm.LLM (tensor_parallel_size, gpu_memory_utilization, enable_sleep_mode, ...).
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        plan: PrecisionPlan | None,
        *,
        tokenizer: Any = None,
        device: str = "auto",
        max_batch_size: int = 1024,
        **options: Any,
    ) -> None:
        if device not in ("auto", "cpu", "gpu"):
            raise ValueError(f"device is {device!r}; allowed: auto, cpu, gpu")
        if plan is not None:
            require_plan(plan)
        if isinstance(model, nn.Module) and tokenizer is None:
            raise ValueError("a model object comes without a tokenizer; pass tokenizer=...")
        vllm = start_vllm()
        self.device = ("gpu" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self.plan, self.refits, self.llm = plan, 0, None
        self.tokenizer = tokenizer or load_tokenizer(model)
        self._vllm, self._whole, self._scales, self._calls = vllm, True, None, 0
        self._counts = {"sequences": 0, "tokens": 0, "prompt_tokens": 0, "seconds": 0.0}
        self._skeleton = skeleton(model)
        self._decisions = [] if plan is None else [d for d in plan.coverage(self._skeleton) if d.side == "rollout"]
        self._eos = eos_tokens(self._skeleton.generation_config, self.tokenizer)
        settings = {
            "skip_tokenizer_init": True,
            "max_model_len": self._skeleton.config.max_position_embeddings,
            "max_num_seqs": max_batch_size,
            "logprobs_mode": "processed_logprobs",
            "seed": 0,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            **(self._gpu_settings() if self.device == "gpu" else self._cpu_settings(options)),
            **options,
        }
        first = model if isinstance(model, nn.Module) else load_model(model)
        require_finite(named_weights(first))
        has_experts = any(expert_tensors(self._skeleton))
        make_room(has_experts)
        with tempfile.TemporaryDirectory(prefix="fp8lab-vllm-") as folder, process_unchanged(), catch_warnings():
            simplefilter("ignore", FutureWarning)  # vLLM looks at deprecated names of torch
            if isinstance(model, nn.Module):
                with quiet():
                    merged(model).save_pretrained(folder)
            self.llm = vllm.LLM(folder if isinstance(model, nn.Module) else resolve_model(model), **settings)
        LIVE[self] = has_experts
        if self.device == "gpu":  # never run
            self._push(named_weights(merged(first)))
        elif plan is not None:
            self._require_names()

    def _cpu_settings(self, options: Mapping[str, Any]) -> dict[str, Any]:
        settings = {"dtype": "float32", "enforce_eager": True}
        if self.plan is None:
            return settings
        if options.get("tensor_parallel_size", 1) != 1:
            raise ValueError("emulated FP8 runs in one process; tensor_parallel_size is for GPUs")
        if self.plan.rollout.attention.is_fp8:
            raise ValueError(
                f"plan {self.plan.name} has {self.plan.rollout.attention} in the rollout; vLLM's FP8 KV cache needs "
                "AVX-512 or AMX on a CPU and is not emulated: use NativeEngine, or a plan with a BF16 cache"
            )
        names = [decision.name for decision in self._decisions]
        config = _quantization().settings(self.plan, names, num_decoder_layers(self._skeleton))
        return settings | {"hf_overrides": {"quantization_config": config}}

    def _gpu_settings(self) -> dict[str, Any]:
        """Never run."""
        if self.plan is None:
            raise ValueError("plan=None is for the CPU build; on a GPU give a plan, 'bf16' for example")
        os.environ.update(vllm_gpu.deep_gemm(self.plan.rollout.linear, os.environ))
        return vllm_gpu.engine_options(self.plan, self._decisions)

    def _require_names(self) -> None:
        held, planned = self._held()[0].keys(), {d.name for d in self._decisions}
        if held != planned:
            odd = sorted(held ^ planned)
            self.close()
            raise ValueError(
                f"vLLM and transformers name {len(odd)} layers of this model differently, first {odd[0]!r}, so the "
                "plan cannot be followed; use NativeEngine"
            )

    def refit(self, source: Mapping[str, torch.Tensor] | Any) -> None:
        """Give vLLM new weights, requantize them, and drop every cached key and value.

        source: a Trainer (anything with `.model`, adapters are merged) or float32 tensors under the model's parameter
        names. ValueError before anything is written for what does not fit, as NativeEngine.refit.
        """
        self._require_open()
        new = source if isinstance(source, Mapping) else named_weights(merged(source.model))
        require_weights(new, named_weights(self._skeleton))
        if self.plan is None and any(expert_tensors(self._skeleton)):
            raise ValueError(
                "vLLM's own CPU experts are packed once and stay unpacked after a reload (wrong results); give a plan"
            )
        self._push(new)
        self.refits += 1

    def _push(self, weights: Mapping[str, torch.Tensor]) -> None:
        items = checkpoint_tensors(self._skeleton, weights).items()
        if self.device == "gpu":  # never run
            precisions = {d.name: d.precision for d in self._decisions}
            items = vllm_gpu.checkpoint_items(dict(items), precisions, self._scales)
        whole, self._whole = self._whole or bool(weights), False
        with process_unchanged():
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(items)})
            if self.device == "cpu" and self.plan is not None:
                self.llm.apply_model(_quantization().forget)
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("vLLM kept its prefix cache, whose keys and values have the old weights")
        self._whole = whole

    def _needs_scales(self) -> bool:
        attention = None if self.plan is None else self.plan.rollout.attention
        return attention is not None and attention.is_fp8 and attention.scales == "per-layer"

    @property
    def attention_scales(self) -> AttentionScales | None:
        """Scales of q, k and v for an FP8 KV cache with per-layer scales; GPU, never run."""
        return self._scales

    @attention_scales.setter
    def attention_scales(self, scales: AttentionScales) -> None:
        self._require_open()
        layers = num_decoder_layers(self._skeleton)
        if not self._needs_scales() or scales.layers != layers:
            needed = f"those of {layers} layers" if self._needs_scales() else "none"
            raise ValueError(f"scales of {scales.layers} layers given; plan {self.plan} on this model needs {needed}")
        self._scales = scales
        self._push({})

    def calibrate(self, batch: Rollout | Sequence[str] | Sequence[Sequence[int]] | None) -> dict[str, float]:
        """{}: weight scales are taken at every refit and activation scales at every token. RuntimeError for an FP8 KV
        cache with per-layer scales: vLLM measures none; calibrate on the trainer's model, assign attention_scales."""
        self._require_whole()
        if self._needs_scales():
            raise RuntimeError("vLLM takes no scales itself; use calibration.py on the trainer, set attention_scales")
        return {}

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        seed: int,
        on_batch: Callable[[int, int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Rollout:
        """Sample `sampling.n` completions for each prompt; see RolloutEngine.generate.

        Every sequence has a random stream of its own, from `seed` and its place. on_batch is called when sequences are
        finished, should_stop before every step of the engine; vLLM's other requests are aborted then, as after any
        error or interrupt. ValueError also for raw_logprobs where they differ from processed ones.
        """
        self._require_whole()
        if self._needs_scales() and self._scales is None:
            raise RuntimeError("the FP8 KV cache has no scales: set attention_scales")
        if sampling.raw_logprobs and (sampling.truncates or sampling.temperature not in (0, 1)):
            raise ValueError(
                "raw_logprobs=True: this engine reports processed log-probs; use NativeEngine for raw ones"
            )
        start_time = time.perf_counter()
        limit, vocabulary = self.llm.model_config.max_model_len, vocabulary_size(self._skeleton)
        ids = encode_prompts(prompts, self.tokenizer, limit, vocabulary)
        with process_unchanged():
            outputs = self._run(ids, sampling, seed, on_batch, should_stop)
        shape = (len(ids) * sampling.n, sampling.max_tokens)
        completions, logprobs = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
        counts = torch.zeros(len(completions), dtype=torch.long)
        for row, output in enumerate(output for request in outputs for output in request):
            counts[row] = count = len(output.token_ids)
            completions[row, :count] = torch.tensor(list(output.token_ids))
            chosen = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
            logprobs[row, :count] = torch.tensor(chosen)
        rollout = pack_rollout(ids, completions, logprobs, counts, sampling, tokenizer=self.tokenizer, eos=self._eos)
        self._counts["sequences"] += len(completions)
        self._counts["tokens"] += int(counts.sum())
        self._counts["prompt_tokens"] += sum(map(len, ids))
        self._counts["seconds"] += time.perf_counter() - start_time
        return rollout

    def _run(self, ids: list[list[int]], sampling: SamplingParams, seed: int, on_batch, should_stop) -> list[list[Any]]:
        """vLLM's CompletionOutputs: for each prompt those of its n completions, in order."""
        from vllm.sampling_params import RequestOutputKind

        engine, self._calls = self.llm.llm_engine, self._calls + 1
        generator = torch.Generator().manual_seed(seed)
        seeds = torch.randint(2**62, (len(ids),), generator=generator).tolist()
        names = [f"{self._calls}-{i}" for i in range(len(ids))]
        copies = sampling.n if sampling.temperature == 0 else 1  # vLLM wants n = 1 for greedy completions, all alike
        done: dict[str, list[Any]] = {}
        try:
            for name, prompt, own_seed in zip(names, ids, seeds, strict=True):
                params = self._vllm.SamplingParams(
                    n=sampling.n // copies,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    max_tokens=sampling.max_tokens,
                    seed=own_seed,  # vLLM adds the completion's number to it
                    logprobs=0,
                    stop_token_ids=self._eos.tolist(),
                    ignore_eos=True,  # what ends a completion is told above, as NativeEngine has it
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                engine.add_request(name, {"prompt_token_ids": prompt}, params)
            while engine.has_unfinished_requests():
                if should_stop is not None and should_stop():
                    raise GenerationStopped("should_stop() was true while sampling; call generate again for a rollout")
                before = len(done)
                for output in engine.step():
                    done[output.request_id] = sorted(output.outputs, key=lambda completion: completion.index) * copies
                if on_batch is not None and len(done) > before:
                    on_batch(len(done) * sampling.n, len(ids) * sampling.n)
        finally:
            engine.abort_request([name for name in names if name not in done])
        return [done[name] for name in names]

    def check_same_bytes(self, trainer: Any) -> dict[str, str]:
        """Layers whose weight vLLM does not hold as the trainer's bytes -> why; empty means proven equal.

        Compared are codes and scales of FP8 layers, the values of BF16 ones, and every other parameter. RuntimeError
        where vLLM's own kernels keep weights in layouts of theirs: with plan=None, and on a GPU.
        """
        self._require_whole()
        if self.plan is None or self.device == "gpu":
            raise RuntimeError("vLLM's own kernels keep weights in layouts of theirs, which fp8lab does not read back")
        model = merged(trainer.model)
        return diagnostics.differing_weights((dict(float8_layers(model)), model.state_dict()), self._held())

    def _held(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        with process_unchanged():
            return self.llm.apply_model(_quantization().held_weights)[0]

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache, and move weights to the CPU (level 1) or drop them (2: refit after waking). GPU with
        enable_sleep_mode=True; never run."""
        self._require_open()
        if level not in (1, 2):
            raise ValueError(f"sleep level is {level!r}; allowed: 1 (weights go to the CPU), 2 (weights are dropped)")
        self._whole = self._whole and level == 1
        self.llm.sleep(level=level)

    def wake(self) -> None:
        """Undo `sleep`; never run."""
        self._require_open()
        self.llm.wake_up()

    def stats(self) -> dict[str, Any]:
        """What this engine is and what it has done since it was made."""
        emulated = "emulated" if self.plan is not None else "vllm (float32)"
        return {
            "engine": f"vllm {self._vllm.__version__}",
            "backend": "vllm" if self.device == "gpu" else emulated,
            "forward": "vllm",
            "refits": self.refits,
            **self._counts,
        }

    def close(self) -> None:
        """Free vLLM's model and cache; any later call but close() and stats() raises RuntimeError."""
        if self.llm is not None:
            with process_unchanged():
                self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            LIVE.pop(self)
            gc.collect()

    def _require_open(self) -> None:
        if self.llm is None:
            raise RuntimeError("this engine is closed; make a new one")

    def _require_whole(self) -> None:
        self._require_open()
        if not self._whole:
            raise RuntimeError("vLLM's weights are not whole: a refit was interrupted, or sleep(2) dropped them; refit")


def skeleton(model: str | Path | nn.Module) -> nn.Module:
    """The transformers model without memory (meta device): names, shapes, configs."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = model.config if isinstance(model, nn.Module) else AutoConfig.from_pretrained(resolve_model(model))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if isinstance(model, nn.Module):
        empty.generation_config = model.generation_config
    elif (Path(resolve_model(model)) / "generation_config.json").is_file():
        empty.generation_config = GenerationConfig.from_pretrained(resolve_model(model))
    return empty.eval()


def checkpoint_tensors(empty: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights by parameter name -> as save_pretrained writes them: a tied weight once, each expert by itself."""
    from transformers.core_model_loading import revert_weight_conversion

    once = {name for name, _ in empty.named_parameters()} | {name for name, _ in empty.named_buffers()}
    return dict(revert_weight_conversion(empty, {name: tensor for name, tensor in weights.items() if name in once}))


def _quantization():
    """vllm_quantization.py, which can be imported only after start_vllm."""
    from fp8lab.rollout import vllm_quantization

    return vllm_quantization
