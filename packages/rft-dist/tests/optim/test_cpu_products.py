"""What a CPU is said to multiply."""

from __future__ import annotations

import pytest
import torch

from rft_dist.optim.cpu_products import cpu_multiplies_bf16


@pytest.mark.parametrize(("told", "can"), [({"avx512_bf16": True}, True), ({"amx_bf16": False, "avx2": True}, False)])
def test_a_cpu_is_asked_for_its_instructions(told: dict[str, bool], can: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told, raising=False)
    assert cpu_multiplies_bf16() is can
    # versions of torch before tell it by one name
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: can)
    assert cpu_multiplies_bf16() is can
