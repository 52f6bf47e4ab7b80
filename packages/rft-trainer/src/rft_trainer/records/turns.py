"""Turns of a conversation: the policy's sampled turns, and the environment's observations between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    """A span of a rollout's tokens; turns follow one another without a gap from the end of the prompt on.

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
    """Seconds that the environment took to answer the turn."""


def sampled_mask(turns: Sequence[Turn]) -> tuple[bool, ...]:
    """Return one entry a token of the turns: whether the policy sampled it."""
    return tuple(chain.from_iterable(repeat(turn.sampled, turn.num_tokens) for turn in turns))


def turn_rewards(turns: Sequence[Turn]) -> tuple[tuple[int, float], ...]:
    """Return (index of the last token, reward) of every sampled turn that has tokens."""
    ends = accumulate(turn.num_tokens for turn in turns)
    return tuple(
        (end - 1, turn.reward) for turn, end in zip(turns, ends, strict=True) if turn.sampled and turn.num_tokens
    )


def turns_from_json(rows: Iterable[Mapping[str, Any]]) -> tuple[Turn, ...]:
    """Build turns from their `dataclasses.asdict` rows."""
    return tuple(Turn(**row) for row in rows)


@dataclass(frozen=True, slots=True)
class TurnCounts:
    """Sums over conversations; adding those of parts gives those of the whole.

    Example: a garbled call, a call, the answer::

        TurnCounts(conversations=1, turns=3, calling=1, calls=1, malformed=1)
    """

    conversations: int = 0
    turns: int = 0
    """Turns of the policy."""
    calling: int = 0
    """Turns of the policy with a well-formed call."""
    calls: int = 0
    """Well-formed calls."""
    malformed: int = 0
    """Calls that could not be read."""

    def shares(self) -> dict[str, float]:
        """Return the values of the `eval/...` metrics by name, without the prefix; empty without turns."""
        if not self.turns:
            return {}
        shares = {"turns_mean": self.turns / self.conversations, "call_share": self.calling / self.turns}
        attempts = self.calls + self.malformed
        return shares | ({"well_formed_share": self.calls / attempts} if attempts else {})


def turn_counts(turns: Iterable[Turn]) -> TurnCounts:
    """Count the turns and calls of one conversation; all counts are 0 for a response without turns."""
    sampled = [turn for turn in turns if turn.sampled]
    if not sampled:
        return TurnCounts()
    return TurnCounts(
        conversations=1,
        turns=len(sampled),
        calling=sum(turn.num_calls > 0 for turn in sampled),
        calls=sum(turn.num_calls for turn in sampled),
        malformed=sum(turn.num_malformed for turn in sampled),
    )


def total(counts: Iterable[TurnCounts]) -> TurnCounts:
    """Sum the counts of several conversations."""
    rows = [(one.conversations, one.turns, one.calling, one.calls, one.malformed) for one in counts]
    return TurnCounts(*map(sum, zip(*rows, strict=True))) if rows else TurnCounts()
