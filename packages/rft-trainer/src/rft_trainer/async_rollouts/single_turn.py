"""Single-turn samples: one response a prompt and key, scored by a reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rft_trainer.async_rollouts.partial_rollout import PartialSample
from rft_trainer.async_rollouts.protocols import PartialRollout
from rft_trainer.protocols import ResponseDecoder
from rft_trainer.records.rollouts import Prompt, Rollout
from rft_trainer.rollouts.collector import RewardFunction, score_rollouts


class SingleResponses:
    """The `RolloutType` of single-turn samples, which need no answers."""

    answers = 0

    def __init__(self, decoder: ResponseDecoder, reward: RewardFunction, max_new_tokens: int) -> None:
        self._decoder, self._reward, self._budget = decoder, reward, max_new_tokens

    def begin(self, prompt: Prompt, keys: Sequence[int]) -> list[PartialRollout]:
        """Begin one sample a key, as `RolloutType.begin`."""
        del prompt
        return [PartialSample(key, self._budget) for key in keys]

    def restore(self, prompt: Prompt, keys: Sequence[int], states: Sequence[Mapping[str, Any]]) -> list[PartialRollout]:
        """Restore samples from their states, which hold the keys, as `RolloutType.restore`."""
        del prompt, keys
        return [PartialSample.of(state) for state in states]

    def answer(self, drafts: Sequence[PartialRollout]) -> Callable[[], None]:
        """Raise `AssertionError`: a single response needs no answer."""
        raise AssertionError(f"{len(drafts)} single responses ask")

    def rollouts(self, groups: Sequence[tuple[Prompt, Sequence[PartialRollout]]]) -> list[list[Rollout]]:
        """Decode and score whole samples, as `RolloutType.rollouts`."""
        own = [[draft for draft in drafts if isinstance(draft, PartialSample)] for _, drafts in groups]
        # one call for all groups, consumed below in the same order
        texts = iter(self._decoder.decode_batch([draft.token_ids for drafts in own for draft in drafts]))
        prompts = [prompt for prompt, _ in groups]
        sampled = [
            [draft.rollout(prompt, index, next(texts)) for index, draft in enumerate(drafts)]
            for prompt, drafts in zip(prompts, own, strict=True)
        ]
        return score_rollouts(self._reward, prompts, sampled, self._decoder)
