"""Training-inference mismatch: the gap between an engine's log-probs and the trainer's on the engine's samples.

Both are log p(token | earlier tokens) under the same weights; their difference is arithmetic:
kernels, caches, precision, another vocabulary width, or weights that are not the same after all.
A ratio of the two enters every loss, so the gap is the error of that ratio, in nats. Where top-p cuts,
the log of the mass that was kept is compared likewise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rft_algos.decoding.sampling import kept_tokens, temperature_scaled_logprobs
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.packed_tokens import PackedTokens
from rft_trainer.protocols import Engine, Policy

Verdict = Literal["equal", "close", "apart"]
VERDICTS: tuple[Verdict, ...] = ("equal", "close", "apart")

NextTokenLogits = Callable[[PackedTokens], Iterable[Tensor]]
"""Packed tokens -> chunks [R, V] of the logits that predict the targets, in their order, before any temperature."""


@dataclass(frozen=True, slots=True)
class MismatchLimits:
    """Gaps in nats that the precision of the weights explains."""

    equal: float
    """At the worst token: the order of sums."""
    mean: float
    """On average, for a gap that is close; and how far rounding moves a cumulative probability that top-p cuts at."""
    largest: float
    """At the worst token, for a gap that is close."""


FULL = MismatchLimits(equal=1e-4, mean=1e-4, largest=1e-3)
"""float32 and float64: what other kernels, other blocks and another order of sums come to."""
HALF = MismatchLimits(equal=1e-4, mean=0.02, largest=0.3)
"""16 bits: ratios within 2 % on average, 35 % at the worst."""

SEQUENCES_AT_ONCE = 16
"""Sequences of one forward."""


def limits_of(dtype: torch.dtype) -> MismatchLimits:
    """The limits for weights of this type."""
    return HALF if dtype.itemsize <= 2 else FULL


@dataclass(frozen=True, slots=True)
class Gap:
    """Statistics of |engine - trainer| over all sampled tokens, in nats; NaN where one of the two is NaN."""

    num_tokens: int
    mean: float
    p99: float
    largest: float

    @classmethod
    def of(cls, gaps_N: Tensor) -> Gap:
        """Compute the statistics of [N] float64 distances."""
        return cls(gaps_N.numel(), float(gaps_N.mean()), float(gaps_N.quantile(0.99)), float(gaps_N.max()))

    def verdict(self, limits: MismatchLimits) -> Verdict:
        """Return the verdict on a gap of this size: equal, close, or apart."""
        # NaN fails every comparison here, and ends as "apart"
        if self.largest <= limits.equal:
            return "equal"
        return "close" if self.mean <= limits.mean and self.largest <= limits.largest else "apart"


@dataclass(frozen=True, slots=True)
class TokenGap:
    """One sampled token with the engine's log-prob and the trainer's."""

    prompt: int
    sample: int
    """Number of the sample among those of its prompt."""
    position: int
    """Number of the token in the completion, from 0."""
    token_id: int
    engine: float
    """log p of the engine, in nats."""
    trainer: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of one comparison: an engine's samples against the trainer's forward on them."""

    limits: MismatchLimits
    gap: Gap
    worst: TokenGap
    num_beyond: int
    """Tokens with a gap above `limits.largest`."""
    kept_mass: Gap | None
    """Distance of the logs of the mass that top-p kept; None where nothing was cut off or nothing was compared."""
    worst_kept: TokenGap | None
    """The token with the largest of these; its two numbers are logs of the kept mass."""
    num_outside: int
    """Drawn tokens that are not among those which the trainer's own probabilities keep."""
    samples: tuple[tuple[int, ...], ...]
    """The drawn tokens, prompt after prompt."""

    @property
    def verdict(self) -> Verdict:
        """Verdict: the worse of log-probs and kept mass; a token from outside the kept set is "apart"."""
        verdicts: list[Verdict] = [self.gap.verdict(self.limits), "apart" if self.num_outside else "equal"]
        if self.kept_mass is not None:
            verdicts.append(self.kept_mass.verdict(self.limits))
        return max(verdicts, key=VERDICTS.index)


@dataclass(frozen=True, slots=True)
class _Sample:
    prompt: int
    number: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    log_kept_mass: list[float]


def measure_gap(
    engine: Engine,
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[Sequence[int]],
    draw: SamplingOptions,
    *,
    limits: MismatchLimits = FULL,
    logits: NextTokenLogits | None = None,
    device: torch.device | str = "cpu",
) -> Measured:
    """Sample with the engine, score the same tokens with the trainer's forward, and compare.

    Args:
        engine: awake, with the policy's weights.
        policy: the trained policy.
        prompts: token ids, at least one each.
        keys: for each prompt the keys of its samples.
        draw: sampling options; a trainer's top-p is compared, top-k and min-p are not.
        limits: what the precision of the weights explains.
        logits: whole rows of the trainer's logits, to compare the mass that top-p kept; None = it is not compared.
        device: where the policy is.
    """
    samples = _drawn(engine, prompts, keys, draw)
    scored: list[Tensor] = []
    kept: list[_Kept] = []
    # in parts: the rows of logits of all samples at once may not fit
    for first in range(0, len(samples), SEQUENCES_AT_ONCE):
        chosen = samples[first : first + SEQUENCES_AT_ONCE]
        pack = _pack([(sample.prompt_ids, sample.token_ids) for sample in chosen], device)
        scored.append(_logprobs(policy, pack, draw.temperature))
        if logits is not None and draw.top_p < 1.0:
            mass_N = _flat([sample.log_kept_mass for sample in chosen])
            kept.append(_kept_masses(logits, pack, draw, mass_N, limits.mean))
    trainer_N, engine_N = torch.cat(scored), _flat([sample.logprobs for sample in samples])
    gaps_N = (trainer_N - engine_N).abs()
    return Measured(
        limits=limits,
        gap=Gap.of(gaps_N),
        worst=_token(samples, int(gaps_N.argmax()), engine_N, trainer_N),
        # not `gaps_N > ...`, which would leave NaN out
        num_beyond=int((~(gaps_N <= limits.largest)).sum()),
        kept_mass=Gap.of(torch.cat([part.gaps_N for part in kept])) if kept else None,
        worst_kept=_worst_kept(samples, kept) if kept else None,
        num_outside=sum(part.num_outside for part in kept),
        samples=tuple(tuple(sample.token_ids) for sample in samples),
    )


def scored_tokens(
    policy: Policy, pairs: Sequence[tuple[list[int], list[int]]], temperature: float, device: torch.device | str
) -> list[list[float]]:
    """Compute for each (prompt, continuation) the policy's log-prob of every continuation token, in nats."""
    values = iter(_logprobs(policy, _pack(pairs, device), temperature))
    return [[float(next(values)) for _ in new] for _, new in pairs]


def _drawn(
    engine: Engine, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], draw: SamplingOptions
) -> list[_Sample]:
    groups = engine.generate(prompts, keys, draw)
    return [
        _Sample(p, s, list(prompt), list(one.token_ids), list(one.logprobs), list(one.log_kept_mass))
        for p, (prompt, completions) in enumerate(zip(prompts, groups, strict=True))
        for s, one in enumerate(completions)
    ]


def _pack(pairs: Sequence[tuple[list[int], list[int]]], device: torch.device | str) -> PackedTokens:
    """Concatenate prompts and continuations; the sampled tokens are the targets."""
    rows = [prompt + new for prompt, new in pairs]
    return PackedTokens(
        torch.tensor([token for row in rows for token in row], device=device),
        torch.cat([torch.arange(len(row)) for row in rows]).to(device),
        torch.cat([torch.full((len(row),), number) for number, row in enumerate(rows)]).to(device),
        torch.cat([torch.arange(len(p) + len(n)) >= len(p) for p, n in pairs]).to(device),
    )


@torch.no_grad()
def _logprobs(policy: Policy, tokens: PackedTokens, temperature: float) -> Tensor:
    """Compute [N] float64 on the host: the policy's log-prob of every sampled token."""
    logprobs_T, _ = policy.token_logprobs(tokens, temperature=temperature)
    return logprobs_T[tokens.target_mask_T].to("cpu", torch.float64)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The log mass that the trainer's probabilities keep, [N] float64, and the engine's distance from it."""

    gaps_N: Tensor
    trainer_N: Tensor
    num_outside: int


def _flat(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


@torch.no_grad()
def _kept_masses(
    logits: NextTokenLogits, tokens: PackedTokens, draw: SamplingOptions, mass_N: Tensor, slack: float
) -> _Kept:
    """Compare the mass that top-p keeps of the trainer's probabilities with the engine's [N] logs of the kept mass.

    Where top-p cuts is a jump: a token more or less is kept when rounding moves a sum across the bound.
    So the engine's mass is held against the kept sets at top-p and at top-p -/+ `slack`; the nearest counts,
    and a drawn token is outside where the largest of the three lacks it.
    """
    # sorted, so that the last kept set is the largest
    bounds = [max(draw.top_p - slack, 1e-9), draw.top_p, min(draw.top_p + slack, 1.0)]
    drawn_N = tokens.token_ids_T[tokens.target_mask_T]
    masses: list[Tensor] = []
    outside, start = 0, 0
    for logits_RV in logits(tokens):
        logprobs_RV = temperature_scaled_logprobs(logits_RV, draw.temperature)
        kept = [kept_tokens(logprobs_RV, bound, 0, 0.0) for bound in bounds]
        masses.append(torch.stack([_log_mass(logprobs_RV, kept_RV) for kept_RV in kept], dim=1))
        rows = slice(start, start + logits_RV.shape[0])
        # in the largest set: a token at the very edge is not held against the engine
        outside += int((~kept[-1].gather(1, drawn_N[rows, None])).sum())
        start = rows.stop
    assert start == mass_N.numel(), f"{start} rows of logits for {mass_N.numel()} tokens"
    masses_N3 = torch.cat(masses)
    nearest_N1 = (masses_N3 - mass_N[:, None]).abs().argmin(1, keepdim=True)
    trainer_N = masses_N3.gather(1, nearest_N1)[:, 0]
    return _Kept((trainer_N - mass_N).abs(), trainer_N, outside)


def _log_mass(logprobs_RV: Tensor, kept_RV: Tensor) -> Tensor:
    """Compute the log of the kept mass, [R] float64 on the host; 0 where everything is kept."""
    # in float64: near 1 the log of the mass is small, and float32 would add a gap of its own
    return logprobs_RV.double().masked_fill(~kept_RV, -math.inf).logsumexp(1).clamp(max=0.0).cpu()


def _worst_kept(samples: Sequence[_Sample], kept: Sequence[_Kept]) -> TokenGap:
    index = int(torch.cat([part.gaps_N for part in kept]).argmax())
    engine_N = _flat([sample.log_kept_mass for sample in samples])
    return _token(samples, index, engine_N, torch.cat([part.trainer_N for part in kept]))


def _token(samples: Sequence[_Sample], index: int, engine_N: Tensor, trainer_N: Tensor) -> TokenGap:
    """Return the token at `index` among all sampled ones."""
    offset = index
    for sample in samples:
        if offset < len(sample.token_ids):
            token = sample.token_ids[offset]
            engine, trainer = float(engine_N[index]), float(trainer_N[index])
            return TokenGap(sample.prompt, sample.number, offset, token, engine, trainer)
        offset -= len(sample.token_ids)
    raise AssertionError("unreachable")
