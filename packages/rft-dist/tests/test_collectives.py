"""Sums, maxima and bytes over ranks that are threads, and what a collective that breaks says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rft_core import fault_points
from rft_core.errors import PeerError
from rft_dist.collectives import SingleProcess, TorchCollectives
from rft_dist.health.activity import Activity, Call
from rft_dist.testing.thread_ranks import run_in_threads

CPU = torch.device("cpu")


def mine(rank: int) -> torch.Tensor:
    return torch.tensor([[1.0 + rank, -2.0], [0.5, 10.0 * rank]])


def test_one_process_gives_back_what_it_was_given() -> None:
    alone, tensor = SingleProcess(), torch.tensor([1.0, 2.0], requires_grad=True)
    for same in (alone.sum(tensor), alone.max(tensor)):
        assert same.tolist() == [1.0, 2.0]
        assert same.data_ptr() != tensor.data_ptr()
        assert not same.requires_grad
    assert alone.gather_bytes(b"ab") == [b"ab"]
    assert alone.broadcast_bytes(b"ab") == b"ab"
    with pytest.raises(AssertionError):
        alone.broadcast_bytes(None)
    assert (alone.rank, alone.world_size) == (0, 1)


def test_sums_and_maxima_leave_the_tensor_of_a_rank_alone() -> None:
    def work(ranks: TorchCollectives) -> list[Any]:
        own = mine(ranks.rank).requires_grad_()
        total, largest, turned = ranks.sum(own), ranks.max(own), ranks.sum(own.T)
        assert not total.requires_grad
        assert not largest.requires_grad
        assert torch.equal(own.detach(), mine(ranks.rank))
        return [total.tolist(), largest.tolist(), turned.tolist(), turned.is_contiguous()]

    expected = [[[6.0, -6.0], [1.5, 30.0]], [[3.0, -2.0], [0.5, 20.0]], [[6.0, 1.5], [-6.0, 30.0]], True]
    assert run_in_threads(3, work) == [expected] * 3


def test_in_place_the_tensor_of_a_rank_is_replaced_and_must_be_contiguous() -> None:
    def work(ranks: TorchCollectives) -> list[Any]:
        total, first = mine(ranks.rank).requires_grad_(), mine(ranks.rank + 1).requires_grad_()
        ranks.sum_in_place(total)
        ranks.broadcast_in_place(first)
        for operation in (ranks.sum_in_place, ranks.broadcast_in_place):
            with pytest.raises(AssertionError):
                operation(mine(0).T)
        return [total.tolist(), first.tolist()]

    expected = [[[3.0, -4.0], [1.0, 10.0]], mine(1).tolist()]
    assert run_in_threads(2, work) == [expected] * 2


def test_bytes_of_unequal_length_come_in_the_order_of_the_ranks() -> None:
    def work(ranks: TorchCollectives) -> list[Any]:
        rank = ranks.rank
        return [
            ranks.gather_bytes(bytes(range(rank * 100))),
            ranks.gather_bytes(b""),
            ranks.gather_bytes(b"a" if rank == 0 else b""),
            ranks.broadcast_bytes(b"from zero" if rank == 0 else None),
            ranks.broadcast_bytes(b"" if rank == 0 else b"ignored"),
        ]

    ragged = [b"", bytes(range(100)), bytes(range(200))]
    expected = [ragged, [b""] * 3, [b"a", b"", b""], b"from zero", b""]
    assert run_in_threads(3, work) == [expected] * 3


def test_rank_0_has_to_give_what_is_broadcast() -> None:
    def work(ranks: TorchCollectives) -> None:
        with pytest.raises(AssertionError):
            ranks.broadcast_bytes(None)

    run_in_threads(1, work)


def test_every_collective_is_numbered_compared_before_it_and_left_afterwards() -> None:
    def work(ranks: TorchCollectives) -> list[Any]:
        activity, compared = Activity(), list[tuple[Call, bool]]()

        def compare(call: Call) -> None:
            assert activity.last is not None
            compared.append((call, activity.last.inside))

        counted = TorchCollectives(CPU, activity=activity, compare=compare)
        counted.sum(torch.zeros(2, 3))
        counted.max(torch.zeros(4, dtype=torch.int64))
        counted.gather_bytes(b"abc")
        counted.broadcast_in_place(torch.zeros(5))
        assert activity.last is not None
        assert not activity.last.inside
        assert all(inside for _, inside in compared)
        assert compared[0][0].site.endswith("(work)")
        return [(call.number, call.name, call.shape, call.dtype) for call, _ in compared]

    expected = [
        (1, "sum", (2, 3), "float32"),
        (2, "max", (4,), "int64"),
        (3, "gather", (1,), "int64"),
        (4, "gather", (3,), "uint8"),
        (5, "broadcast", (5,), "float32"),
    ]
    assert run_in_threads(2, work) == [expected] * 2


def test_faults_can_be_planted_before_and_after_every_kind_of_collective() -> None:
    reached: list[str] = []

    def work(ranks: TorchCollectives) -> None:
        fault_points.install(reached.append)
        ranks.sum(torch.zeros(1))
        ranks.max(torch.zeros(1))
        ranks.gather_bytes(b"")
        ranks.broadcast_bytes(b"")

    run_in_threads(1, work)
    names = ("sum", "max", "gather", "broadcast")
    assert reached == [f"collective.{name}.{when}" for name in names for when in ("before", "after")]


@pytest.mark.parametrize(("text", "reason"), [("gloo: connection\nsecond line", "gloo: connection"), ("", "no reason")])
def test_a_broken_collective_is_an_error_of_a_peer_with_its_place_and_stays_open(
    monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError(text)

    def work(ranks: TorchCollectives) -> PeerError:
        activity = Activity()
        counted = TorchCollectives(CPU, activity=activity)
        monkeypatch.setattr(dist, "all_reduce", broken)
        with pytest.raises(PeerError) as caught:
            counted.sum(torch.zeros(2, 3))
        assert activity.last is not None
        assert activity.last.inside, "who looks at the process sees where it was"
        return caught.value

    [error] = run_in_threads(1, work)
    assert error.problem.code == "collective.failed"
    assert error.problem.where == "rank 0"
    assert "#1 sum [2, 3] float32" in error.problem.what
    assert reason in error.problem.why
    assert "second line" not in error.problem.why


def test_errors_name_the_place_that_was_given() -> None:
    def work(ranks: TorchCollectives) -> str:
        def refuse(call: Call) -> None:
            raise RuntimeError("x" * 400)

        named = TorchCollectives(CPU, where="rank 0 on node-a", compare=refuse)
        with pytest.raises(PeerError) as caught:
            named.max(torch.zeros(1))
        assert caught.value.problem.why.endswith(": " + "x" * 300)
        return caught.value.problem.where

    assert run_in_threads(1, work) == ["rank 0 on node-a"]
