"""Tokens that are added to a tokenizer: each is one id wherever it stands in a text."""

from __future__ import annotations

from collections.abc import Sequence

from rft_core.errors import DataError
from rft_models.tokenization.tokenizer import HfTokenizer


def known_tokens(tokenizer: HfTokenizer, tokens: Sequence[str]) -> tuple[str, ...]:
    """Return those of `tokens` that the vocabulary has already."""
    vocabulary = tokenizer.hf_tokenizer.get_vocab()
    return tuple(token for token in tokens if token in vocabulary)


def with_added_tokens(tokenizer: HfTokenizer, tokens: Sequence[str]) -> HfTokenizer:
    """Return the tokenizer with `tokens` behind its vocabulary, in their order; it is changed in place.

    Raises:
        DataError: as `token_ids_of` does.
    """
    tokenizer.hf_tokenizer.add_tokens(list(tokens))
    extended = HfTokenizer(tokenizer.hf_tokenizer, eos_ids=tokenizer.eos_ids, where=tokenizer.where)
    extended.companions = tokenizer.companions
    token_ids_of(extended, tokens)
    return extended


def token_ids_of(tokenizer: HfTokenizer, tokens: Sequence[str]) -> list[int]:
    """Return the id of each token.

    Raises:
        DataError: a token is not one id of this tokenizer, or its id does not decode to its text.
    """
    encoded = tokenizer.encode_batch(list(tokens))
    for token, ids in zip(tokens, encoded, strict=True):
        if len(ids) != 1 or tokenizer.decode(ids) != token:
            raise DataError(
                code="tokenizer.not_one_token",
                what=f"{token!r} is {len(ids)} tokens and reads back as {tokenizer.decode(ids)!r}",
                where=tokenizer.where,
                why="a token that stands for a code must be one id in every text, and be written as it is read",
                do="take the tokenizer of a model that was extended by these tokens, or write them in plain characters",
            )
    return [ids[0] for ids in encoded]
