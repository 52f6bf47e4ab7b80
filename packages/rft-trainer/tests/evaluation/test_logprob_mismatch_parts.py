"""A comparison with exact numbers: which token is meant, where a limit begins, and how much mass top-p keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.packed_tokens import PackedTokens
from rft_trainer.evaluation import logprob_mismatch
from rft_trainer.evaluation.logprob_mismatch import (
    FULL,
    HALF,
    Gap,
    Measured,
    MismatchLimits,
    measure_gap,
    scored_tokens,
)
from rft_trainer.testing.bigram import BigramEngine, BigramPolicy, FakeCompletion

PROBABILITIES = (0.5, 0.3, 0.15, 0.05)
"""Of every next token, whatever came before."""
LIMITS = MismatchLimits(equal=0.125, mean=0.0625, largest=0.25)


class Fixed(BigramPolicy):
    """Gives every token the probability of its id; counts the sequences of each forward."""

    def __init__(self, probabilities: Sequence[float] = PROBABILITIES) -> None:
        super().__init__(len(probabilities), dtype=torch.float64)
        self.logits_V = torch.tensor(probabilities, dtype=torch.float64).log()
        self.noted: list[int] = []

    def token_logprobs(self, tokens: PackedTokens, **options: Any) -> tuple[Tensor, Tensor | None]:
        self.noted.append(int(tokens.segment_ids_T.max()) + 1)
        return (self.logits_V / options["temperature"]).log_softmax(0)[tokens.token_ids_T], None

    def logits(self, tokens: PackedTokens) -> Iterator[Tensor]:
        """Chunks of two rows."""
        assert tokens.target_mask_T is not None
        for part in torch.zeros(int(tokens.target_mask_T.sum())).split(2):
            yield self.logits_V.expand(len(part), -1)


class Scripted(BigramEngine):
    """Says the given tokens, with log-probs and kept mass moved by so much at single tokens."""

    def __init__(
        self,
        samples: Sequence[Sequence[Sequence[int]]],
        moved: dict[tuple[int, int, int], float] | None = None,
        masses: dict[tuple[int, int, int], float] | None = None,
        mass: float = 1.0,
    ) -> None:
        super().__init__(BigramPolicy(4))
        self.samples, self.moved, self.masses, self.mass = samples, moved or {}, masses or {}, mass

    def generate(self, *arguments: Any, **options: Any) -> Any:
        return [
            [
                FakeCompletion(
                    tuple(tokens),
                    tuple(math.log(PROBABILITIES[t]) + self.moved.get((p, s, i), 0.0) for i, t in enumerate(tokens)),
                    tuple(math.log(self.mass) + self.masses.get((p, s, i), 0.0) for i in range(len(tokens))),
                    "stop",
                    0,
                )
                for s, tokens in enumerate(samples)
            ]
            for p, samples in enumerate(self.samples)
        ]


SAMPLES = [[[0, 1, 0], []], [[2], [1, 1, 0, 2]]]


def measured(
    engine: Scripted, policy: Fixed | None = None, top_p: float = 1.0, sequences_at_once: int = 16, **more: Any
) -> Measured:
    prompts = [[3] * (1 + number) for number in range(len(engine.samples))]
    keys = [list(range(len(samples))) for samples in engine.samples]
    draw = SamplingOptions(temperature=1.0, top_p=top_p, max_new_tokens=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprob_mismatch, "SEQUENCES_AT_ONCE", sequences_at_once)
        return measure_gap(engine, policy or Fixed(), prompts, keys, draw, **more)


@pytest.mark.parametrize("place", [(0, 0, 0), (0, 0, 2), (1, 0, 0), (1, 1, 0), (1, 1, 3)])
def test_the_worst_token_is_found_at_the_edges_of_samples_too(place: tuple[int, int, int]) -> None:
    prompt, sample, position = place
    found = measured(Scripted(SAMPLES, {place: -0.5, (0, 0, 1): 0.25}))
    token = SAMPLES[prompt][sample][position]
    worst = found.worst
    assert (worst.prompt, worst.sample, worst.position, worst.token_id) == (*place, token)
    assert worst.trainer == pytest.approx(math.log(PROBABILITIES[token]))
    assert worst.engine == pytest.approx(math.log(PROBABILITIES[token]) - 0.5)
    assert found.samples == ((0, 1, 0), (), (2,), (1, 1, 0, 2))
    assert found.gap.num_tokens == 8
    assert found.gap.mean == pytest.approx(0.75 / 8)


def test_a_gap_at_the_limit_is_not_beyond_it() -> None:
    def num_beyond(gap: float) -> int:
        return measured(Scripted([[[0, 0]]], {(0, 0, 0): gap}), limits=limits).num_beyond

    exact = abs((math.log(0.5) - 0.25) - math.log(0.5))
    limits = MismatchLimits(0.0, 1.0, exact)
    assert num_beyond(-0.25) == 0
    assert num_beyond(-0.2500001) == 1


def test_percentiles_are_between_the_mean_and_the_largest() -> None:
    gap = Gap.of(torch.arange(101, dtype=torch.float64))
    assert (gap.num_tokens, gap.mean, gap.p99, gap.largest) == (101, 50.0, 99.0, 100.0)


def test_limits_of_the_two_precisions() -> None:
    assert (FULL.equal, FULL.mean, FULL.largest) == (1e-4, 1e-4, 1e-3)
    assert (HALF.equal, HALF.mean, HALF.largest) == (1e-4, 0.02, 0.3)


@pytest.mark.parametrize(
    ("mean", "largest", "verdict"),
    [(0.0, 0.125, "equal"), (0.0625, 0.25, "close"), (0.0626, 0.25, "apart"), (0.0625, 0.26, "apart")],
)
def test_what_reaches_a_limit_is_within_it(mean: float, largest: float, verdict: str) -> None:
    assert Gap(4, mean, mean, largest).verdict(LIMITS) == verdict


def test_the_verdict_is_the_worst_of_log_probs_and_mass() -> None:
    small, large = {(0, 0, 0): 0.2}, {(0, 0, 0): 0.5}
    tokens = [[[0, 1, 0, 0]]]

    def verdict(moved: dict[Any, float], masses: dict[Any, float]) -> str:
        # 0.8 is kept; a slack of 0.0625 around 0.75 keeps the same
        return measured(
            Scripted(tokens, moved, masses, mass=0.8), top_p=0.72, limits=LIMITS, logits=Fixed().logits
        ).verdict

    assert verdict({}, {}) == "equal"
    assert verdict(small, {}) == verdict({}, small) == verdict(small, small) == "close"
    assert verdict(large, small) == verdict(small, large) == verdict({}, large) == "apart"


def test_the_worst_mass_is_named_among_all_parts() -> None:
    engine = Scripted(SAMPLES, masses={(1, 1, 2): 0.5, (0, 0, 0): 0.25}, mass=0.8)
    found = measured(engine, top_p=0.72, limits=LIMITS, logits=Fixed().logits, sequences_at_once=1)
    assert found.worst_kept is not None
    assert (found.worst_kept.prompt, found.worst_kept.sample, found.worst_kept.position) == (1, 1, 2)
    assert found.worst_kept.token_id == 0
    assert found.worst_kept.engine == pytest.approx(math.log(0.8) + 0.5)
    assert found.worst_kept.trainer == pytest.approx(math.log(0.8))
    assert found.kept_mass is not None
    assert found.kept_mass.num_tokens == 8
    assert found.kept_mass.mean == pytest.approx(0.75 / 8)


@pytest.mark.parametrize(
    ("mass", "gap"), [(0.5, 0.0), (0.8, 0.0), (0.95, math.log(0.95 / 0.8)), (1.0, math.log(1 / 0.8))]
)
def test_a_cut_within_rounding_below_top_p_is_no_gap(mass: float, gap: float) -> None:
    # with a slack of 0.0625 below, 0.55 and 0.4875 keep two tokens and one
    found = measured(Scripted([[[0, 0]]], mass=mass), top_p=0.55, limits=LIMITS, logits=Fixed().logits)
    assert found.kept_mass is not None
    assert found.kept_mass.largest == pytest.approx(gap, abs=1e-9)


@pytest.mark.parametrize(("mass", "gap"), [(0.5, math.log(0.8 / 0.5)), (0.8, 0.0), (0.95, 0.0)])
def test_a_cut_within_rounding_above_top_p_is_no_gap(mass: float, gap: float) -> None:
    # and above 0.75, 0.8125 keeps three where 0.75 keeps two
    found = measured(Scripted([[[0, 0]]], mass=mass), top_p=0.75, limits=LIMITS, logits=Fixed().logits)
    assert found.kept_mass is not None
    assert found.kept_mass.largest == pytest.approx(gap, abs=1e-9)


@pytest.mark.parametrize(("top_p", "mass"), [(0.01, 0.5), (0.99, 1.0)])
def test_a_top_p_nearer_to_0_or_1_than_the_slack_keeps_something_and_at_most_all(top_p: float, mass: float) -> None:
    found = measured(Scripted([[[0]]], mass=mass), top_p=top_p, limits=LIMITS, logits=Fixed().logits)
    assert found.kept_mass is not None
    assert found.kept_mass.largest == pytest.approx(0.0, abs=1e-9)


def test_tokens_are_outside_where_the_largest_of_the_kept_sets_lacks_them() -> None:
    # above 0.75, 0.8125 keeps tokens 0, 1 and 2
    found = measured(Scripted([[[0, 2, 3], [3, 1]]], mass=0.8), top_p=0.75, limits=LIMITS, logits=Fixed().logits)
    assert found.num_outside == 2
    assert found.verdict == "apart"
    assert (
        measured(Scripted([[[0, 2, 1]]], mass=0.8), top_p=0.75, limits=LIMITS, logits=Fixed().logits).num_outside == 0
    )


def test_the_mass_is_that_of_the_temperature() -> None:
    engine = Scripted([[[0]]], mass=1.0)
    draw = SamplingOptions(temperature=0.5, top_p=0.6, max_new_tokens=1)
    squares = [p * p for p in PROBABILITIES]
    found = measure_gap(engine, Fixed(), [[3]], [[0]], draw, limits=LIMITS, logits=Fixed().logits)
    assert found.worst_kept is not None
    # the first alone has 0.685 of it, which is enough
    assert found.worst_kept.trainer == pytest.approx(math.log(squares[0] / sum(squares)))


def test_where_nothing_is_cut_off_no_mass_is_compared() -> None:
    assert measured(Scripted(SAMPLES), logits=Fixed().logits).kept_mass is None
    assert measured(Scripted(SAMPLES), top_p=0.9).kept_mass is None


def test_rows_of_logits_for_other_tokens_are_a_mistake_of_the_caller() -> None:
    def too_few(tokens: PackedTokens) -> Iterator[Tensor]:
        yield Fixed().logits_V[None]

    with pytest.raises(AssertionError, match="1 rows of logits for 2 tokens"):
        measured(Scripted([[[0, 0]]]), top_p=0.9, logits=too_few)


def test_sixteen_sequences_are_in_one_forward_unless_said() -> None:
    policy = Fixed()
    measured(Scripted([[[0]] * 17]), policy)
    assert policy.noted == [16, 1]
    policy.noted.clear()
    measured(Scripted([[[0]] * 17]), policy, sequences_at_once=9)
    assert policy.noted == [9, 8]


def test_the_limits_are_those_of_float32_unless_said() -> None:
    assert measured(Scripted(SAMPLES)).limits is FULL
    assert measured(Scripted(SAMPLES), limits=HALF).limits is HALF


def test_given_texts_may_have_nothing_to_score() -> None:
    assert scored_tokens(Fixed(), [([1], []), ([2], [0])], 1.0, "cpu") == [[], [pytest.approx(math.log(0.5))]]


def test_where_all_is_kept_its_log_is_0_although_float32_adds_up_to_more_than_1() -> None:
    rows_RV = torch.arange(64 * 33, dtype=torch.float32).reshape(64, 33).sin()
    sums_R = rows_RV.log_softmax(1).double().logsumexp(1)
    above_V = rows_RV[int(sums_R.argmax())]
    assert sums_R.max() > 0

    def logits(tokens: PackedTokens) -> Iterator[Tensor]:
        yield above_V[None]

    found = measured(Scripted([[[0]]]), top_p=0.9999999, limits=FULL, logits=logits)
    assert found.worst_kept is not None
    assert (found.worst_kept.trainer, found.worst_kept.engine) == (0.0, 0.0)
    assert found.kept_mass is not None
    assert found.kept_mass.largest == 0.0
