"""Randomness as a function of what it is for: (seed, purpose, step, sample) in, numbers out.

There is no generator with a hidden state. A number depends on its key alone, so a resumed run,
another number of ranks or another order of work draws the same numbers. The block function is
Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011), which needs 32-bit additions, rotations and XORs only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_FEISTEL_ROUNDS = 8
"""Four make a network as good as its round function (Luby and Rackoff 1988); small domains need more."""
_ORDER_BLOCK = 4096


def derive_key(seed: int, purpose: str, *indices: int) -> int:
    """64-bit key of (seed, purpose, indices), signed so that it fits a torch int64.

    BLAKE2b over the fields with their lengths, so that no two different tuples collide by
    concatenation. `purpose` is a word such as "sample" or "shuffle".
    """
    text = f"{seed}|{len(purpose)}:{purpose}|" + "|".join(str(int(i)) for i in indices)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def threefry2x32(key_0: Tensor, key_1: Tensor, count_0: Tensor, count_1: Tensor) -> tuple[Tensor, Tensor]:
    """Threefry-2x32-20 (SC 2011, section 3.2): int64 tensors holding 32-bit words, broadcast together."""
    # words of 32 bits in int64 with a mask, since torch has few operations on uint32
    keys = (key_0, key_1, key_0 ^ key_1 ^ _PARITY)
    x0 = (count_0 + keys[0]) & _MASK
    x1 = (count_1 + keys[1]) & _MASK
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = (x0 + x1) & _MASK
            x1 = (((x1 << rotation) & _MASK) | (x1 >> (32 - rotation))) ^ x0
        x0 = (x0 + keys[(group + 1) % 3]) & _MASK
        x1 = (x1 + keys[(group + 2) % 3] + group + 1) & _MASK
    return x0, x1


def uniforms(keys: Sequence[int] | Tensor, num: int, start: int = 0) -> Tensor:
    """[N, num] float64 in [0, 1): row n holds draws `start` to `start + num` of the stream of key n."""
    keys_N1 = torch.as_tensor(keys, dtype=torch.int64).reshape(-1, 1)
    counter_1P = torch.arange(start, start + num, dtype=torch.int64).reshape(1, -1)
    high, low = threefry2x32((keys_N1 >> 32) & _MASK, keys_N1 & _MASK, counter_1P >> 32, counter_1P & _MASK)
    # 32 bits of one word and 21 of the other are the 53 that a float64 holds
    return ((high << 21) | (low >> 11)).to(torch.float64) * 2.0**-53


def permutation(key: int, num: int) -> Tensor:
    """[num] int64: the order of `num` items under `key`, by sorting one keyed draw an item."""
    return uniforms([key], num)[0].argsort(stable=True)


def permuted(key: int, num: int, positions: Tensor) -> Tensor:
    """[P] int64: the items at `positions` of a permutation of [0, num) that is computed place by place.

    A Feistel network over the smallest even number of bits that holds `num`, whose round function is Threefry under the
    key; a result of `num` or more is put through again until it is below (cycle walking). Black and Rogaway, "Ciphers
    with arbitrary finite domains", CT-RSA 2002, methods 2 and 3. No order is in memory, unlike with `permutation`,
    whose order is another one.

    Args:
        key: of `derive_key`.
        num: items, from 1 to 2^62.
        positions: [P] int64, each in [0, num).
    """
    half = max(1, -(-max(num - 1, 1).bit_length() // 2))
    items = _feistel(key, half, positions)
    while len(outside := (items >= num).nonzero().flatten()):
        items[outside] = _feistel(key, half, items[outside])
    return items


def _feistel(key: int, half: int, values: Tensor) -> Tensor:
    """One pass of the network over values of twice `half` bits."""
    key_0, key_1 = torch.tensor((key >> 32) & _MASK), torch.tensor(key & _MASK)
    mask = (1 << half) - 1
    left, right = values >> half, values & mask
    for turn in range(_FEISTEL_ROUNDS):
        word, _ = threefry2x32(key_0, key_1, right, torch.tensor(turn))
        left, right = right, left ^ (word & mask)
    return (left << half) | right


class KeyedOrder(Sequence[int]):
    """The permutation of `permuted` as a sequence, a block of which is computed at a time.

    Example: `[*KeyedOrder(derive_key(1, "order", 0), 5)]` holds each of 0 to 4 once.
    """

    def __init__(self, key: int, num: int) -> None:
        self._key, self._num = key, num
        self._first, self._block = 0, torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        """Return the number of items."""
        return self._num

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        """Return the item at a position, or those of a slice."""
        if isinstance(index, slice):
            positions = torch.tensor(range(*index.indices(self._num)), dtype=torch.int64)
            return [int(item) for item in permuted(self._key, self._num, positions)]
        position = range(self._num)[index]
        if not 0 <= position - self._first < len(self._block):
            self._first = position - position % _ORDER_BLOCK
            stop = min(self._first + _ORDER_BLOCK, self._num)
            self._block = permuted(self._key, self._num, torch.arange(self._first, stop))
        return int(self._block[position - self._first])


def integers(key: int, num: int, low: int, high: int) -> Tensor:
    """[num] int64, uniform in [low, high)."""
    return (uniforms([key], num)[0] * (high - low)).floor().to(torch.int64) + low


def keyed_normal(shape: Sequence[int], key: int) -> Tensor:
    """Float32 draws from N(0, 1) that depend on the key alone."""
    generator = torch.Generator().manual_seed(key & 0x7FFF_FFFF_FFFF_FFFF)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)
