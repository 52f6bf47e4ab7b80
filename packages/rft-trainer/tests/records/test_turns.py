"""Turns and calls of conversations add up, over prompts and over ranks, and are shares of the right wholes."""

from __future__ import annotations

import pytest

from rft_trainer.records.turns import Turn, TurnCounts, total, turn_counts

CALLED = (
    Turn(False, 3, "asked"),
    Turn(True, 5, "call and garble", num_calls=2, num_malformed=1),
    Turn(False, 2, "42"),
    Turn(True, 4, "It is 42", reward=1.0),
)
GUESSED = (Turn(False, 3, "asked"), Turn(True, 4, "It is 41"))


def test_turns_and_calls_are_counted_by_hand() -> None:
    assert turn_counts(CALLED) == TurnCounts(conversations=1, turns=2, calling=1, calls=2, malformed=1)
    assert turn_counts(GUESSED) == TurnCounts(conversations=1, turns=1)
    assert turn_counts(()) == TurnCounts()


def test_shares_are_of_turns_and_of_calls() -> None:
    whole = total(map(turn_counts, (CALLED, GUESSED, GUESSED)))
    assert whole.shares() == pytest.approx({"turns_mean": 4 / 3, "call_share": 1 / 4, "well_formed_share": 2 / 3})
    assert total([total([turn_counts(CALLED)]), total(map(turn_counts, (GUESSED, GUESSED)))]) == whole


def test_what_nobody_did_has_no_share() -> None:
    assert total([]).shares() == {}
    assert turn_counts(()).shares() == {}
    assert turn_counts(GUESSED).shares() == {"turns_mean": 1.0, "call_share": 0.0}
