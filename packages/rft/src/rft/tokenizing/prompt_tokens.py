"""Prompts to answer as tokens with what rewards see, a block of rows at a time: those of a run without a store."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rft.tokenizing.texts import texts_and_tokens
from rft_core.errors import DataError
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.columns import has_column
from rft_trainer.data.prompts import PromptRow, content_records, prompts_from_rows
from rft_trainer.data.readers.rows import Row
from rft_trainer.data.rendering import PromptRenderer
from rft_trainer.data.row_forms import Keys, ReadRows, as_read
from rft_trainer.data.store.build import Tokenized
from rft_trainer.data.store.prompt_records import prompt_record
from rft_trainer.data.store.token_columns import columns_of


@dataclass(frozen=True, slots=True)
class PromptText:
    """The settings that the tokens of prompts follow from, beside the tokenizer."""

    sources: Sequence[str]
    """Names of the sources."""
    present: Sequence[Sequence[str]]
    """Columns of the first row of each source, by which the form of its rows is known."""
    input_key: str
    label_key: str
    """Column of the labels; empty = rows without labels."""
    absent: Sequence[str]
    """Of each source the column of labels that none of its rows has; empty where it is not asked for."""
    whole_rows: bool
    """Whether rewards may read any column."""
    input_template: str
    system_prompt: str
    apply_chat_template: bool
    max_len: int

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> PromptText:
        """Return the settings that came as JSON."""
        return cls(**record)

    def read(self, source: int, rows: Sequence[Row]) -> ReadRows:
        """Return rows as the columns of their source say."""
        return as_read(rows, Keys(self.input_key, self.label_key), present=self.present[source])


def text_key(text: str) -> int:
    """Return 64 bits of the SHA-256 of a rendered prompt, by which it is found among others."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8], "big")


class PromptTokens:
    """Tokeniser of prompts that a policy answers; with `hashes_rows` it tells what their hash in memory is of."""

    def __init__(self, text: PromptText, tokenizer: HfTokenizer, *, hashes_rows: bool = False) -> None:
        self._text, self._tokenizer, self._hashes_rows = text, tokenizer, hashes_rows
        self._renderer = PromptRenderer(
            tokenizer,
            input_template=text.input_template or None,
            system_prompt=text.system_prompt or None,
            apply_chat_template=text.apply_chat_template,
            add_special_tokens=not text.apply_chat_template,
        )

    def __call__(self, source: int, rows: Sequence[Row], first: int) -> Tokenized:
        """Return the prompts of rows, the first of which has the number `first` in its source.

        Raises:
            DataError: a row cannot be used; it is named with its file and line.
        """
        text = self._text
        if text.absent[source]:
            _refuse_labels(rows, text.absent[source], text.sources[source])
        read = text.read(source, rows)
        prompts = prompts_from_rows(
            read.rows,
            source=text.sources[source],
            input_key=read.keys.input,
            label_key=read.keys.label,
            whole_rows=text.whole_rows,
            first=first,
        )
        texts, token_ids = texts_and_tokens(self._renderer, self._tokenizer, prompts)
        kept = [row for row, ids in enumerate(token_ids) if len(ids) <= text.max_len]
        columns = columns_of(
            [prompts[row].index for row in kept],
            [len(token_ids[row]) for row in kept],
            [1.0] * len(kept),
            [token_ids[row] for row in kept],
            [()] * len(kept),
            prompt_key=np.array([text_key(texts[row]) for row in kept], np.uint64),
            records=[self._record(prompts[row], texts[row]) for row in kept],
        )
        too_long = [
            (prompt.prompt_id, len(ids))
            for prompt, ids in zip(prompts, token_ids, strict=True)
            if len(ids) > text.max_len
        ]
        content = content_records(prompts[row] for row in kept) if self._hashes_rows else None
        return Tokenized(columns, too_long, {}, content)

    def _record(self, prompt: PromptRow, text: str) -> bytes:
        return prompt_record(text, prompt.label, self._renderer.messages(prompt), prompt.columns)


def _refuse_labels(rows: Sequence[Row], label_key: str, source: str) -> None:
    """Refuse a row with a label in a source whose first row has none, where no reward compares with labels."""
    for row in rows:
        if has_column(row.fields, label_key):
            raise DataError(
                code="data.label_in_some_rows",
                what=f"the row has the field {label_key}, and the first row of {source} lacks it",
                where=row.where(label_key),
                why="the field that --label_key names is in every row of a source, or in none",
                do=f"take {label_key} out of the rows of {source}, or give it to all",
            )
