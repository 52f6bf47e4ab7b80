"""The plain kind of samples: one response a prompt and key, scored by a reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rft_trainer.async_rollouts.partial_rollout import Draft
from rft_trainer.async_rollouts.protocols import SampleDraft
from rft_trainer.protocols import ResponseDecoder
from rft_trainer.records.rollouts import Prompt, Rollout
from rft_trainer.rollouts.collector import RewardFunction, score_rollouts


class SingleResponses:
    """A `SampleKind` whose samples ask nothing."""

    answers = 0

    def __init__(self, decoder: ResponseDecoder, reward: RewardFunction, max_new_tokens: int) -> None:
        self._decoder, self._reward, self._budget = decoder, reward, max_new_tokens

    def begin(self, prompt: Prompt, keys: Sequence[int]) -> list[SampleDraft]:
        """See `SampleKind`."""
        del prompt
        return [Draft(key, self._budget) for key in keys]

    def restore(self, prompt: Prompt, keys: Sequence[int], states: Sequence[Mapping[str, Any]]) -> list[SampleDraft]:
        """See `SampleKind`; the keys are in the states."""
        del prompt, keys
        return [Draft.of(state) for state in states]

    def answer(self, drafts: Sequence[SampleDraft]) -> Callable[[], None]:
        """Never called: a response asks nothing."""
        raise AssertionError(f"{len(drafts)} single responses ask")

    def rollouts(self, groups: Sequence[tuple[Prompt, Sequence[SampleDraft]]]) -> list[list[Rollout]]:
        """See `SampleKind`."""
        own = [[draft for draft in drafts if isinstance(draft, Draft)] for _, drafts in groups]
        texts = iter(self._decoder.decode_batch([draft.token_ids for drafts in own for draft in drafts]))
        prompts = [prompt for prompt, _ in groups]
        sampled = [
            [draft.rollout(prompt, index, next(texts)) for index, draft in enumerate(drafts)]
            for prompt, drafts in zip(prompts, own, strict=True)
        ]
        return score_rollouts(self._reward, prompts, sampled, self._decoder)
