"""Pairs of responses as tokens, a block of rows at a time: the samples that a run without a store makes one by one."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rft.tokenizing.texts import encoded, named, prompt_tokens
from rft_core.errors import DataError
from rft_models.reward_model.text import ended, reward_text, shared_length
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.preference_rows.preference_columns import PreferenceKeys
from rft_trainer.data.preference_rows.preferences import PreferencePair, pairs_from_rows
from rft_trainer.data.prompts import PromptRow
from rft_trainer.data.readers.rows import Row
from rft_trainer.data.rendering import PromptRenderer
from rft_trainer.data.store.build import Tokenized
from rft_trainer.data.store.token_columns import columns_of
from rft_trainer.records.pairs import EQUAL, FIRST_IS_BETTER, PairLabel

EQUAL_RESPONSES, TIES, CHOSEN_LONGER = "equal", "ties", "chosen_longer"
"""Counts of pairs: left out since both responses are the same text; judged equal; with more characters in the chosen
response."""


@dataclass(frozen=True, slots=True)
class PairText:
    """The settings that the tokens of pairs follow from, beside the tokenizer."""

    sources: Sequence[str]
    """Names of the sources."""
    keys: Sequence[Mapping[str, Any]]
    """Of each source the columns that are read, as the fields of `PreferenceKeys`."""
    max_len: int
    chat: bool
    """Whether texts of hh-rlhf become messages."""
    input_template: str = ""
    system_prompt: str = ""
    apply_chat_template: bool = False

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> PairText:
        """Return the settings that came as JSON."""
        return cls(**record)

    def keys_of(self, source: int) -> PreferenceKeys:
        """Return the columns of a source."""
        fields: dict[str, Any] = {**self.keys[source]}
        # JSON has lists alone
        fields["outcomes"] = tuple(fields["outcomes"])
        return PreferenceKeys(**fields)


class _Pairs(ABC):
    """Tokeniser of rows of pairs: two samples a pair, chosen before rejected."""

    def __init__(self, text: PairText, tokenizer: HfTokenizer) -> None:
        self._text, self._tokenizer = text, tokenizer

    def __call__(self, source: int, rows: Sequence[Row], first: int) -> Tokenized:
        """Return the samples of rows, the first of which has the number `first` in its source.

        Raises:
            DataError: a row cannot be used; it is named with its file and line.
        """
        text = self._text
        read = pairs_from_rows(
            rows, source=text.sources[source], keys=text.keys_of(source), chat=text.chat, first=first
        )
        # equal responses say nothing of what is better
        pairs = [pair for pair in read if pair.chosen != pair.rejected]
        made = self._tokens(pairs) if pairs else []
        longest = [max(len(chosen), len(rejected)) for chosen, rejected, _ in made]
        kept = [number for number, length in enumerate(longest) if length <= text.max_len]
        too_long = [
            (pair.pair_id, length) for pair, length in zip(pairs, longest, strict=True) if length > text.max_len
        ]
        fitting = [pairs[number] for number in kept]
        numbers, prompt_keys = self._labels(fitting)
        columns = columns_of(
            [pair.prompt.index for pair in fitting for _ in (0, 1)],
            [made[number][2] for number in kept for _ in (0, 1)],
            [self._weight(pair) for pair in fitting for _ in (0, 1)],
            [ids for number in kept for ids in made[number][:2]],
            [()] * (2 * len(kept)),
            np.repeat(numbers, 2, axis=0),
            np.repeat(prompt_keys, 2),
        )
        counts = {
            EQUAL_RESPONSES: len(read) - len(pairs),
            TIES: sum(EQUAL in pair.outcomes for pair in fitting),
            CHOSEN_LONGER: sum(len(pair.chosen) > len(pair.rejected) for pair in fitting),
        }
        return Tokenized(columns, too_long, counts)

    @abstractmethod
    def _tokens(self, pairs: Sequence[PreferencePair]) -> list[tuple[list[int], list[int], int]]:
        """Return of each pair (tokens with the chosen response, with the rejected one, tokens of the prompt)."""

    @abstractmethod
    def _labels(self, pairs: Sequence[PreferencePair]) -> tuple[Any, Any]:
        """Return (numbers [P, K] float64 that the loss reads, hashes [P] uint64 of the prompts)."""

    @abstractmethod
    def _weight(self, pair: PreferencePair) -> float:
        """Return the factor on the loss of a pair, as a sample of it has it."""


class PreferenceTokens(_Pairs):
    """Tokeniser of the pairs of `dpo`: the prompt's tokens, those of each response, and the end token."""

    def __init__(self, text: PairText, tokenizer: HfTokenizer) -> None:
        super().__init__(text, tokenizer)
        self._renderer = PromptRenderer(
            tokenizer,
            input_template=text.input_template or None,
            system_prompt=text.system_prompt or None,
            apply_chat_template=text.apply_chat_template,
            add_special_tokens=not text.apply_chat_template,
        )

    def _tokens(self, pairs: Sequence[PreferencePair]) -> list[tuple[list[int], list[int], int]]:
        prompts = [pair.prompt for pair in pairs]
        end = list(self._tokenizer.eos_ids[:1])
        asked = prompt_tokens(self._renderer, self._tokenizer, prompts)
        # responses are encoded apart, so that the prompt has the tokens that it has when they are sampled
        chosen = encoded(self._tokenizer, prompts, [pair.chosen for pair in pairs], special=False)
        rejected = encoded(self._tokenizer, prompts, [pair.rejected for pair in pairs], special=False)
        return [
            ([*ids, *better, *end], [*ids, *worse, *end], len(ids))
            for ids, better, worse in zip(asked, chosen, rejected, strict=True)
        ]

    def _labels(self, pairs: Sequence[PreferencePair]) -> tuple[Any, Any]:
        margins = np.array([pair.margin for pair in pairs], np.float64).reshape(-1, 1)
        return margins, np.zeros(len(pairs), np.uint64)

    def _weight(self, pair: PreferencePair) -> float:
        return pair.weight


class RewardPairTokens(_Pairs):
    """Tokeniser of the pairs of `rm`: both texts as a reward model reads them."""

    def _tokens(self, pairs: Sequence[PreferencePair]) -> list[tuple[list[int], list[int], int]]:
        texts: list[str] = []
        prompts = [pair.prompt for pair in pairs for _ in (0, 1)]
        for pair in pairs:
            with named(pair.prompt):
                texts += reward_texts(self._tokenizer, pair)
        special = not self._tokenizer.has_chat_template
        rows = [ended(self._tokenizer, ids) for ids in encoded(self._tokenizer, prompts, texts, special=special)]
        # what both texts begin with alike counts as the prompt
        return [
            (chosen, rejected, shared_length((chosen, rejected)))
            for chosen, rejected in zip(rows[::2], rows[1::2], strict=True)
        ]

    def _labels(self, pairs: Sequence[PreferencePair]) -> tuple[Any, Any]:
        num_outcomes = max(len(self._text.keys_of(0).outcomes), 1)
        labels = [PairLabel(pair.outcomes or (FIRST_IS_BETTER,), pair.margin, pair.weight) for pair in pairs]
        numbers = np.array([label.as_numbers() for label in labels], np.float64).reshape(-1, 2 + num_outcomes)
        return numbers, np.array([prompt_key(pair.prompt) for pair in pairs], np.uint64)

    def _weight(self, pair: PreferencePair) -> float:
        del pair  # stands in the numbers that the loss reads
        return 1.0


def reward_texts(tokenizer: HfTokenizer, pair: PreferencePair) -> list[str]:
    """Return the texts with the chosen and with the rejected response, as a reward model reads them.

    Raises:
        DataError: as `refuse_messages` does, or the template refuses the messages.
    """
    refuse_messages(tokenizer, pair.prompt)
    messages = [message.as_dict() for message in pair.prompt.messages or ()]
    return [
        reward_text(tokenizer, pair.prompt.text or "", messages, response) for response in (pair.chosen, pair.rejected)
    ]


def refuse_messages(tokenizer: HfTokenizer, prompt: PromptRow) -> None:
    """Raise `DataError` for a conversation, where the tokenizer has no chat template."""
    if prompt.messages and not tokenizer.has_chat_template:
        raise DataError(
            code="data.no_template",
            what="the prompt is a conversation, and the model's tokenizer has no chat template",
            where=prompt.prompt_id,
            why="only a template turns the turns of a conversation into one text",
            do="take a model with a chat template, or give the prompt as text",
        )


def prompt_key(prompt: PromptRow) -> int:
    """Return 64 bits of the SHA-256 of a prompt: pairs of one prompt have one number."""
    turns = [[turn.role, turn.content, dict(turn.others), turn.learned] for turn in prompt.messages or ()]
    record = json.dumps([prompt.text, turns], sort_keys=True)
    return int.from_bytes(hashlib.sha256(record.encode()).digest()[:8], "big")
