"""Reward from a step (process) reward model in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from rft_algos.rewards.step_scores import StepReduction, step_reward
from rft_trainer.records.scores import RewardItem, RewardStatus, Score


class StepScorer(Protocol):
    """Protocol of a model that scores the steps of texts."""

    def score_responses(
        self,
        prompts: Sequence[str],
        messages: Sequence[Sequence[Mapping[str, Any]]],
        responses: Sequence[str],
    ) -> Sequence[Sequence[tuple[int, float]] | str]:
        """Score each response: (characters up to the end of a step, its logit) a step, or why there are none."""
        ...


class StepModelReward:
    """Reward of a response that a model reduces from the scores of its steps.

    The reward of a step is the probability that it is right; algorithms that credit steps read it at the step's end.
    """

    def __init__(
        self,
        name: str,
        scorer: StepScorer,
        reduction: StepReduction,
        weight: float = 1.0,
        *,
        phase: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Store the model and how its scores become one reward.

        Args:
            name: of its one part.
            scorer: the model.
            reduction: of the scores of a response's steps.
            weight: of the model's head.
            phase: entered around every call: brings the model to its device, and away again.
        """
        self.name = name
        self._scorer = scorer
        self._reduction: StepReduction = reduction
        self._weight = weight
        self._phase = phase

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the reward's entries in the breakdown."""
        return (self.name,)

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        if not items:
            return []
        if any(item.media is not None for item in items):
            return [Score(None, RewardStatus.FAILED, detail="a step reward model reads no images")] * len(items)
        with self._phase():
            results = self._scorer.score_responses(
                [item.prompt_text for item in items],
                [item.messages for item in items],
                [item.response_text for item in items],
            )
        assert len(results) == len(items), f"{len(results)} scores for {len(items)} responses"
        return [self._score(steps) for steps in results]

    def close(self) -> None:
        """Do nothing: there are no processes to end."""

    def _score(self, steps: Sequence[tuple[int, float]] | str) -> Score:
        if isinstance(steps, str):
            return Score(None, RewardStatus.FAILED, detail=steps)
        logits_J = torch.tensor([logit for _, logit in steps], dtype=torch.float64)
        reduced = float(step_reward(logits_J, self._reduction))
        # a status: as a number it would spread over the whole group through its mean
        if not math.isfinite(reduced):
            return Score(None, RewardStatus.FAILED, detail=f"the reward model {self.name} gave {logits_J.tolist()}")
        rewards = (self._weight * logits_J.sigmoid()).tolist()
        ends = tuple((end, reward) for (end, _), reward in zip(steps, rewards, strict=True))
        return Score(self._weight * reduced, breakdown={self.name: reduced}, steps=ends)
