"""The turns of a conversation: what the policy sampled, and what the environment put between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    """A stretch of a rollout's tokens; they follow one another without a gap from the end of the prompt on.

    Example: a call, its result, the answer::

        Turn(True, 21, '<tool_call>...</tool_call>', num_calls=1), Turn(False, 9, "1175"), Turn(True, 5, "1175")
    """

    sampled: bool
    """True: the policy's own tokens, which are learned; False: tokens of an observation, which are not."""
    num_tokens: int
    text: str
    reward: float = 0.0
    """What a sampled turn earned."""
    num_calls: int = 0
    """Well-formed tool calls of a sampled turn."""
    num_malformed: int = 0
    """Calls of it that could not be read."""
    seconds: float = 0.0
    """That the environment took to answer it."""


def sampled_mask(turns: Sequence[Turn]) -> tuple[bool, ...]:
    """One entry a token of the turns: whether the policy sampled it."""
    return tuple(turn.sampled for turn in turns for _ in range(turn.num_tokens))


def turn_rewards(turns: Sequence[Turn]) -> tuple[tuple[int, float], ...]:
    """(index of its last token, what it earned) of every sampled turn that has tokens."""
    ends = accumulate(turn.num_tokens for turn in turns)
    return tuple(
        (end - 1, turn.reward) for turn, end in zip(turns, ends, strict=True) if turn.sampled and turn.num_tokens
    )


def turns_from_json(rows: Iterable[Mapping[str, Any]]) -> tuple[Turn, ...]:
    """The inverse of `dataclasses.asdict` of turns."""
    return tuple(Turn(**row) for row in rows)
