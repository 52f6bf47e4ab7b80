"""Experts over groups of ranks: the steps of whole ones, each rank with its own experts; four threads are the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_core.errors import OptionsError
from rft_dist.collectives import SingleProcess, TorchCollectives
from rft_dist.settings import AdamSettings, StrategySettings
from rft_dist.strategies.data_parallel import DataParallelOptimizer
from rft_dist.strategies.dtensor_shards import local, start_of
from rft_dist.strategies.expert_parallel import parallelize
from rft_dist.strategies.process_groups import ExpertGroup
from rft_dist.strategies.protocols import StrategyContext
from rft_dist.testing.thread_ranks import run_in_threads

CPU = torch.device("cpu")
EXPERTS, WIDTH, RANKS, STEPS = 6, 3, 4, 3
OPTIONS: Any = {"betas": (0.9, 0.99), "epsilon": 1e-3, "weight_decay": 0.1, "max_norm": 0.05}


class Mixture(nn.Module):
    """A router and a matrix for each expert; as its own `ShardableModel`, which sends each row to its expert."""

    def __init__(self) -> None:
        super().__init__()
        count = torch.arange(EXPERTS * WIDTH * WIDTH, dtype=torch.float32)
        self.router = nn.Parameter(torch.sin(torch.arange(WIDTH * EXPERTS, dtype=torch.float32)).view(WIDTH, EXPERTS))
        self.experts = nn.Parameter(torch.cos(count).view(EXPERTS, WIDTH, WIDTH))
        self.module, self.group = self, None

    def release_trained_rows(self) -> dict[str, int]:
        return {}

    def trainable_parameters(self) -> Any:
        return self.named_parameters()

    def enable_expert_parallel(self, group: ExpertGroup, divide: Callable[[list[str]], None]) -> None:
        self.group = group
        divide(["experts"])

    def loss(self, rows_ND: Tensor) -> Tensor:
        weights_N, chosen_N = (rows_ND @ self.router).softmax(-1).max(-1)
        order_N = chosen_N.argsort(stable=True)
        rows_ND, weights_N, chosen_N = rows_ND[order_N], weights_N[order_N], chosen_N[order_N]
        if self.group is None:
            results_ND = torch.einsum("nd,nde->ne", rows_ND, self.experts[chosen_N])
        else:
            size, here = self.group.size, local(self.experts)
            counts_E = torch.bincount(chosen_N, minlength=EXPERTS)
            arrived_E = self.group.exchange(counts_E, [EXPERTS // size] * size, [EXPERTS // size] * size)
            sent, received = (each.view(size, -1).sum(1).tolist() for each in (counts_E, arrived_E))
            own_N = torch.arange(len(here)).repeat(size).repeat_interleave(arrived_E)
            came_ND = self.group.exchange(rows_ND, sent, received)
            results_ND = self.group.exchange(torch.einsum("nd,nde->ne", came_ND, here[own_N]), received, sent)
        return (results_ND * weights_N[:, None]).tanh().sum() / 20


def rows(step: int, rank: int) -> Tensor:
    """Different numbers of rows for different ranks, of one sign: no rank has all experts."""
    count = WIDTH * (2 + rank)
    return torch.sin(torch.arange(count, dtype=torch.float32) * (1 + step) + rank).abs().view(-1, WIDTH)


def whole() -> tuple[dict[str, Tensor], list[float]]:
    model = Mixture()
    optimizer = DataParallelOptimizer(model.named_parameters(), SingleProcess(), **OPTIONS)
    norms: list[float] = []
    for step in range(STEPS):
        for rank in range(RANKS):
            optimizer.backward(model.loss(rows(step, rank)))
        norms.append(optimizer.step(1e-2).gradient_norm)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


def divided(ranks: TorchCollectives, size: int) -> dict[str, Any]:
    model: Any = Mixture()
    settings = StrategySettings(ep_size=size)
    adam = AdamSettings(adam_betas=(0.9, 0.99), adam_epsilon=1e-3, l2=0.1, max_norm=0.05, l2_factors="router=1")
    context = StrategyContext(settings=settings, collectives=ranks, device=CPU, adam=adam)
    distributed = parallelize(model, context)
    optimizer = distributed.optimizer
    assert optimizer is not None
    assert distributed.data is ranks, "every rank has samples of its own"
    norms: list[float] = []
    for step in range(STEPS):
        optimizer.backward(model.loss(rows(step, ranks.rank)))
        norms.append(optimizer.step(1e-2).gradient_norm)
    saved: Any = optimizer.checkpoint_tensors()
    return {
        "norms": norms,
        "first": start_of(model.experts)[0],
        "held": local(model.experts.detach()).untyped_storage().nbytes() // 4,
        "saved": [(shard.name, shard.start[0]) for shard in saved if shard.name.startswith("exp_avg/")],
        "weights": {name: tensor.clone() for name, tensor in distributed.weights.full_tensors()},
    }


@pytest.mark.parametrize("size", [2])
def test_three_steps_are_those_of_whole_experts(size: int) -> None:
    weights, norms = whole()
    found = run_in_threads(RANKS, lambda ranks: divided(ranks, size))
    for rank, each in enumerate(found):
        assert each["norms"] == pytest.approx(norms, rel=1e-5)
        assert each["first"] == rank % size * EXPERTS // size
        assert each["held"] == EXPERTS // size * WIDTH * WIDTH, "no other rank's experts stay in memory"
        for name, tensor in weights.items():
            assert torch.allclose(each["weights"][name], tensor, rtol=1e-5, atol=1e-6), name
    saved = [entry for each in found for entry in each["saved"]]
    assert sorted(saved) == [("exp_avg/experts", 0), ("exp_avg/experts", 3), ("exp_avg/router", 0)], (
        "each is saved once"
    )


def test_rows_go_where_they_are_sent_and_gradients_come_back() -> None:
    def work(ranks: TorchCollectives) -> tuple[list[float], list[float]]:
        group = ExpertGroup(ranks, 2, CPU)
        sent = [[3, 1], [0, 2]][group.rank]
        own = torch.full((sum(sent), 2), float(ranks.rank), requires_grad=True)
        came = group.exchange(own, sent, [[3, 0], [1, 2]][group.rank])
        (came * (10.0 + ranks.rank)).sum().backward()
        assert own.grad is not None
        return came[:, 0].tolist(), own.grad[:, 0].tolist()

    found = run_in_threads(4, work)
    assert found[0] == ([0, 0, 0], [10, 10, 10, 11])
    assert found[1] == ([0, 1, 1], [11, 11])
    assert found[2] == ([2, 2, 2], [12, 12, 12, 13])
    assert found[3] == ([2, 3, 3], [13, 13])


def test_groups_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(OptionsError) as caught:
        ExpertGroup(SingleProcess(), 2, CPU)
    assert caught.value.problem.code == "expert.ep_size"
    assert caught.value.problem.what == "ep_size = 2, 1 rank"
    assert caught.value.problem.do == "--ep_size 1"
    rows_ND = torch.ones(2, 3)
    assert ExpertGroup(SingleProcess(), 1, CPU).exchange(rows_ND, [2], [2]) is rows_ND
