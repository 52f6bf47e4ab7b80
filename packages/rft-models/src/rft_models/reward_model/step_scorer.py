"""Steps of responses as text, scored by a step reward model with its own tokenizer and chat template.

A response is divided at the separator of the model's spec, and its tokens are those of the training (`step_encoding`).
A response that is longer than the model places, or has no step, has no scores; it is never cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rft_core.errors import DataError
from rft_core.packed_tokens import PackedTokens
from rft_models.reward_model.model import RewardModel
from rft_models.reward_model.scorer import batches_within
from rft_models.reward_model.step_encoding import StepText, StepTextEncoder, split_steps
from rft_models.reward_model.text import Messages


class StepTextScorer:
    """Scores of the steps of responses, packed up to `max_tokens` a forward."""

    def __init__(self, model: RewardModel, *, max_tokens: int = 8192) -> None:
        """Set up scoring by one step reward model.

        Args:
            model: in eval mode, with a tokenizer and steps in its spec.
            max_tokens: tokens of a forward; a longer text runs alone.
        """
        steps, tokenizer = model.spec.steps, model.tokenizer
        assert steps is not None, "a reward model of whole texts has RewardTextScorer"
        assert tokenizer is not None, "a reward model without a tokenizer scores token ids only"
        self.model = model
        self.steps = steps
        self._encoder = StepTextEncoder(tokenizer, steps)
        self._max_tokens = max_tokens

    def score_responses(
        self, prompts: Sequence[str], messages: Sequence[Messages], responses: Sequence[str]
    ) -> list[list[tuple[int, float]] | str]:
        """Compute (characters of the response up to the end of a step, its score) of every step of each response.

        A score is a logit. Of a response that has none the reason is returned.

        Args:
            prompts: the prompts as the policy saw them, used where the tokenizer has no chat template.
            messages: the prompts as conversations; empty for a prompt that is plain text.
            responses: texts without special tokens.
        """
        divided = [split_steps(response, self.steps.separator) for response in responses]
        scores = self.score_steps(prompts, messages, [[step for step, _ in steps] for steps in divided])
        return [
            row if isinstance(row, str) else [(end, score) for (_, end), score in zip(steps, row, strict=True)]
            for steps, row in zip(divided, scores, strict=True)
        ]

    @torch.no_grad()
    def score_steps(
        self, prompts: Sequence[str], messages: Sequence[Messages], steps: Sequence[Sequence[str]]
    ) -> list[list[float] | str]:
        """Compute a score, a logit, for each of the given steps, or return the reason why there are none."""
        rows = [self._encoded(*row) for row in zip(prompts, messages, steps, strict=True)]
        results: list[list[float] | str] = [row if isinstance(row, str) else [] for row in rows]
        texts = {index: row for index, row in enumerate(rows) if not isinstance(row, str)}
        for batch in batches_within({index: len(text.token_ids) for index, text in texts.items()}, self._max_tokens):
            logits = self._forward([texts[index] for index in batch])
            for index in batch:
                count = len(texts[index].ends)
                results[index], logits = logits[:count], logits[count:]
        return results

    def _encoded(self, prompt: str, messages: Messages, steps: Sequence[str]) -> StepText | str:
        if not steps:
            return "the response has no step"
        try:
            text = self._encoder.encode(prompt, messages, steps)
        except DataError as error:
            return f"the reward model cannot read it: {error.problem.what}"
        limit = self.model.max_positions
        if limit and len(text.token_ids) > limit:
            return f"{len(text.token_ids)} tokens, but the reward model takes at most {limit}"
        return text

    def _forward(self, texts: Sequence[StepText]) -> list[float]:
        """Return the scores of the steps of all texts, one after another."""
        device = self.model.device
        lengths = torch.tensor([len(text.token_ids) for text in texts])
        positions_T = torch.cat([torch.arange(len(text.token_ids)) for text in texts])
        ends_T = torch.zeros(len(positions_T), dtype=torch.bool)
        for start, text in zip((lengths.cumsum(0) - lengths).tolist(), texts, strict=True):
            ends_T[[start + end for end in text.ends]] = True
        packed = PackedTokens(
            torch.tensor([token for text in texts for token in text.token_ids], device=device),
            positions_T.to(device),
            torch.repeat_interleave(torch.arange(len(texts)), lengths).to(device),
            ends_T.to(device),
        )
        return self.model.step_scores(packed).tolist()
