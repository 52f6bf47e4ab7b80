"""Prompts of an RL run in its store: opened, and what is known of them without a list of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rft.hub.download import ASIDE
from rft.tokenizing.kinds import StoredRowsText
from rft.tokenizing.prompts import PromptText, text_key
from rft.tokenizing.row_store import StoredRows, first_rows_of_sources, open_store, stored_sources
from rft.tokenizing.texts import all_too_long, held_out_note
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.columns import has_column
from rft_trainer.data.readers.rows import Row
from rft_trainer.data.row_forms import Keys, as_read
from rft_trainer.data.sources import unused_columns
from rft_trainer.data.store.prompts import StoredPrompts
from rft_trainer.settings.data import DataSettings

_LOG = logging.getLogger(__name__)
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class PlacedRow:
    """What rewards see of a stored prompt, and its place, which is looked up when it is told."""

    columns: Mapping[str, Any]
    source: str
    prompt_id: str
    stored: StoredRows

    @property
    def place(self) -> str:
        """Return file:line of the row."""
        return self.stored.row(self.prompt_id).where()


@dataclass(frozen=True, slots=True)
class StoredPromptRows:
    """The prompts of a run in a store."""

    stored: StoredRows
    prompts: StoredPrompts
    limit: int
    """Tokens that a prompt may have."""
    label_key: str
    """Column of the labels; empty where the rows have none."""
    unused: tuple[str, ...]
    """A sentence on each source that has columns which nothing reads."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return self.stored.longest

    def rows(self) -> Iterator[PlacedRow]:
        """Yield what rewards see of every prompt, in order."""
        return (PlacedRow(prompt.columns, prompt.source, prompt.prompt_id, self.stored) for prompt in self.prompts)

    def notes_on(self, held_out: Sequence[str]) -> tuple[str, ...]:
        """Return what a person should know, of held-out texts too."""
        keys = np.array([text_key(text) for text in held_out], np.uint64)
        shared = int(np.isin(keys, self.stored.samples.prompt_keys()).sum()) if held_out else 0
        return (*held_out_note(shared, len(held_out)), *self.unused)

    def lines(self) -> list[str]:
        """Return the lines of the plan."""
        lines, left_out = self.stored.lines(noun="prompts", longest="longest prompt"), self.stored.too_long
        if left_out:
            named = ", ".join(f"{name} ({length})" for name, length in left_out[:_MOST_NAMED])
            more = len(left_out) - _MOST_NAMED
            rest = f" and {more} more" if more > 0 else ""
            lines.append(f"left out, longer than {self.limit} tokens: {named}{rest}")
        return lines


def open_prompts(
    data: DataSettings, tokenizer: HfTokenizer, *, max_len: int, whole_rows: bool, needs_labels: bool
) -> StoredPromptRows:
    """Build what is missing of the store of prompts, and open it.

    Args:
        data: names the rows, their columns and the place of the store.
        tokenizer: makes their tokens.
        max_len: tokens that a prompt may have.
        whole_rows: whether rewards may read any column.
        needs_labels: whether a reward compares with labels; without it rows that all lack them have none.

    Raises:
        DataError: a row cannot be used, or none fits.
    """
    specs, rows = stored_sources(data), first_rows_of_sources(data)
    present = [list(row.fields) for row in rows]
    lacking = ["" if needs_labels else _lacking(row, data) for row in rows]
    label_key = "" if any(lacking) else data.label_key
    text = PromptText(
        sources=[spec.name for spec in specs],
        present=present,
        input_key=data.input_key,
        label_key=label_key,
        absent=lacking,
        whole_rows=whole_rows,
        input_template=data.input_template,
        system_prompt=data.system_prompt,
        apply_chat_template=data.apply_chat_template,
        max_len=max_len,
    )
    unused: list[str] = []
    for number, (spec, row) in enumerate(zip(specs, rows, strict=True)):
        read = text.read(number, [row])
        if read.note:
            _LOG.info("%s: %s", spec.name, read.note, extra=ASIDE)
        note = "" if read.note or whole_rows else unused_columns(read)
        unused += [f"{spec.name}: {note}"] if note else []
    stored = open_store(
        data, tokenizer, StoredRowsText("prompts", text), lambda too_long, _: all_too_long(too_long, max_len)
    )
    return StoredPromptRows(stored, StoredPrompts(stored.samples), max_len, label_key, tuple(unused))


def _lacking(row: Row, data: DataSettings) -> str:
    """Return the column of labels that a source should have and its first row lacks; empty where it has it."""
    read = as_read([row], Keys(data.input_key, data.label_key))
    label = read.keys.label
    return label if label and not has_column(read.rows[0].fields, label) else ""
