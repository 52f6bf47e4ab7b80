"""An optimizer in shards goes on from a checkpoint, with its averages and loss scale where they were saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rft_dist.checkpoints.reader import StoredTensors
from rft_dist.checkpoints.store import CheckpointStore
from rft_dist.collectives import SingleProcess
from rft_dist.optim.loss_scaler import LossScaler
from rft_dist.strategies.fsdp import ShardedOptimizer


def optimizer_of(weight: nn.Parameter, *, averages: bool, scaled: bool) -> ShardedOptimizer:
    return ShardedOptimizer(
        [("w", weight)],
        SingleProcess(),
        betas=(0.9, 0.95),
        epsilon=1e-8,
        weight_decay=0.0,
        max_norm=0.0,
        ema_decay=0.5 if averages else None,
        scaler=LossScaler(scale=2.0**10, growth_interval=2) if scaled else None,
    )


def train(weight: nn.Parameter, optimizer: ShardedOptimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.backward((weight * torch.tensor([1.0, -2.0])).sum())
        optimizer.step(0.1)


def saved(path: Path, *, averages: bool, scaled: bool) -> tuple[nn.Parameter, ShardedOptimizer, StoredTensors]:
    """An optimizer after three steps, and its checkpoint."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = optimizer_of(weight, averages=averages, scaled=scaled)
    train(weight, optimizer, 3)
    store = CheckpointStore(path / "checkpoints", keep_last=None, keep_bytes=None, run_id="a")
    store.save(
        3,
        tensors={"optimizer": optimizer.shards()},
        records={},
        model_writer=lambda directory: (directory / "config.json").write_text("{}") and None,
        metadata={},
    )
    return weight, optimizer, store.open(3).component("optimizer")


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize(("averages", "scaled"), [(True, True), (True, False), (False, True), (False, False)])
def test_all_that_was_saved_is_restored_and_the_next_steps_are_the_same(
    averages: bool, scaled: bool, tmp_path: Path
) -> None:
    weight, optimizer, point = saved(tmp_path, averages=averages, scaled=scaled)
    again = nn.Parameter(weight.detach().clone())
    resumed = optimizer_of(again, averages=averages, scaled=scaled)
    resumed.restore(point)
    expected, found = copied(optimizer.state_tensors()), copied(resumed.state_tensors())
    assert ("ema/w" in found, "loss_scale" in found) == (averages, scaled)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    if scaled:
        assert found["loss_scale"].tolist() == [2.0**11, 1, 0], "doubled after two sound steps"
    if averages:
        assert not torch.equal(found["ema/w"], again.detach())
    for each, stepping in ((weight, optimizer), (again, resumed)):
        train(each, stepping, 2)
    assert torch.equal(weight, again)


def test_averages_and_a_scale_that_were_not_saved_begin_anew(tmp_path: Path) -> None:
    weight, _, point = saved(tmp_path, averages=False, scaled=False)
    again = nn.Parameter(weight.detach().clone())
    resumed = optimizer_of(again, averages=True, scaled=True)
    resumed.restore(point)
    state = resumed.state_tensors()
    assert float(state["step/w"]) == 3
    assert torch.equal(state["ema/w"], again.detach())
    assert state["loss_scale"].tolist() == [2.0**10, 0, 0]


def test_averages_and_a_scale_that_are_no_longer_kept_are_left(tmp_path: Path) -> None:
    weight, _, point = saved(tmp_path, averages=True, scaled=True)
    resumed = optimizer_of(nn.Parameter(weight.detach().clone()), averages=False, scaled=False)
    resumed.restore(point)
    assert sorted(resumed.state_tensors()) == ["exp_avg/w", "exp_avg_sq/w", "step/w"]
    assert float(resumed.state_tensors()["step/w"]) == 3
