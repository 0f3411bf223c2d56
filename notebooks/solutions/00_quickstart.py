"""Quickstart, exercise "protect two layers": the first two.

A rounding error made in layer 0 passes through three more layers; one made in layer 3 goes straight to the logits.
Measured on tiny-llama at its first weights: the first two in BF16 leave about half of the mismatch, the last two more
than four fifths.
"""

from fp8lab import PrecisionPlan

plan = PrecisionPlan.preset("fp8-rollout").with_bf16(first=2)
