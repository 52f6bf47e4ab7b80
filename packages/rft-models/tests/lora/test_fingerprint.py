"""The fingerprint of base weights: what changes it, and that files and memory give the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rft_models.lora.fingerprint import fingerprint

MATRIX, VECTOR, NUMBER = torch.arange(200.0).view(10, 20).t(), torch.arange(64) * 3, torch.tensor(5.0).bfloat16()
NAMED = [("m", MATRIX), ("v", VECTOR), ("n", NUMBER), ("none", torch.empty(0, 3))]


class Stored:
    """Weights that are read one element at a time."""

    def block(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        assert shape == (1,) * len(start)
        return dict(NAMED)[name][tuple(start)].reshape(tuple(shape)).double()

    def close(self) -> None:
        """Nothing is open."""


def test_it_is_the_hash_of_names_types_shapes_and_64_elements_from_the_first_to_the_last() -> None:
    flat = MATRIX.reshape(-1).tolist()
    chosen = [flat[round(place * 199 / 63)] for place in range(64)]
    lines = [
        f"m|torch.float32|[20, 10]|{chosen}",
        f"v|torch.int64|[64]|{[float(number * 3) for number in range(64)]}",
        "n|torch.bfloat16|[]|[5.0]",
        "none|torch.float32|[0, 3]|[]",
    ]
    expected = hashlib.blake2b("".join(f"{line}\n" for line in lines).encode(), digest_size=16).hexdigest()
    assert fingerprint(NAMED) == expected
    assert len(expected) == 32


def test_elements_of_files_are_those_of_the_tensors() -> None:
    named = NAMED[:2]
    without_memory = [(name, tensor.to("meta")) for name, tensor in named]
    assert fingerprint(without_memory, Stored()) == fingerprint(named)


def test_elements_of_a_large_tensor_are_told_apart() -> None:
    asked: list[int] = []
    rows, columns = 2**13, 2**13 + 3

    class Large(Stored):
        """Notes which elements are read."""

        def block(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
            asked.append(start[0] * columns + start[1])
            return torch.zeros(tuple(shape))

    fingerprint([("large", torch.empty(rows, columns, device="meta"))], Large())
    assert asked == [round(place * (rows * columns - 1) / 63) for place in range(64)]


@pytest.mark.parametrize(
    "other",
    [
        [("w", MATRIX), *NAMED[1:]],
        [("m", MATRIX.double()), *NAMED[1:]],
        [("m", MATRIX.reshape(10, 20)), *NAMED[1:]],
        [("m", MATRIX + 1), *NAMED[1:]],
        NAMED[::-1],
        NAMED[:3],
    ],
)
def test_other_weights_have_another(other: list[tuple[str, Tensor]]) -> None:
    assert fingerprint(other) != fingerprint(NAMED)
