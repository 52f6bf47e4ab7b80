"""Groups of neighbouring ranks, over ranks that are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rft_core.errors import OptionsError
from rft_dist.collectives import SingleProcess, TorchCollectives
from rft_dist.strategies.process_groups import DataParallelRanks, SubGroup, TensorGroup
from rft_dist.testing.thread_ranks import run_in_threads

CPU = torch.device("cpu")


def made(ranks: Any, size: int) -> SubGroup:
    return SubGroup(ranks, size, flag="sp_size", code="sequence.sp_size", what="sequences")


def test_neighbours_share_a_group_and_add_among_themselves() -> None:
    def work(ranks: TorchCollectives) -> list[Any]:
        group, own = made(ranks, 2), torch.tensor([float(ranks.rank), -float(ranks.rank)], requires_grad=True)
        total, largest = group.sum(own), group.max(own)
        assert not total.requires_grad
        assert own.tolist() == [float(ranks.rank), -float(ranks.rank)]
        merged = group.merge(own)
        (merged * (1 + ranks.rank)).sum().backward()
        assert own.grad is not None
        place = [group.size, group.world_size, group.data_rank, group.data_size, group.rank]
        return [place, total.tolist(), largest.tolist(), merged.tolist(), own.grad.tolist()]

    found = run_in_threads(4, work)
    places = [[2, 2, 0, 2, 0], [2, 2, 0, 2, 1], [2, 2, 1, 2, 0], [2, 2, 1, 2, 1]]
    assert [row[0] for row in found] == places
    assert [row[1] for row in found] == [[1.0, -1.0]] * 2 + [[5.0, -5.0]] * 2
    assert [row[2] for row in found] == [[1.0, 0.0]] * 2 + [[3.0, -2.0]] * 2
    assert [row[3] for row in found] == [row[1] for row in found]
    assert [row[4] for row in found] == [[1.0 + rank] * 2 for rank in range(4)], "each has its own gradient"


def test_a_group_of_one_gives_back_what_it_was_given() -> None:
    group, own = made(SingleProcess(), 1), torch.arange(6.0).view(2, 3).T
    assert (group.size, group.data_rank, group.data_size, group.rank) == (1, 0, 1, 0)
    assert torch.equal(group.sum(own), own)
    assert group.sum(own).is_contiguous()
    assert group.merge(own) is own
    tensors = TensorGroup(SingleProcess(), 1, CPU)
    tensors.sum_over_copies(own)
    for mesh in ("mesh", "data_mesh"):
        with pytest.raises(AssertionError):
            getattr(tensors, mesh)


@pytest.mark.parametrize(("size", "nearest"), [(0, "1"), (4, "3"), (5, "6"), (7, "6"), (-2, "1")])
def test_a_size_that_does_not_divide_the_ranks_is_refused_with_the_nearest_that_does(size: int, nearest: str) -> None:
    ranks = SingleProcess()
    ranks.world_size = 6  # type: ignore[misc]
    with pytest.raises(OptionsError) as caught:
        made(ranks, size)
    assert caught.value.problem.code == "sequence.sp_size"
    assert caught.value.problem.do == f"--sp_size {nearest}"
    assert caught.value.problem.why.endswith("allowed: 1, 2, 3, 6")
    with pytest.raises(OptionsError) as caught:
        TensorGroup(ranks, size, CPU)
    assert caught.value.problem.code == "tensor.tp_size"
    assert caught.value.problem.do == f"--tp_size {nearest}"


def test_ranks_of_a_tensor_group_are_neighbours_and_copies_stand_apart() -> None:
    def work(ranks: TorchCollectives) -> list[Any]:
        group = TensorGroup(ranks, 2, CPU)
        copies = torch.tensor([10.0**ranks.rank])
        group.sum_over_copies(copies)
        own = group.sum(torch.tensor([10.0**ranks.rank]))
        return [group.mesh.size(), group.data_mesh.size(), group.everyone is ranks, copies.item(), own.item()]

    found = run_in_threads(4, work)
    assert [row[:3] for row in found] == [[2, 2, True]] * 4
    assert [row[3] for row in found] == [101.0, 1010.0, 101.0, 1010.0]
    assert [row[4] for row in found] == [11.0, 11.0, 1100.0, 1100.0]


def test_each_group_counts_as_one_rank_of_the_data() -> None:
    def work(ranks: TorchCollectives) -> list[Any]:
        data = DataParallelRanks(ranks, made(ranks, 2))
        own = torch.tensor([float(1 + ranks.rank)])
        return [
            (data.rank, data.world_size),
            data.sum(own).item(),
            data.max(own).item(),
            data.gather_bytes(b"%d" % ranks.rank),
        ]

    found = run_in_threads(4, work)
    assert [row[0] for row in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert all(row[1:] == [1.0 + 3.0, 4.0, [b"0", b"2"]] for row in found)
