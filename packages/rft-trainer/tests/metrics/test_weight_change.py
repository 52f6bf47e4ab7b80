"""The size of an update is seen on the same sample, however the weights are divided over ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.metrics.weight_change import (
    SAMPLED_NUMBERS,
    SAMPLED_TENSORS,
    ReplicatedWeights,
    WeightBlock,
    WeightSample,
)
from rft_trainer.testing.bigram import OneRank

SHAPES = {"matrix": (70, 60), "gain": (9,), "scale": (), "cube": (4, 30, 20)}


@dataclass
class Block:
    name: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    data: Tensor


class Divided:
    """One rank's blocks of tensors that are divided along a dimension; what has no such dimension is on rank 0."""

    def __init__(self, tensors: Mapping[str, Tensor], rank: int, size: int, dimension: int) -> None:
        self.tensors, self.rank, self.size, self.dimension = tensors, rank, size, dimension

    def trained_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return SHAPES

    def own_blocks(self, names: Collection[str]) -> Sequence[WeightBlock]:
        found: list[WeightBlock] = []
        for name in names:
            tensor, start = self.tensors[name], [0] * len(SHAPES[name])
            if tensor.ndim <= self.dimension:
                found += [Block(name, SHAPES[name], tuple(start), tensor)] if self.rank == 0 else []
                continue
            width = -(-tensor.shape[self.dimension] // self.size)
            start[self.dimension] = self.rank * width
            own = tensor.narrow(
                self.dimension, self.rank * width, min(width, tensor.shape[self.dimension] - start[self.dimension])
            )
            found.append(Block(name, SHAPES[name], tuple(start), own))
        return found


def relative(sample: WeightSample, change: Callable[[], object]) -> float | None:
    totals = MetricTotals()
    sample.begin()
    change()
    totals.add_change("policy/weight_change", sample.change())
    return totals.merged(OneRank()).get("policy/weight_change")


@torch.no_grad()
def shift(tensor: Tensor, by: float) -> None:
    tensor.add_(by)


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_shares_of_ranks_add_up_to_the_change_of_the_whole(size: int, dimension: int) -> None:
    generator = torch.Generator().manual_seed(3)
    before = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    step = {name: 0.01 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

    def shares(num: int, along: int) -> Tensor:
        weights = {name: tensor.clone() for name, tensor in before.items()}
        samples = [WeightSample(Divided(weights, rank, num, along)) for rank in range(num)]
        for sample in samples:
            sample.begin()
        for name, tensor in weights.items():
            tensor += step[name]
        found = [sample.change() for sample in samples]
        return torch.stack([share for share in found if share is not None])

    whole = shares(1, 0)[0]
    # every number of these small tensors but the largest is sampled
    small = [name for name in SHAPES if name not in ("matrix", "cube")]
    assert whole[1] > sum(before[name].double().square().sum() for name in small)
    torch.testing.assert_close(shares(size, dimension).sum(0), whole, rtol=1e-12, atol=0.0)


def test_updates_of_a_step_are_added_over_the_size_of_the_weights() -> None:
    model = nn.Linear(3, 4, bias=False)
    nn.init.constant_(model.weight, 2.0)
    sample = WeightSample(ReplicatedWeights(model))
    assert relative(sample, lambda: None) == 0.0
    assert relative(sample, lambda: shift(model.weight, 0.5)) == pytest.approx(0.25)
    totals = MetricTotals()
    for size in (2.5, -1.0):
        sample.begin()
        shift(model.weight, size)
        totals.add_change("policy/weight_change", sample.change())
    assert totals.merged(OneRank()) == {"policy/weight_change": pytest.approx(1.0 + 1.0 / 5.0)}


def test_weights_of_zero_have_no_relative_change() -> None:
    model = nn.Linear(3, 4, bias=False)
    nn.init.zeros_(model.weight)
    assert relative(WeightSample(ReplicatedWeights(model)), lambda: shift(model.weight, 1.0)) is None


def test_large_models_are_sampled_all_over_and_frozen_tensors_are_not() -> None:
    layers = [nn.Linear(100, 100) for _ in range(30)]
    model = nn.Sequential(*layers)
    for layer in layers[:10]:
        layer.requires_grad_(False)
    sample = WeightSample(ReplicatedWeights(model))
    sample.begin()
    assert sample.num_kept <= SAMPLED_TENSORS * SAMPLED_NUMBERS
    assert relative(sample, lambda: [shift(layer.weight, 1.0) for layer in layers[:10]]) == 0.0
    # the last row of each alone
    assert (relative(sample, lambda: [shift(layer.weight[-1], 1.0) for layer in layers[10:]]) or 0.0) > 0


def test_without_weights_that_are_trained_here_nothing_is_said() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    for source in (model, object()):
        sample = WeightSample(ReplicatedWeights(source))
        assert relative(sample, lambda: None) is None


def many_layers() -> list[nn.Linear]:
    return [nn.Linear(4, 4, bias=False) for _ in range(3 * SAMPLED_TENSORS)]


def test_after_a_step_without_a_change_of_the_sample_every_weight_is_looked_at() -> None:
    layers = many_layers()
    sample = WeightSample(ReplicatedWeights(nn.Sequential(*layers)))

    def step(by: float) -> float | None:
        found = relative(sample, lambda: shift(layers[1].weight, by))  # one that is not in the sample
        sample.see(found)
        return found

    assert step(1.0) == 0.0
    outside = step(1.0)
    assert outside is not None
    assert 0 < outside < 1e-9
    assert step(1.0) == 0.0, "the cost of a look at all weights is for steps that seem to change nothing"
    assert step(0.0) == 0.0
    assert step(0.0) == 0.0


def test_a_step_that_weights_of_fewer_bits_lose_is_seen_in_the_copies_that_add_it_up() -> None:
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    master = model.weight.detach().float()
    sample = WeightSample(ReplicatedWeights(model), copies=lambda: [master])
    alone = WeightSample(ReplicatedWeights(model))

    @torch.no_grad()
    def step(by: float) -> None:
        master.add_(by)
        model.weight.copy_(master)

    for each in (sample, alone):
        each.see(0.0)
    found = relative(sample, lambda: step(1e-4))
    assert found is not None
    assert 0 < found < 1e-9
    assert relative(alone, lambda: step(1e-4)) == 0.0, "lost where there is no copy"


def test_weights_that_no_step_changes_are_not_sampled() -> None:
    layers = many_layers()
    model = nn.Sequential(*layers)
    moving = {f"{number}.weight" for number in range(3)}
    sample = WeightSample(ReplicatedWeights(model), moves=moving.__contains__)
    assert relative(sample, lambda: [shift(layer.weight, 1.0) for layer in layers[3:]]) == 0.0
    for number in range(3):
        assert (relative(sample, lambda number=number: shift(layers[number].weight, 1.0)) or 0.0) > 0
    nowhere = WeightSample(ReplicatedWeights(model), moves=lambda name: False)
    assert (relative(nowhere, lambda: shift(layers[0].weight, 1.0)) or 0.0) > 0, "said of none, all are sampled"
