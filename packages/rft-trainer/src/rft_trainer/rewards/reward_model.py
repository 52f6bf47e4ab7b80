"""Reward from a reward model in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from rft_algos.rewards.step_scores import StepReduction, step_reward
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.images import Images, files_of


class TextScorer(Protocol):
    """Protocol of a model that scores texts."""

    @property
    def heads(self) -> Sequence[str]: ...

    def score(
        self,
        prompts: Sequence[str],
        messages: Sequence[Sequence[Mapping[str, Any]]],
        responses: Sequence[str],
        images: Sequence[Images] | None = None,
    ) -> Sequence[Mapping[str, float] | str]:
        """Score each pair: a number for each head, or the reason why there is none.

        `images` are the encoded images of each prompt, which has a marker (`rft_trainer.data.images.MARKER`) or a part
        of a message in the place of each; a response takes none, whatever it spells. None: no prompt has any.
        """
        ...


class ModelReward:
    """Reward that is the weighted sum of a model's heads.

    The parts are the heads, before their weights: `name` where there is one, `name/head` where there are several.
    """

    def __init__(
        self,
        name: str,
        scorer: TextScorer,
        weights: Mapping[str, float],
        *,
        phase: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Store the model and the weights of its heads.

        Args:
            name: of its parts.
            scorer: the model.
            weights: of each head.
            phase: entered around every call: brings the model to its device, and away again.
        """
        self.name = name
        self._scorer = scorer
        self._phase = phase
        heads = tuple(scorer.heads)
        self._parts = {head: name if len(heads) == 1 else f"{name}/{head}" for head in heads}
        self._weights = {head: weights[head] for head in heads}

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the reward's entries in the breakdown."""
        return tuple(self._parts.values())

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        if not items:
            return []
        with self._phase():
            results = self._scorer.score(
                [item.prompt_text for item in items],
                [item.messages for item in items],
                [item.response_text for item in items],
                **({} if all(item.media is None for item in items) else {"images": files_of(items)}),
            )
        assert len(results) == len(items), f"{len(results)} scores for {len(items)} responses"
        return [self._score(scores) for scores in results]

    def close(self) -> None:
        """Do nothing: there are no processes to end."""

    def _score(self, scores: Mapping[str, float] | str) -> Score:
        if isinstance(scores, str):
            return Score(None, RewardStatus.FAILED, detail=scores)
        value = sum(self._weights[head] * scores[head] for head in self._parts)
        # a status: as a number it would spread over the whole group through its mean
        if not math.isfinite(value):
            return Score(None, RewardStatus.FAILED, detail=f"the reward model {self.name} gave {dict(scores)}")
        return Score(value, breakdown={part: scores[head] for head, part in self._parts.items()})


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
