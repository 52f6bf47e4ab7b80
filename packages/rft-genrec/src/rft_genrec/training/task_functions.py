"""Functions of the installed task `genrec`: the IDs that may be written, and metrics of held-out answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rft_genrec.catalogue.chosen import chosen_dataset
from rft_genrec.settings.catalogue import CatalogueSettings


class ConstraintTokenizer(Protocol):
    """Protocol of the tokenizer of a constraint."""

    @property
    def eos_ids(self) -> Sequence[int]: ...

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode `text` to token ids."""
        ...


def item_sequences(tokenizer: ConstraintTokenizer, argument: str) -> list[list[int]]:
    """Return the token ids of every ID of the catalogue in a directory, each with the end of a text.

    Raises:
        DataError: no catalogue with IDs, or the tokenizer writes a token of an ID otherwise than as one id.
    """
    _, ids = chosen_dataset(CatalogueSettings(catalogue=str(Path(argument).expanduser())))
    token_id = {token: _one(tokenizer, token) for token in ids.vocabulary}
    return [[*(token_id[token] for token in tokens), tokenizer.eos_ids[0]] for tokens in ids.items_by_id]


def held_out_metrics(
    responses: Sequence[str], labels: Sequence[str], rewards: Sequence[float | None]
) -> dict[str, float]:
    """Return metrics of the most likely items: hits, first tokens that are right, and how many are different.

    `hr@1` is the share of answers that are the item that was taken.
    """
    hits = sum(response == label for response, label in zip(responses, labels, strict=True))
    first = sum(
        response.partition(">")[0] == label.partition(">")[0] for response, label in zip(responses, labels, strict=True)
    )
    total = len(responses)
    return {"hr@1": hits / total, "first_level": first / total, "distinct": len(set(responses)) / total}


def _one(tokenizer: ConstraintTokenizer, token: str) -> int:
    from rft_core.errors import DataError

    ids = tokenizer.encode(token)
    if len(ids) != 1:
        raise DataError(
            code="genrec.vocabulary",
            what=f"the tokenizer writes {token!r} as {len(ids)} tokens",
            where="--constraint, --pretrain",
            why="a level of an ID is one token of a model that was trained on the IDs",
            do="--pretrain with a model that `rft-train genrec sft` has trained on this catalogue",
        )
    return ids[0]
