"""The one builder of prompts: training, reinforcement learning, evaluation and serving ask it and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rft_genrec.catalogue.records import SemanticIds


@dataclass(frozen=True)
class PromptBuilder:
    """Texts of histories and of next items.

    Example: with IDs `<a_0><b_1>` and `<a_2><b_0>`, `prompt([0, 1])` is `<a_0><b_1><a_2><b_0>`.
    """

    ids: SemanticIds
    max_history: int = 10
    """Newest items of a history that a prompt holds; 0 = all."""

    def prompt(self, history: Sequence[int]) -> str:
        """Return the prompt after which the model writes the next item."""
        newest = history[-self.max_history :] if self.max_history else history
        return "".join(self.ids.text(item) for item in newest)

    def response(self, item: int) -> str:
        """Return what the model writes for an item."""
        return self.ids.text(item)

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides a prompt: a model is asked with the builder that it was trained with."""
        facts = {"ids": self.ids.digest, "max_history": self.max_history}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
