"""GRPO as pure functions: advantages from a group of rewards, and the clipped policy loss.

For each prompt, n completions are sampled and rewarded. A completion's advantage is how much better it did than its
siblings, and every one of its tokens shares it:

    A_i    = (r_i - mean(r)) / (std(r) + 1e-4)                              scale_rewards="group"
    ratio  = exp(logp - old_logp)                                           1 in the first update after a rollout
    loss_t = -w_t * min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A)  +  beta * KL(policy || reference)

w_t is the importance-sampling correction of `corrections.py`: the samples came from the *rollout* engine, the gradient
is the *trainer's*. Sources: GRPO, DeepSeekMath (arXiv:2402.03300); token-level normalization and epsilon_high, DAPO
(arXiv:2503.14476); dr_grpo, arXiv:2503.20783; dual clip, arXiv:1912.09729. The knobs carry TRL's names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8lab.checks import require_alike, require_types
from fp8lab.corrections import MODES, check_bounds

LOSS_TYPES = ("dapo", "grpo", "dr_grpo")
SCHEDULES = ("constant_with_warmup", "linear")
SCALE_REWARDS = ("group", "batch", "none")


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """Everything the trainer step needs to know besides the plan."""

    num_generations: int = 8
    """Completions per prompt: the group."""
    learning_rate: float = 1e-4
    """AdamW's step size after warm-up."""
    warmup_steps: int = 5
    """Updates over which the learning rate rises linearly from 0."""
    lr_scheduler_type: str = "constant_with_warmup"
    """Or `linear`: after the warm-up it falls linearly to a tenth at the last update."""
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.99
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm."""
    beta: float = 0.0
    """Weight of the KL penalty to the reference model (the initial weights); 0 keeps no reference."""
    epsilon: float = 0.2
    """Lower clip of the policy ratio: 1 - epsilon."""
    epsilon_high: float | None = None
    """Upper clip 1 + epsilon_high; None means epsilon."""
    delta: float | None = None
    """Dual clip: bound the loss of tokens with negative advantage at delta * |A|; None turns it off, else > 1 +
    epsilon."""
    loss_type: str = "dapo"
    """`dapo`: mean over all tokens; `grpo`: mean over each completion, then over completions; `dr_grpo`: over B *
    max_tokens."""
    scale_rewards: str = "group"
    """Divide advantages by the reward's standard deviation in the `group`, in the `batch`, or not (`none`)."""
    leave_one_out: bool = False
    """Baseline is the mean of the *other* completions (NeMo RL's use_leave_one_out_baseline)."""
    mask_truncated_completions: bool = False
    """Completions cut at max_tokens give no gradient."""
    steps_per_generation: int = 1
    """Optimizer updates per rollout, each on its share of the groups."""
    num_iterations: int = 1
    """Passes over each rollout."""
    importance_sampling: str = "is"
    """Correction of the rollout/trainer mismatch: see corrections.MODES."""
    importance_sampling_max: float = 2.0
    """Upper bound of a token's ratio (`tis`, `icepop`) or a sequence's (modes of level sequence)."""
    importance_sampling_min: float = 0.0
    """Lower bound of the same; `icepop` and `seq-mask-tis` need one above 0."""
    drop_rejected: bool = False
    """Tokens that the correction rejects leave the loss's denominator, too (verl, SkyRL); else they count with weight 0
    (NeMo RL, TRL, AReaL)."""
    force_on_policy_ratio: bool = False
    """The policy ratio is 1 by construction (its gradient is kept); as in NeMo RL, only with one update per rollout."""
    seq_logprob_error_threshold: float | None = None
    """Completions with mean exp(|t - g|) above this are dropped from the loss and its denominator (NeMo RL); None keeps
    all, else >= 1."""
    micro_batch_size: int = 1024
    """Most sequences per forward (whole groups, at least one); gradients add up over micro-batches."""

    def __post_init__(self) -> None:
        require_types(self)
        for name in ("weight_decay", "beta", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be >= 0")
        for name, allowed in (
            ("loss_type", LOSS_TYPES),
            ("scale_rewards", SCALE_REWARDS),
            ("lr_scheduler_type", SCHEDULES),
            ("importance_sampling", MODES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        check_bounds(self.importance_sampling, self.importance_sampling_min, self.importance_sampling_max)
        for name in ("num_generations", "steps_per_generation", "num_iterations", "micro_batch_size"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be an integer >= 1")
        for name in ("learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be > 0")
        if not 0 <= self.epsilon < 1 or (self.epsilon_high is not None and self.epsilon_high < 0):
            raise ValueError(
                f"epsilon is {self.epsilon}, epsilon_high {self.epsilon_high}; they must be in [0, 1) and >= 0"
            )
        if self.delta is not None and self.delta <= 1 + self.epsilon:
            raise ValueError(f"delta is {self.delta}; the dual clip must lie above 1 + epsilon = {1 + self.epsilon}")
        if self.force_on_policy_ratio and self.updates_per_rollout > 1:
            raise ValueError(
                f"force_on_policy_ratio with {self.updates_per_rollout} updates per rollout; the weights move after "
                "the first, so set steps_per_generation=1 and num_iterations=1, or turn it off"
            )
        if self.seq_logprob_error_threshold is not None and not self.seq_logprob_error_threshold >= 1:
            raise ValueError(
                f"seq_logprob_error_threshold is {self.seq_logprob_error_threshold}; mean exp(|t - g|) is at least 1, "
                "so give a number >= 1, or None for no threshold"
            )

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer updates made from one rollout."""
        return self.steps_per_generation * self.num_iterations


def group_advantages(
    rewards: torch.Tensor, num_generations: int, *, scale_rewards: str = "group", leave_one_out: bool = False
) -> torch.Tensor:
    """Advantages (B,) float32 of rewards (B,), the num_generations completions of a prompt being neighbours.

    A group whose rewards are all equal has advantage 0. ValueError if B is no multiple of num_generations, if a reward
    is not finite, or for leave-one-out with one completion.
    """
    rewards = rewards.float()
    if rewards.ndim != 1 or len(rewards) % num_generations:
        raise ValueError(f"{tuple(rewards.shape)} rewards do not split into groups of {num_generations}")
    if not bool(rewards.isfinite().all()):
        bad = (~rewards.isfinite()).nonzero()[:5].flatten().tolist()
        raise ValueError(f"rewards at {bad} are not finite; the reward function must return finite numbers")
    if leave_one_out and num_generations < 2:
        raise ValueError("leave_one_out needs num_generations >= 2")
    groups = rewards.view(-1, num_generations)
    centred = groups - groups.mean(dim=1, keepdim=True)
    if leave_one_out:
        centred = centred * (num_generations / (num_generations - 1))
    if num_generations > 1 and scale_rewards == "group":
        centred = centred / (groups.std(dim=1, keepdim=True) + 1e-4)
    elif len(rewards) > 1 and scale_rewards == "batch":
        centred = centred / (rewards.std() + 1e-4)
    equal = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)  # exactly 0, not a rounding residue
    return torch.where(equal, 0.0, centred).view(-1)


def within_logprob_error(
    rollout_logprobs: torch.Tensor, trainer_logprobs: torch.Tensor, mask: torch.Tensor, threshold: float
) -> torch.Tensor:
    """Rows whose engines agree, (B,) bool: mean exp(|t - g|) over a row's tokens is at most `threshold`; all (B, T).

    Tokens with a non-finite log-prob are left out of the mean, and exponents are clamped to 20; a row without usable
    tokens agrees. Source: NeMo RL, compute_and_apply_seq_logprob_error_masking (nemo_rl/algorithms/grpo.py).
    """
    mask = require_alike(rollout_logprobs, trainer_logprobs, mask)
    usable = mask & rollout_logprobs.isfinite() & trainer_logprobs.isfinite()
    difference = torch.where(usable, trainer_logprobs.double() - rollout_logprobs.double(), 0.0)
    error = torch.where(usable, difference.abs().clamp(max=20).exp(), 0.0).sum(1) / usable.sum(1).clamp(min=1)
    return error <= threshold


def token_weights(mask: torch.Tensor, loss_type: str, max_tokens: int) -> torch.Tensor:
    """What each token's loss is multiplied by before the sum, (B, T) float32; 0 outside mask (B, T) bool.

    The weights depend on the whole batch, so micro-batches add up to the same loss. No token at all gives all zeros.
    """
    weights = mask.float()
    if loss_type == "dapo":
        return weights / weights.sum().clamp(min=1)
    if loss_type == "grpo":
        return weights / weights.sum(dim=1, keepdim=True).clamp(min=1) / len(mask)
    return weights / (len(mask) * max_tokens)


def policy_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, config: GRPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token clipped policy loss (B, T), before weights and masks, and which tokens were clipped (B, T) bool.

    logprobs (with gradient) and old_logprobs: (B, T); advantages: (B,). The exponent is clamped to +-20. A token with a
    non-finite log-prob has loss 0 and gradient 0.
    """
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    advantage = advantages[:, None]
    usable = logprobs.isfinite() & old_logprobs.isfinite()
    ratio = torch.where(usable, logprobs - old_logprobs, 0.0).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - config.epsilon, 1 + high)
    objective = torch.minimum(ratio * advantage, clipped * advantage)
    if config.delta is not None:
        bounded = torch.maximum(objective, config.delta * advantage)
        objective = torch.where(advantage < 0, bounded, objective)
    was_clipped = (clipped * advantage < ratio * advantage).detach()
    return torch.where(usable, -objective, 0.0), was_clipped


def reference_kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Per-token k3 estimate of KL(policy || reference), (B, T): exp(ref - logp) - (ref - logp) - 1, exponent clamped to
    +-20; 0 where a log-prob is not finite.

    Source: Schulman, "Approximating KL divergence" (2020).
    """
    usable = logprobs.isfinite() & reference_logprobs.isfinite()
    difference = torch.where(usable, reference_logprobs - logprobs, 0.0).clamp(-20, 20)
    return difference.exp() - difference - 1
