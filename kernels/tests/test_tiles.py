from __future__ import annotations

import pytest
import torch

from rft_kernels.tiles import FLOAT32, HOPPER, OLDER, Tiles, default_splits, default_tiles

H200_SMS = 132
SHARED_MEMORY = 227 * 1024
REGISTERS = 65536


def tile_steps(num_rows: int, vocab_size: int, tiles: Tiles, splits: int) -> tuple[int, float]:
    """Tiles that the busiest place goes through with programs in waves, and the least possible."""
    rows, vocab = -(-num_rows // tiles.rows), -(-vocab_size // tiles.vocab)
    slots = H200_SMS * tiles.programs_per_sm
    waves = -(-rows * splits // slots)
    return waves * -(-vocab // splits), rows * vocab / slots


@pytest.mark.parametrize("num_rows", [8192, 32768])
@pytest.mark.parametrize("vocab_size", [50257, 128256, 151936])
@pytest.mark.parametrize("tiles", HOPPER, ids=str)
def test_default_splits_keep_a_large_gpu_busy(num_rows: int, vocab_size: int, tiles: Tiles):
    busiest, least = tile_steps(num_rows, vocab_size, tiles, default_splits(num_rows, vocab_size, tiles, H200_SMS))
    assert busiest <= 1.06 * least


def test_few_rows_are_spread_over_all_multiprocessors():
    splits = default_splits(64, 151936, HOPPER[-1], H200_SMS)
    assert splits >= 0.9 * H200_SMS


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 257, 1000])
def test_splits_are_never_more_than_vocabulary_tiles(vocab_size: int):
    for num_rows in (1, 128, 10_000):
        assert 1 <= default_splits(num_rows, vocab_size, HOPPER[0], H200_SMS) <= -(-vocab_size // 256)


@pytest.mark.parametrize("tiles", HOPPER, ids=str)
def test_tiles_fit_a_hopper_multiprocessor(tiles: Tiles):
    held = (tiles.rows + tiles.vocab) * tiles.hidden * 2 * tiles.num_stages
    assert held * tiles.programs_per_sm < SHARED_MEMORY
    a_thread = tiles.max_registers or 255
    assert 32 * tiles.num_warps * a_thread * tiles.programs_per_sm <= REGISTERS


def test_defaults_follow_type_device_and_rows():
    assert default_tiles(torch.float32, 8192, (9, 0)) == FLOAT32
    assert default_tiles(torch.bfloat16, 8192, (8, 0)) == OLDER
    assert default_tiles(torch.bfloat16, 8192, (9, 0)).rows == 128
    assert default_tiles(torch.float16, 64, (9, 0)).rows == 64
