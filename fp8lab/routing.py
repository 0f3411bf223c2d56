"""Which experts a token takes, on each side: router agreement, and router replay.

A router's choice is discrete. A last bit, or FP8 rounding of what the layers before it compute, swaps the k-th expert
for the (k+1)-th wherever their scores are close, and the token is then computed by other weights: a jump, not a small
error. So mixture-of-experts models have a larger rollout/trainer gap than dense ones, in BF16 too.

    changed      share of tokens whose set of experts differs between the sides
    overlap      mean |A & B| / k of the two sets
    logit_rms    root mean square difference of the router's logits

**Router replay** (Rollout Routing Replay, R3: arXiv:2510.11370) records the experts each token took in the rollout and
lets the trainer take the same ones. Only the choice is replayed; the weights of the experts come from the trainer's own
logits s, so the router still learns:

    p_e = exp(s_e) / sum over the replayed experts j of exp(s_j)            (or the model's own formula, below)

The router's own code runs; only its `topk` answers with the given experts and the router's own scores of them
(verl's router_replay_patch.py does the same: `scores.gather(1, indices)`). So normalization, sigmoid scores, biases
and group limits stay those of the model. R3 reports 10 % of choices and 94 % of tokens (somewhere) changed between
SGLang and Megatron; numbers of the tiny model are in tests/test_routing.py.

    with record_routes(engine.model) as recorded:
        rollout = engine.generate(prompts, sampling, seed=0)
    rollout = recorded.add_to(rollout)        # Rollout.routes; the trainer replays them, if there are any

Routes have the right shape for any batch of that shape. So `Rollout.with_routes` wants the tokens they were recorded
for, and a checksum of each row's tokens and routes is compared where the routes are used.

Left out: gradients of auxiliary balance losses, replay under gradient checkpointing (the recomputation in backward
happens outside of the block), engines that report routes themselves (vLLM's and SGLang's `routed_experts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fp8lab.names import ROUTERS, expert_tensors
from fp8lab.rollout.engine import Rollout, row_checksums

NOT_RECORDED = -1


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> router of every layer with fused experts, in order; ValueError for a model without any.

    A router is the `gate` or `router` beside the experts; called, it returns (logits (T, E), weights (T, k), experts
    (T, k)).
    """
    blocks = dict.fromkeys(name.rsplit(".", 2)[0] for name, _, _ in expert_tensors(model))
    found = {}
    for block in blocks:
        parent = model.get_submodule(block)
        name = next((key for key in ROUTERS if hasattr(parent, key)), None)
        if name is None:
            raise ValueError(f"{block} has fused experts but no {' or '.join(ROUTERS[:2])} beside them")
        found[f"{block}.{name}"] = getattr(parent, name)
    if not found:
        raise ValueError(f"{type(model).__name__} has no layers with fused experts, so there are no routes")
    return found


# ---- recording ----------------------------------------------------------------------------------------


@dataclass
class RecordedForward:
    """One forward of the model over tokens (B, T)."""

    tokens: torch.Tensor
    """(B, T) int64, padding included."""
    experts: list[torch.Tensor] = field(default_factory=list)
    """(B * T, k) int16 of each router, in order."""
    logits: list[torch.Tensor] = field(default_factory=list)
    """(B * T, E) float32 of each router, if asked for."""

    def routes(self) -> torch.Tensor:
        """(B, T, L, k) int16."""
        return torch.stack(self.experts, dim=1).view(*self.tokens.shape, len(self.experts), -1)


@dataclass
class Recorded:
    """The forwards that `record_routes` saw, in order."""

    forwards: list[RecordedForward] = field(default_factory=list)

    def add_to(self, rollout: Rollout) -> Rollout:
        """The rollout of one `NativeEngine.generate` that was recorded whole, with its `routes`.

        The engine takes prompts by length, reads those of a batch at once, and then, token by token, every sequence
        that goes on. Each recorded token is compared with the rollout's: ValueError if one differs or is missing, or
        there are more.
        """
        if not self.forwards:
            raise ValueError("nothing was recorded: no forward of this model ran while record_routes was on")
        n, starts, lengths = rollout.sampling.n, rollout.prompt_lengths, rollout.lengths
        routes = rollout.tokens.new_full((*rollout.tokens.shape, *self.forwards[0].routes().shape[2:]), NOT_RECORDED)
        waiting = sorted(range(0, len(lengths), n), key=lambda row: int(starts[row]))  # the first row of each prompt
        batch, step = torch.zeros(0, dtype=torch.long), 0
        for seen in self.forwards:
            count, width = seen.tokens.shape
            source, rows = torch.arange(count), batch[(lengths - starts)[batch] > step + 1]
            if len(rows):
                step += 1
                layouts, end = [starts[rows, None] + step - 1], lengths
            else:
                first, waiting = torch.tensor(waiting[:count], dtype=torch.long), waiting[count:]
                batch, step = (first[:, None] + torch.arange(n)).flatten(), 0
                rows, source = batch, source.repeat_interleave(n)
                right = torch.arange(width).expand(len(rows), -1)
                layouts, end = [right, right - width + starts[rows, None]], starts  # padded on the right, or the left
            for columns in layouts if len(rows) == len(source) else ():
                real = (columns >= 0) & (columns < end[rows, None])
                row, column = rows[:, None].expand_as(columns)[real], columns[real]
                if torch.equal(rollout.tokens[row, column], seen.tokens[source][real]):
                    routes[row, column] = seen.routes()[source][real].long()
                    break
            else:
                raise ValueError("the recording is not of this rollout: it has other tokens, or more of them")
        read = torch.arange(routes.shape[1]) < lengths[:, None] - 1  # a last token is never read
        if missing := int((routes[:, :, 0, 0] == NOT_RECORDED)[read].sum()):
            raise ValueError(f"{missing} of the {int(read.sum())} tokens that this rollout read were not recorded")
        return rollout.with_routes(routes, rollout.tokens)


@contextmanager
def record_routes(model: nn.Module, *, logits: bool = False) -> Iterator[Recorded]:
    """Within this block, keep the experts (and the routers' logits) of every token of every forward of `model`."""
    recorded = Recorded()

    def of_embedding(_: nn.Module, arguments: tuple[torch.Tensor, ...], __: torch.Tensor) -> None:
        recorded.forwards.append(RecordedForward(arguments[0]))

    def of_router(_: nn.Module, __: Any, output: tuple[torch.Tensor, ...]) -> None:
        recorded.forwards[-1].experts.append(output[-1].to(torch.int16))
        if logits:
            recorded.forwards[-1].logits.append(output[0].detach().float())

    with ExitStack() as stack:
        for router in routers(model).values():
            stack.callback(router.register_forward_hook(of_router).remove)
        stack.callback(model.get_input_embeddings().register_forward_hook(of_embedding).remove)
        yield recorded


# ---- agreement ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RouterAgreement:
    """How the routers of two models differ over the same tokens; sequences have one number a layer."""

    layers: tuple[str, ...]
    """Names of the routers."""
    changed: tuple[float, ...]
    """Share of tokens whose set of experts differs."""
    overlap: tuple[float, ...]
    """Mean share of a token's experts that both sides chose; 1 if they agree."""
    logit_rms: tuple[float, ...]
    """Root mean square difference of the logits."""
    margin: tuple[float, ...]
    """Median gap between the k-th and the next logit of the first model: what logit_rms has to be small against."""
    anywhere: float
    """Share of tokens whose set differs in at least one layer."""
    tokens: int

    @property
    def agreement(self) -> float:
        """Share of (token, layer) pairs with the same set of experts; 1 is perfect."""
        return 1 - sum(self.changed) / len(self.changed)

    def as_dict(self) -> dict[str, float]:
        """For a metrics log."""
        overlap = sum(self.overlap) / len(self.overlap)
        return {"router_agreement": self.agreement, "router_overlap": overlap, "router_changed_anywhere": self.anywhere}


@torch.no_grad()
def router_agreement(
    rollout_model: nn.Module, trainer_model: nn.Module, tokens: torch.Tensor, mask: torch.Tensor
) -> RouterAgreement:
    """Run both models over tokens (B, T), padded on the right, and compare their routes where mask (B, T) is True.

    ValueError if the models have different routers, or the mask no token.
    """
    if routers(rollout_model).keys() != routers(trainer_model).keys():
        raise ValueError("the two models do not have the same routers")
    if not bool(mask.any()):
        raise ValueError("the mask is True nowhere: there is no token to compare")
    experts, logits = [], []
    for model in (rollout_model, trainer_model):
        with record_routes(model, logits=True) as recorded:
            model(input_ids=tokens, use_cache=False)
        experts.append(recorded.forwards[0].routes()[mask].long())
        logits.append(torch.stack(recorded.forwards[0].logits, dim=1).view(*mask.shape, len(experts[-1][0]), -1)[mask])
    chosen = [torch.zeros_like(s, dtype=torch.bool).scatter_(2, e, True) for e, s in zip(experts, logits, strict=True)]
    k = experts[0].shape[2]
    changed, best = (chosen[0] != chosen[1]).any(dim=2), logits[0].sort(dim=2, descending=True).values
    return RouterAgreement(
        layers=tuple(routers(rollout_model)),
        changed=tuple(changed.float().mean(dim=0).tolist()),
        overlap=tuple(((chosen[0] & chosen[1]).sum(dim=2) / k).mean(dim=0).tolist()),
        logit_rms=tuple((logits[0] - logits[1]).square().mean(dim=(0, 2)).sqrt().tolist()),
        margin=tuple((best[:, :, k - 1] - best[:, :, min(k, best.shape[2] - 1)]).median(dim=0).values.tolist()),
        anywhere=changed.any(dim=1).float().mean().item(),
        tokens=len(changed),
    )


# ---- replay -------------------------------------------------------------------------------------------


def routes_at(rollout: Rollout, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor | None:
    """Routes (B, T, L, k) of the tokens of `rows` (B,) of a rollout in `columns` (B, T), NOT_RECORDED where a column is
    -1 (padding); None for a rollout without routes.

    ValueError if routes are missing for a token, or are not those that `Rollout.with_routes` put beside these tokens.
    """
    routes = rollout.routes
    if routes is None:
        return None
    if routes.ndim != 4 or routes.shape[:2] != rollout.tokens.shape:
        raise ValueError(
            f"routes have shape {tuple(routes.shape)} for tokens {tuple(rollout.tokens.shape)}; they must be (B, T, "
            "layers, k) with the same B and T: these belong to another rollout"
        )
    found = routes[rows[:, None], columns.clamp(min=0)]
    found = torch.where((columns >= 0)[:, :, None, None], found, NOT_RECORDED)
    if missing := int((found < 0).any(dim=3).any(dim=2)[columns >= 0].sum()):
        raise ValueError(f"{missing} tokens have no recorded routes; record the whole rollout, or drop its routes")
    _require_own_routes(rollout, rows)
    return found


def _require_own_routes(rollout: Rollout, rows: torch.Tensor) -> None:
    """ValueError unless the checksums of `rows` are those of their tokens and routes."""
    known, count = rollout.route_checksums, len(rollout.tokens)
    if known is None or len(known) != count:
        found = "no checksums" if known is None else f"{len(known)} checksums for {count} rows"
        raise ValueError(f"routes with {found}; put routes on a rollout with `rollout.with_routes(routes, tokens)`")
    own = row_checksums(rollout.tokens[rows], rollout.routes[rows], rollout.lengths[rows])
    if bad := rows[own != known[rows]].tolist():
        raise ValueError(
            f"the routes of {len(bad)} rows (first: row {bad[0]}) were not recorded for their tokens; record this "
            "rollout itself, or put changed routes on it with `rollout.with_routes(routes, tokens)`"
        )


@contextmanager
def replay_routes(model: nn.Module, routes: torch.Tensor | None) -> Iterator[None]:
    """Within this block, tokens of every forward take the experts in routes (B, T, L, k); those with NOT_RECORDED
    choose for themselves. None changes nothing.

    ValueError if the routes do not fit the model (layers, k, number of experts) or a forward's tokens (B * T).
    """
    if routes is None:
        yield
        return
    found = routers(model)
    if routes.shape[2] != len(found):
        raise ValueError(f"routes are of {routes.shape[2]} layers; {type(model).__name__} has {len(found)} routers")
    with ExitStack() as stack:
        counts = {name.rsplit(".", 2)[0]: parameter.shape[0] for name, _, parameter in expert_tensors(model)}.values()
        for layer, ((name, router), count) in enumerate(zip(found.items(), counts, strict=True)):
            original, own = router.forward, "forward" in router.__dict__
            router.forward = _Replayed(name, original, count, routes[:, :, layer].flatten(0, 1).long())
            stack.callback(setattr, router, "forward", original) if own else stack.callback(delattr, router, "forward")
        yield


class _Replayed:
    """A router's forward with given experts."""

    def __init__(self, name: str, original: Any, count: int, experts: torch.Tensor) -> None:
        self.name, self.original, self.count, self.experts = name, original, count, experts
        if int(experts.max()) >= count:
            raise ValueError(f"routes name expert {int(experts.max())}; {name} has {count}, numbered from 0")

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = hidden_states.numel() // hidden_states.shape[-1]
        if tokens != len(self.experts):
            raise ValueError(f"{self.name} routes {tokens} tokens, but routes of {len(self.experts)} were given")
        with _TopK(self.count, self.experts) as topk:
            output = self.original(hidden_states, *args, **kwargs)
        if topk.answered != 1:
            raise ValueError(
                f"{self.name} asked {topk.answered} times for the top {self.experts.shape[1]} of {self.count} experts; "
                "replay needs a router that asks once, and routes of its k"
            )
        return output


class _TopK(TorchFunctionMode):
    """Answers the top-k over experts with the given ones, and their scores; other top-k's (of groups) pass."""

    def __init__(self, count: int, experts: torch.Tensor) -> None:
        super().__init__()
        self.count, self.experts, self.answered = count, experts, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].shape != (len(self.experts), self.count):
            return result
        if result.indices.shape != self.experts.shape:
            return result
        scores, self.answered = args[0], self.answered + 1
        experts = torch.where(self.experts < 0, result.indices, self.experts)
        return torch.return_types.topk((scores.gather(1, experts), experts))
