"""Weights as they were, kept on each rank as its blocks: put back in place, saved, and read on other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_core.errors import CheckpointError
from rft_dist.checkpoint_format.shards import Shard, ShardSink, flat_shards
from rft_dist.collectives import TorchCollectives
from rft_dist.strategies.dtensor_shards import ShardedWeights
from rft_dist.strategies.fsdp import FullyShardedModel
from rft_dist.strategies.weights_snapshot import WeightsSnapshot
from rft_dist.testing.thread_ranks import run_in_threads

CPU = torch.device("cpu")


class Stored:
    """A component of a checkpoint, as whole tensors (`StoredComponent`)."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def dtype_of(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def tensors(self) -> dict[str, Tensor]:
        return self._tensors

    def load(self, sink: ShardSink) -> None:
        for each in sink.shard_requests():
            assert each.dtype == self._tensors[each.name].dtype
            box = tuple(slice(a, a + size) for a, size in zip(each.start, each.shape, strict=True))
            sink.write(each.name, each.start, self._tensors[each.name][box].clone())


class Ranges:
    """Weights that every rank holds in full and saves a range of, as ZeRO 1 and 2 do (`ModelWeights`)."""

    def __init__(self, tensors: dict[str, Tensor], rank: int) -> None:
        self.tensors, self._rank = tensors, rank

    def blocks(self) -> list[Shard]:
        return [Shard(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor) for name, tensor in self.tensors.items()]

    def checkpoint_tensors(self) -> list[Shard]:
        found: list[Shard] = []
        for name, tensor in self.tensors.items():
            half = tensor.numel() // 2
            own = tensor.reshape(-1)[half:] if self._rank else tensor.reshape(-1)[:half]
            found += flat_shards(name, tensor.shape, half * self._rank, own)
        return found

    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        assert not any(start)
        self.tensors[name].copy_(tensor)


def whole(ranks: TorchCollectives, shards: list[Shard]) -> dict[str, Tensor]:
    """What the shards of all ranks make together, each element from one of them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for own in gathered(ranks, {each.name: each.global_shape for each in shards}):
        shapes |= own
    found = {}
    for name, shape in sorted(shapes.items()):
        values, counts = torch.zeros(shape), torch.zeros(shape)
        for each in shards:
            if each.name == name:
                box = tuple(slice(a, a + size) for a, size in zip(each.start, each.data.shape, strict=True))
                values[box], counts[box] = each.data.detach().float(), counts[box] + 1
        assert bool((ranks.sum(counts) == 1).all()), f"{name}: every element is saved once"
        found[name] = ranks.sum(values)
    return found


def gathered(ranks: TorchCollectives, value: Any) -> Iterator[Any]:
    import json

    for data in ranks.gather_bytes(json.dumps(value).encode()):
        yield {name: tuple(shape) for name, shape in json.loads(data).items()}


@torch.no_grad()
def fill(weights: Any, change: Callable[[Tensor], Tensor]) -> None:
    for block in weights.blocks():
        block.data.copy_(change(block.data))


def sharded(ranks: TorchCollectives, **options: Any) -> FullyShardedModel:
    layers = [nn.Linear(3, 5), nn.Linear(5, 1, bias=False)]
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.constant_(parameter, 1.5)
    return FullyShardedModel(nn.Sequential(*layers), layers, ranks, device=CPU, **options)


def names_of(weights: FullyShardedModel) -> list[str]:
    return [name for name, _ in weights.model.named_parameters()]


def values(weights: FullyShardedModel) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights.full_tensors()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("shard_size", [2, 1])
def test_kept_blocks_are_put_back_saved_once_and_read_on_other_ranks(shard_size: int) -> None:
    def work(ranks: TorchCollectives) -> dict[str, Tensor]:
        weights = sharded(ranks, shard_size=shard_size)
        snapshot = WeightsSnapshot(weights, names_of(weights))
        first = values(weights)
        snapshot.put_back()
        assert same(values(weights), first), "nothing was kept yet"
        assert same(whole(ranks, snapshot.checkpoint_tensors()), first), "the present values"
        fill(weights, lambda data: data + 1)
        best = values(weights)
        snapshot.keep()
        fill(weights, lambda data: data * 3)
        stored = whole(ranks, snapshot.checkpoint_tensors())
        assert same(stored, best)
        other = sharded(ranks)
        again = WeightsSnapshot(other, names_of(other))
        # of a type that another strategy held them in
        again.restore(Stored({name: tensor.double() for name, tensor in stored.items()}))
        assert same(values(other), first), "read, and not yet put back"
        for one in (again, snapshot):
            one.put_back()
        assert same(values(other), best)
        assert same(values(weights), best)
        return best

    first, second = run_in_threads(2, work)
    assert same(first, second)


def test_of_full_weights_each_rank_saves_its_range_of_the_kept_values() -> None:
    def work(ranks: TorchCollectives) -> None:
        weights = Ranges(
            {"a": torch.arange(15.0).view(5, 3), "b": torch.arange(4.0), "frozen": torch.ones(2)}, ranks.rank
        )
        snapshot = WeightsSnapshot(weights, ["a", "b"])  # type: ignore[arg-type]
        snapshot.keep()
        fill(weights, torch.zeros_like)
        stored = whole(ranks, snapshot.checkpoint_tensors())
        assert stored.keys() == {"a", "b"}
        assert torch.equal(stored["a"], torch.arange(15.0).view(5, 3))
        snapshot.put_back()
        assert torch.equal(weights.tensors["b"], torch.arange(4.0))
        assert torch.equal(weights.tensors["frozen"], torch.zeros(2)), "what is not named is left"

    run_in_threads(2, work)


@pytest.mark.parametrize("stored", [["a"], ["a", "b", "c"], [], ["a", "c"]])
def test_weights_of_another_model_are_refused(stored: list[str]) -> None:
    parameters = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("a", "b")}
    snapshot = WeightsSnapshot(ShardedWeights(parameters.items, 0), parameters)
    with pytest.raises(CheckpointError) as caught:
        snapshot.restore(Stored({name: torch.ones(2) for name in stored}))
    assert caught.value.problem.code == "checkpoint.best_weights"
    snapshot.put_back()
    assert not any(bool(parameter.any()) for parameter in parameters.values())
