"""Items with the same codes, told apart."""

import pytest
import torch

from rft_genrec.semantic_ids.collisions import collision_rate, last_residuals, resolve

LAST = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
CODES = torch.tensor([[0, 1], [0, 1], [0, 1], [5, 1]])
LEFT = torch.tensor([[1.4], [1.0], [0.9], [1.0]])


def resolved(how: str, taken=(), codes=CODES, left=LEFT):
    return resolve(codes, left, LAST, how, epsilon=0.003, taken=taken)


def test_the_nearest_item_keeps_its_code_and_the_others_take_the_nearest_free() -> None:
    # 1.0 is at the code 1; of the others 1.4 is nearer to 2, and 0.9 to 0
    assert resolved("free") == [(0, 2), (0, 1), (0, 0), (5, 1)]


def test_codes_that_are_taken_stay_taken() -> None:
    found = resolved("free", taken=[(0, 1)])
    assert len({*found, (0, 1)}) == 5
    # a prefix whose codes are all taken has no room: the rest keep what they have
    full = resolved("free", taken=[(0, 0), (0, 1), (0, 2), (0, 3)])
    assert full[:3] == [(0, 1)] * 3


def test_an_extra_code_is_the_rank_in_the_group() -> None:
    assert resolved("extra") == [(0, 1, 0), (0, 1, 1), (0, 1, 2), (5, 1)]
    assert resolved("extra", taken=[(0, 1, 0), (0, 1, 3), (5, 1)])[0] == (0, 1, 4)
    # an item that has the three tokens counts as the first
    assert resolved("extra", taken=[(5, 1)])[3] == (5, 1, 1)


def test_sinkhorn_spreads_a_group_over_the_last_level() -> None:
    found = resolved("sinkhorn")
    assert [one[:1] for one in found] == [(0,), (0,), (0,), (5,)]
    assert collision_rate(found) == 0
    assert resolved("keep") == [(0, 1)] * 3 + [(5, 1)]
    assert collision_rate(resolved("keep")) == pytest.approx(2 / 4)


def test_what_the_last_level_quantises_is_what_the_others_leave() -> None:
    books = (torch.tensor([[0.0], [8.0]]), LAST)
    left = last_residuals(torch.tensor([[9.0], [2.0]]), torch.tensor([[1, 1], [0, 2]]), books)
    assert left.flatten().tolist() == [1, 2]
