"""Blocks of distributed tensors, compared with blocks cut by `torch.chunk`, over four ranks that are threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from rft_dist.checkpoint_format.shards import ShardRequest
from rft_dist.collectives import TorchCollectives
from rft_dist.strategies.dtensor_shards import (
    ShardedWeights,
    full_tensors,
    is_first_copy,
    is_sharded,
    local,
    num_copies,
    start_of,
)
from rft_dist.testing.thread_ranks import run_in_threads

ROWS, COLUMNS, BOTH = Shard(0), Shard(1), Replicate()
LINE, SQUARE, PAIR, APART = "four in a line", "two by two", "two neighbours", "two that are no neighbours"
CASES: dict[str, tuple[tuple[int, ...], str, list[Placement]]] = {
    "rows": ((8, 3), LINE, [ROWS]),
    "rows of which the last rank has none": ((5, 3), LINE, [ROWS]),
    "columns": ((3, 8), LINE, [COLUMNS]),
    "the same on all": ((4,), LINE, [BOTH]),
    "rows of each pair": ((5, 3), SQUARE, [BOTH, ROWS]),
    "rows over the pairs": ((5, 3), SQUARE, [ROWS, BOTH]),
    "rows and columns": ((5, 7), SQUARE, [ROWS, COLUMNS]),
    "rows that are cut twice": ((7, 3), SQUARE, [ROWS, ROWS]),
    "rows cut twice, of which one rank has none": ((3, 2), SQUARE, [ROWS, ROWS]),
    "the same on all of two by two": ((3, 2), SQUARE, [BOTH, BOTH]),
    "rows of a mesh of two ranks": ((5, 3), PAIR, [ROWS]),
    "the same on a mesh of two ranks": ((5, 3), PAIR, [BOTH]),
    "rows of a mesh of ranks 0 and 2 or 1 and 3": ((5, 3), APART, [ROWS]),
    "the same on a mesh of ranks 0 and 2 or 1 and 3": ((5, 3), APART, [BOTH]),
}


def mesh_of(kind: str) -> DeviceMesh:
    if kind == LINE:
        return init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    return {SQUARE: square, PAIR: square["inner"], APART: square["outer"]}[kind]


def cut(full: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> tuple[tuple[int, ...], Tensor]:
    """(start, block): the last dimension of the mesh cuts first, each as `torch.chunk` does."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    start, block = [0] * full.ndim, full
    for number in reversed(range(mesh.ndim)):
        kind = placements[number]
        if isinstance(kind, Shard):
            pieces = list(block.chunk(mesh.shape[number], kind.dim))
            pieces += [block.narrow(kind.dim, 0, 0)] * (mesh.shape[number] - len(pieces))
            start[kind.dim] += sum(piece.shape[kind.dim] for piece in pieces[: coordinate[number]])
            block = pieces[coordinate[number]]
    return tuple(start), block.contiguous()


def distributed(full: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> tuple[tuple[int, ...], Tensor, DTensor]:
    start, block = cut(full, mesh, placements)
    whole: dict[str, Any] = {"shape": full.shape, "stride": full.stride()}
    return start, block, DTensor.from_local(block.clone(), mesh, placements, run_check=False, **whole)


@dataclass
class Held:
    """What one rank found of its block."""

    start: tuple[int, ...]
    block: list[Any]
    copies: int
    first: bool


@pytest.mark.parametrize("name", CASES)
def test_every_rank_knows_its_block_its_copies_and_the_whole(name: str) -> None:
    shape, kind, placements = CASES[name]
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)

    def work(ranks: TorchCollectives) -> Held:
        start, block, tensor = distributed(full, mesh_of(kind), placements)
        assert torch.equal(local(tensor), block)
        assert start_of(tensor) == start
        assert is_sharded(tensor) == (placements != [BOTH] * len(placements))
        [(found_name, found)] = list(full_tensors([("w", tensor)]))
        assert found_name == "w"
        assert not isinstance(found, DTensor)
        assert torch.equal(found, full)
        return Held(start, block.tolist(), num_copies(tensor, ranks.world_size), is_first_copy(tensor, ranks.rank))

    held = run_in_threads(4, work)
    for rank, mine in enumerate(held):
        same = [other for other, each in enumerate(held) if (each.start, each.block) == (mine.start, mine.block)]
        assert mine.copies == len(same)
        assert mine.first == (rank == same[0])


def test_a_plain_tensor_is_whole_on_every_rank() -> None:
    tensor = nn.Parameter(torch.ones(2, 3))
    assert local(tensor) is tensor
    assert start_of(tensor) == (0, 0)
    assert num_copies(tensor, 6) == 6
    assert [is_first_copy(tensor, rank) for rank in range(3)] == [True, False, False]
    assert not is_sharded(tensor)
    [(_, full)] = list(full_tensors([("w", tensor)]))
    assert full.data_ptr() == tensor.data_ptr()
    assert not full.requires_grad


def weights_of_a_rank(ranks: TorchCollectives) -> tuple[dict[str, nn.Parameter], ShardedWeights]:
    """Three rows over four ranks, a column of each rank that is frozen, and a plain tensor."""
    mesh = mesh_of(LINE)
    named = {
        "rows": nn.Parameter(distributed(torch.arange(6.0).reshape(3, 2), mesh, [ROWS])[2]),
        "columns": nn.Parameter(distributed(torch.ones(2, 4), mesh, [COLUMNS])[2], requires_grad=False),
        "plain": nn.Parameter(torch.full((2,), 5.0, dtype=torch.bfloat16)),
    }
    return named, ShardedWeights(lambda: named.items(), ranks.rank)


def test_a_rank_gives_asks_for_and_saves_its_own_shards() -> None:
    def work(ranks: TorchCollectives) -> list[str]:
        rank, (_, weights) = ranks.rank, weights_of_a_rank(ranks)
        rows = [] if rank == 3 else ["rows"]
        assert [name for name, _ in weights.local_shards()] == ["rows", "columns", "plain"]
        assert list(weights.state_tensors()) == [*rows, "columns", "plain"]
        assert not any(tensor.requires_grad for tensor in weights.state_tensors().values())
        requests = [
            ShardRequest("rows", (3, 2), torch.float32, (min(rank, 2), 0), (1, 2)),
            ShardRequest("columns", (2, 4), torch.float32, (0, rank), (2, 1)),
            ShardRequest("plain", (2,), torch.bfloat16, (0,), (2,)),
        ]
        assert weights.shard_requests() == [each for each in requests if each.name in {*rows, "columns", "plain"}]
        saved = weights.checkpoint_tensors()
        assert all(each.data.is_contiguous() and not each.data.requires_grad for each in saved)
        places = {request.name: (request.global_shape, request.start, request.shape) for request in requests}
        for each in saved:
            assert (each.global_shape, each.start, tuple(each.data.shape)) == places[each.name]
        return [each.name for each in saved]

    names = ["rows", "columns", "plain"]
    assert run_in_threads(4, work) == [names, names[:2], names[:2], ["columns"]]


def test_what_is_written_is_in_the_shard_and_in_the_full_tensors_of_all() -> None:
    def work(ranks: TorchCollectives) -> None:
        named, weights = weights_of_a_rank(ranks)
        if ranks.rank < 3:
            weights.write("rows", (ranks.rank, 0), torch.tensor([[7.0, 8.0]]))
        weights.write("plain", (0,), torch.tensor([3.0, 4.0]))
        full = dict(weights.full_tensors())
        assert full["rows"].tolist() == [[7.0, 8.0]] * 3
        assert full["plain"].tolist() == [3.0, 4.0]
        assert list(full) == ["rows", "columns", "plain"]
        assert [name for name, _ in weights.full_tensors(trained=True)] == ["rows", "plain"]
        assert named["rows"].requires_grad

    run_in_threads(4, work)
