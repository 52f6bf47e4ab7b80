"""Kinds of rows that are tokenised for the data store, by the name that a worker is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rft.tokenizing.demonstrations import Demonstrations, StoredText
from rft.tokenizing.pairs import PairText, PreferenceTokens, RewardPairTokens
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.store.build import Tokenize

Kind = Literal["demonstrations", "preferences", "reward_pairs"]


@dataclass(frozen=True, slots=True)
class StoredRowsText:
    """What is tokenised, and the settings that its tokens follow from."""

    kind: Kind
    text: StoredText | PairText

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> StoredRowsText:
        """Return what came as JSON."""
        kind: Kind = record["kind"]
        return cls(kind, (StoredText if kind == "demonstrations" else PairText).of(record["text"]))

    def as_record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    def tokenizer_of_rows(self, tokenizer: HfTokenizer) -> Tokenize:
        """Return what makes samples of rows."""
        if isinstance(self.text, StoredText):
            return Demonstrations(self.text, tokenizer)
        return (PreferenceTokens if self.kind == "preferences" else RewardPairTokens)(self.text, tokenizer)
