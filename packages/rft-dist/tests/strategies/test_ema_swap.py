"""Averages in the place of the weights: they are there, and every bit of the weights comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rft_dist.collectives import SingleProcess
from rft_dist.strategies.data_parallel import DataParallelOptimizer
from rft_dist.strategies.ema_swap import swap_in_ema
from rft_dist.testing.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("zero")
PROGRAM = Path(__file__).with_name("averaged_ranks.py")
CASES = (
    *("replicated", "replicated bfloat16", "fsdp", "fsdp bfloat16", "fsdp in host memory", "fsdp hybrid", "tensor"),
    *("zero 1", "zero 1 bfloat16", "zero 2", "zero 3", "zero 3 bfloat16", "zero 3 gathered"),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    out = tmp_path_factory.mktemp("averaged")
    run_ranks(PROGRAM, 2, out)
    return [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.night
def test_every_strategy_that_keeps_averages_is_tried(results: list[dict[str, Any]]) -> None:
    assert set(results[0]) == set(CASES)


@pytest.mark.night
@pytest.mark.parametrize("case", CASES)
def test_every_rank_computes_with_the_averages_and_trains_on_as_if_it_had_not(
    results: list[dict[str, Any]], case: str
) -> None:
    narrow = "bfloat16" in case and "fsdp" not in case  # blocks are float32, and gathered as bfloat16
    for found in (told[case] for told in results):
        assert found["distance"] < (1e-2 if narrow else 1e-6)
        assert found["moved"] > 1e-3
        assert found["back"], "weights, copies and moments have the bits that they had"
        assert found["goes on"], "the next step is that of a run that never looked at its averages"
    assert results[0][case]["loss"] == pytest.approx(results[1][case]["loss"], rel=1e-6)


def trained(dtype: torch.dtype) -> tuple[nn.Parameter, DataParallelOptimizer]:
    weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
    optimizer = DataParallelOptimizer(
        [("w", weight)],
        SingleProcess(),
        betas=(0.9, 0.95),
        epsilon=1e-6,
        weight_decay=0.0,
        max_norm=0.0,
        master=dtype != torch.float32,
        ema_decay=0.5,
    )
    optimizer.backward((weight.float() * torch.tensor([1.0, -2.0])).sum())
    optimizer.step(0.25)
    return weight, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_by_hand_and_back(dtype: torch.dtype) -> None:
    weight, optimizer = trained(dtype)
    assert weight.tolist() == pytest.approx([0.75, 2.25], abs=1e-5)
    last, place = weight.detach().clone(), weight.data_ptr()
    with swap_in_ema({"w": weight}, optimizer.state_tensors):
        assert weight.tolist() == pytest.approx([0.875, 2.125], abs=1e-5)
        assert weight.data_ptr() == place, "an engine that shares the memory sees them"
    assert torch.equal(weight.detach(), last)


def test_an_error_meanwhile_leaves_the_weights() -> None:
    weight, optimizer = trained(torch.float32)
    last = weight.detach().clone()
    with pytest.raises(RuntimeError, match="broken"), swap_in_ema({"w": weight}, optimizer.state_tensors):
        raise RuntimeError("broken")
    assert torch.equal(weight.detach(), last)
