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
    return texts_and_tokens(renderer, tokenizer, prompts)[1]


def texts_and_tokens(
    renderer: PromptRenderer, tokenizer: HfTokenizer, prompts: Sequence[PromptRow]
) -> tuple[list[str], list[list[int]]]:
    """Return the rendered texts of prompts, and their tokens; errors as `prompt_tokens` raises them."""
    texts: list[str] = []
    for prompt in prompts:
        # by hand: a context a row takes longer than the text of a short prompt
        try:
            texts.append(renderer.text(prompt))
        except DataError as error:
            raise _placed(prompt, error) from error
    found = encoded(tokenizer, prompts, texts, special=not renderer.apply_chat_template)
    for prompt, ids in zip(prompts, found, strict=True):
        if not ids:
            with named(prompt):
                renderer.render(prompt)  # refuses a prompt without a token
    return texts, found


def held_out_note(num_shared: int, num_held_out: int) -> tuple[str, ...]:
    """Return what a person should know of held-out prompts that are among the training prompts."""
    if not num_shared:
        return ()
    return (f"{num_shared:,} of {num_held_out:,} held-out prompts are among the training prompts too",)


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


def all_too_long(too_long: Sequence[tuple[str, int]], limit: int, flag: str = "--prompt_max_len") -> DataError:
    """Return the error of prompts none of which fits."""
    longest = max((length for _, length in too_long), default=limit)
    return DataError(
        code="prompt.all_too_long",
        what=f"0 of {len(too_long)} prompts have at most {limit} tokens (the longest has {longest})",
        where=flag,
        why="a prompt is used whole or left out, and here all would be left out",
        do=f"{flag} {longest}",
    )


@contextmanager
def named(prompt: PromptRow) -> Generator[None]:
    """Let an error name the file and line of the row, where it names the row's number or the tokenizer's directory."""
    try:
        yield
    except DataError as error:
        raise _placed(prompt, error) from error


def _placed(prompt: PromptRow, error: DataError) -> DataError:
    """Return the error with the place of the row, or a copy where it has it."""
    where = error.problem.where if prompt.place in error.problem.where else prompt.place
    return DataError(**{**asdict(error.problem), "where": where})
