"""Models distributed by each strategy that shards weights take the steps of replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_dist.collectives import TorchCollectives
from rft_dist.settings import AdamSettings, StrategySettings
from rft_dist.strategies import data_parallel, fsdp, tensor_parallel, tensor_parallel_fsdp
from rft_dist.strategies.fsdp import ShardedOptimizer
from rft_dist.strategies.protocols import DistributedModel, StrategyContext
from rft_dist.strategies.tensor_parallel import TensorParallelOptimizer
from rft_dist.strategies.tensor_parallel_fsdp import TensorShardedOptimizer
from rft_dist.strategies.weights_snapshot import WeightsSnapshot
from rft_dist.testing.thread_ranks import rank_program, run_in_threads

pytestmark = pytest.mark.xdist_group("tensor")
PROGRAM = rank_program(Path(__file__).with_name("tensor_ranks.py"))
CPU = torch.device("cpu")
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "blocks": (fsdp, {"fsdp": True}),
    "blocks of two ranks": (fsdp, {"fsdp": True, "shard_size": 2}),
    "blocks in host memory": (fsdp, {"fsdp": True, "fsdp_cpu_offload": True}),
    "parts": (tensor_parallel, {"tp_size": 2}),
    "parts in blocks": (tensor_parallel_fsdp, {"fsdp": True, "tp_size": 2}),
}


class Shardable:
    """The model of `tensor_ranks.py` as strategies take it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.module: nn.Module = PROGRAM.Model(dtype)
        self.wrapper: Callable[..., Any] = lambda function, *arguments: function(*arguments)
        self.pending: list[tuple[Any, ...]] = []

    @property
    def layers(self) -> Sequence[nn.Module]:
        return list(self.module.get_submodule("layers").children())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((f"model.{name}", parameter) for name, parameter in self.module.named_parameters())

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    def release_trained_rows(self) -> dict[str, int]:
        return {}

    def cross_module_reads(self) -> list[Any]:
        return []

    def wrap_forward(self, wrapper: Callable[..., Any]) -> None:
        self.wrapper = wrapper

    def load_pending(self, load: Any, device: torch.device, compute_dtype: torch.dtype | None) -> None:
        self.pending.append((load, device, compute_dtype))

    def enable_sequence_parallel(self, group: Any, mode: Any) -> None:
        raise AssertionError("nothing is shared")

    def enable_tensor_parallel(self, group: Any, shard: Callable[[Any], None]) -> Any:
        shard(PROGRAM.Plan())
        return PROGRAM.Plan()

    def enable_expert_parallel(self, group: Any, divide: Any) -> None:
        raise AssertionError("there are no experts")

    def loss(self, tokens_T: Tensor) -> Tensor:
        return self.wrapper(self.module.loss, tokens_T)


def distributed(
    ranks: TorchCollectives, way: Any, model: Shardable, *, trained: bool = True, **settings: Any
) -> DistributedModel:
    adam = AdamSettings(adam_epsilon=1e-6, l2=0.1, max_norm=0.5) if trained else None
    context = StrategyContext(settings=StrategySettings(**settings), collectives=ranks, device=CPU, adam=adam)
    return way.parallelize(model, context)


def stepped(ranks: TorchCollectives, way: Any, **settings: Any) -> tuple[dict[str, Tensor], float, list[Any]]:
    """(weights after a step, its norm, the kind of the optimizer and the ranks that divide batches)."""
    model = Shardable()
    made = distributed(ranks, way, model, **settings)
    assert made.optimizer is not None
    rows = torch.arange(4 * 5).view(4, 5) % PROGRAM.VOCABULARY
    for tokens in rows[made.data.rank :: made.data.world_size]:
        made.optimizer.backward(model.loss(tokens))
    norm = made.optimizer.step(1e-2).gradient_norm
    weights = {name: tensor.clone() for name, tensor in made.weights.full_tensors()}
    return weights, norm, [type(made.optimizer), made.data.world_size]


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, Tensor], float]:
    """Weights and norm of four replicas."""
    [weights, norm, _] = run_in_threads(4, lambda ranks: stepped(ranks, data_parallel))[0]
    return weights, norm


@pytest.mark.parametrize("name", WAYS)
def test_a_step_is_that_of_replicas(name: str, expected: tuple[dict[str, Tensor], float]) -> None:
    way, settings = WAYS[name]
    kinds: dict[Any, Any] = {fsdp: ShardedOptimizer, tensor_parallel: TensorParallelOptimizer}
    for weights, norm, kind in run_in_threads(4, lambda ranks: stepped(ranks, way, **settings)):
        assert norm == pytest.approx(expected[1], rel=1e-5)
        assert kind == [kinds.get(way, TensorShardedOptimizer), 4 // settings.get("tp_size", 1)]
        assert set(weights) == set(expected[0])
        assert all(key.startswith("model.") for key in weights), "the names of a checkpoint"
        for key, tensor in expected[0].items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", WAYS)
def test_a_model_that_is_not_trained_has_no_optimizer(name: str) -> None:
    way, settings = WAYS[name]

    def work(ranks: TorchCollectives) -> None:
        assert distributed(ranks, way, Shardable(), trained=False, **settings).optimizer is None

    run_in_threads(4, work)


@pytest.mark.parametrize("name", ["blocks", "parts in blocks"])
def test_a_model_without_memory_is_given_its_blocks_and_the_type_that_it_computes_in(name: str) -> None:
    way, settings = WAYS[name]

    def work(ranks: TorchCollectives) -> None:
        model = Shardable()
        made = distributed(ranks, way, model, use_mp_opt=True, **settings)
        [(load, device, compute_dtype)] = model.pending
        assert (device, compute_dtype) == (CPU, torch.bfloat16)
        read: list[tuple[Any, ...]] = []

        def block(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
            read.append((name, start, shape))
            return torch.full(shape, 7.0)

        load(block)
        assert len(read) == len({name for name, _, _ in read}) > 0
        assert all((tensor == 7.0).all() for _, tensor in made.weights.full_tensors())
        assert model.loss(torch.arange(5)).isfinite()

    run_in_threads(4, work)


def test_narrow_parts_are_stepped_on_in_float32_copies() -> None:
    def work(ranks: TorchCollectives) -> list[bool]:
        found: list[bool] = []
        for settings in ({}, {"use_mp_opt": True}):
            made = distributed(ranks, tensor_parallel, Shardable(torch.bfloat16), tp_size=2, **settings)
            assert made.optimizer is not None
            found.append(any(name.startswith("master/") for name in made.optimizer.state_tensors()))
        return found

    assert run_in_threads(2, work) == [[False, True]] * 2


@pytest.mark.parametrize("name", ["replicas", *WAYS])
def test_weights_that_are_put_back_are_those_that_the_next_step_begins_with(name: str) -> None:
    way, settings = WAYS.get(name, (data_parallel, {}))

    def work(ranks: TorchCollectives) -> None:
        # blocks are float32, and narrowed for the forward
        model = Shardable(torch.float32 if "fsdp" in settings else torch.bfloat16)
        made = distributed(ranks, way, model, use_mp_opt=True, **settings)
        optimizer = made.optimizer
        assert optimizer is not None

        def weights() -> dict[str, Tensor]:
            return {name: tensor.clone() for name, tensor in made.weights.full_tensors()}

        def step(learning_rate: float) -> None:
            optimizer.backward(model.loss(torch.arange(5)), last=True)
            assert optimizer.step(learning_rate).applied

        step(1e-2)
        best = WeightsSnapshot(made.weights, list(weights()))
        best.keep()
        kept = weights()
        step(1e-1)
        assert any(not torch.equal(tensor, kept[name]) for name, tensor in weights().items())
        best.put_back()
        # also the weight decay of a step follows its rate
        step(0.0)
        assert all(torch.equal(tensor, kept[name]) for name, tensor in weights().items())

    run_in_threads(4, work)


@pytest.mark.parametrize(
    ("sizes", "expected_sizes"),
    [
        ([3, 2, 3, 3], [[3, 2], [3], [3]]),
        ([0, 5, 0, 1], [[5], [1]]),
        ([9, 1], [[9], [1]]),
        ([4, 1, 4, 1], [[4, 1], [4, 1]]),
        ([], []),
    ],
)
def test_gradients_of_parts_travel_in_buckets_of_at_most_so_many_bytes(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], expected_sizes: list[list[int]]
) -> None:
    monkeypatch.setattr(tensor_parallel, "BUCKET_BYTES", 20)
    gradients = [torch.full((size, 1), float(number)) for number, size in enumerate(sizes)]
    found = list(tensor_parallel.buckets(gradients))
    assert [[part.numel() for part in parts] for _, parts in found] == expected_sizes
    for flat, parts in found:
        assert flat.tolist() == [float(value) for part in parts for value in part.flatten()]
        tensor_parallel.unflatten_buckets(flat + 0.5, parts)
    assert [tensor.flatten().tolist() for tensor in gradients] == [
        [number + 0.5] * size for number, size in enumerate(sizes)
    ]


def test_a_bucket_has_one_type_and_is_float32_at_least() -> None:
    narrow, half, wide = torch.ones(2), torch.ones(3, dtype=torch.bfloat16), torch.ones(1, dtype=torch.float64)
    found = list(tensor_parallel.buckets([narrow, half, half, wide, wide]))
    assert [(flat.dtype, flat.numel(), len(parts)) for flat, parts in found] == [
        (torch.float32, 2, 1),
        (torch.float32, 6, 2),
        (torch.float64, 2, 2),
    ]
