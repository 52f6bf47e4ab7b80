"""Kinds of rows that are tokenised for the data store, by the name that a worker is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rft.tokenizing.demonstrations import Demonstrations, StoredText
from rft.tokenizing.pairs import PairText, PreferenceTokens, RewardPairTokens
from rft.tokenizing.prompt_tokens import PromptText, PromptTokens
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.store.build import Tokenize

Kind = Literal["demonstrations", "preferences", "reward_pairs", "prompts"]
Text = StoredText | PairText | PromptText

_TEXTS: Mapping[str, Callable[[Mapping[str, Any]], Text]] = {
    "demonstrations": StoredText.of,
    "preferences": PairText.of,
    "reward_pairs": PairText.of,
    "prompts": PromptText.of,
}
_TOKENIZERS: Mapping[str, Callable[..., Tokenize]] = {
    "demonstrations": Demonstrations,
    "preferences": PreferenceTokens,
    "reward_pairs": RewardPairTokens,
    "prompts": PromptTokens,
}


@dataclass(frozen=True, slots=True)
class StoredRowsText:
    """Kind of the rows, and the settings that their tokens follow from."""

    kind: Kind
    text: Text
    hashes_rows: bool = False
    """Whether the store has the hash of the rows that they have in memory; of prompts and demonstrations alone."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> StoredRowsText:
        """Return what came as JSON."""
        return cls(record["kind"], _TEXTS[record["kind"]](record["text"]), record.get("hashes_rows", False))

    def as_record(self) -> dict[str, Any]:
        """Return it as JSON."""
        record = asdict(self)
        # without it a store has the name that it had before there were such hashes
        return record if self.hashes_rows else {name: record[name] for name in ("kind", "text")}

    def tokenizer_of_rows(self, tokenizer: HfTokenizer) -> Tokenize:
        """Return what makes samples of rows."""
        make = _TOKENIZERS[self.kind]
        return make(self.text, tokenizer, hashes_rows=True) if self.hashes_rows else make(self.text, tokenizer)
