"""How far the log-probs of an engine are from the trainer's, on texts that the engine itself draws.

Both say log p(token | earlier tokens) of the same weights; what lies between them is arithmetic:
kernels, caches, precision, another vocabulary width, or weights that are not the same after all.
A ratio of the two enters every loss, so the gap is the error of that ratio, in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rft_trainer.protocols import Engine, Policy

Verdict = Literal["equal", "close", "apart"]
EQUAL = 1e-4
"""Nats at the worst token: what the order of float32 sums explains."""
CLOSE = (0.02, 0.3)
"""Mean and largest gap in nats that 16-bit arithmetic explains: ratios within 2 % on average, 35 % at the worst."""


@dataclass(frozen=True, slots=True)
class Gap:
    """|log p_engine - log p_trainer| over all drawn tokens, in nats."""

    num_tokens: int
    mean: float
    p99: float
    largest: float

    @property
    def verdict(self) -> Verdict:
        """What explains a gap of this size."""
        if self.largest <= EQUAL:
            return "equal"
        return "close" if self.mean <= CLOSE[0] and self.largest <= CLOSE[1] else "apart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How tokens are drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 32
    stop_token_ids: tuple[int, ...] = ()


def measure_gap(
    engine: Engine,
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[Sequence[int]],
    draw: Draw,
    *,
    device: torch.device | str = "cpu",
    sequences_at_once: int = 16,
) -> Gap:
    """Let the engine draw, score the same tokens with the trainer's forward, compare.

    Args:
        engine: awake, with the policy's weights.
        policy: what is trained.
        prompts: token ids, at least one each.
        keys: for each prompt the keys of its samples.
        draw: how.
        device: where the policy is.
        sequences_at_once: sequences of one forward.

    Returns:
        The gap over all tokens of all samples.
    """
    found = engine.generate(
        prompts,
        keys,
        temperature=draw.temperature,
        top_p=draw.top_p,
        max_new_tokens=draw.max_new_tokens,
        stop_token_ids=draw.stop_token_ids,
    )
    pairs = [
        (list(prompt), list(completion.token_ids), list(completion.logprobs))
        for prompt, completions in zip(prompts, found, strict=True)
        for completion in completions
    ]
    gaps: list[Tensor] = []
    for first in range(0, len(pairs), sequences_at_once):
        chosen = pairs[first : first + sequences_at_once]
        scored_T, is_new_T = _scored(policy, [(a, b) for a, b, _ in chosen], draw.temperature, device)
        drawn = torch.tensor([value for _, _, values in chosen for value in values], dtype=torch.float64)
        gaps.append((scored_T[is_new_T].to("cpu", torch.float64) - drawn).abs())
    gap = torch.cat(gaps)
    return Gap(gap.numel(), float(gap.mean()), float(gap.quantile(0.99)), float(gap.max()))


def scored_tokens(
    policy: Policy, pairs: Sequence[tuple[list[int], list[int]]], temperature: float, device: torch.device | str
) -> list[list[float]]:
    """For each (prompt, continuation) the policy's log-prob of every token of the continuation, in nats."""
    logprobs_T, is_new_T = _scored(policy, pairs, temperature, device)
    values = iter(logprobs_T[is_new_T].to("cpu", torch.float64))
    return [[float(next(values)) for _ in new] for _, new in pairs]


@torch.no_grad()
def _scored(
    policy: Policy, pairs: Sequence[tuple[list[int], list[int]]], temperature: float, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """([T] log-probs of the packed sequences, [T] bool: the token was drawn)."""
    ids = [prompt + new for prompt, new in pairs]
    token_ids_T = torch.tensor([token for row in ids for token in row], device=device)
    positions_T = torch.cat([torch.arange(len(row)) for row in ids]).to(device)
    segment_ids_T = torch.cat([torch.full((len(row),), number) for number, row in enumerate(ids)]).to(device)
    is_new_T = torch.cat([torch.arange(len(p) + len(n)) >= len(p) for p, n in pairs]).to(device)
    logprobs_T, _ = policy.token_logprobs(token_ids_T, positions_T, segment_ids_T, is_new_T, temperature=temperature)
    return logprobs_T, is_new_T
