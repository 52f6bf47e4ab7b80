"""What a forward computes in: by what is asked for, what the device can, and what all ranks can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rft_dist.collectives import SingleProcess
from rft_dist.settings import StrategySettings
from rft_dist.strategies import autocast
from rft_dist.strategies.autocast import compute_type

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Among(SingleProcess):
    """A rank whose peers bring `most` to every maximum."""

    def __init__(self, most: int = 0) -> None:
        self.most = most

    def max(self, tensor: Tensor) -> Tensor:
        return torch.clamp(tensor, min=self.most)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """A GPU that multiplies bfloat16, or does not."""
    can = {"bf16": True}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: can["bf16"])
    return can


@pytest.mark.parametrize(
    ("settings", "name", "dtype"),
    [
        ({}, "off", None),
        ({"amp": True, "amp_dtype": "fp16"}, "fp16", torch.float16),
        ({"amp": True, "amp_dtype": "bf16"}, "bf16", torch.bfloat16),
    ],
)
def test_a_type_that_is_asked_for_is_computed_in(
    settings: dict[str, Any], name: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autocast, "cpu_multiplies_bf16", lambda: False)
    found = compute_type(StrategySettings(**settings), CPU, SingleProcess())
    assert (found.name, found.dtype) == (name, dtype)


def test_a_gpu_without_bfloat16_computes_in_float16(gpu: dict[str, bool]) -> None:
    settings = StrategySettings(amp=True)
    found = compute_type(settings, CUDA, SingleProcess())
    assert (found.name, found.reason) == ("bf16", "GPU multiplies bfloat16")
    gpu["bf16"] = False
    assert compute_type(settings, CUDA, SingleProcess()).dtype == torch.float16


def test_a_cpu_without_bfloat16_stays_in_float32_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for can, dtype in ((True, torch.bfloat16), (False, None)):
        monkeypatch.setattr(autocast, "cpu_multiplies_bf16", lambda can=can: can)
        found = compute_type(StrategySettings(amp=True), CPU, SingleProcess())
        assert found.dtype == dtype
        assert ("no bfloat16" in found.reason) != can


def test_ranks_compute_in_what_all_of_them_can(gpu: dict[str, bool]) -> None:
    found = compute_type(StrategySettings(amp=True), CUDA, Among(most=1))
    assert (found.name, found.reason) == ("fp16", "another rank has no bf16")
    assert compute_type(StrategySettings(amp=True), CUDA, Among(most=2)).dtype is None
    gpu["bf16"] = False
    assert compute_type(StrategySettings(amp=True), CUDA, Among(most=1)).reason.startswith("GPU")
