"""Steps that are refused, run out of memory or meet a changed bit: on one and two ranks the run ends as if undisturbed.

Losses of a policy, of demonstrations, of pre-training and of a critic, on AdamW over replicas; every rank ends with the
same weights, which are those of a run that never saw the fault.
"""

from __future__ import annotations

import math
import re
from functools import partial

import pytest
import torch
from support.guarded_steps import KINDS, MARKER, NUM_STEPS, Rank, clean, on, rows, spoils, with_bad_row
from torch import Tensor

from rft_core.errors import NumericsError, ServiceError
from rft_dist.collectives import TorchCollectives
from rft_trainer.batches.units import MicroBatching
from rft_trainer.records.rollouts import TokenBatch
from rft_trainer.testing.bigram import OneRank
from rft_trainer.update.numeric_guard import NumericGuard
from rft_trainer.update.optimizer_step import MicroBatchOutput
from rft_trainer.update.weight_check import WeightCheck


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("stage", ["loss", "gradient"])
def test_a_run_with_bad_rows_ends_as_one_that_never_had_them(
    world_size: int, kind: str, value: float, stage: str
) -> None:
    bad_steps = {1: 0, 2: 3, 4: 6}
    steps = [with_bad_row(step, bad_steps[step]) if step in bad_steps else rows(step) for step in range(NUM_STEPS)]
    expected = clean(kind, [rows(step) for step in range(NUM_STEPS)], world_size)

    def work(ranks: TorchCollectives) -> tuple[Tensor, dict[str, float]]:
        rank = Rank(ranks, kind, spoils(stage, value, MARKER))
        return rank.train(steps), rank.guard.metrics

    ends = on(world_size, work)
    for table, metrics in ends:
        assert torch.equal(table, ends[0][0]), "all ranks hold the same weights"
        torch.testing.assert_close(table, expected, rtol=1e-9, atol=1e-11)
        assert metrics == {"policy/rows_set_aside": 3.0}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("room", [4, 8, 11])
def test_a_step_that_runs_out_of_memory_is_taken_again_with_the_same_result(
    world_size: int, kind: str, room: int
) -> None:
    """At most `room` tokens of a micro-batch fit; the micro-batches ask for three rows."""
    steps = [[row for row in rows(step) if row.num_tokens <= room] for step in range(NUM_STEPS)]
    expected = clean(kind, steps, world_size)

    def act(batch: TokenBatch, output: MicroBatchOutput) -> MicroBatchOutput:
        if len(batch.token_ids_T) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return output

    def work(ranks: TorchCollectives) -> tuple[Tensor, int, list[int]]:
        rank = Rank(ranks, kind, act)
        return rank.train(steps), rank.guard.halved, rank.loss.seen

    ends = on(world_size, work)
    for table, halved, _ in ends:
        assert torch.equal(table, ends[0][0])
        torch.testing.assert_close(table, expected, rtol=1e-9, atol=1e-11)
        assert halved == ends[0][1] >= 1, "the ranks agree, also where only one ran out"


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_row_that_does_not_fit_ends_the_run_before_a_weight_changes(world_size: int) -> None:
    def act(batch: TokenBatch, output: MicroBatchOutput) -> MicroBatchOutput:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    def work(ranks: TorchCollectives) -> bool:
        rank = Rank(ranks, "policy", act)
        before = rank.model.table.detach().clone()
        with pytest.raises(ServiceError) as caught:
            rank.train([rows(0)])
        assert caught.value.problem.code == "memory.micro_batch"
        assert re.search(r"the longest sample is 0:\d+, of \d tokens", caught.value.problem.what)
        return torch.equal(rank.model.table, before)

    assert all(on(world_size, work))


@pytest.mark.parametrize(
    ("cut", "code", "remedy"),
    [
        (MicroBatching(3, 0, False), "memory.collective_forward", "resume --micro_train_batch_size 2"),
        (
            MicroBatching(9, 21, True),
            "memory.collective_forward",
            "resume --no-packing_samples --micro_train_batch_size 1",
        ),
        (MicroBatching(1, 0, False), "memory.micro_batch", None),
    ],
)
def test_where_the_others_wait_in_the_forward_memory_that_runs_out_ends_the_run_with_smaller_micro_batches(
    cut: MicroBatching, code: str, remedy: str | None
) -> None:
    def act(batch: TokenBatch, output: MicroBatchOutput) -> MicroBatchOutput:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    guard = NumericGuard(resume_command="resume")
    rank = Rank(OneRank(), "policy", act, guard, cut, collective_forward=True)  # type: ignore[arg-type]
    before = rank.model.table.detach().clone()
    with pytest.raises(ServiceError) as caught:
        rank.train([rows(0)])
    assert caught.value.problem.code == code
    assert remedy is None or caught.value.problem.do == remedy
    assert torch.equal(rank.model.table, before)


def test_another_error_of_the_forward_is_no_lack_of_memory() -> None:
    def act(batch: TokenBatch, output: MicroBatchOutput) -> MicroBatchOutput:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        on(1, lambda ranks: Rank(ranks, "policy", act).train([rows(0)]))


FLIPS = [(name, bit, at) for name in ("weight", "exp_avg", "exp_avg_sq") for bit in (0, 31, 52, 63) for at in (0, 17)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("tensor", "bit", "place"), FLIPS)
def test_one_changed_bit_is_found_before_the_next_step_is_trained(
    world_size: int, tensor: str, bit: int, place: int
) -> None:
    def flip(values: Tensor) -> None:
        bits = values.detach().view(-1).view(torch.int64)
        mask = 1 << bit if bit < 63 else -(1 << 63)
        bits[place] ^= mask

    def work(ranks: TorchCollectives) -> str:
        rank = Rank(ranks, "policy")

        def tensors() -> list[tuple[str, Tensor]]:
            return [("table", rank.model.table), *sorted(rank.optimizer.state_tensors().items())]

        check = WeightCheck(tensors=tensors, collectives=ranks, every=1, replicated=True, remedy="resume")
        for step in range(3):
            check.before(step, step)
            rank.train([rows(step)])
            check.after(step + 1, step)
        if ranks.rank == ranks.world_size - 1:
            flip(rank.model.table if tensor == "weight" else rank.optimizer.state_tensors()[f"{tensor}/table"])
        with pytest.raises(NumericsError) as caught:
            check.before(3, 3)
        assert caught.value.problem.code == "numerics.memory"
        return caught.value.problem.what

    told = on(world_size, work)[-1]
    assert ("table" if tensor == "weight" else f"{tensor}/table") in told


@pytest.mark.parametrize("tensor", ["weight", "exp_avg"])
def test_ranks_that_came_apart_in_a_step_are_found_at_its_end(tensor: str) -> None:
    def work(ranks: TorchCollectives) -> str:
        rank = Rank(ranks, "policy")
        named = partial(dict, table=rank.model.table)
        check = WeightCheck(
            tensors=lambda: [*named().items(), *sorted(rank.optimizer.state_tensors().items())],
            collectives=ranks,
            every=2,
            replicated=True,
            remedy="resume",
        )
        rank.train([rows(0)])
        if ranks.rank == 1:
            spoiled = rank.model.table if tensor == "weight" else rank.optimizer.state_tensors()["exp_avg/table"]
            with torch.no_grad():
                spoiled[0, 0] += 1e-9
        check.after(1, 0)  # not due
        with pytest.raises(NumericsError) as caught:
            check.after(2, 0)
        return caught.value.problem.what

    assert all("one of two ranks differs" in told for told in on(2, work))
