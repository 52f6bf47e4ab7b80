"""Files of tensors in pieces, read by the library whose format they have."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load

from rft_dist.checkpoint_format.safetensors_pieces import DTYPES, file_pieces, num_tensor_bytes, tensor_bytes

TENSORS = {
    "c": torch.arange(6.0).view(2, 3).T,
    "a": torch.arange(3, dtype=torch.int64),
    "e": torch.tensor([True, False, True]),
    "b": torch.arange(5.0),
    "d": torch.arange(4.0).to(torch.bfloat16),
    "f": torch.zeros(0, 4),
    "g": torch.tensor(2.5),
}


def whole(metadata: dict[str, str] | None = None) -> bytes:
    return b"".join(bytes(piece) for piece in file_pieces(TENSORS, metadata))


def test_the_library_reads_every_tensor_back() -> None:
    found = load(whole())
    assert set(found) == set(TENSORS)
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )


def test_the_widest_types_come_first_then_names_and_nothing_lies_between() -> None:
    file = whole()
    (length,) = struct.unpack("<Q", file[:8])
    assert length % 8 == 0
    header = json.loads(file[8 : 8 + length])
    assert file[8 : 8 + length].rstrip() == json.dumps(header, separators=(",", ":")).encode()
    assert list(header) == ["a", "b", "c", "f", "g", "d", "e"]
    end = 0
    for row in header.values():
        assert row["data_offsets"][0] == end
        end = row["data_offsets"][1]
    assert len(file) == 8 + length + end


def test_metadata_is_text_by_text(tmp_path: pytest.TempPathFactory) -> None:
    file = whole({"format": "pt"})
    path = tmp_path / "a.safetensors"  # type: ignore[operator]
    path.write_bytes(file)
    with safe_open(path, "pt") as opened:  # type: ignore[no-untyped-call]
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_every_type_has_its_own_size(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 5).to(dtype)
    assert num_tensor_bytes(tensor) == 15 * dtype.itemsize
    [found] = load(b"".join(bytes(piece) for piece in file_pieces({"x": tensor}))).values()
    assert found.dtype == dtype


def test_a_type_that_the_format_does_not_have_is_refused() -> None:
    with pytest.raises(AssertionError):
        list(file_pieces({"x": torch.zeros(1, dtype=torch.complex64)}))


def test_parameters_and_empty_tensors_have_bytes_too() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    assert bytes(tensor_bytes(weight.T)) == weight.detach().T.contiguous().numpy().tobytes()
    for dtype in DTYPES.values():
        assert bytes(tensor_bytes(torch.empty(0, 4, dtype=dtype))) == b""
