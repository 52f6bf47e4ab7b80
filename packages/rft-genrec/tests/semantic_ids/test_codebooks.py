"""Quantisers and their files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rft_core.errors import DataError
from rft_genrec.semantic_ids.codebooks import Quantiser, load_quantiser


def test_a_quantiser_with_networks_comes_back_from_its_file(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(3, 5, generator=generator), torch.randn(3, generator=generator)
    made = Quantiser(
        "rqvae",
        (torch.randn(4, 3, generator=generator), torch.randn(2, 3, generator=generator)),
        ((weight, bias),),
        ((weight.T.contiguous(), torch.zeros(5)),),
        facts={"seed": 3},
    )
    made.save(tmp_path / "c.safetensors")
    read = load_quantiser(tmp_path / "c.safetensors")
    points = torch.randn(6, 5, generator=generator)
    assert (read.method, read.facts, read.dim, read.sizes) == ("rqvae", {"seed": 3}, 5, (4, 2))
    assert torch.equal(read.codes(points), made.codes(points))
    assert torch.equal(read.reconstruct(read.codes(points)), made.reconstruct(made.codes(points)))
    torch.testing.assert_close(read.latents(points), points @ weight.T + bias)


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        ({"other": torch.zeros(2, 2)}, "it holds other"),
        ({"codebook_0": torch.zeros(2, 2), "codebook_2": torch.zeros(2, 2)}, "it holds codebook_0, codebook_2"),
        ({"codebook_0": torch.zeros(2, 2), "codebook_1": torch.zeros(2, 3)}, r"codebook_1 \(2, 3\)"),
        ({"codebook_0": torch.full((2, 2), torch.nan)}, "codebook_0 holds NaN"),
        ({"codebook_0": torch.zeros(2, 2), "encoder.0.weight": torch.zeros(2, 2)}, "encoder.0.bias"),
    ],
)
def test_a_file_with_something_else_is_refused(tmp_path: Path, tensors, what: str) -> None:
    save_file(tensors, tmp_path / "c.safetensors")
    with pytest.raises(DataError, match=what):
        load_quantiser(tmp_path / "c.safetensors")
    (tmp_path / "d.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be read"):
        load_quantiser(tmp_path / "d.safetensors")
