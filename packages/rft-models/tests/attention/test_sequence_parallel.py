"""Rows of a head shared out evenly over ranks that hold unequally many of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_models.attention.sequence_parallel import balance_rows


class OneOf:
    """A rank of several, whose exchanges are written down and made by nobody."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.pieces: tuple[Tensor, ...] = ()
        self.received: list[int] = []

    def lengths(self, num_rows: int) -> list[int]:
        return [num_rows // self.size + (rank < num_rows % self.size) for rank in range(self.size)]

    def hand_out(self, rows_LD: Tensor, sent: list[int], received: list[int]) -> Tensor:
        self.pieces, self.received = rows_LD.split(sent), received
        return rows_LD.new_zeros((sum(received), rows_LD.shape[1]))


def shared_out(size: int, num_rows: int, tokens_R: Tensor, rows_R: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each rank its tokens, and the numbers of the rows that arrive for them."""
    every: list[Any] = [OneOf(rank, size) for rank in range(size)]
    state_KD = torch.arange(num_rows, dtype=torch.float64)[:, None]  # a state tells which row it is of
    held = state_KD.split(every[0].lengths(num_rows))
    tokens = [balance_rows(one, held[one.rank], num_rows, tokens_R, rows_R)[0] for one in every]
    arrived = [[other.pieces[one.rank] for other in every] for one in every]
    for one, parts in zip(every, arrived, strict=True):
        assert [len(part) for part in parts] == one.received
    return [(own, torch.cat(parts)[:, 0].long()) for own, parts in zip(tokens, arrived, strict=True)]


def test_the_last_tokens_of_a_context_are_shared_by_all() -> None:
    tokens_R = torch.arange(6, 12)
    shares = shared_out(3, 12, tokens_R, tokens_R - 1)
    assert [own.tolist() for own, _ in shares] == [[6, 7], [8, 9], [10, 11]]
    assert [rows.tolist() for _, rows in shares] == [[5, 6], [7, 8], [9, 10]]


def test_ranks_that_hold_rows_in_another_order_share_in_that_order() -> None:
    tokens_R, rows_R = torch.tensor([3, 4, 5, 6]), torch.tensor([7, 2, 6, 2])  # two tokens follow one state
    shares = shared_out(2, 8, tokens_R, rows_R)
    assert [own.tolist() for own, _ in shares] == [[4, 6], [5, 3]]
    assert [rows.tolist() for _, rows in shares] == [[2, 2], [6, 7]]


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_somebodys_with_its_own_state(seed: int) -> None:
    draw = random.Random(seed)
    size, num_rows = draw.randint(1, 5), draw.randint(1, 40)
    number = draw.choice([0, 1, draw.randint(0, 60)])
    rows_R = torch.tensor([draw.randrange(num_rows) for _ in range(number)], dtype=torch.int64)
    tokens_R = torch.tensor(draw.sample(range(1000), number), dtype=torch.int64)
    row_of = dict(zip(tokens_R.tolist(), rows_R.tolist(), strict=True))
    shares = shared_out(size, num_rows, tokens_R, rows_R)
    found = [token for own, _ in shares for token in own.tolist()]
    assert sorted(found) == sorted(row_of)
    for own, rows in shares:
        assert [row_of[token] for token in own.tolist()] == rows.tolist()
    assert max(len(own) for own, _ in shares) - min(len(own) for own, _ in shares) <= 1
