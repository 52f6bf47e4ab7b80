"""Demonstrations as tokens, a block of rows at a time: the samples that a run without a store makes one by one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rft.hub.download import ASIDE
from rft.tokenizing.texts import encoded, named, prompt_tokens
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.prompts import PromptRow, content_records, prompts_from_rows
from rft_trainer.data.readers.rows import Row
from rft_trainer.data.rendering import PromptRenderer
from rft_trainer.data.row_forms import Keys, as_read
from rft_trainer.data.store.build import Tokenized
from rft_trainer.data.store.token_columns import columns_of
from rft_trainer.data.turn_masks import TrainedTurns

_LOG = logging.getLogger(__name__)

WEIGHTLESS = "weightless"
"""Count of rows of weight 0, which are left out."""


@dataclass(frozen=True, slots=True)
class StoredText:
    """The settings that tokens follow from, beside the tokenizer."""

    sources: Sequence[str]
    """Names of the sources."""
    input_key: str
    output_key: str
    weight_key: str
    input_template: str
    system_prompt: str
    apply_chat_template: bool
    roles: Sequence[str]
    last_only: bool
    max_len: int

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> StoredText:
        """Return the settings that came as JSON."""
        return cls(**record)

    def renderer(self, tokenizer: HfTokenizer) -> PromptRenderer:
        """Return the way from a row to text; rows of a store have no images."""
        return PromptRenderer(
            tokenizer,
            input_template=self.input_template or None,
            system_prompt=self.system_prompt or None,
            apply_chat_template=self.apply_chat_template,
            add_special_tokens=not self.apply_chat_template,
            turns=TrainedTurns(tuple(self.roles), last_only=self.last_only),
        )


class Demonstrations:
    """Tokeniser of rows: prompt, response and end token; or whole conversations, some turns of which are learned.

    With `hashes_rows` it tells what the hash of the rows in memory is of.
    """

    def __init__(self, text: StoredText, tokenizer: HfTokenizer, *, hashes_rows: bool = False) -> None:
        self._text, self._tokenizer, self._hashes_rows = text, tokenizer, hashes_rows
        self._renderer = text.renderer(tokenizer)

    def __call__(self, source: int, rows: Sequence[Row], first: int) -> Tokenized:
        """Return the samples of rows, the first of which has the number `first` in its source.

        Raises:
            DataError: a row cannot be used; it is named with its file and line.
        """
        text = self._text
        read = as_read(rows, Keys(text.input_key, None, text.output_key), conversations=True)
        if read.note and not first:
            _LOG.info("%s: %s", text.sources[source], read.note, extra=ASIDE)
        prompts = prompts_from_rows(
            read.rows,
            source=text.sources[source],
            input_key=read.keys.input,
            output_key=read.keys.output,
            conversations=read.conversations,
            weight_key=text.weight_key or None,
            first=first,
        )
        made = self._conversations(prompts) if read.conversations else self._responses(prompts)
        token_ids, prompt_lengths, _ = made
        # as in memory: a row counts there where its prompt fits, and is left out later where its response does not
        lengths = map(len, token_ids) if read.conversations else prompt_lengths
        used = (prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= text.max_len)
        return self._fitting(prompts, *made, content=content_records(used) if self._hashes_rows else None)

    def _fitting(
        self,
        prompts: Sequence[PromptRow],
        token_ids: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        masks: Sequence[Sequence[bool]],
        content: bytes | None,
    ) -> Tokenized:
        limit = self._text.max_len
        too_long = [
            (prompt.prompt_id, len(ids)) for prompt, ids in zip(prompts, token_ids, strict=True) if len(ids) > limit
        ]
        kept = [row for row, prompt in enumerate(prompts) if prompt.weight > 0 and len(token_ids[row]) <= limit]
        columns = columns_of(
            [prompts[row].index for row in kept],
            [prompt_lengths[row] for row in kept],
            [prompts[row].weight for row in kept],
            [token_ids[row] for row in kept],
            [masks[row] for row in kept],
        )
        weightless = len(prompts) - len(kept) - len(too_long)
        return Tokenized(columns, too_long, {WEIGHTLESS: weightless}, content)

    def _responses(self, prompts: Sequence[PromptRow]) -> tuple[list[list[int]], list[int], list[Sequence[bool]]]:
        end = list(self._tokenizer.eos_ids[:1])
        asked = prompt_tokens(self._renderer, self._tokenizer, prompts)
        # the response is encoded apart, so that the prompt has the tokens that it has when responses are sampled
        answers = encoded(self._tokenizer, prompts, [prompt.output or "" for prompt in prompts], special=False)
        token_ids = [[*one, *other, *end] for one, other in zip(asked, answers, strict=True)]
        return token_ids, [len(ids) for ids in asked], [()] * len(prompts)

    def _conversations(
        self, prompts: Sequence[PromptRow]
    ) -> tuple[list[tuple[int, ...]], list[int], list[Sequence[bool]]]:
        token_ids: list[tuple[int, ...]] = []
        prompt_lengths: list[int] = []
        masks: list[Sequence[bool]] = []
        for prompt in prompts:
            with named(prompt):
                rendered = self._renderer.render(prompt)
            # what stands before the first learned token is the prompt
            first = rendered.learned.index(True)
            mask = rendered.learned[first:]
            token_ids.append(rendered.token_ids)
            prompt_lengths.append(first)
            masks.append(() if all(mask) else mask)
        return token_ids, prompt_lengths, masks
