"""Replicas of several ranks: what is exchanged, in which buckets and type, and how a model is made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rft_core.errors import PeerError
from rft_dist.collectives import SingleProcess, TorchCollectives
from rft_dist.settings import AdamSettings, StrategySettings
from rft_dist.strategies.data_parallel import DataParallelOptimizer, parallelize, verify_equal_weights
from rft_dist.strategies.dtensor_shards import ShardedWeights
from rft_dist.strategies.process_groups import DataParallelRanks
from rft_dist.strategies.protocols import StrategyContext
from rft_dist.testing.thread_ranks import run_in_threads

ADAM: dict[str, Any] = {"betas": (0.0, 0.9), "epsilon": 1e-8, "weight_decay": 0.0, "max_norm": 0.0}
"""With a first beta of 0 the first moment is the gradient."""


class Peers(SingleProcess):
    """Rank 0 of several, whose peers add `term` to everything that is summed; sums are noted."""

    def __init__(self, world_size: int = 2, term: float = 0.0, other: bytes | None = None) -> None:
        self.world_size, self.term, self.other = world_size, term, other
        self.sums: list[tuple[int, torch.dtype]] = []

    def sum_in_place(self, tensor: Tensor) -> None:
        self.sums.append((tensor.numel(), tensor.dtype))
        tensor.add_(self.term)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data, *[data if self.other is None else self.other] * (self.world_size - 1)]


def parameters_of(**sizes: tuple[int, torch.dtype]) -> dict[str, Parameter]:
    return {name: Parameter(torch.zeros(size, dtype=dtype)) for name, (size, dtype) in sizes.items()}


def moments(optimizer: DataParallelOptimizer) -> dict[str, Tensor]:
    state = optimizer.state_tensors()
    return {name.removeprefix("exp_avg/"): state[name].clone() for name in state if name.startswith("exp_avg/")}


def test_gradients_travel_in_buckets_of_one_type_and_of_at_most_so_many_bytes() -> None:
    wide, narrow, half = torch.float64, torch.float32, torch.bfloat16
    parameters = parameters_of(
        a=(3, narrow), b=(2, half), c=(3, narrow), d=(2, narrow), e=(1, narrow), f=(1, wide), g=(9, narrow)
    )
    peers = Peers(term=0.5)
    optimizer = DataParallelOptimizer(parameters.items(), peers, bucket_bytes=20, **ADAM)
    for number, parameter in enumerate(parameters.values()):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step(0.0)
    # a and b fill 20 bytes, as c and d do; e is of another type than f, and g is larger than a bucket
    assert peers.sums == [(5, narrow), (5, narrow), (1, narrow), (1, wide), (9, narrow)]
    for number, (name, moment) in enumerate(moments(optimizer).items()):
        assert moment.tolist() == [number + 0.5] * len(parameters[name]), name


def test_a_rank_alone_exchanges_no_gradients() -> None:
    peers, parameters = Peers(world_size=1), parameters_of(a=(3, torch.float32))
    DataParallelOptimizer(parameters.items(), peers, **ADAM).step(0.0)
    assert peers.sums == []


FINE = 1.0 + 2.0**-10
"""Rounded to 1 in bfloat16."""


def test_a_peers_gradient_of_narrow_weights_with_master_copies_stays_float32() -> None:
    parameters = parameters_of(w=(2, torch.bfloat16))
    optimizer = DataParallelOptimizer(parameters.items(), Peers(term=FINE), master=True, **ADAM)
    optimizer.step(0.0)  # no micro-batch of this rank touched it
    assert moments(optimizer)["w"].tolist() == [FINE] * 2


def narrow_backward(optimizer: DataParallelOptimizer, parameter: Parameter, gradient: float) -> None:
    optimizer.backward((parameter.float() * gradient).sum())


def test_micro_batches_of_narrow_weights_with_master_copies_add_up_in_float32_and_only_until_the_step() -> None:
    parameters = parameters_of(w=(2, torch.bfloat16))
    optimizer = DataParallelOptimizer(parameters.items(), SingleProcess(), master=True, **ADAM)
    for gradient in (256.0, 1.0, 0.5):  # the next number after 256 is 258 in bfloat16
        narrow_backward(optimizer, parameters["w"], gradient)
        assert parameters["w"].grad is None, "of gradients in the smaller type there is one at a time"
    optimizer.step(0.0)
    assert moments(optimizer)["w"].tolist() == [257.5] * 2
    optimizer.step(0.0)
    assert moments(optimizer)["w"].tolist() == [0.0] * 2


def test_without_master_copies_gradients_stay_with_their_weights() -> None:
    parameters = parameters_of(w=(2, torch.bfloat16))
    optimizer = DataParallelOptimizer(parameters.items(), SingleProcess(), **ADAM)
    narrow_backward(optimizer, parameters["w"], 3.0)
    assert parameters["w"].grad is not None
    optimizer.step(0.0)
    assert moments(optimizer)["w"].dtype == torch.bfloat16


def test_of_two_optimizers_the_first_takes_a_gradient_and_one_that_is_gone_takes_none() -> None:
    parameters = parameters_of(w=(2, torch.bfloat16))
    first = DataParallelOptimizer(parameters.items(), SingleProcess(), master=True, **ADAM)
    second = DataParallelOptimizer(parameters.items(), SingleProcess(), master=True, **ADAM)
    narrow_backward(first, parameters["w"], 3.0)
    second.step(0.0)
    first.step(0.0)
    assert (moments(first)["w"].tolist(), moments(second)["w"].tolist()) == ([3.0, 3.0], [0.0, 0.0])
    del first
    narrow_backward(second, parameters["w"], 5.0)
    second.step(0.0)
    assert moments(second)["w"].tolist() == [5.0, 5.0]
    del second
    parameters["w"].float().sum().backward()
    assert parameters["w"].grad is not None


def test_ranks_whose_weights_differ_from_those_of_rank_0_are_named() -> None:
    named = [("w", torch.zeros(2))]
    verify_equal_weights(named, Peers(world_size=3))
    with pytest.raises(PeerError) as caught:
        verify_equal_weights(named, Peers(world_size=3, other=b"0" * 64))
    assert caught.value.problem.code == "replicas.weights_differ"
    assert "ranks 1, 2 of 3" in caught.value.problem.where
    with pytest.raises(PeerError):
        DataParallelOptimizer(parameters_of(w=(2, torch.float32)).items(), Peers(other=b"0" * 64), **ADAM)


def test_a_checkpoint_is_read_in_full() -> None:
    parameters = parameters_of(w=(2, torch.float32))
    optimizer, other = (DataParallelOptimizer(parameters.items(), SingleProcess(), **ADAM) for _ in range(2))
    parameters["w"].grad = torch.full((2,), 4.0)
    optimizer.step(0.0)

    class Stored:
        names = tuple(optimizer.state_tensors())

        def tensors(self) -> dict[str, Tensor]:
            return optimizer.state_tensors()

        def load(self, sink: Any) -> None:
            raise AssertionError("not in shards")

    other.restore(Stored())
    assert moments(other)["w"].tolist() == [4.0, 4.0]


def test_ranks_take_the_step_of_one_process_and_refuse_a_step_together() -> None:
    torch.manual_seed(0)
    first, inputs = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(6, 4)

    def work(ranks: TorchCollectives | SingleProcess, *micro_batches: list[int]) -> list[Any]:
        model = copy.deepcopy(first)
        optimizer = DataParallelOptimizer(model.named_parameters(), ranks, bucket_bytes=50, **ADAM)
        for rows in micro_batches:
            optimizer.backward(model(inputs[rows]).square().sum())
        outcome, gradients, weights = optimizer.step(1e-2), moments(optimizer), optimizer.weights_hash()
        if ranks.rank == ranks.world_size - 1:
            next(model.parameters()).grad = torch.full((5, 4), float("nan"))
        assert outcome.applied
        assert not optimizer.step(1e-2).applied
        assert optimizer.weights_hash() == weights
        return [weights, outcome.gradient_norm, gradients]

    shares: list[list[list[int]]] = [[[0, 1, 2], [3]], [[4, 5]], []]
    found = run_in_threads(3, lambda ranks: work(ranks, *shares[ranks.rank]))
    [_, norm, gradients] = work(SingleProcess(), list(range(6)))
    assert len({weights for weights, _, _ in found}) == 1
    for _, own_norm, own in found:
        assert own_norm == pytest.approx(norm, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(own[name], gradient, rtol=1e-4, atol=1e-6)


class Model:
    """A model of one weight, which is named otherwise in checkpoints."""

    def __init__(self) -> None:
        self.module = nn.Linear(2, 2, bias=False)
        self.sequence: list[Any] = []
        self.blocks: list[nn.Module] = []

    @property
    def layers(self) -> list[nn.Module]:
        return []

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        return self.module.named_parameters(prefix="model")

    def trainable_parameters(self) -> Iterator[tuple[str, Parameter]]:
        return self.module.named_parameters()

    def release_trained_rows(self) -> dict[str, int]:
        return {}

    def cross_module_reads(self) -> list[Any]:
        return []

    def wrap_forward(self, wrapper: Callable[..., Any]) -> None:
        raise AssertionError("replicas need no exchange in a forward")

    def load_pending(self, load_shards: Any, device: torch.device, compute_dtype: torch.dtype | None) -> None:
        raise AssertionError("replicas are loaded in full")

    def enable_sequence_parallel(self, group: Any, mode: str) -> None:
        self.sequence.append((group.size, mode))

    def enable_tensor_parallel(self, group: Any, shard: Any) -> Any:
        raise AssertionError("replicas are not cut")

    def enable_expert_parallel(self, group: Any, divide: Any) -> None:
        raise AssertionError("replicas have all experts")


def context_of(collectives: Any, *, trained: bool = True, **settings: Any) -> StrategyContext:
    return StrategyContext(
        settings=StrategySettings(**settings),
        collectives=collectives,
        device=torch.device("cpu"),
        adam=AdamSettings(adam_betas=(0.5, 0.75), l2=0.25, max_norm=3.0) if trained else None,
    )


def test_a_replicated_model_has_all_weights_the_ranks_of_the_run_and_an_optimizer_where_it_is_trained() -> None:
    model, alone = Model(), SingleProcess()
    whole = parallelize(model, context_of(alone))
    assert whole.data is alone
    assert isinstance(whole.weights, ShardedWeights)
    assert [name for name, _ in whole.weights.full_tensors()] == ["model.weight"]
    assert isinstance(whole.optimizer, DataParallelOptimizer)
    assert sorted(whole.optimizer.state_tensors()) == ["exp_avg/weight", "exp_avg_sq/weight", "step/weight"]
    assert model.sequence == []
    assert parallelize(model, context_of(alone, trained=False)).optimizer is None


@pytest.mark.parametrize(("word", "copies"), [("fp16", True), ("use_mp_opt", True), ("enable_ema", False)])
def test_a_narrow_forward_steps_on_master_copies(word: str, copies: bool) -> None:
    model = Model()
    model.module.bfloat16()
    optimizer = parallelize(model, context_of(SingleProcess(), **{word: True})).optimizer
    assert optimizer is not None
    assert ("master/weight" in optimizer.state_tensors()) == copies


def test_ranks_that_share_sequences_are_one_to_those_who_divide_batches() -> None:
    def work(ranks: TorchCollectives) -> list[Any]:
        model = Model()
        data = parallelize(model, context_of(ranks, trained=False, sp_size=2, sp_mode="ring")).data
        assert isinstance(data, DataParallelRanks)
        return [model.sequence, data.rank, data.world_size]

    assert run_in_threads(4, work) == [[[(2, "ring")], rank // 2, 2] for rank in range(4)]


def test_ranks_of_muon_stay_equal_and_take_the_step_of_one() -> None:
    def work(ranks: Any, mine: list[int]) -> list[Any]:
        model = Model()
        model.module.weight.data = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
        model.blocks = [model.module]
        context = replace(context_of(ranks), adam=AdamSettings(optimizer="muon", l2=0.25))
        optimizer = parallelize(model, context).optimizer
        assert optimizer is not None
        for seed in (0, 10):
            for number in mine:
                rows = torch.randn(3, 2, generator=torch.Generator().manual_seed(seed + number))
                optimizer.backward(model.module(rows).square().sum())
            optimizer.step(0.1)
        assert sorted(optimizer.state_tensors()) == ["momentum/weight"]
        return [model.module.weight.detach(), optimizer.state_tensors()["momentum/weight"]]

    shares = [[0, 2], [1]]
    first, second = run_in_threads(2, lambda ranks: work(ranks, shares[ranks.rank]))
    one = work(SingleProcess(), [0, 1, 2])
    for mine, other, alone in zip(first, second, one, strict=True):
        assert torch.equal(mine, other)
        # the order in which gradients are added up shows in the last bit, and Muon rounds to bfloat16
        torch.testing.assert_close(mine, alone, rtol=0, atol=2e-3)
