"""Measures of several responses to a prompt: pass@k, maj@k, best@k and picked@k, a number a prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rft_algos.evaluation.majority_vote import majority_at_k_estimate
from rft_algos.evaluation.picked_sample import picked_at_k_estimate
from rft_algos.statistics import best_of_k_estimate, pass_at_k_estimate


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A response that has a reward."""

    reward: float
    is_correct: bool
    answer: str | None
    """Its vote; None where it has no answer."""
    score: float | None = None
    """What picks the best of several; None where nothing picks."""


def default_ks(num_samples: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... below the number of samples, and that number; nothing for a single sample."""
    if num_samples < 2:
        return ()
    powers = [1 << power for power in range(num_samples.bit_length()) if 1 << power < num_samples]
    return (*powers, num_samples)


def by_prompt(
    samples_by_prompt: Sequence[Sequence[ScoredSample]], ks: Sequence[int]
) -> Mapping[str, tuple[float | None, ...]]:
    """Return pass@k for each k, and maj@k and best@k for each k above 1, where they are no mean of the samples.

    Where samples have scores there is picked@k too; in a draw a sample without one is picked only where none has one.
    A prompt with fewer than k scored samples says nothing of k: it has None.
    """
    measures = [("pass", _passes, 1), ("maj", _majority, 2), ("best", _best, 2)]
    if any(sample.score is not None for samples in samples_by_prompt for sample in samples):
        measures.append(("picked", _picked, 2))
    return {
        f"{name}@{k}": tuple(measure(samples, k) if len(samples) >= k else None for samples in samples_by_prompt)
        for name, measure, least in measures
        for k in ks
        if k >= least
    }


def hits_at_k(correct_by_prompt: Sequence[Sequence[bool]], ks: Sequence[int]) -> Mapping[str, tuple[float | None, ...]]:
    """Return hit@k for each k: whether one of the first k responses is right, where their order is a ranking.

    Fewer responses than k, as where a set of sequences has fewer, are all that there are.
    """
    return {f"hit@{k}": tuple(float(any(correct[:k])) for correct in correct_by_prompt) for k in ks}


def _passes(samples: Sequence[ScoredSample], k: int) -> float:
    return pass_at_k_estimate(sum(sample.is_correct for sample in samples), len(samples), k=k)


def _majority(samples: Sequence[ScoredSample], k: int) -> float:
    votes = [sample.answer for sample in samples]
    return majority_at_k_estimate(votes, [float(sample.is_correct) for sample in samples], k=k)


def _best(samples: Sequence[ScoredSample], k: int) -> float:
    return best_of_k_estimate([sample.reward for sample in samples], k=k)


def _picked(samples: Sequence[ScoredSample], k: int) -> float:
    scores = [-math.inf if sample.score is None else sample.score for sample in samples]
    return picked_at_k_estimate(scores, [float(sample.is_correct) for sample in samples], k=k)
