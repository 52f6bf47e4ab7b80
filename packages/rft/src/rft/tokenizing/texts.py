"""Texts of rows as tokens, a block at a time: what is wrong with a text is told with the file and line of its row."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from rft_core.errors import DataError
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.prompts import PromptRow
from rft_trainer.data.rendering import PromptRenderer


def tokenizer_digest(tokenizer: HfTokenizer) -> str:
    """Return the SHA-256 of all that the tokens of a text or a chat follow from."""
    return tokenizer.digest


def prompt_tokens(renderer: PromptRenderer, tokenizer: HfTokenizer, prompts: Sequence[PromptRow]) -> list[list[int]]:
    """Return the tokens of prompts that are answered, as `PromptRenderer.render` has them.

    Raises:
        DataError: a prompt cannot be rendered, or has no token.
    """
    texts: list[str] = []
    for prompt in prompts:
        with named(prompt):
            texts.append(renderer.text(prompt))
    found = encoded(tokenizer, prompts, texts, special=not renderer.apply_chat_template)
    for prompt, ids in zip(prompts, found, strict=True):
        if not ids:
            with named(prompt):
                renderer.render(prompt)  # refuses a prompt without a token
    return found


def encoded(
    tokenizer: HfTokenizer, prompts: Sequence[PromptRow], texts: Sequence[str], *, special: bool
) -> list[list[int]]:
    """Encode one text a row, with special tokens where they are asked for.

    Raises:
        DataError: the tokenizer cannot take the text of a row, which is named.
    """
    try:
        return tokenizer.encode_batch(texts, add_special_tokens=special)
    except DataError:
        # one by one only now: the batch that failed does not say which row it was
        found: list[list[int]] = []
        for prompt, text in zip(prompts, texts, strict=True):
            with named(prompt):
                found.append(tokenizer.encode(text, add_special_tokens=special))
        return found


@contextmanager
def named(prompt: PromptRow) -> Generator[None]:
    """Let an error name the file and line of the row, where it names the row's number or the tokenizer's directory."""
    try:
        yield
    except DataError as error:
        if prompt.place in error.problem.where:
            raise
        raise DataError(**{**asdict(error.problem), "where": prompt.place}) from error
