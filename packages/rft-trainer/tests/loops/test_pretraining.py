"""The loop of pre-training: its measures of held-out text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from rft_trainer.loops import pretraining
from rft_trainer.loops.pretraining import Window, bits_per_byte
from rft_trainer.records.rollouts import TrainingSample


def window(first: int, *lengths: int) -> Window:
    return tuple(TrainingSample(f"{first}#{n}", tuple(range(length)), 0, 0.0) for n, length in enumerate(lengths))


def test_bits_per_byte_do_not_depend_on_the_tokenizer() -> None:
    # 8 bytes, told at 2 bits each: as 8 tokens of 1 byte, and as 2 tokens of 4
    assert bits_per_byte(2 * math.log(2), 8, 8) == pytest.approx(2.0)
    assert bits_per_byte(8 * math.log(2), 2, 8) == pytest.approx(2.0)


def test_text_without_bytes_has_no_bits() -> None:
    assert math.isnan(bits_per_byte(1.0, 1, 0))


def test_blocks_hold_every_piece_of_every_window_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretraining, "_BLOCK", 1)
    windows: Sequence[Window] = [window(n, *([3] * (n % 3 + 1))) for n in range(7)]
    blocks = list(pretraining._blocks(windows, 2))
    assert [sample.sample_id for block in blocks for sample in block] == [s.sample_id for w in windows for s in w]
    assert len(blocks) == 4
