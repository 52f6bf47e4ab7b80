"""Tile sizes of the fused kernel over rows, vocabulary and hidden width, and the number of vocabulary parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rft_kernels.row_statistics import num_parts

_START_COST = 0.1
"""What a program costs before its first tile and after its last, in tiles: filling the pipeline, writing sums."""
_MOST_TILES = 32


@dataclass(frozen=True, slots=True)
class Tiles:
    """One way to run the fused kernel; sums are added in an order that depends on `vocab` and `splits` alone."""

    rows: int
    vocab: int
    hidden: int
    """Depth of one step of a product."""
    num_warps: int
    num_stages: int
    """Steps in flight: each holds (rows + vocab) * hidden elements of shared memory."""
    programs_per_sm: int
    """As many as fit by shared memory and registers; `default_splits` counts on it."""
    group: int = 16
    """Row tiles that go through one part of the vocabulary together, so that they find it in the L2 cache."""
    flat: bool = False
    """Loads of a vocabulary tile start while the one before is summed."""
    max_registers: int | None = None
    """A limit a thread, for two programs to fit; None leaves it to the compiler."""


HOPPER = (
    # two warp groups of 64 x 256, 144 KB in 3 stages: fewest bytes a product, each tile's sums wait for its products
    Tiles(128, 256, 64, num_warps=8, num_stages=3, programs_per_sm=1),
    Tiles(128, 256, 64, num_warps=8, num_stages=3, programs_per_sm=1, flat=True),
    Tiles(128, 256, 64, num_warps=8, num_stages=4, programs_per_sm=1, flat=True),
    Tiles(256, 128, 64, num_warps=8, num_stages=3, programs_per_sm=1, flat=True),
    # two programs a multiprocessor, 96 KB each: one's exponentials run beside the other's products
    Tiles(128, 128, 64, num_warps=4, num_stages=3, programs_per_sm=2),
    Tiles(128, 128, 64, num_warps=4, num_stages=3, programs_per_sm=2, flat=True),
    Tiles(128, 128, 64, num_warps=8, num_stages=3, programs_per_sm=2, max_registers=128),
    # all row tiles of 8192 rows together: the matrix is read once from memory, the hidden states from the L2 cache
    Tiles(128, 256, 64, num_warps=8, num_stages=3, programs_per_sm=1, group=64, flat=True),
    # few rows
    Tiles(64, 256, 64, num_warps=4, num_stages=3, programs_per_sm=1),
)
"""16-bit inputs on compute capability 9.0, to choose from by `fused_logprobs.measure`; the order is no measurement."""

OLDER = Tiles(64, 128, 64, num_warps=4, num_stages=3, programs_per_sm=2)
"""16-bit inputs elsewhere: 72 KB in 3 stages."""

FLOAT32 = Tiles(64, 64, 32, num_warps=4, num_stages=2, programs_per_sm=2)
"""float32 inputs, whose products run without tensor cores."""


def default_tiles(dtype: torch.dtype, num_rows: int, capability: tuple[int, int]) -> Tiles:
    """The tiles that are taken where none are named.

    Fixed, not measured at the first call: a choice that differs between two runs would change the last
    bits of a result.

    Args:
        dtype: of hidden states and matrix.
        num_rows: rows.
        capability: compute capability of the device.
    """
    if dtype == torch.float32:
        return FLOAT32
    if capability < (9, 0):
        return OLDER
    return HOPPER[-1] if num_rows <= 64 else HOPPER[0]


def default_splits(num_rows: int, vocab_size: int, tiles: Tiles, num_sms: int) -> int:
    """Parts of the vocabulary for which the last wave of programs leaves the fewest multiprocessors idle.

    With k tiles a part there are P = ceil(R / rows) * ceil(ceil(V / vocab) / k) programs in
    ceil(P / slots) waves, and a wave takes k tiles and a start.

    Args:
        num_rows: rows, at least 1.
        vocab_size: entries of the vocabulary, at least 1.
        tiles: tiles.
        num_sms: multiprocessors of the device.
    """
    # programs that run at the same time
    slots = num_sms * tiles.programs_per_sm
    num_row_tiles, num_vocab_tiles = num_parts(num_rows, tiles.rows), num_parts(vocab_size, tiles.vocab)

    def cost(tiles_per_part: int) -> float:
        programs = num_row_tiles * num_parts(num_vocab_tiles, tiles_per_part)
        return num_parts(programs, slots) * (tiles_per_part + _START_COST)

    best = min(range(1, min(_MOST_TILES, num_vocab_tiles) + 1), key=cost)
    return num_parts(num_vocab_tiles, best)
