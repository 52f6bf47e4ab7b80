"""The answer that a response marks: in `<answer>` tags, in a box, or behind `####`."""

from __future__ import annotations

from rft_trainer.rewards.answers import marked_answers

_OPENING, _CLOSING = "<answer>", "</answer>"


def final_answer(text: str) -> str | None:
    """Return the last marked answer of a text, a box within answer tags before the tags; None where none is marked."""
    end = text.rfind(_CLOSING)
    start = text.rfind(_OPENING, 0, end) if end >= 0 else -1
    inside = text[start + len(_OPENING) : end] if start >= 0 else None
    marked = marked_answers(text if inside is None else inside)
    if marked:
        return marked[-1]
    return None if inside is None else inside.strip()
