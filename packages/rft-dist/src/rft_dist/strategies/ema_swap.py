"""Swap EMA weights in for the trained weights on every rank; afterwards every bit is as it was.

The trained weights are kept in host memory meanwhile. All ranks must enter and leave together: where weights are
sharded, every use of them is an exchange, and DeepSpeed's averages, of which a rank has a range, are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from rft_dist.checkpoint_format.shards import Shard, flat_shards
from rft_dist.collectives import Collectives
from rft_dist.optim import ema
from rft_dist.strategies.dtensor_shards import local
from rft_dist.strategies.zero.flat_ranges import own_weights, shape_of


def averages_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the averages among the tensors of an optimizer's state, by the names of the averaged parameters."""
    start = f"{ema.KIND}/"
    return {key.removeprefix(start): tensor for key, tensor in state.items() if key.startswith(start)}


@contextmanager
def swap_in_ema(parameters: Mapping[str, Tensor], state: Callable[[], Mapping[str, Tensor]]) -> Generator[None]:
    """Replace every averaged parameter (this rank's block of it) by its average while the block runs.

    Args:
        parameters: what the optimizer steps on, or what its float32 copies are rounded to; the copies stay.
        state: gives the optimizer's state, of which the averages have the shapes of the blocks.
    """
    averages = averages_of(state())
    blocks = {name: local(parameters[name].detach()) for name in averages}
    # all are kept before the first is replaced: whatever fails in between, `finally` can put them back
    kept = {name: block.to("cpu", copy=True) for name, block in blocks.items()}
    try:
        for name, average in averages.items():
            blocks[name].copy_(average)
        yield
    finally:
        for name, block in kept.items():
            blocks[name].copy_(block)


class ShardStore(Protocol):
    """Weights or state that are given and taken block by block (`ZeroWeights`, `ZeroState`)."""

    def shards(self) -> Sequence[Shard]: ...
    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None: ...


@contextmanager
def swap_in_ema_zero(
    parameters: Mapping[str, nn.Parameter], weights: ShardStore, state: ShardStore, ranks: Collectives
) -> Generator[None]:
    """Swap EMA weights in as `swap_in_ema` does, under DeepSpeed, which steps on ranges of flattened tensors.

    Args:
        parameters: the trained ones, by name; on every rank the same.
        weights: of the model; what is put there goes into the float32 copies that are stepped on as well.
        state: of the optimizer; its float32 copies are put back.
        ranks: all of them.
    """
    kept = [block for name, parameter in parameters.items() for block in _copies(name, parameter, ranks.rank)]
    own = list(state.shards())
    masters = [(each.name, each.start, each.data.to("cpu", copy=True)) for each in own if each.name[:7] == "master/"]
    averages = {name: [each for each in own if each.name == f"{ema.KIND}/{name}"] for name in parameters}
    try:
        for name, parameter in parameters.items():
            # one whole parameter at a time: together they would be the model once more, in float32
            full = _full_tensor(shape_of(parameter), averages[name], parameter.device, ranks)
            weights.write(name, (0,) * full.ndim, full)
        yield
    finally:
        # weights first: putting them overwrites the float32 copies too, which are then put back exactly
        for block in kept:
            weights.write(block.name, block.start, block.data)
        for name, start, data in masters:
            state.write(name, start, data)


def _copies(name: str, parameter: nn.Parameter, rank: int) -> list[Shard]:
    """Copy this rank's range of a parameter to host memory, as blocks."""
    offset, flat = own_weights(parameter, rank)
    return flat_shards(name, shape_of(parameter), offset, flat.to("cpu", copy=True)) if flat.numel() else []


def _full_tensor(shape: tuple[int, ...], own: Sequence[Shard], device: torch.device, ranks: Collectives) -> Tensor:
    """Assemble the blocks of all ranks into one tensor: a sum in which each element has one nonzero summand."""
    full = torch.zeros(shape, dtype=torch.float32, device=device)
    for each in own:
        slices = tuple(slice(first, first + size) for first, size in zip(each.start, each.data.shape, strict=True))
        full[slices] = each.data.to(device)
    ranks.sum_in_place(full)
    return full
