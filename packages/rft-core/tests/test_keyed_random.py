from __future__ import annotations

import pytest
import torch

from rft_core import keyed_random
from rft_core.keyed_random import KeyedOrder, derive_key, integers, permutation, permuted, threefry2x32, uniforms


def words(*values: int) -> list[torch.Tensor]:
    return [torch.tensor([value]) for value in values]


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    # known answers of the Random123 distribution for threefry2x32, 20 rounds
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_block_function_gives_the_published_answers(
    key: tuple[int, int], counter: tuple[int, int], expected: tuple[int, int]
):
    x0, x1 = threefry2x32(*words(*key, *counter))
    assert (int(x0), int(x1)) == expected


def test_a_uniform_is_made_of_the_top_53_bits_of_a_block():
    # key 0, draw 0 is the first known answer
    expected = ((0x6B200159 << 32 | 0x99BA4EFE) >> 11) * 2.0**-53
    assert float(uniforms([0], 1)[0, 0]) == expected
    key = 0x13198A2E_03707344
    draw = uniforms([key], 1, start=0x243F6A88_85A308D3)
    assert float(draw[0, 0]) == ((0xC4923A9C << 32 | 0x483DF7A0) >> 11) * 2.0**-53


def test_a_negative_key_is_its_64_bits():
    expected = threefry2x32(*words(0xFFFFFFFF, 0xFFFFFFFE, 0, 5))
    assert float(uniforms([-2], 1, start=5)[0, 0]) == ((int(expected[0]) << 32 | int(expected[1])) >> 11) * 2.0**-53


def test_draws_depend_on_key_and_position_alone():
    whole = uniforms([11, -7, 11], 20)
    assert whole.shape == (3, 20)
    assert whole.dtype == torch.float64
    assert torch.equal(whole[0], whole[2])
    assert torch.equal(uniforms([-7], 5, start=9)[0], whole[1, 9:14])
    assert torch.equal(uniforms(torch.tensor([11, -7]), 20), whole[:2])
    assert uniforms([], 3).shape == (0, 3)
    assert uniforms([1], 0).shape == (1, 0)


def chi_square(bins: torch.Tensor) -> float:
    expected = bins.sum() / bins.numel()
    return float(((bins - expected) ** 2 / expected).sum())


def test_draws_are_uniform_within_and_across_streams():
    keys = [derive_key(0, "uniformity", index) for index in range(200)]
    draws = uniforms(keys, 100)
    assert 0.0 <= float(draws.min()) < float(draws.max()) < 1.0
    # 63 degrees of freedom: 99.99 % lie below 115
    assert chi_square(torch.histc(draws, 64, 0.0, 1.0)) < 115
    assert chi_square(torch.histc(draws[:, 0], 10, 0.0, 1.0)) < 34
    assert float(draws.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(draws.var()) == pytest.approx(1 / 12, rel=0.03)


def test_neighbouring_draws_and_neighbouring_keys_are_not_correlated():
    draws = uniforms(list(range(100)), 100)
    for first, second in [(draws[:, :-1], draws[:, 1:]), (draws[:-1], draws[1:])]:
        correlation = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
        assert abs(float(correlation)) < 0.04  # four standard deviations of 9900 pairs
        pairs = (first.flatten() * 8).floor() * 8 + (second.flatten() * 8).floor()
        assert chi_square(torch.bincount(pairs.long(), minlength=64).double()) < 115


def test_keys_fit_int64_and_differ_by_every_field():
    fields = [(0, "sample"), (1, "sample"), (0, "shuffle"), (0, "sample", 0), (0, "sample", 1), (0, "sample", 0, 0)]
    fields += [(0, "sample", 1, 12), (0, "sample", 11, 2), (0, "sample|1"), (-1, "sample"), (0, "")]
    keys = [derive_key(*each) for each in fields]
    assert len(set(keys)) == len(keys)
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert any(key < 0 for key in keys)


def test_a_key_is_the_same_in_every_process_and_release():
    # these numbers may never change: a resumed run would draw others
    assert derive_key(42, "sample", 3, 7) == -7067002993275142054
    assert derive_key(0, "shuffle") == 3941546798430219895


def test_a_permutation_holds_every_item_once_and_depends_on_the_key():
    orders = [permutation(key, 50) for key in range(30)]
    for order in orders:
        assert order.sort().values.tolist() == list(range(50))
    assert len({tuple(order.tolist()) for order in orders}) == 30
    assert torch.equal(permutation(7, 50), orders[7])
    assert permutation(3, 0).tolist() == []


def test_every_item_is_as_often_first():
    firsts = torch.tensor([int(permutation(derive_key(1, "first", k), 5)[0]) for k in range(500)])
    assert chi_square(torch.bincount(firsts, minlength=5).double()) < 24  # 4 degrees of freedom, 99.99 %


def test_integers_fill_their_range_and_stay_in_it():
    found = integers(5, 2000, -3, 4)
    assert found.dtype == torch.int64
    assert set(found.tolist()) == set(range(-3, 4))
    assert chi_square(torch.bincount(found + 3).double()) < 28


@pytest.mark.parametrize("span", [1, 2, 3, 9, 1000, 2**31, 2**52, 2**53])
def test_the_largest_draw_stays_below_the_upper_end(monkeypatch: pytest.MonkeyPatch, span: int):
    largest = torch.tensor([[1 - 2.0**-53]], dtype=torch.float64)
    monkeypatch.setattr(keyed_random, "uniforms", lambda keys, num: largest)
    assert integers(0, 1, 0, span).tolist() == [span - 1]


@pytest.mark.parametrize("num", [*range(1, 34), 63, 64, 65, 255, 256, 257, 1000, 4097, 65537])
def test_an_order_by_place_holds_every_item_once(num: int) -> None:
    items = permuted(derive_key(3, "order", 0), num, torch.arange(num))
    assert items.sort().values.tolist() == list(range(num))


def test_an_order_by_place_depends_on_key_and_position_alone() -> None:
    key, num = derive_key(5, "order", 0), 100_003
    order = KeyedOrder(key, num)
    assert len(order) == num
    places = torch.tensor([7, 99_999, 0, 4095, 4096, 7])
    one_by_one = [int(permuted(key, num, places[i : i + 1])) for i in range(len(places))]
    assert [order[int(place)] for place in places] == permuted(key, num, places).tolist() == one_by_one
    assert order[4090:4100] == [order[place] for place in range(4090, 4100)]
    assert order[-1] == order[num - 1]
    with pytest.raises(IndexError):
        order[num]
    # four ranks that each read their own positions see the order that one reads
    ranks = [[order[place] for place in range(rank, 400, 4)] for rank in range(4)]
    assert [ranks[place % 4][place // 4] for place in range(400)] == order[:400]
    assert order[:400] != KeyedOrder(derive_key(5, "order", 1), num)[:400]


def chi_squared_is_usual(values: torch.Tensor, bins: int) -> bool:
    """Whether Pearson's statistic of uniform values is within 4 deviations of its mean."""
    expected = len(values) / bins
    counts = torch.bincount(values, minlength=bins).double()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return abs(statistic - (bins - 1)) < 4 * (2 * (bins - 1)) ** 0.5


def test_items_of_an_order_by_place_are_uniform_over_places() -> None:
    num = 100_003
    items = permuted(derive_key(1, "order", 0), num, torch.arange(20_000))
    assert chi_squared_is_usual(items * 64 // num, 64)
    steps = (items[1:] - items[:-1]) % num
    assert chi_squared_is_usual(steps * 64 // num, 64)


def test_items_of_an_order_by_place_are_uniform_over_keys() -> None:
    num = 10
    orders = torch.stack([permuted(derive_key(seed, "order", 0), num, torch.arange(num)) for seed in range(200)])
    assert chi_squared_is_usual(orders[:, 0], num)
    assert chi_squared_is_usual((orders == 0).nonzero()[:, 1], num)
    assert chi_squared_is_usual((orders[:, 1] - orders[:, 0]) % num - 1, num - 1)


def test_an_order_of_any_size_is_begun_without_memory() -> None:
    order = KeyedOrder(derive_key(1, "order", 0), 2**40)
    first = order[:1000]
    assert len(set(first)) == 1000
    assert 0.45 < sum(first) / 1000 / 2**40 < 0.55
    assert order[2**40 - 1] < 2**40
