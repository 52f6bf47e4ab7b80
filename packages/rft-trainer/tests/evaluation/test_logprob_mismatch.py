from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.keyed_random import uniforms
from rft_core.packed_tokens import PackedTokens
from rft_trainer.evaluation import logprob_mismatch
from rft_trainer.evaluation.logprob_mismatch import (
    FULL,
    HALF,
    Gap,
    Measured,
    MismatchLimits,
    limits_of,
    measure_gap,
    scored_tokens,
)
from rft_trainer.testing.bigram import BigramEngine, BigramPolicy, FakeCompletion

V = 9


class Counted(BigramPolicy):
    """Off by `error` nats at token number `error_at` of every sequence; counts its forwards."""

    def __init__(self, error: float = 0.0, error_at: int = 3) -> None:
        super().__init__(V)
        with torch.no_grad():
            self.table.copy_(torch.randn(V, V, generator=torch.Generator().manual_seed(5)))
        self.error, self.error_at, self.forwards = error, error_at, 0

    def token_logprobs(self, tokens: PackedTokens, **options: Any) -> tuple[Tensor, Tensor | None]:
        self.forwards += 1
        assert options["temperature"] > 0
        found_T, _ = super().token_logprobs(tokens, **options)
        return torch.where(tokens.positions_T == self.error_at, found_T + self.error, found_T), None

    def logits(self, tokens: PackedTokens) -> Iterator[Tensor]:
        """Chunks of five rows of the table."""
        assert tokens.target_mask_T is not None
        for rows_R in (tokens.target_mask_T.nonzero()[:, 0] - 1).split(5):
            yield self.table.detach()[tokens.token_ids_T[rows_R]]


class Cutting(BigramEngine):
    """Top-p in plain Python numbers: sort, add up, cut."""

    lie = 0.0
    """Added to the mass that it reports."""
    cuts_at: float | None = None
    """Top-p that it takes in place of the one it is asked for."""

    def generate(self, prompts: Any, sample_keys: Any, options: SamplingOptions, **_: Any) -> Any:
        cut = self.cuts_at or options.top_p
        return [
            [self._drawn(prompt[-1], key, options.temperature, cut, options.max_new_tokens) for key in keys]
            for prompt, keys in zip(prompts, sample_keys, strict=True)
        ]

    def _drawn(self, last: int, key: int, temperature: float, top_p: float, limit: int) -> FakeCompletion:
        tokens, logprobs, masses = list[int](), list[float](), list[float]()
        for uniform in uniforms([key], limit)[0].tolist():
            p = (self._policy.table[last].double() / temperature).softmax(0).tolist()
            kept, mass = kept_by_hand(p, top_p)
            total = 0.0
            for token in sorted(kept):
                total += p[token]
                if total > uniform * mass:
                    break
            tokens.append(token)
            logprobs.append(math.log(p[token]))
            masses.append(math.log(mass) + self.lie)
            last = token
        return FakeCompletion(tuple(tokens), tuple(logprobs), tuple(masses), "length", self.version)


def kept_by_hand(p: Sequence[float], top_p: float) -> tuple[list[int], float]:
    kept, mass = list[int](), 0.0
    for token in sorted(range(len(p)), key=lambda token: -p[token]):
        if mass >= top_p:
            break
        kept.append(token)
        mass += p[token]
    return kept, mass


def measured(
    policy: Counted, draw: SamplingOptions, engine: Any = None, sequences_at_once: int = 16, **options: Any
) -> Measured:
    chosen = engine or BigramEngine(policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprob_mismatch, "SEQUENCES_AT_ONCE", sequences_at_once)
        return measure_gap(chosen, policy, [[1], [2, 3]], [[5, 6], [7, 8, 9]], draw, **options)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_same_weights_have_no_gap_at_any_temperature(temperature: float) -> None:
    policy = Counted()
    found = measured(policy, SamplingOptions(temperature=temperature, max_new_tokens=32), sequences_at_once=2)
    assert found.gap.num_tokens == 5 * 32
    assert found.gap.largest < 1e-5
    assert found.verdict == "equal"
    assert (found.num_beyond, found.kept_mass, found.num_outside) == (0, None, 0)
    assert [len(sample) for sample in found.samples] == [32] * 5
    assert policy.forwards == 3


def test_a_gap_is_of_drawn_tokens_alone() -> None:
    found = measured(Counted(error=-0.25), SamplingOptions(max_new_tokens=10, temperature=1.0))
    assert found.gap.mean == pytest.approx(0.025, abs=1e-5)  # one of the ten new tokens of every sequence
    assert found.gap.largest == pytest.approx(0.25, abs=1e-5)
    assert found.gap.p99 == pytest.approx(0.25, abs=1e-5)
    assert found.num_beyond == 5
    assert found.verdict == "apart"
    assert (
        measured(Counted(error=9.0, error_at=0), SamplingOptions(temperature=1.0, max_new_tokens=32)).gap.largest < 1e-5
    )  # the prompt's


class Shifted(BigramEngine):
    """Says 0.4 nats less of token 6 of the second sample of the second prompt."""

    def generate(self, *arguments: Any, **options: Any) -> Any:
        found = super().generate(*arguments, **options)
        one = found[1][1]
        said = [value - 0.4 * (place == 6) for place, value in enumerate(one.logprobs)]
        found[1][1] = replace(one, logprobs=tuple(said))
        return found


def test_the_worst_token_is_named_with_both_values() -> None:
    policy = Counted()
    found = measured(policy, SamplingOptions(max_new_tokens=10, temperature=1.0), Shifted(policy), sequences_at_once=2)
    worst = found.worst
    assert (worst.prompt, worst.sample, worst.position) == (1, 1, 6)
    drawn = found.samples[3]
    assert worst.token_id == drawn[6]
    exact = float(policy.table.detach()[drawn[5]].double().log_softmax(0)[drawn[6]])
    assert worst.trainer == pytest.approx(exact, abs=1e-6)
    assert worst.engine == pytest.approx(exact - 0.4, abs=1e-6)
    assert (found.num_beyond, found.verdict) == (1, "apart")


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 0.9), (0.7, 0.6)])
def test_the_mass_that_top_p_keeps_is_that_of_plain_arithmetic(temperature: float, top_p: float) -> None:
    policy = Counted()
    found = measured(
        policy,
        SamplingOptions(temperature=temperature, top_p=top_p, max_new_tokens=32),
        Cutting(policy),
        logits=policy.logits,
    )
    assert found.kept_mass is not None
    assert found.kept_mass.num_tokens == 5 * 32
    assert found.kept_mass.largest < 1e-5
    assert (found.num_outside, found.verdict) == (0, "equal")


def test_an_engine_that_says_another_mass_is_apart() -> None:
    policy, engine = Counted(), Cutting(Counted())
    engine.lie = 0.01
    found = measured(
        policy, SamplingOptions(top_p=0.9, temperature=1.0, max_new_tokens=32), engine, logits=policy.logits
    )
    assert found.gap.verdict(FULL) == "equal"
    assert found.kept_mass is not None
    assert found.worst_kept is not None
    assert found.kept_mass.mean == pytest.approx(0.01, abs=1e-4)
    assert found.worst_kept.engine - found.worst_kept.trainer == pytest.approx(0.01, abs=1e-4)
    assert found.verdict == "apart"


def test_an_engine_that_ignores_top_p_draws_from_outside() -> None:
    policy = Counted()
    found = measured(
        policy,
        SamplingOptions(top_p=0.5, temperature=1.0, max_new_tokens=32),
        BigramEngine(policy),
        logits=policy.logits,
    )
    outside = 0
    for prompt, sample in zip([1, 1, 3, 3, 3], found.samples, strict=True):
        for last, token in zip([prompt, *sample], sample, strict=False):
            outside += token not in kept_by_hand(policy.table[last].double().softmax(0).tolist(), 0.5)[0]
    assert found.num_outside == outside > 10
    assert found.verdict == "apart"


def test_a_cut_on_the_other_side_of_a_rounding_error_is_no_gap() -> None:
    policy = Counted()
    with torch.no_grad():  # 0.5, 0.4, 0.1: the first two hold 0.9 up to rounding
        policy.table.copy_(torch.tensor([0.5, 0.4, 0.1, *[1e-30] * (V - 3)]).log().expand(V, V))
    for cut, kept in ((0.9 - 1e-6, 0.9), (0.9 + 1e-6, 1.0)):
        engine = Cutting(policy)
        engine.cuts_at = cut
        found = measured(
            policy, SamplingOptions(top_p=0.9, temperature=1.0, max_new_tokens=32), engine, logits=policy.logits
        )
        assert found.worst_kept is not None
        assert found.worst_kept.engine == pytest.approx(math.log(kept), abs=1e-6)
        assert found.verdict == "equal", cut


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_apart(value: float) -> None:
    found = measured(Counted(error=value), SamplingOptions(max_new_tokens=4, temperature=1.0))
    assert found.verdict == "apart"
    assert found.num_beyond == 5
    assert found.worst.position in (1, 2)


@pytest.mark.parametrize(
    ("limits", "mean", "largest", "verdict"),
    [
        (HALF, 0.0, 1e-4, "equal"),
        (HALF, 0.0, 1.1e-4, "close"),
        (HALF, 0.02, 0.3, "close"),
        (HALF, 0.021, 0.3, "apart"),
        (HALF, 0.001, 0.31, "apart"),
        (FULL, 1e-5, 1e-4, "equal"),
        (FULL, 1e-4, 1e-3, "close"),
        (FULL, 1e-5, 2e-3, "apart"),
        (FULL, 2e-4, 9e-4, "apart"),
    ],
)
def test_verdicts(limits: MismatchLimits, mean: float, largest: float, verdict: str) -> None:
    assert Gap(10, mean, mean, largest).verdict(limits) == verdict


def test_limits_follow_the_precision_of_the_weights() -> None:
    assert [limits_of(kind) for kind in (torch.float64, torch.float32)] == [FULL, FULL]
    assert [limits_of(kind) for kind in (torch.bfloat16, torch.float16)] == [HALF, HALF]


def test_given_texts_are_scored_token_by_token() -> None:
    policy = Counted()
    [first, second] = scored_tokens(policy, [([1], [2, 3]), ([4, 5], [6])], 0.5, "cpu")
    table = (policy.table.detach().double() / 0.5).log_softmax(-1)
    assert first == pytest.approx([float(table[1, 2]), float(table[2, 3])], abs=1e-5)
    assert second == pytest.approx([float(table[5, 6])], abs=1e-5)
