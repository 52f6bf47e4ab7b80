"""The order of an epoch: complete, keyed, and in the asked proportions."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_core.errors import DataError, OptionsError
from rft_core.keyed_random import KeyedOrder
from rft_trainer.data import mixture as module
from rft_trainer.data.mixture import Mixture, WeightedOrder

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@given(SIZES, st.integers(0, 2**40), st.integers(0, 5))
def test_without_probabilities_an_epoch_is_each_prompt_exactly_once(sizes: list[int], seed: int, epoch: int) -> None:
    order = Mixture(sizes).order(seed, epoch)
    assert sorted(order.tolist()) == list(range(sum(sizes)))


@given(SIZES, st.integers(0, 2**40), st.integers(0, 5), st.data())
@settings(deadline=None)
def test_with_probabilities_no_prompt_of_a_source_is_more_than_one_visit_ahead(
    sizes: list[int], seed: int, epoch: int, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    mixture = Mixture(sizes, [w / sum(weights) for w in weights])
    order = mixture.order(seed, epoch).tolist()
    assert len(order) == mixture.num_prompts == sum(sizes)
    cut = data.draw(st.integers(0, len(order)))
    visits = Counter(order[:cut])
    first = 0
    for size in sizes:
        counts = [visits[index] for index in range(first, first + size)]
        assert max(counts) - min(counts) <= 1
        first += size


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_the_order_depends_on_seed_and_epoch_only_not_on_what_was_asked_before(asked: list[tuple[int, int]]) -> None:
    for probabilities in (None, [0.3, 0.7]):
        used, fresh = Mixture([5, 8], probabilities), Mixture([5, 8], probabilities)
        for seed, epoch in asked:
            used.order(seed, epoch)
        assert torch.equal(used.order(3, 1), fresh.order(3, 1))


def test_an_order_above_a_size_is_computed_by_place_and_below_it_is_the_one_in_memory() -> None:
    few, many = Mixture([30, 10], most_in_memory=40), Mixture([30, 11], most_in_memory=40)
    assert few.sequence(3, 1) == Mixture([30, 10]).order(3, 1).tolist()
    assert isinstance(many.sequence(3, 1), KeyedOrder)
    assert sorted(many.sequence(3, 1)) == list(range(41))
    assert [*many.sequence(3, 1)] != [*many.sequence(3, 2)]
    shares = Mixture([30, 11], [0.5, 0.5], most_in_memory=40)
    assert isinstance(shares.sequence(1, 0), WeightedOrder)


@given(SIZES, st.integers(0, 2**40), st.integers(0, 5), st.data())
@settings(deadline=None, max_examples=12)
def test_weighted_places_walk_through_each_source_and_keep_its_share(
    sizes: list[int], seed: int, epoch: int, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    order = WeightedOrder(sizes, [w / sum(weights) for w in weights], seed, epoch)
    cut = data.draw(st.integers(0, len(order)))
    visits = Counter(order[:cut])
    assert sum(visits.values()) == cut
    first = 0
    for size in sizes:
        counts = [visits[index] for index in range(first, first + size)]
        assert max(counts) - min(counts) <= 1
        first += size


def test_weighted_places_are_exact_at_any_place_without_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 50)
    sizes, shares = [100, 60, 40], [0.7, 0.2, 0.1]
    order = WeightedOrder(sizes, shares, 3, 1)
    whole = [*order]
    assert whole[150:] == [*WeightedOrder(sizes, shares, 3, 1)[150:]]
    for place in (50, 150, 200):
        drawn = [
            sum(low <= index < high for index in whole[:place]) for low, high in ((0, 100), (100, 160), (160, 200))
        ]
        assert drawn == order.draws_before(place)
        assert all(abs(num - place * share) <= 2 for num, share in zip(drawn, shares, strict=True))
    # in every block, not only over all of them
    assert [sum(index < 100 for index in whole[block : block + 50]) for block in (0, 50, 100, 150)] == [34, 35, 35, 35]


def test_a_weighted_order_of_a_thousand_million_places_takes_no_memory() -> None:
    sizes = [10**9, 10**8]
    order = WeightedOrder(sizes, [0.5, 0.5], 1, 0)
    last = order[len(order) - 3 :]
    assert len(order) == sum(sizes)
    assert all(0 <= index < sum(sizes) for index in last)
    # the small source is walked through five times and a half
    assert order.draws_before(len(order)) == [sum(sizes) // 2, sum(sizes) // 2]
    assert order[0] == WeightedOrder(sizes, [0.5, 0.5], 1, 0)[0] != WeightedOrder(sizes, [0.5, 0.5], 2, 0)[0]


def test_epochs_and_seeds_differ() -> None:
    for mixture in (Mixture([200]), Mixture([100, 100], [0.5, 0.5])):
        orders = [tuple(mixture.order(seed, epoch).tolist()) for seed in range(3) for epoch in range(3)]
        assert len(set(orders)) == 9


def test_sources_come_in_the_asked_proportions() -> None:
    mixture = Mixture([1000, 3000, 6000], [0.5, 0.3, 0.2])
    order = mixture.order(1, 0)
    shares = [float(((order >= low) & (order < high)).double().mean()) for low, high in ((0, 1000), (1000, 4000))]
    # three standard deviations of a share of 10,000 draws are at most 0.015
    assert abs(shares[0] - 0.5) < 0.015
    assert abs(shares[1] - 0.3) < 0.015


def test_one_source_with_probability_one_is_a_plain_permutation() -> None:
    assert torch.equal(Mixture([50], [1.0]).order(4, 2), Mixture([50]).order(4, 2))


def test_a_known_order_stays_what_it_is() -> None:
    assert Mixture([6]).order(0, 0).tolist() == [2, 1, 5, 4, 0, 3]
    assert Mixture([3, 3], [0.75, 0.25]).order(0, 0).tolist() == [2, 0, 1, 3, 0, 1]


@pytest.mark.parametrize(
    ("probabilities", "do"),
    [
        ([0.5], "--prompt_data_probs 0.5,0.5"),
        ([0.5, 0.25, 0.25], "--prompt_data_probs 0.5,0.5"),
        ([0.7, 0.7], "--prompt_data_probs 0.5,0.5"),
        ([3, 1], "--prompt_data_probs 0.75,0.25"),
        ([1.0, 0.0], "leave the source out of --prompt_data"),
        ([1.5, -0.5], "leave the source out of --prompt_data"),
        ([float("nan"), 0.5], "leave the source out of --prompt_data"),
        ([float("inf"), 0.5], "leave the source out of --prompt_data"),
    ],
)
def test_probabilities_that_do_not_fit_are_refused_with_ones_that_do(probabilities: list[float], do: str) -> None:
    with pytest.raises(OptionsError) as caught:
        Mixture([10, 10], probabilities)
    assert caught.value.problem.do == do


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=5), st.integers(1, 5))
def test_the_suggested_probabilities_are_accepted(given_ones: list[float], num: int) -> None:
    try:
        Mixture([1] * num, given_ones)
    except OptionsError as error:
        flag, values = error.problem.do.split(" ", 1)
        assert flag == "--prompt_data_probs"
        Mixture([1] * num, [float(value) for value in values.split(",")])


def test_probabilities_may_be_a_millionth_off() -> None:
    assert Mixture([1, 1], [0.5, 0.5000009]).probabilities == (0.5, 0.5000009)
    for last in (0.4999985, 0.5000015):
        with pytest.raises(OptionsError) as caught:
            Mixture([1, 1], [0.5, last])
        assert caught.value.problem.code == "data.probabilities"


def test_a_draw_takes_the_source_whose_share_it_falls_into(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = [0.0, 0.0999999999, 0.1, 0.1000000001, 0.999]  # a share ends before its bound
    monkeypatch.setattr(
        "rft_trainer.data.mixture.uniforms", lambda keys, num: torch.tensor([draws], dtype=torch.float64)
    )
    order = Mixture([2, 3], [0.1, 0.9]).order(0, 0).tolist()
    assert [index >= 2 for index in order] == [False, False, True, True, True]
    assert sorted(order) == [0, 1, 2, 3, 4]


def test_a_source_that_is_never_drawn_leaves_the_epoch_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rft_trainer.data.mixture.uniforms", lambda keys, num: torch.full((1, num), 0.5, dtype=torch.float64)
    )
    order = Mixture([1, 2, 2], [0.1, 0.8, 0.1]).order(0, 0)
    assert order.dtype is torch.int64
    assert Counter(order.tolist()) in (Counter({1: 3, 2: 2}), Counter({1: 2, 2: 3}))


@pytest.mark.parametrize("sizes", [[], [0], [3, 0]])
def test_a_source_without_prompts_is_refused(sizes: list[int]) -> None:
    with pytest.raises(DataError):
        Mixture(sizes)
