"""Text that a reward model reads of a prompt and a response, and its end; of text alone, and without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rft_models.tokenization.tokenizer import HfTokenizer

Messages = Sequence[Mapping[str, Any]]


def reward_text(tokenizer: HfTokenizer, prompt: str, messages: Messages, response: str) -> str:
    """Return prompt and response as one text: through the chat template, where the tokenizer has one.

    Args:
        tokenizer: of the reward model.
        prompt: the prompt as text, used where the tokenizer has no chat template.
        messages: the prompt as a conversation; empty for a prompt that is plain text.
        response: a text without special tokens.

    Raises:
        DataError: the template refuses the messages.
    """
    if not tokenizer.has_chat_template:
        return prompt + response
    turns = list(messages) or [{"role": "user", "content": prompt}]
    answered = [*turns, {"role": "assistant", "content": response}]
    return tokenizer.render_chat(answered, add_generation_prompt=False)


def ended(tokenizer: HfTokenizer, ids: list[int]) -> list[int]:
    """Return the tokens of such a text with the end token, which a chat template has put there already."""
    end = () if tokenizer.has_chat_template else tokenizer.eos_ids[:1]
    # the tokenizer, or the response itself, may have put the end token there already
    return ids if not end or ids[-1:] == list(end) else [*ids, *end]


def shared_length(rows: Sequence[Sequence[int]]) -> int:
    """Count the first tokens that all rows share, below the length of each: one token at least stays a row's own."""
    limit = min(len(row) for row in rows) - 1
    first = rows[0]
    return next((i for i in range(limit) if any(row[i] != first[i] for row in rows)), max(limit, 0))
