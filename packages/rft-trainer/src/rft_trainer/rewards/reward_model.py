"""A reward model of this process as a reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.images import Images, files_of


class TextScorer(Protocol):
    """A model that scores texts, as the reward sees it."""

    @property
    def heads(self) -> Sequence[str]: ...

    def score(
        self,
        prompts: Sequence[str],
        messages: Sequence[Sequence[Mapping[str, Any]]],
        responses: Sequence[str],
        images: Sequence[Images] | None = None,
    ) -> Sequence[Mapping[str, float] | str]:
        """A number for each head, or the reason why there is none, for each pair.

        `images` are the encoded images of each prompt, which has a marker (`rft_trainer.data.images.MARKER`) or a part
        of a message in the place of each; a response takes none, whatever it spells. None: no prompt has any.
        """
        ...


class ModelReward:
    """The weighted sum of a model's heads.

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
        """
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
        """Names in the breakdown."""
        return tuple(self._parts.values())

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        if not items:
            return []
        with self._phase():
            found = self._scorer.score(
                [item.prompt_text for item in items],
                [item.messages for item in items],
                [item.response_text for item in items],
                **({} if all(item.media is None for item in items) else {"images": files_of(items)}),
            )
        assert len(found) == len(items), f"{len(found)} scores for {len(items)} responses"
        return [self._score(scores) for scores in found]

    def close(self) -> None:
        """Nothing to end."""

    def _score(self, scores: Mapping[str, float] | str) -> Score:
        if isinstance(scores, str):
            return Score(None, RewardStatus.FAILED, detail=scores)
        value = sum(self._weights[head] * scores[head] for head in self._parts)
        if not math.isfinite(value):
            return Score(None, RewardStatus.FAILED, detail=f"the reward model {self.name} gave {dict(scores)}")
        return Score(value, breakdown={part: scores[head] for head, part in self._parts.items()})
