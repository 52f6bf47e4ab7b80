"""Test of a reward model by itself: its preferences, and the numerical soundness of its scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from rft_algos.rewards.step_scores import step_reward
from rft_algos.statistics import CalibrationBin, Interval, calibration_curve, calibration_error, wilson_interval
from rft_core.errors import PreflightError
from rft_models.reward_model.loading import load_reward_model
from rft_models.reward_model.model import RewardModel
from rft_models.reward_model.scorer import RewardTextScorer
from rft_models.reward_model.step_scorer import StepTextScorer
from rft_trainer.data.images import RowImage

_SUMS = [(f"{a}+{b}=", str(a + b), str(a + b + 1)) for a, b in ((1, 1), (2, 3), (4, 4), (12, 7), (20, 22), (35, 14))]
_TOGETHER = 1e-4
"""Largest distance of a score alone from the same score in a batch, relative to the largest score."""
_WITH_IMAGES = 32
"""Pairs with images that are scored together."""


Scorer: TypeAlias = "RewardTextScorer | ReducedStepScorer"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two responses to one prompt, of which one is better."""

    prompt: str
    messages: tuple[dict[str, Any], ...]
    chosen: str
    rejected: str
    outcome: float = 1.0
    """1 chosen is the better, -1 rejected, 0 they are equal, 2 nobody has said."""
    images: tuple[RowImage, ...] = ()
    """Of the prompt, in the order of their places."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Figures of a reward model on pairs."""

    heads: tuple[str, ...]
    pooling: str
    num_right: int
    """Decided pairs whose better response has the higher score."""
    num_decided: int
    figures: Mapping[str, float]
    """By name: pairs, prefers_chosen, mean_margin, lowest, highest, difference_alone, calibration_error."""
    chosen: tuple[float, ...] = ()
    """Reward of the chosen response of each pair: the weighted sum of the heads."""
    rejected: tuple[float, ...] = ()
    calibration: tuple[CalibrationBin, ...] = ()
    """How sure the model is of its preference, sigmoid of the difference, beside how often it is right."""

    @property
    def right_interval(self) -> Interval:
        """The 95 % interval of the share of decided pairs in the right order."""
        return wilson_interval(self.num_right, self.num_decided)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The share of pairs of which two reward models prefer the same response."""

    num_same: int
    num_pairs: int
    kappa: float
    """Cohen's kappa: (p - q) / (1 - q), p the share of equal preferences and q what two independent models with these
    shares of the first response would agree on (Cohen 1960); not a number where both always prefer the same side."""

    @property
    def interval(self) -> Interval:
        """The 95 % interval of the share of equal preferences."""
        return wilson_interval(self.num_same, self.num_pairs)


def probe_reward_model(
    directory: str, pairs: Sequence[Pair] | None, *, bf16: bool = False, device: str = "cpu"
) -> ProbeReport:
    """Score pairs of responses; without any, those of a few sums.

    Raises:
        DataError: a directory that is no reward model.
        PreflightError: scores that cannot be trained on.
    """
    model = load_reward_model(directory, dtype=torch.bfloat16 if bf16 else torch.float32, device=device)
    scorer = RewardTextScorer(model) if model.spec.steps is None else ReducedStepScorer(model)
    compared = pairs if pairs is not None else _sums()
    chosen, rejected = _scores(scorer, compared)
    figures = _report(scorer, compared, chosen, rejected)
    scored = zip(compared, chosen, rejected, strict=True)
    decided = [(pair.outcome * (a - b), a - b) for pair, a, b in scored if abs(pair.outcome) == 1]
    right = [signed > 0 for signed, _ in decided]
    sure = [1 / (1 + math.exp(-min(abs(difference), 700.0))) for _, difference in decided]
    bins = calibration_curve(sure, right, low=0.5)
    if bins:
        figures |= {"prefers_chosen": sum(right) / len(right), "calibration_error": calibration_error(bins)}
    return ProbeReport(
        tuple(scorer.model.spec.heads),
        scorer.model.spec.pooling,
        sum(right),
        len(right),
        figures,
        tuple(chosen),
        tuple(rejected),
        tuple(bins),
    )


def agreement(one: ProbeReport, other: ProbeReport) -> Agreement:
    """Compare the preferences of two models on the same pairs."""
    first, second = ([a > b for a, b in zip(report.chosen, report.rejected, strict=True)] for report in (one, other))
    num = len(first)
    same = sum(a == b for a, b in zip(first, second, strict=True))
    shares = [sum(prefers) / num for prefers in (first, second)]
    by_chance = shares[0] * shares[1] + (1 - shares[0]) * (1 - shares[1])
    return Agreement(same, num, (same / num - by_chance) / (1 - by_chance) if by_chance < 1 else math.nan)


def _sums() -> list[Pair]:
    return [Pair(prompt, (), chosen, rejected) for prompt, chosen, rejected in _SUMS]


class ReducedStepScorer:
    """The reward of whole responses from the scores of their steps, as training with the model reduces them."""

    def __init__(self, model: RewardModel) -> None:
        self.model = model
        self._scorer = StepTextScorer(model)

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the scores."""
        return self.model.spec.heads

    def score(
        self,
        prompts: Sequence[str],
        messages: Sequence[Sequence[Mapping[str, Any]]],
        responses: Sequence[str],
        images: Sequence[object] = (),
    ) -> list[dict[str, float] | str]:
        """Compute the reward of each response, or return the reason why there is none."""
        assert not images, "a step reward model sees no images"
        found = self._scorer.score_responses(prompts, messages, responses)
        return [steps if isinstance(steps, str) else {self.heads[0]: self._reduced(steps)} for steps in found]

    def _reduced(self, steps: Sequence[tuple[int, float]]) -> float:
        logits_J = torch.tensor([logit for _, logit in steps], dtype=torch.float64)
        return float(step_reward(logits_J, self._scorer.steps.reduction))


def _scores(scorer: Scorer, pairs: Sequence[Pair]) -> tuple[list[float], list[float]]:
    """Weighted sums of the heads for chosen and rejected; those of heads without stated weights count once each."""
    # prepared images are large: those of so many pairs are held at once
    size = _WITH_IMAGES if any(pair.images for pair in pairs) else max(1, len(pairs))
    chosen: list[float] = []
    rejected: list[float] = []
    for part in (pairs[start : start + size] for start in range(0, len(pairs), size)):
        chosen += _rewards(scorer, part, [pair.chosen for pair in part])
        rejected += _rewards(scorer, part, [pair.rejected for pair in part])
    return chosen, rejected


def _rewards(scorer: Scorer, pairs: Sequence[Pair], texts: Sequence[str]) -> list[float]:
    """Weighted sums of the heads for one text a pair."""
    prompts, messages = [pair.prompt for pair in pairs], [pair.messages for pair in pairs]
    weights = scorer.model.spec.weights or (1.0,) * len(scorer.heads)
    images = [tuple(image.read() for image in pair.images) for pair in pairs]
    rewards: list[float] = []
    for scores in scorer.score(prompts, messages, texts, **({"images": images} if any(images) else {})):
        if isinstance(scores, str):
            raise _refused(f"a response has no score: {scores}", "every response of the test needs one")
        rewards.append(sum(w * scores[head] for w, head in zip(weights, scorer.heads, strict=True)))
    return rewards


def _report(
    scorer: Scorer, pairs: Sequence[Pair], chosen: Sequence[float], rejected: Sequence[float]
) -> dict[str, float]:
    """Figures by name; `PreflightError` where they cannot be trained on."""
    everything = [*chosen, *rejected]
    if not all(map(math.isfinite, everything)):
        raise _refused("a score is not finite", "it would be a failed reward in every step")
    span = max(everything) - min(everything)
    # the same batch again must give the same bits; a pair by itself may differ by rounding
    again = max(map(abs, (a - b for a, b in zip(_scores(scorer, pairs)[0], chosen, strict=True))))
    single = max(abs(_scores(scorer, [pair])[0][0] - score) for pair, score in zip(pairs, chosen, strict=True))
    if span == 0.0:
        raise _refused(f"all {len(everything)} scores are {everything[0]:g}", "equal rewards teach nothing")
    if again > 0.0 or single > _TOGETHER * max(1.0, *map(abs, everything)):
        raise _refused(f"scores differ by {again:g} twice, by {single:g} alone", "a text has one score")
    return {
        "pairs": len(pairs),
        "mean_margin": sum(a - b for a, b in zip(chosen, rejected, strict=True)) / len(pairs),
        "lowest": min(everything),
        "highest": max(everything),
        "difference_alone": single,
    }


def _refused(what: str, why: str) -> PreflightError:
    return PreflightError(
        code="reward.model_unfit",
        what=what,
        where="--model",
        why=why,
        do="use another reward model, or other pairs (--eval_data FILE)",
    )
