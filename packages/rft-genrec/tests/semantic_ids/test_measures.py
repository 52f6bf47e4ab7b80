"""Measures of semantic IDs."""

import pytest
import torch

from rft_genrec.semantic_ids.codebooks import Quantiser
from rft_genrec.semantic_ids.measures import histogram, level_use, nearest_items, shared_prefixes, unexplained_share

PAIRS = torch.tensor([[0.0], [1.0], [8.0], [9.0]])


def test_use_of_a_level() -> None:
    use = level_use(torch.tensor([0, 0, 2, 2]), 4)
    assert (use.codes, use.used, use.largest) == (4, 2, 2)
    assert use.perplexity == pytest.approx(2)
    assert histogram(torch.tensor([0, 0, 2]), 4) == [2, 1, 0, 0]


def test_what_is_not_explained_is_a_share_of_the_spread() -> None:
    coarse = Quantiser("rqkmeans", (torch.tensor([[0.5], [8.5]]),))
    # 4 x 0.25 of 4.5^2 + 3.5^2 + 3.5^2 + 4.5^2
    assert unexplained_share(PAIRS, coarse, PAIRS.mean(0)) == pytest.approx(1 / 65)
    assert unexplained_share(torch.ones(2, 1), coarse, torch.ones(1)) == 0


def test_neighbours_share_codes_more_often_than_chance() -> None:
    near = nearest_items(PAIRS, 1)
    assert near.flatten().tolist() == [1, 0, 3, 2]
    codes = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 0]])
    assert shared_prefixes(codes, near, 1) == (1.0, pytest.approx(4 / 12))
    assert shared_prefixes(codes, near, 2) == (0.5, pytest.approx(2 / 12))
