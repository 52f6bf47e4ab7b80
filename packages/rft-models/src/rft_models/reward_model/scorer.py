"""Prompts and responses as text, scored by a reward model with its own tokenizer and chat template.

The policy's tokens mean nothing here: two tokenizers share no ids, and a template's turns are what the reward model
was trained on (`encoding`). A text ends as those of its training do, also where the policy was cut off. A text that
is longer than the model places has no score; it is never cut.

A reward model that takes images sees those of the prompt through its own processor; a response has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch

from rft_core.errors import DataError
from rft_core.packed_tokens import PackedTokens
from rft_models.reward_model.encoding import Images, RewardTextEncoder
from rft_models.reward_model.model import RewardModel
from rft_models.reward_model.text import Messages, shared_length
from rft_models.vision.media import Media


class RewardTextScorer:
    """Scores of prompt and response pairs, packed up to `max_tokens` a forward."""

    def __init__(self, model: RewardModel, *, max_tokens: int = 8192) -> None:
        """Set up scoring by one reward model.

        Args:
            model: in eval mode, with a tokenizer.
            max_tokens: tokens of a forward; a longer text runs alone.
        """
        assert model.tokenizer is not None, "a reward model without a tokenizer scores token ids only"
        self.model = model
        self._encoder = RewardTextEncoder(model.tokenizer)
        self._max_tokens = max_tokens

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the scores."""
        return self.model.spec.heads

    @torch.no_grad()
    def score(
        self,
        prompts: Sequence[str],
        messages: Sequence[Messages],
        responses: Sequence[str],
        images: Sequence[Images] | None = None,
    ) -> list[dict[str, float] | str]:
        """Compute one score a head for each pair, or return the reason why there is none.

        Args:
            prompts: the prompts as the policy saw them, used where the tokenizer has no chat template.
            messages: the prompts as conversations; empty for a prompt that is plain text.
            responses: texts without special tokens.
            images: files of each prompt's images, in the order of their places; None: no prompt has any.
        """
        seen = images if images is not None else [()] * len(prompts)
        rows = [self._encoded(*row) for row in zip(prompts, messages, responses, seen, strict=True)]
        results: list[dict[str, float] | str] = [row if isinstance(row, str) else {} for row in rows]
        texts = {index: row for index, row in enumerate(rows) if not isinstance(row, str)}
        lengths = {index: len(ids) for index, (ids, _) in texts.items()}
        for batch in batches_within(lengths, self._max_tokens):
            asked = [(prompts[index], seen[index]) for index in batch]
            shared = shared_lengths([texts[index][0] for index in batch], asked)
            for index, scores in zip(batch, self._forward([texts[index] for index in batch], shared), strict=True):
                results[index] = scores
        return results

    def token_ids(self, prompt: str, messages: Messages, response: str) -> list[int]:
        """Encode the pair as the reward model reads it, for a prompt without images.

        Raises:
            DataError: its tokenizer or template cannot take the text.
        """
        return self.encode(prompt, messages, response)[0]

    def encode(
        self, prompt: str, messages: Messages, response: str, images: Images = ()
    ) -> tuple[list[int], Media | None]:
        """Encode the pair as the reward model reads it, and its images.

        Raises:
            DataError: its tokenizer, template or image processor cannot take it.
        """
        return self._encoder.encode(prompt, messages, response, images)

    def _encoded(
        self, prompt: str, messages: Messages, response: str, images: Images
    ) -> tuple[list[int], Media | None] | str:
        if images and not self._encoder.takes_images:
            return "the reward model takes no images"
        try:
            ids, media = self.encode(prompt, messages, response, images)
        except DataError as error:
            return f"the reward model cannot read it: {error.problem.what}"
        limit = self.model.max_positions
        if limit and len(ids) > limit:
            return f"{len(ids)} tokens, but the reward model takes at most {limit}"
        return (ids, media) if ids else "the text has no tokens"

    def _forward(
        self, texts: Sequence[tuple[Sequence[int], Media | None]], shared: Sequence[int]
    ) -> list[dict[str, float]]:
        device = self.model.device
        rows, media = [ids for ids, _ in texts], tuple(one for _, one in texts)
        lengths = torch.tensor([len(row) for row in rows])
        segments_T = torch.repeat_interleave(torch.arange(len(rows)), lengths)
        positions_T = torch.cat([torch.arange(len(row)) for row in rows])
        # given as targets, though nothing is predicted: what neighbours share before the first one runs once
        own_T = positions_T >= torch.tensor(shared)[segments_T]
        packed = PackedTokens(
            torch.tensor([token for row in rows for token in row], device=device),
            positions_T.to(device),
            segments_T.to(device),
            own_T.to(device),
            mm_inputs=media if any(media) else None,
        )
        scores = self.model.scores(packed)
        columns = [scores[name].tolist() for name in self.heads]
        return [dict(zip(self.heads, row, strict=True)) for row in zip(*columns, strict=True)]


def batches_within(num_tokens: Mapping[int, int], max_tokens: int) -> list[list[int]]:
    """Group indices in order, as many a forward as fit into `max_tokens`; a longer text runs alone."""
    batches: list[list[int]] = []
    room = 0
    for index, length in num_tokens.items():
        if not batches or length > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(index)
        room -= length
    return batches


def shared_lengths(rows: Sequence[Sequence[int]], prompts: Sequence[object]) -> list[int]:
    """Count for each row the first tokens that neighbours with its prompt share; below its own length."""
    shared: list[int] = []
    for _, run in groupby(zip(prompts, rows, strict=True), key=lambda pair: pair[0]):
        listed = [row for _, row in run]
        shared += [shared_length(listed) if len(listed) > 1 else 0] * len(listed)
    return shared
