"""Units of a step: never divided by optimizer steps, ranks or micro-batches, and counted."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_core.errors import OptionsError
from rft_trainer.batches.packing import count, filler_batches, pack, rank_micro_batches
from rft_trainer.batches.units import MicroBatching, optimizer_batches, unit_lengths, units_of
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.testing.bigram import OneRank


def sample(name: str, length: int, unit: str = "") -> TrainingSample:
    return TrainingSample(name, (1,) * length, 1, 0.0, unit=unit)


PAIRS = [sample("a", 3, "x"), sample("b", 5, "x"), sample("c", 2), sample("d", 4, "y"), sample("e", 2, "y")]


def names(samples: object) -> list[str]:
    return [one.sample_id for one in samples]  # type: ignore[attr-defined]


def test_neighbours_of_one_name_are_a_unit_and_samples_without_are_alone() -> None:
    assert [names(unit) for unit in units_of(PAIRS)] == [["a", "b"], ["c"], ["d", "e"]]
    assert unit_lengths(units_of(PAIRS)) == [8, 2, 6]
    assert count(PAIRS).num_units == 3
    assert [names(unit) for unit in units_of([PAIRS[0], PAIRS[2], PAIRS[1]])] == [["a"], ["c"], ["b"]]
    assert units_of([]) == []


def test_an_optimizer_step_takes_whole_units() -> None:
    assert [names(batch) for batch in optimizer_batches(PAIRS, 2)] == [["a", "b", "c"], ["d", "e"]]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_no_cut_divides_a_unit_or_loses_a_sample(sizes: list[tuple[int, int]], world_size: int, data: st.DataObject):
    samples = [
        sample(f"{number}.{place}", length, f"u{number}")
        for number, (length, size) in enumerate(sizes)
        for place in range(size)
    ]
    longest = max(unit_lengths(units_of(samples)))
    cut = data.draw(
        st.sampled_from([MicroBatching(2, 0, False), MicroBatching(3, longest, False), MicroBatching(2, longest, True)])
    )
    seen: list[str] = []
    for rank in range(world_size):
        for batch in rank_micro_batches(samples, rank, world_size, cut.cut):
            for unit, members in itertools.groupby(batch, key=lambda one: one.unit):
                together = names(members)
                assert len(together) == sizes[int(unit[1:])][1], "a unit is in one micro-batch, whole"
                seen += together
    assert sorted(seen) == sorted(names(samples))


def test_a_packed_batch_knows_the_unit_of_each_segment() -> None:
    ids = pack(PAIRS).unit_ids_S
    assert ids is not None
    assert ids.tolist() == [0, 0, 1, 2, 2]
    assert pack(PAIRS[2:3]).unit_ids_S is None


class SecondOfTwo(OneRank):
    rank, world_size = 1, 2


def test_a_filler_is_a_whole_unit_the_shortest() -> None:
    samples = [sample("l", 30), *PAIRS[3:], sample("m", 7), sample("n", 7)]
    first = SecondOfTwo()
    first.rank = 0
    [filler, _] = filler_batches(samples, first, MicroBatching(1, 0, False).cut, "cpu")
    assert filler.token_ids_T.shape == (6,)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (MicroBatching(3, 0, False), MicroBatching(2, 0, False)),
        (MicroBatching(99, 0, False), MicroBatching(2, 0, False)),
        (MicroBatching(99, 8, False), MicroBatching(1, 8, False)),
        (MicroBatching(1, 0, False), None),
        (MicroBatching(9, 30, True), MicroBatching(9, 15, True, lowered=True)),
        (MicroBatching(2, 0, True), MicroBatching(2, 8, True, lowered=True)),
        (MicroBatching(9, 12, True), MicroBatching(9, 8, True, lowered=True)),
        (MicroBatching(9, 8, True), None),
    ],
)
def test_half_a_micro_batch_still_holds_the_longest_unit(limits: MicroBatching, expected: MicroBatching | None) -> None:
    assert limits.halved(PAIRS) == expected


def test_a_limit_that_the_run_made_smaller_refuses_no_longer_unit_of_a_later_step() -> None:
    lowered = MicroBatching(9, 12, True).halved(PAIRS)
    assert lowered is not None
    assert lowered.cut([20, 3, 4, 17]) == [[0], [1, 3], [2]]
    with pytest.raises(OptionsError):
        replace(lowered, lowered=False).cut([20, 3, 4, 17])


@pytest.mark.parametrize(
    ("limits", "flags"),
    [
        (MicroBatching(99, 0, False), "--micro_train_batch_size 2"),
        (MicroBatching(99, 8, False), "--micro_train_batch_size 1"),
        (MicroBatching(9, 40, True), "--no-packing_samples --micro_train_batch_size 2"),
        (MicroBatching(9, 12, True), "--no-packing_samples --micro_train_batch_size 1"),
        (MicroBatching(1, 0, False), ""),
    ],
)
def test_half_as_much_is_named_by_flags_that_hold_in_every_step(limits: MicroBatching, flags: str) -> None:
    assert limits.half_as_flags(PAIRS) == flags


def test_limits_are_said_in_words() -> None:
    assert str(MicroBatching(2, 4096, False)) == "2 samples, 4,096 tokens"
    assert str(MicroBatching(2, 0, False)) == "2 samples"
    assert str(MicroBatching(2, 4096, True)) == "4,096 tokens"
    assert str(MicroBatching(2, 0, True)) == "2 times the longest sample"
