"""What the texts that a model continues begin with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rft.pretraining.continued_texts import first_tokens
from rft_trainer.records.rollouts import TrainingSample

TOKENIZER: Any = SimpleNamespace(eos_ids=(7,))


def windows(*lengths: tuple[int, ...]) -> Any:
    return [
        tuple(TrainingSample(f"{n}", tuple(range(100 * n, 100 * n + size)), 0, 0.0) for size in sizes)
        for n, sizes in enumerate(lengths)
    ]


def test_they_begin_with_held_out_windows_spread_over_the_text() -> None:
    held_out = windows(*[(40,)] * 9)
    assert [ids[0] for ids in first_tokens(TOKENIZER, held_out, 3)] == [0, 300, 600]


def test_the_longest_document_of_a_window_is_begun_and_half_of_it_is_left() -> None:
    assert first_tokens(TOKENIZER, windows((3, 10, 4)), 1) == [[0, 1, 2, 3, 4]]
    assert len(first_tokens(TOKENIZER, windows((90,)), 1)[0]) == 16


@pytest.mark.parametrize("held_out", [None, windows((2,))])
def test_texts_beyond_the_held_out_ones_begin_from_nothing(held_out: Any) -> None:
    found = first_tokens(TOKENIZER, cast("Any", held_out), 2)
    assert len(found) == 2
    assert found[1] == [7]
