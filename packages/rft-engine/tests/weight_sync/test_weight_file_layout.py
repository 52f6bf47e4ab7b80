"""The bytes of a weight file: its header, where tensors are mapped and where they are copied, and what is kept."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from rft_engine.weight_sync.weight_file import read_weight_file, write_weight_file


def test_a_header_is_compact_and_may_fill_its_room_exactly(tmp_path: Path) -> None:
    entry = json.dumps({"": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, separators=(",", ":"))
    longest = 2**16 - 8 - len(entry)
    name = "n" * longest
    assert write_weight_file(tmp_path / "a", [(name, torch.tensor([2.5]))], 1) == 4
    assert read_weight_file(tmp_path / "a")[name].tolist() == [2.5]
    data = (tmp_path / "a").read_bytes()
    assert data[8 : 2**16].decode() == entry.replace('""', f'"{name}"', 1)
    with pytest.raises(AssertionError):
        write_weight_file(tmp_path / "b", [(name + "n", torch.tensor([2.5]))], 1)


@pytest.mark.parametrize("odd", [0, 1, 2, 3])
def test_tensors_at_an_aligned_place_are_mapped_and_others_copied_to_one(tmp_path: Path, odd: int) -> None:
    names = ("bytes", "one", "two", "more", "three")
    dtypes = ("U8", "F32", "F32", "U8", "F32")
    ends = (3, 7, 11, 12, 16)
    entries = {
        name: {"dtype": dtype, "shape": [(end - begin) // (1 if dtype == "U8" else 4)], "data_offsets": [begin, end]}
        for name, dtype, begin, end in zip(names, dtypes, (0, *ends), ends, strict=False)
    }
    header = json.dumps(entries).encode()
    header += b" " * ((odd - len(header)) % 4)
    values = (bytes([1, 2, 3]), struct.pack("<f", 1.5), struct.pack("<f", -2.5), bytes([4]), struct.pack("<f", 8.0))
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header + b"".join(values))
    found = read_weight_file(tmp_path / "a")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "bytes": [1, 2, 3],
        "one": [1.5],
        "two": [-2.5],
        "more": [4],
        "three": [8.0],
    }
    first = found["bytes"].data_ptr()
    for name, begin in (("one", 3), ("two", 7), ("three", 12)):
        assert found[name].data_ptr() % 4 == 0
        assert (found[name].data_ptr() - first == begin) is ((odd + begin) % 4 == 0)
