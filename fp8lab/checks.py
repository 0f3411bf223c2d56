"""Checks that several modules share: a value is one of those allowed, a field has the type that its annotation says,
log-probs and mask are of one shape.

A YAML file is where configs go wrong: `1e-4` without a dot is text in YAML 1.1, `yes` is a truth value, a missing value
is None. Each check raises ValueError with the field's name, what was found and what is allowed.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

if TYPE_CHECKING:
    import torch


def require_choice(name: str, value: Any, allowed: tuple) -> None:
    """ValueError, with the allowed values, if `value` is none of them, or equal only across types (True and 1)."""
    if not any(type(value) is type(option) and value == option for option in allowed):
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(str, allowed))}")


def require_alike(rollout: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask as bool; ValueError if the two log-probs and the mask are not all of one shape (B, T)."""
    if not rollout.shape == trainer.shape == mask.shape or mask.ndim != 2:
        shapes = [tuple(x.shape) for x in (rollout, trainer, mask)]
        raise ValueError(f"rollout, trainer and mask have shapes {shapes}; they must be one (B, T)")
    return mask.bool()


def require_count(name: str, value: Any, *, least: int = 1) -> None:
    """ValueError unless the value is an integer, and at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}, of type {type(value).__name__}; it must be an integer >= {least}")


def require_positive(name: str, value: Any, *, zero: bool = False, finite: bool = False) -> float:
    """The value as a float; ValueError unless it is a number above 0, or 0 if `zero`, and not infinite if `finite`."""
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer beyond float64
        number = math.nan
    if not (number > 0 or (zero and number == 0)) or (finite and number == math.inf):
        allowed = f"a {'finite ' if finite else ''}number {'>= 0' if zero else 'above 0'}"
        raise ValueError(f"{name} is {value!r}, of type {type(value).__name__}; it must be {allowed}")
    return number


def require_types(config: Any) -> None:
    """ValueError for a dataclass field that is not of its annotated type, or is NaN; an int serves as a float."""
    for name, hint in get_type_hints(type(config)).items():
        allowed, value = get_args(hint) or (hint,), getattr(config, name)
        number = isinstance(value, int) and not isinstance(value, bool) and float in allowed
        fits = isinstance(value, allowed) and not (isinstance(value, bool) and bool not in allowed)
        if not (number or fits):
            kinds = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
            raise ValueError(f"{name} is {value!r}, of type {type(value).__name__}; it must be {kinds}")
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{name} is NaN; it must be a number")
