"""The size of an update, seen on a sample of the weights that is the same however they are divided over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

SAMPLED_TENSORS, SAMPLED_NUMBERS = 8, 1024
"""Trained tensors, and numbers of each, that stand for all of them in the size of a step."""
_OUTSIDE = 1e-12
"""Change that is stated where weights changed and none of the sample did, over the size of the sample."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightBlock(Protocol):
    """A block of a weight that this rank keeps."""

    @property
    def name(self) -> str: ...
    @property
    def global_shape(self) -> tuple[int, ...]: ...
    @property
    def start(self) -> tuple[int, ...]:
        """Index of the first element of the block in the whole weight."""
        ...

    @property
    def data(self) -> Tensor:
        """The block, sharing memory with the weight."""
        ...


class TrainedWeights(Protocol):
    """The weights that are trained, whole or divided over ranks."""

    def trained_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each whole weight that is trained, by name; the same on every rank."""
        ...

    def own_blocks(self, names: Collection[str]) -> Sequence[WeightBlock]:
        """Return blocks of these weights, sharing memory; those of all ranks cover each element once."""
        ...


@dataclass(frozen=True, slots=True)
class _Block:
    name: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    data: Tensor


class ReplicatedWeights:
    """The weights of a model that every rank has whole."""

    def __init__(self, model: object) -> None:
        """Keep a model; one without `named_parameters` has no weights that could be seen."""
        self._model = model

    def trained_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each weight that is trained, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._trained()}

    def own_blocks(self, names: Collection[str]) -> Sequence[WeightBlock]:
        """Return these weights, on every rank: each then counts once a rank, in the change and in the size."""
        shapes = ((name, tensor.detach(), tuple(tensor.shape)) for name, tensor in self._trained() if name in names)
        return [_Block(name, shape, (0,) * len(shape), tensor) for name, tensor, shape in shapes]

    def _trained(self) -> list[tuple[str, Tensor]]:
        named = getattr(self._model, "named_parameters", None)
        return [] if named is None else [(name, tensor) for name, tensor in named() if _is_whole(tensor)]


def _is_whole(tensor: Tensor) -> bool:
    return tensor.requires_grad and not hasattr(tensor, "to_local")


class WeightSample:
    """Some numbers of some trained tensors, by which the size of an update is seen at next to no cost.

    They are chosen by their places in whole weights, so that the sum over ranks does not depend on who keeps what.
    What is kept between two calls is at most `SAMPLED_TENSORS` x `SAMPLED_NUMBERS` float32 numbers.

    A sample that an update did not change says nothing about the other weights: behind such a step all of them are
    compared, by their checksums, and so are the float32 copies in which steps add up that weights of fewer bits lose.
    """

    def __init__(
        self,
        weights: TrainedWeights,
        *,
        moves: Callable[[str], bool] | None = None,
        copies: Callable[[], Iterable[Tensor]] | None = None,
    ) -> None:
        """Keep the weights, as this rank keeps them; what is sampled of them is chosen at the first use.

        Args:
            weights: that are trained.
            moves: whether a weight of this name is changed by the steps, where some have a learning rate of 0.
            copies: what this rank steps on in the place of weights of fewer bits.
        """
        self._weights = weights
        self._moves = moves or (lambda name: True)
        self._copies = copies or (lambda: ())
        self._sees_all = False
        self._sums: list[int] | None = None
        self._names: frozenset[str] | None = None
        self._places: dict[tuple[str, tuple[int, ...]], tuple[Tensor, ...]] = {}
        self._blocks: Sequence[WeightBlock] = ()
        self._before: list[Tensor] = []

    def begin(self) -> None:
        """Keep the sampled numbers as they are before an update."""
        if self._names is None:
            self._names = _chosen_names(self._weights.trained_shapes(), self._moves)
        self._blocks = self._weights.own_blocks(self._names) if self._names else ()
        self._sums = self._checksums() if self._sees_all else None
        self._before = [self._numbers(block) for block in self._blocks]

    @property
    def num_kept(self) -> int:
        """Numbers that are kept since `begin`."""
        return sum(numbers.numel() for numbers in self._before)

    def change(self) -> Tensor | None:
        """Return [2] float64: the sums of the squared change since `begin`, and of the squared numbers before it.

        Both are this rank's share, which the exchange of the metrics adds up; None where no weight is trained.
        """
        if not self._names:
            return None
        changes = [
            torch.stack([(self._numbers(block) - before).square().sum(), before.square().sum()])
            for block, before in zip(self._blocks, self._before, strict=True)
        ]
        # the blocks of one rank may be on several devices, as where experts are offloaded
        share = torch.zeros(2, dtype=torch.float64, device=changes[0].device if changes else None)
        for change in changes:
            share += change.to(share.device)
        if self._sums is not None and not float(share[0]) and self._sums != self._checksums():
            share[0] = _OUTSIDE**2 * (float(share[1]) or 1.0)
        self._blocks, self._before, self._sums = (), [], None
        return share

    def see(self, change: float | None) -> None:
        """Take the change of a step, that of all ranks; behind one of 0 the next updates are looked for everywhere."""
        self._sees_all = change == 0.0

    def _checksums(self) -> list[int]:
        blocks = self._weights.own_blocks(frozenset(self._weights.trained_shapes()))
        return [bit_sum(tensor) for tensor in (*(block.data for block in blocks), *self._copies())]

    def _numbers(self, block: WeightBlock) -> Tensor:
        key = (block.name, block.start)
        if key not in self._places:
            self._places[key] = _places(block)
        # by coordinates, which reads memory of any layout without a copy of it
        return block.data[self._places[key]].reshape(-1).double()


def bit_sum(tensor: Tensor) -> int:
    """Return the sum of the bits of a tensor, read as integers of its element size, modulo 2^64."""
    own = tensor.detach().contiguous()
    return int(own.view(_INTEGERS[own.element_size()]).sum(dtype=torch.int64)) if own.numel() else 0


def _chosen_names(shapes: Mapping[str, tuple[int, ...]], moves: Callable[[str], bool]) -> frozenset[str]:
    """Choose names evenly, in their order, of weights that are changed; of all where that is said of none."""
    trained = [name for name, shape in shapes.items() if math.prod(shape)]
    names = [name for name in trained if moves(name)] or trained
    return frozenset(names[:: max(1, -(-len(names) // SAMPLED_TENSORS))])


def _places(block: WeightBlock) -> tuple[Tensor, ...]:
    """Return the indices in a block, one tensor a dimension, of the sampled elements that lie in it."""
    if not block.global_shape:
        return ()
    numel = math.prod(block.global_shape)
    # a last row may be a token that no text has: numbers from all over the whole tensor
    chosen = torch.arange(0, numel, -(-numel // SAMPLED_NUMBERS))
    own = [
        axis - first for axis, first in zip(torch.unravel_index(chosen, block.global_shape), block.start, strict=True)
    ]
    inside = torch.stack([(axis >= 0) & (axis < size) for axis, size in zip(own, block.data.shape, strict=True)]).all(0)
    return tuple(axis[inside].to(block.data.device) for axis in own)
