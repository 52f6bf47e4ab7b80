"""An optimizer in shards goes on from a checkpoint, with its averages and loss scale where they were saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_dist.checkpoint_format.shards import Shard
from rft_dist.checkpoints.reader import StoredTensors
from rft_dist.checkpoints.store import CheckpointStore
from rft_dist.collectives import SingleProcess, TorchCollectives
from rft_dist.optim.adamw import STATES
from rft_dist.optim.loss_scaler import LossScaler
from rft_dist.optim.parameter_groups import ParameterGroups
from rft_dist.strategies import optimizer as strategy_optimizer
from rft_dist.strategies.data_parallel import DataParallelOptimizer
from rft_dist.strategies.fsdp import FullyShardedModel, ShardedOptimizer
from rft_dist.strategies.optimizer import AdamWOptions
from rft_dist.testing.thread_ranks import run_in_threads


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


class Matrices(nn.Module):
    """An embedding and an output matrix, of which the last rows are trained; what is between them is frozen."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        values = torch.linspace(-1.0, 1.0, 33).view(11, 3)
        self.between = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.between.weight)
        self.embedding, self.head = nn.Parameter(values.clone()), nn.Parameter(values.flip(0).contiguous())
        if tied:
            self.head = self.embedding
        self.between.weight.requires_grad_(False)

    def loss(self, tokens_T: Tensor) -> Tensor:
        logits_TV = self.between(self.embedding[tokens_T[:-1]]) @ self.head.T
        return nn.functional.cross_entropy(logits_TV, tokens_T[1:], reduction="sum") / 10


ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "epsilon": 1e-3, "weight_decay": 0.5, "max_norm": 0.5}


@pytest.mark.parametrize(("first", "tied"), [(7, False), (7, True), (6, False), (10, True), (0, False)])
def test_shards_of_the_last_rows_are_trained_as_these_rows_alone_and_the_others_keep_their_bits(
    first: int, tied: bool
) -> None:
    alone = Matrices(tied=tied)
    names = [name for name, parameter in alone.named_parameters() if parameter.requires_grad]
    before = {name: alone.get_parameter(name).detach().clone() for name in names}
    rows = {name: nn.Parameter(alone.get_parameter(name).detach()[first:]) for name in names}
    expected = DataParallelOptimizer(rows.items(), SingleProcess(), **ADAM)
    for step in range(3):
        for rank in (0, 1, 2):
            alone.loss(tokens_of(step, rank)).backward()
        for name in names:
            gradient = alone.get_parameter(name).grad
            assert gradient is not None
            rows[name].grad, alone.get_parameter(name).grad = gradient[first:], None
        expected.step(1e-2)

    def work(ranks: TorchCollectives) -> list[Shard]:
        model = Matrices(tied=tied)
        weights = FullyShardedModel(model, [], ranks, device=torch.device("cpu"))
        optimizer = ShardedOptimizer(model.named_parameters(), ranks, **ADAM, first_rows=dict.fromkeys(names, first))
        for step in range(3):
            optimizer.backward(weights.compute(model.loss, tokens_of(step, ranks.rank)))
            optimizer.step(1e-2)
        for name, tensor in weights.full_tensors():
            if name in names:
                assert torch.equal(tensor[:first], before[name][:first])
                assert torch.allclose(tensor[first:], rows[name], atol=1e-6, rtol=0)
                assert not torch.equal(tensor[first:], before[name][first:])
        shards = optimizer.checkpoint_tensors()
        optimizer.load_state_tensors(copied(optimizer.state_tensors()))
        requests = {(each.name, each.start): each.shape for each in optimizer.shard_requests()}
        assert all(requests[each.name, each.start] == tuple(each.data.shape) for each in shards)
        return shards

    found: dict[str, Tensor] = {}
    for shard in [shard for shards in run_in_threads(3, work) for shard in shards]:
        box = tuple(slice(a, a + size) for a, size in zip(shard.start, shard.data.shape, strict=True))
        full = found.setdefault(shard.name, torch.full(shard.global_shape, math.nan))
        assert bool(full[box].isnan().all()), "every element is saved once"
        full[box] = shard.data
    state = {
        f"{kind}/{name}[{first}:]": expected.state_tensors()[f"{kind}/{name}"] for kind in STATES for name in names
    }
    assert found.keys() == state.keys()
    assert all(torch.allclose(found[key], tensor, atol=1e-6, rtol=0) for key, tensor in state.items())


def tokens_of(step: int, rank: int) -> Tensor:
    return (torch.arange(9) * (3 + rank) + step + rank) % 11
