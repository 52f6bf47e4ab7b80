"""What a CPU is said to multiply."""

from __future__ import annotations

import pytest
import torch

from rft_dist.optim.cpu_products import cpu_multiplies_bf16


@pytest.mark.parametrize(("told", "can"), [({"avx512_bf16": True}, True), ({"amx_bf16": False, "avx2": True}, False)])
def test_a_cpu_is_asked_for_its_instructions(told: dict[str, bool], can: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told, raising=False)
    assert cpu_multiplies_bf16() is can


@pytest.mark.parametrize(("vectors", "tiles"), [(True, False), (False, True), (False, False)])
def test_a_torch_without_a_table_of_instructions_is_asked_for_each(
    vectors: bool, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: vectors, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles, raising=False)
    assert cpu_multiplies_bf16() is (vectors or tiles)
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name)
    assert not cpu_multiplies_bf16()
