"""The edges of a ledger: the last entry, entries that are not in flight, states of one entry too many."""

from __future__ import annotations

import json
import weakref
from typing import Any

import pytest

from rft_core.errors import CheckpointError, OptionsError
from rft_trainer.batches.prompt_ledger import EntryState, Ledger, LedgerEntry
from rft_trainer.data.prompts import HASH_SCHEME

FORWARD = (EntryState.GENERATED, EntryState.SCORED, EntryState.TRAINED)


def order(epoch: int) -> list[int]:
    """Four prompts, turned by the epoch."""
    return [(place + epoch) % 4 for place in range(4)]


def make(num_episodes: int = 2) -> Ledger:
    return Ledger(4, num_episodes, order, data_hash="d", seed=7)


def train(ledger: Ledger, entries: list[LedgerEntry]) -> None:
    for state in FORWARD:
        ledger.advance(entries, state)


def test_a_stored_state_is_plain_and_of_version_1() -> None:
    ledger = make()
    train(ledger, ledger.reserve(1))
    first, second = ledger.reserve(2)
    ledger.give_back([first])
    ledger.drop(ledger.reserve(2)[1:], "filter")
    assert json.loads(json.dumps(ledger.state())) == {
        "version": 1,
        "data_hash": "d",
        "hash_scheme": HASH_SCHEME,
        "seed": 7,
        "num_prompts": 4,
        "num_episodes": 2,
        "next": [1, 0],
        "in_flight": [[0, 1, 1], [0, 2, 2]],
        "trained": 1,
        "dropped": {"filter": 1},
    }
    assert make().state()["next"] == [0, 0]
    assert make().state()["trained"] == 0
    assert second == LedgerEntry(0, 2, 2)


def test_one_prompt_and_one_episode_are_enough() -> None:
    ledger = Ledger(1, 1, lambda epoch: [0], data_hash="d", seed=0)
    train(ledger, ledger.reserve(1))
    assert ledger.finished


@pytest.mark.parametrize(
    ("num_prompts", "num_episodes", "where"),
    [(0, 1, "--prompt_data"), (1, 0, "--num_episodes"), (-1, 1, "--prompt_data")],
)
def test_without_a_prompt_or_an_episode_the_flag_is_named(num_prompts: int, num_episodes: int, where: str) -> None:
    with pytest.raises(OptionsError) as caught:
        Ledger(num_prompts, num_episodes, order, data_hash="d", seed=0)
    assert caught.value.problem.code == "ledger.nothing_to_do"
    assert caught.value.problem.where == where
    assert caught.value.problem.do.startswith(where)


def test_a_batch_is_filled_up_with_new_entries_behind_returned_ones() -> None:
    ledger = make()
    first, second = ledger.reserve(2)
    ledger.give_back([second])
    assert [entry.position for entry in ledger.reserve(2)] == [1, 2]
    ledger.give_back([first])
    assert [entry.position for entry in ledger.reserve(1)] == [0]
    assert [entry.position for entry in ledger.reserve(9)] == [3]


def test_an_older_epoch_is_completed_by_itself() -> None:
    ledger = make()
    old, new = ledger.reserve(4), ledger.reserve(2)
    train(ledger, old[1:])
    assert (ledger.epoch, ledger.finished) == (0, False)
    ledger.give_back([old[0], new[0]])
    assert ledger.epoch == 0
    assert ledger.reserve(3) == old[:1]
    train(ledger, old[:1])
    assert ledger.epoch == 1
    assert ledger.reserve(2) == [new[0], LedgerEntry(1, 2, 3)]


def test_what_waits_keeps_a_ledger_from_being_finished() -> None:
    ledger = make(1)
    batch = ledger.reserve(4)
    train(ledger, batch[:3])
    assert not ledger.finished
    ledger.give_back(batch[3:])
    assert not ledger.finished
    assert ledger.epoch == 0
    ledger.drop(ledger.reserve(1), "filter")
    assert ledger.finished
    assert ledger.epoch == 1


def test_an_unfinished_epoch_without_anything_in_flight_is_not_finished() -> None:
    ledger = make(1)
    assert not ledger.finished
    train(ledger, ledger.reserve(2))
    assert not ledger.finished
    assert make(2).epoch == 0


def test_entries_of_a_shorter_run_are_finished_where_more_was_handed_out() -> None:
    longer = make(3)
    for _ in range(2):
        train(longer, longer.reserve(4))
    shorter = make(1)
    shorter.load_state(longer.state())
    assert shorter.finished
    assert shorter.reserve(1) == []


@pytest.mark.parametrize("how", ["drop", "give_back", "advance"])
def test_what_is_not_in_flight_cannot_be_used_up_or_returned(how: str) -> None:
    ledger = make()
    [entry] = ledger.reserve(1)
    train(ledger, [entry])
    before = ledger.state()
    ways: dict[str, Any] = {
        "drop": lambda: ledger.drop([entry], "filter"),
        "give_back": lambda: ledger.give_back([entry]),
        "advance": lambda: ledger.advance([entry], EntryState.GENERATED),
    }
    with pytest.raises(ValueError, match="not in flight"):
        ways[how]()
    assert ledger.state() == before


def test_every_state_is_counted() -> None:
    ledger = make()
    a, b, c, d = ledger.reserve(4)
    ledger.advance([a, b], EntryState.GENERATED)
    ledger.advance([b], EntryState.SCORED)
    ledger.drop([d], "filter")
    assert ledger.counts() == {"reserved": 1, "generated": 1, "scored": 1, "trained": 0, "dropped": 1}
    ledger.give_back([a, c])
    assert ledger.counts() == {"reserved": 2, "generated": 0, "scored": 1, "trained": 0, "dropped": 1}
    ledger.drop([b], "filter")
    assert ledger.dropped() == {"filter": 2}


def loaded(**changes: Any) -> Ledger:
    """A state with two trained, and the third in flight."""
    ledger = make()
    train(ledger, ledger.reserve(2))
    ledger.reserve(1)
    fresh = make()
    fresh.load_state(ledger.state() | changes)
    return fresh


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        # one entry twice, so that the numbers add up
        ({"trained": 1, "in_flight": [[0, 2, 2], [0, 2, 2]]}, "ledger.inconsistent"),
        ({"trained": 3}, "ledger.inconsistent"),
        # the one that is handed out next
        ({"in_flight": [[0, 3, 3]]}, "ledger.order"),
        # a place behind the last
        ({"next": [1, 0], "trained": 3, "in_flight": [[0, 4, 0]]}, "ledger.order"),
        ({"in_flight": [[0, -1, 3]]}, "ledger.order"),
    ],
)
def test_a_state_that_cannot_have_been_stored_is_refused(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        loaded(**changes)
    assert caught.value.problem.code == code


def test_the_first_and_the_last_place_of_an_epoch_may_be_in_flight() -> None:
    ledger = loaded(next=[1, 1], trained=2, in_flight=[[1, 0, 1], [0, 3, 3], [0, 0, 0]])
    assert [entry.position for entry in ledger.reserve(9)] == [0, 3]
    assert ledger.reserve(2) == [LedgerEntry(1, 0, 1), LedgerEntry(1, 1, 2)]


def test_what_was_handed_out_counts_whole_epochs() -> None:
    ledger = loaded(next=[1, 2], trained=4, dropped={"filter": 1}, in_flight=[[1, 0, 1]])
    assert ledger.counts() == {"reserved": 1, "generated": 0, "scored": 0, "trained": 4, "dropped": 1}


def test_loading_replaces_what_was_in_flight() -> None:
    ledger = make()
    ledger.reserve(3)
    ledger.load_state(make().state())
    assert ledger.reserve(9) == [LedgerEntry(0, place, place) for place in range(4)]


class Order(list[int]):
    """A list that can be watched."""


def test_an_order_is_computed_once_and_kept_as_long_as_its_epoch_is_handed_out() -> None:
    asked: list[int] = []
    alive: list[weakref.ref[Order]] = []

    def watched(epoch: int) -> Order:
        asked.append(epoch)
        made = Order(order(epoch))
        alive.append(weakref.ref(made))
        return made

    ledger = Ledger(4, 4, watched, data_hash="d", seed=7)
    first = ledger.reserve(2)
    train(ledger, first)
    assert alive[0]() is not None
    rest = ledger.reserve(2)
    assert asked == [0]
    train(ledger, rest)
    assert alive[0]() is None, "an order has a number for each prompt"
    ledger.drop(ledger.reserve(4), "filter")
    assert alive[1]() is None
    ledger.reserve(4)
    ledger.reserve(1)
    assert asked == [0, 1, 2, 3]
    resumed = Ledger(4, 4, watched, data_hash="d", seed=7)
    resumed.load_state(ledger.state())
    assert asked == [0, 1, 2, 3, 2, 3]
    assert [one() is None for one in alive[4:]] == [True, False]
