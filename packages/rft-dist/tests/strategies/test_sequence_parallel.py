"""Rows of a sequence shared out over ranks that are threads: heads for tokens and back, and around a ring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rft_core.errors import OptionsError
from rft_dist.collectives import SingleProcess, TorchCollectives
from rft_dist.strategies.sequence_parallel import SequenceGroup
from rft_dist.testing.thread_ranks import run_in_threads

T, H, D = 7, 6, 2
ROWS = torch.arange(float(T * H * D)).view(T, H, D)


def test_rows_are_runs_of_which_the_first_are_longer() -> None:
    def work(ranks: TorchCollectives) -> list[Any]:
        group = SequenceGroup(ranks, 3)
        return [group.bounds(8), group.lengths(8), group.bounds(2), group.lengths(2)]

    found = run_in_threads(3, work)
    assert [row[0] for row in found] == [(0, 3), (3, 6), (6, 8)]
    assert [row[2] for row in found] == [(0, 1), (1, 2), (2, 2)]
    assert all(row[1] == [3, 3, 2] and row[3] == [1, 1, 0] for row in found)


def test_sequences_are_refused_for_groups_that_do_not_divide_the_ranks() -> None:
    with pytest.raises(OptionsError) as caught:
        SequenceGroup(SingleProcess(), 2)
    assert caught.value.problem.code == "sequence.sp_size"
    assert caught.value.problem.do == "--sp_size 1"


@pytest.mark.parametrize("num_heads", [3, 6])
def test_tokens_become_heads_and_heads_tokens_again_with_their_gradients(num_heads: int) -> None:
    rows_THD = ROWS[:, :num_heads]

    def work(ranks: TorchCollectives) -> None:
        group = SequenceGroup(ranks, 3)
        first, end = group.bounds(T)
        own_LHD = rows_THD[first:end].clone().requires_grad_()
        share = num_heads // 3
        heads = slice(ranks.rank * share, (ranks.rank + 1) * share)
        heads_THD = group.to_heads(own_LHD, T)
        assert torch.equal(heads_THD, rows_THD[:, heads])
        back_LHD = group.to_rows(heads_THD, T)
        assert torch.equal(back_LHD, own_LHD)
        # the gradient of a row is what its own rank makes of it, whichever rank computed in between
        (back_LHD * rows_THD[first:end].cos()).sum().backward()
        assert own_LHD.grad is not None
        assert torch.allclose(own_LHD.grad, rows_THD[first:end].cos())
        again_LHD = rows_THD[first:end].clone().requires_grad_()
        (group.to_heads(again_LHD, T) * rows_THD[:, heads].sin()).sum().backward()
        assert again_LHD.grad is not None
        assert torch.allclose(again_LHD.grad, rows_THD[first:end].sin())

    run_in_threads(3, work)


def test_rows_are_handed_out_by_number_and_their_gradients_come_back() -> None:
    numbers = [[1, 2], [3, 0]]
    """Rows that each rank gives to each."""

    def work(ranks: TorchCollectives) -> list[Any]:
        group = SequenceGroup(ranks, 2)
        sent, received = numbers[group.rank], [row[group.rank] for row in numbers]
        own = (torch.arange(3.0) + 10 * group.rank)[:, None].requires_grad_()
        got = group.hand_out(own, sent, received)
        (got * torch.arange(1.0, 1.0 + len(got))[:, None] * (1 + group.rank)).sum().backward()
        assert own.grad is not None
        return [got.flatten().tolist(), own.grad.flatten().tolist()]

    first, second = run_in_threads(2, work)
    assert first == [[0.0, 10.0, 11.0, 12.0], [1.0, 2.0, 4.0]]
    assert second == [[1.0, 2.0], [2.0, 3.0, 4.0]]


def test_a_group_of_one_keeps_its_rows() -> None:
    group, own = SequenceGroup(SingleProcess(), 1), torch.arange(4.0).view(2, 2)
    assert torch.equal(group.trade(own, [2], [2]), own)
    assert torch.equal(group.to_heads(ROWS, T), ROWS)
    assert torch.equal(group.to_rows(ROWS, T), ROWS)
    assert torch.equal(group.hand_out(own, [2], [2]), own)


def test_in_a_ring_a_rank_sends_to_the_next_and_hears_from_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(ranks: TorchCollectives) -> list[Any]:
        return [SequenceGroup(ranks, 3)]

    [fourth] = run_in_threads(6, work)[4]
    assert (fourth.data_rank, fourth.rank) == (1, 1)
    moves: list[tuple[str, torch.Tensor, int]] = []
    waited: list[int] = []

    class Work:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            waited.append(self.number)

    monkeypatch.setattr(dist, "P2POp", lambda kind, tensor, peer, group: (kind.__name__, tensor, peer))

    def start(given: list[Any]) -> list[Work]:
        moves.extend(given)
        return [Work(number) for number in range(len(given))]

    monkeypatch.setattr(dist, "batch_isend_irecv", start)
    turned, empty = torch.arange(6.0).view(2, 3).T.requires_grad_(), torch.zeros(0, 4)
    wait = fourth.pass_on([turned, empty], 5)
    sent, received, nothing = moves
    assert (sent[0], sent[2]) == ("isend", 5)
    assert torch.equal(sent[1], turned)
    assert sent[1].is_contiguous()
    assert not sent[1].requires_grad
    assert [(kind, tuple(tensor.shape), peer) for kind, tensor, peer in (received, nothing)] == [
        ("irecv", (5, 2), 3),
        ("irecv", (5, 4), 3),
    ]
    received[1].fill_(7.0)
    arrived = wait()
    assert waited == [0, 1, 2]
    assert arrived[0].tolist() == [[7.0, 7.0]] * 5
    moves.clear()
    assert [tuple(tensor.shape) for tensor in fourth.pass_on([empty], 0)()] == [(0, 4)]
    assert not moves
