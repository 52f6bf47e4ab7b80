"""An algorithm of your own in one file: a choice, its equation, and the record that a command names.

    rft-train rl --pretrain MODEL --prompt_data train.jsonl --advantage_estimator examples/my_algorithm.py:TanhClip

docs/custom-algorithm.md walks through it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from rft_algos.algorithms.components import Clipped, Surrogate
from rft_algos.algorithms.published import PolicyAlgorithm
from rft_algos.objectives import Tokens, register_equation
from rft_algos.packed.importance_ratio import ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class TanhShoulder(Clipped):
    """PPO's clipped surrogate with a round shoulder; `low` and `high` say how far the ratio counts beyond 1."""


@register_equation(TanhShoulder)
def tanh_shoulder(choice: TanhShoulder, tokens: Tokens) -> Tensor:
    """[T] loss -A (1 + s(r - 1)): s(x) = e tanh(x / e) where x gains, A x > 0, and s(x) = x where it loses.

    e is `high` where A > 0, else `low`. At r = 1 value and slope are those of the ratio itself.
    """
    change = ratio(tokens.log_ratio) - 1.0
    high, low = change.new_full((), choice.high), change.new_full((), choice.low)
    reach = torch.where(tokens.advantages > 0, high, low)
    gains = tokens.advantages * change > 0
    return -tokens.advantages * (1.0 + torch.where(gains, reach * torch.tanh(change / reach), change))


@dataclass(frozen=True, slots=True, kw_only=True)
class TanhClip(PolicyAlgorithm):
    """GRPO's advantage with the round shoulder, mean over all tokens, no reference policy."""

    name: ClassVar[str] = "tanh_clip"
    surrogate: Surrogate = field(default_factory=TanhShoulder)
