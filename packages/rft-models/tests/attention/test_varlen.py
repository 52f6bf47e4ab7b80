"""Starts and lengths of concatenated sequences, and the keys that a kernel is handed for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rft_models.attention.varlen import Piece, Sequences, varlen_attention

CPU = torch.device("cpu")


def test_a_piece_has_no_prompt_before_it_by_default() -> None:
    assert Piece(3, 2) == Piece(start=3, length=2, prefix_start=0, prefix_length=0)


@pytest.mark.parametrize(
    ("pieces", "queries", "keys", "longest", "places"),
    [
        ([Piece(0, 3), Piece(3, 1)], [0, 3, 4], [0, 3, 4], (3, 3), None),
        (
            [Piece(0, 2), Piece(2, 1), Piece(3, 3, 0, 2), Piece(6, 1, 2, 1)],
            [0, 2, 3, 6, 7],
            [0, 2, 3, 8, 10],
            (3, 5),
            [0, 1, 2, 0, 1, 3, 4, 5, 2, 6],
        ),
    ],
)
def test_keys_of_a_prompt_stand_before_those_of_its_segments(
    pieces: list[Piece], queries: list[int], keys: list[int], longest: tuple[int, int], places: list[int] | None
) -> None:
    found = Sequences.of(pieces, CPU)
    for starts, expected in ((found.query_starts_N1, queries), (found.key_starts_N1, keys)):
        assert (starts.dtype, starts.tolist()) == (torch.int32, expected)
    assert (found.longest_query, found.longest_key) == longest
    assert (None if found.key_places_S is None else found.key_places_S.tolist()) == places


@pytest.mark.parametrize("shares", [True, False])
def test_a_kernel_is_handed_the_keys_in_that_order_and_every_setting(shares: bool) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def kernel(*words: Any, **settings: Any) -> Tensor:
        calls.append((words, settings))
        return words[0]

    sequences = Sequences.of([Piece(0, 2), Piece(2, 1, 0, 2) if shares else Piece(2, 1)], CPU)
    query, key, value = torch.zeros(3, 1, 2), torch.arange(3.0)[:, None, None], 10 * torch.arange(3.0)[:, None, None]
    given: Any = kernel
    settings: dict[str, Any] = {"scaling": 0.3, "sliding_window": 4, "softcap": 2.0, "dropout": 0.1}
    assert varlen_attention(query, key, value, sequences, given, **settings) is query
    varlen_attention(query, key, value, sequences, given, scaling=0.3)
    order = [0.0, 1.0, 0.0, 1.0, 2.0] if shares else [0.0, 1.0, 2.0]
    for words, _ in calls:
        assert words[0] is query
        assert words[1].flatten().tolist() == order
        assert words[2].flatten().tolist() == [10 * number for number in order]
        assert words[3] is sequences
    plain = {"scaling": 0.3, "sliding_window": None, "softcap": None, "dropout": 0.0}
    assert [given for _, given in calls] == [settings, plain]
