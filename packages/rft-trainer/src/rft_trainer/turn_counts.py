"""How many turns and tool calls conversations had, as sums: what an evaluation says of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rft_trainer.turns import Turn


@dataclass(frozen=True, slots=True)
class TurnCounts:
    """Sums over conversations; adding those of parts gives those of the whole.

    Example: a garbled call, a call, the answer::

        TurnCounts(conversations=1, turns=3, calling=1, calls=1, malformed=1)
    """

    conversations: int = 0
    turns: int = 0
    """That the policy took."""
    calling: int = 0
    """Of these, turns with a well-formed call."""
    calls: int = 0
    """Well-formed calls."""
    malformed: int = 0
    """Calls that could not be read."""

    def shares(self) -> dict[str, float]:
        """Names and values of `eval/...`; empty without turns."""
        if not self.turns:
            return {}
        told = {"turns_mean": self.turns / self.conversations, "call_share": self.calling / self.turns}
        attempts = self.calls + self.malformed
        return told | ({"well_formed_share": self.calls / attempts} if attempts else {})


def turn_counts(turns: Iterable[Turn]) -> TurnCounts:
    """Of one conversation; of a response without turns nothing."""
    spoken = [turn for turn in turns if turn.sampled]
    if not spoken:
        return TurnCounts()
    return TurnCounts(
        conversations=1,
        turns=len(spoken),
        calling=sum(turn.num_calls > 0 for turn in spoken),
        calls=sum(turn.num_calls for turn in spoken),
        malformed=sum(turn.num_malformed for turn in spoken),
    )


def total(counts: Iterable[TurnCounts]) -> TurnCounts:
    """The sums over all of them."""
    rows = [(one.conversations, one.turns, one.calling, one.calls, one.malformed) for one in counts]
    return TurnCounts(*map(sum, zip(*rows, strict=True))) if rows else TurnCounts()
