"""An optimizer in shards goes on from a checkpoint, with its averages and loss scale where they were saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_dist.checkpoints.reader import StoredTensors
from rft_dist.checkpoints.store import CheckpointStore
from rft_dist.collectives import SingleProcess
from rft_dist.optim.loss_scaler import LossScaler
from rft_dist.optim.parameter_groups import ParameterGroups
from rft_dist.strategies import optimizer as strategy_optimizer
from rft_dist.strategies.fsdp import ShardedOptimizer
from rft_dist.strategies.optimizer import AdamWOptions


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


def write_config(directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def saved(path: Path, *, averages: bool, scaled: bool) -> tuple[nn.Parameter, ShardedOptimizer, StoredTensors]:
    """An optimizer after three steps, and its checkpoint."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = optimizer_of(weight, averages=averages, scaled=scaled)
    train(weight, optimizer, 3)
    store = CheckpointStore(path / "checkpoints", keep_last=None, keep_bytes=None, run_id="a")
    store.save(
        3,
        tensors={"optimizer": optimizer.checkpoint_tensors()},
        records={},
        model_writer=write_config,
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


REQUIRED: AdamWOptions = {"betas": (0.0, 0.9), "epsilon": 1e-8, "weight_decay": 0.25, "max_norm": 1.0}
GROUPS = ParameterGroups(rates=(("w", 0.5),))
GIVEN: AdamWOptions = {**REQUIRED, "groups": GROUPS, "master": True, "offload": True, "ema_decay": 0.5}


@pytest.mark.parametrize(
    ("options", "others"), [(REQUIRED, (None, False, False, None)), (GIVEN, (GROUPS, True, True, 0.5))]
)
def test_options_are_handed_on_with_the_tensors_of_which_this_rank_holds_something(
    monkeypatch: pytest.MonkeyPatch, options: AdamWOptions, others: tuple[Any, ...]
) -> None:
    made: list[tuple[list[str], dict[str, Any]]] = []
    monkeypatch.setattr(strategy_optimizer, "LocalAdamW", lambda local, **words: made.append((list(local), words)))
    named = [("w", nn.Parameter(torch.ones(2))), ("none", nn.Parameter(torch.ones(0)))]
    ShardedOptimizer([*named, ("frozen", nn.Parameter(torch.ones(1), requires_grad=False))], SingleProcess(), **options)
    words = {"betas": (0.0, 0.9), "epsilon": 1e-8, "weight_decay": 0.25}
    assert made == [(["w"], words | dict(zip(("groups", "master", "offload", "ema_decay"), others, strict=True)))]


def test_a_loss_is_scaled_and_the_norm_the_bound_and_the_update_are_those_of_the_loss_itself() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    scaler = LossScaler(scale=2.0**10)
    options: AdamWOptions = {**REQUIRED, "scaler": scaler}
    optimizer = ShardedOptimizer([("w", weight)], SingleProcess(), **options)
    optimizer.backward((weight * torch.tensor([3.0, -4.0])).sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0 * 2**10, -4.0 * 2**10]
    outcome = optimizer.step(0.5)
    assert (outcome.gradient_norm, outcome.applied, outcome.loss_scale) == (5.0, True, 2.0**10)
    assert optimizer.state_tensors()["exp_avg/w"].tolist() == pytest.approx([0.6, -0.8])
    assert weight.tolist() == pytest.approx([0.5, 2.5])
    assert weight.grad is None
    optimizer.backward((weight * math.inf).sum())
    refused = optimizer.step(0.5)
    assert (refused.applied, refused.loss_scale) == (False, 2.0**10)
    assert weight.grad is None
    assert (scaler.scale, scaler.skipped) == (2.0**9, 1)
    assert weight.tolist() == pytest.approx([0.5, 2.5])


def test_the_learning_rate_may_be_zero_and_must_be_finite() -> None:
    optimizer = optimizer_of(nn.Parameter(torch.ones(2)), averages=False, scaled=False)
    assert optimizer.step(0.0).applied
    assert optimizer.step(0.5).applied
    for rate in (-0.1, math.inf, math.nan):
        with pytest.raises(AssertionError):
            optimizer.step(rate)


def test_averages_take_the_place_of_the_weights_while_they_are_asked_for() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = optimizer_of(weight, averages=True, scaled=False)
    train(weight, optimizer, 1)
    assert weight.tolist() == pytest.approx([0.9, 2.1])
    with optimizer.swap_in_ema():
        assert weight.tolist() == pytest.approx([0.95, 2.05])
    assert weight.tolist() == pytest.approx([0.9, 2.1])
