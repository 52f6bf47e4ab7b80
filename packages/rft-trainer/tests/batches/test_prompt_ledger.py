"""Every prompt exactly once an epoch, whatever is killed and resumed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_core.errors import CheckpointError, OptionsError
from rft_trainer.batches.prompt_ledger import EntryState, Ledger, LedgerEntry
from rft_trainer.data.mixture import Mixture
from rft_trainer.data.prompts import HASH_SCHEME

G, S, T = EntryState.GENERATED, EntryState.SCORED, EntryState.TRAINED


def make(num_prompts: int = 5, num_episodes: int = 2, *, seed: int = 7, data_hash: str = "d") -> Ledger:
    mixture = Mixture([num_prompts])
    return Ledger(
        num_prompts, num_episodes, lambda epoch: mixture.order(seed, epoch).tolist(), data_hash=data_hash, seed=seed
    )


def train(ledger: Ledger, entries: list[LedgerEntry]) -> None:
    for state in (G, S, T):
        ledger.advance(entries, state)


def through_json(ledger: Ledger) -> dict[str, Any]:
    return json.loads(json.dumps(ledger.state()))


def test_batches_follow_the_order_and_never_span_epochs() -> None:
    ledger, order = make(5, 2), Mixture([5])
    batches = []
    while batch := ledger.reserve(2):
        batches.append(batch)
        train(ledger, batch)
    assert [len(batch) for batch in batches] == [2, 2, 1, 2, 2, 1]
    assert all(len({entry.epoch for entry in batch}) == 1 for batch in batches)
    visited = [entry.prompt_index for batch in batches for entry in batch]
    assert visited == order.order(7, 0).tolist() + order.order(7, 1).tolist()
    assert ledger.finished


def test_the_ledger_is_finished_when_the_last_entry_is_used_up_not_when_it_is_handed_out() -> None:
    ledger = make(2, 1)
    batch = ledger.reserve(2)
    assert (ledger.finished, ledger.epoch) == (False, 0)
    assert ledger.reserve(2) == []
    train(ledger, batch)
    assert (ledger.finished, ledger.epoch) == (True, 1)


def test_counts_follow_each_state() -> None:
    ledger = make(5, 1)
    one, two, three = ledger.reserve(1), ledger.reserve(2), ledger.reserve(1)
    ledger.advance(one, G)
    train(ledger, two)
    ledger.drop(three, "all_correct")
    assert ledger.counts() == {"reserved": 0, "generated": 1, "scored": 0, "trained": 2, "dropped": 1}
    assert ledger.dropped() == {"all_correct": 1}
    ledger.give_back(one)
    assert ledger.counts()["reserved"] == 1
    assert ledger.reserve(9)[0] == one[0]


def test_skipping_or_repeating_a_state_is_an_error_and_changes_nothing() -> None:
    ledger = make()
    batch = ledger.reserve(2)
    for state in (S, T, EntryState.RESERVED, EntryState.DROPPED):
        with pytest.raises(ValueError, match="next state is generated"):
            ledger.advance(batch, state)
    ledger.advance(batch[:1], G)
    with pytest.raises(ValueError, match="next state is scored"):
        ledger.advance(batch, G)
    assert ledger.counts()["generated"] == 1
    train(ledger, ledger.reserve(1))
    with pytest.raises(ValueError, match="not in flight"):
        ledger.advance([LedgerEntry(0, 4, 0)], G)
    with pytest.raises(ValueError, match="cannot reserve 0"):
        ledger.reserve(0)


def test_what_was_in_flight_is_reserved_again_first_and_with_the_same_batches() -> None:
    ledger = make(5, 2)
    train(ledger, ledger.reserve(2))
    lost = [ledger.reserve(2), ledger.reserve(2), ledger.reserve(2)]
    ledger.advance(lost[0], G)
    resumed = make(5, 2)
    resumed.load_state(through_json(ledger))
    assert resumed.counts() == {"reserved": 5, "generated": 0, "scored": 0, "trained": 2, "dropped": 0}
    assert [resumed.reserve(2) for _ in lost] == lost
    assert resumed.reserve(2) == [*ledger.reserve(2)]


def test_prompts_dropped_so_far_keep_their_reasons_across_a_resume() -> None:
    ledger = make(5, 1)
    ledger.drop(ledger.reserve(2), "all_correct")
    ledger.drop(ledger.reserve(1), "unscored")
    resumed = make(5, 1)
    resumed.load_state(through_json(ledger))
    assert resumed.dropped() == {"all_correct": 2, "unscored": 1}
    resumed.drop(resumed.reserve(1), "unscored")
    assert resumed.dropped() == {"all_correct": 2, "unscored": 2}
    assert resumed.counts()["dropped"] == 4


def test_entries_given_back_are_handed_out_in_their_old_order_epoch_by_epoch() -> None:
    ledger = make(3, 2)
    batches = [ledger.reserve(2) for _ in range(3)]
    for batch in (batches[2], batches[1], batches[0][::-1]):
        ledger.give_back(batch)
    assert ledger.reserve(9) == batches[0] + batches[1]
    again = ledger.reserve(9)
    assert again[:2] == batches[2]
    assert [entry.position for entry in again] == [0, 1, 2]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_prompt_is_trained_exactly_once_an_epoch_under_random_kills(data: st.DataObject) -> None:
    """The trained list plays the weights: a kill loses what came after the last save."""
    num_prompts = data.draw(st.integers(1, 12))
    num_episodes = data.draw(st.integers(1, 3))
    ledger = make(num_prompts, num_episodes)
    weights: list[LedgerEntry] = []
    saved: tuple[dict[str, Any], list[LedgerEntry]] = (through_json(ledger), [])
    in_flight: list[tuple[list[LedgerEntry], EntryState]] = []
    choose: Callable[[int], int] = lambda most: data.draw(st.integers(0, most))  # noqa: E731
    kills = 0
    for _ in range(400):
        if ledger.finished:
            break
        action = choose(9)
        if action == 0:
            saved = (through_json(ledger), list(weights))
        elif action == 1 and kills < 6:
            kills += 1
            ledger = make(num_prompts, num_episodes)
            ledger.load_state(saved[0])
            weights, in_flight = list(saved[1]), []
        elif action <= 5 and (batch := ledger.reserve(1 + choose(4))):
            in_flight.append((batch, EntryState.RESERVED))
        elif in_flight:
            batch, state = in_flight.pop(choose(len(in_flight) - 1))
            after = {EntryState.RESERVED: G, G: S, S: T}[state]
            ledger.advance(batch, after)
            if after is T:
                weights += batch
            else:
                in_flight.append((batch, after))
        assert sum(ledger.counts().values()) + _still_to_come(ledger) == num_prompts * num_episodes
    while not ledger.finished:
        if in_flight:
            ledger.give_back([entry for batch, _ in in_flight for entry in batch])
            in_flight = []
        batch = ledger.reserve(3)
        train(ledger, batch)
        weights += batch
    for epoch in range(num_episodes):
        trained = Counter(entry.prompt_index for entry in weights if entry.epoch == epoch)
        assert trained == dict.fromkeys(range(num_prompts), 1)
    assert ledger.counts()["trained"] == num_prompts * num_episodes


def _still_to_come(ledger: Ledger) -> int:
    epoch, position = ledger.state()["next"]
    return (ledger.num_episodes - epoch) * ledger.num_prompts - position


def test_a_resumed_run_may_have_more_or_fewer_episodes() -> None:
    ledger = make(2, 1)
    train(ledger, ledger.reserve(2))
    longer = make(2, 3)
    longer.load_state(through_json(ledger))
    assert [len(longer.reserve(2)) for _ in range(3)] == [2, 2, 0]
    shorter = make(2, 1)
    shorter.load_state({**through_json(longer), "num_episodes": 3})
    assert shorter.counts()["reserved"] == 4


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"seed": 8}, "ledger.seed"),
        ({"data_hash": "other"}, "ledger.data_hash"),
        ({"data_hash": "other", "hash_scheme": HASH_SCHEME + 1}, "ledger.hash_scheme"),
        ({"data_hash": "other", "hash_scheme": None}, "ledger.hash_scheme"),
        ({"data_hash": "other", "hash_scheme": None, "num_prompts": 6}, "ledger.num_prompts"),
        ({"num_prompts": 6}, "ledger.num_prompts"),
        ({"version": 2}, "ledger.version"),
        ({"trained": 1}, "ledger.inconsistent"),
        ({"dropped": {"x": 1}}, "ledger.inconsistent"),
        ({"in_flight": []}, "ledger.inconsistent"),
        ({"in_flight": [[0, 2, 99]]}, "ledger.order"),
        ({"in_flight": [[0, 77, 1]]}, "ledger.order"),
        ({"in_flight": [[1, 4, 1]]}, "ledger.order"),
    ],
)
def test_a_state_of_another_run_is_refused_and_changes_nothing(change: dict[str, Any], code: str) -> None:
    ledger = make()
    train(ledger, ledger.reserve(2))
    ledger.reserve(1)
    state = {**through_json(ledger), **change}
    fresh = make()
    before = fresh.state()
    with pytest.raises(CheckpointError) as caught:
        fresh.load_state(state)
    assert caught.value.problem.code == code
    assert fresh.state() == before


def test_a_state_of_another_hash_scheme_is_not_taken_for_other_prompts() -> None:
    state = through_json(make())
    earlier = {key: value for key, value in state.items() if key != "hash_scheme"}
    make().load_state(earlier)
    with pytest.raises(CheckpointError) as caught:
        make().load_state({**earlier, "data_hash": "other"})
    problem = caught.value.problem
    assert "unnumbered scheme of an earlier version" in problem.what
    assert "cannot tell whether" in problem.why
    assert problem.do.endswith("--accept_changes prompt_data")


def test_a_state_that_lacks_a_part_is_refused() -> None:
    state = through_json(make())
    for name in ("version", "next", "in_flight", "trained", "dropped", "seed"):
        with pytest.raises(CheckpointError, match=name) as caught:
            make().load_state({key: value for key, value in state.items() if key != name})
        assert caught.value.problem.code == "ledger.form"


def test_an_order_of_the_wrong_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 of 3 prompts"):
        Ledger(3, 1, lambda epoch: [0, 1], data_hash="d", seed=0).reserve(1)


@pytest.mark.parametrize(("num_prompts", "num_episodes"), [(0, 1), (1, 0)])
def test_nothing_to_do_is_refused(num_prompts: int, num_episodes: int) -> None:
    with pytest.raises(OptionsError):
        make(max(num_prompts, 1), num_episodes) if num_prompts else Ledger(0, 1, lambda e: [], data_hash="d", seed=0)
