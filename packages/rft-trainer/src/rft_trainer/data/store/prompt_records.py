"""Prompts in a store: their tokens, and beside them text, label and the columns that rewards see."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, overload

from rft_core.json_records import compiled_encoder
from rft_trainer.data.store.samples import StoredSamples
from rft_trainer.records.rollouts import Prompt

_ENCODE = compiled_encoder(ensure_ascii=False)


def prompt_record(
    text: str, label: Any, messages: Sequence[Mapping[str, Any]] = (), columns: Mapping[str, Any] | None = None
) -> bytes:
    """Return the record of a prompt as JSON; labels and columns are JSON already."""
    # a surrogate that stands alone is none of UTF-8, and a chat template may write one
    return _ENCODE([text, label, list(messages), columns or {}]).encode(errors="surrogatepass")


class StoredPrompts(Sequence[Prompt]):
    """The prompts of a store, each made from the memory map when it is asked for, and others behind them.

    Example: `StoredPrompts(samples)[3].prompt_id` is "train:3", where no row before it was left out.
    """

    def __init__(self, stored: StoredSamples, more: Sequence[Prompt] = ()) -> None:
        """Take the samples of the store; `more` are in memory, and stand behind them."""
        self._stored, self._more = stored, more

    def followed_by(self, more: Sequence[Prompt]) -> StoredPrompts:
        """Return these prompts with others behind them."""
        return StoredPrompts(self._stored, more)

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._stored) + len(self._more)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        """Make the prompt, or the list of prompts."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        if number >= len(self._stored):
            return self._more[number - len(self._stored)]
        source, row, token_ids, record = self._stored.recorded(number)
        text, label, messages, columns = json.loads(record.decode(errors="surrogatepass"))
        return Prompt(f"{source}:{row}", token_ids, text, label, source, messages=tuple(messages), columns=columns)
