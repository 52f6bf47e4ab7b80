"""Steps that are refused, run out of memory or meet a changed bit: on one and two ranks the run ends as if undisturbed.

Policy, supervised and critic losses on AdamW over replicas; every rank ends with the same weights, which are those of
a run that never saw the fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_algos.algorithms.published import Grpo
from rft_core.errors import NumericsError, ServiceError
from rft_dist.collectives import TorchCollectives
from rft_dist.strategies.data_parallel import DataParallelOptimizer
from rft_dist.testing.thread_ranks import run_in_threads
from rft_trainer.batches.units import MicroBatching
from rft_trainer.loops.sft import TokenLikelihood
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample
from rft_trainer.testing.bigram import BigramPolicy, OneRank, TokenCritic
from rft_trainer.update.critic import ValueLoss, ValueObjective
from rft_trainer.update.fault_trace import FaultTracer
from rft_trainer.update.numeric_guard import NumericGuard
from rft_trainer.update.optimizer_step import MicroBatchOutput, Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.policy_objective import PolicyObjective
from rft_trainer.update.weight_check import WeightCheck

KINDS = ("policy", "supervised", "critic")
NUM_STEPS, BATCH = 6, 6


def rows(step: int) -> list[TrainingSample]:
    """Samples of 2 to 7 tokens, others in every step."""
    made: list[TrainingSample] = []
    for number in range(BATCH):
        length = 1 + (number + step) % 6
        tokens = (1, *(2 + (step + number * place) % 4 for place in range(length)))
        made.append(
            TrainingSample(
                f"{step}:{number}",
                tokens,
                1,
                1.0 if number % 2 else -0.5,
                old_logprobs=(-1.8,) * length,
                old_values=(0.25,) * length,
                returns=(0.1 * number,) * length,
            )
        )
    return made


@dataclass
class Disturbed:
    """The loss of a model that meets a fault in the micro-batches that hold the row of a fault's step."""

    inner: Any
    act: Callable[[TokenBatch, MicroBatchOutput], MicroBatchOutput]
    prepass: bool = False
    model: object = None
    seen: list[int] = field(default_factory=list[int])

    def begin(self, batches: Sequence[TokenBatch], idle: Sequence[TokenBatch]) -> None: ...

    def __call__(self, batch: TokenBatch, counts: Counts, totals: MetricTotals) -> MicroBatchOutput:
        self.seen.append(len(batch.token_ids_T))
        return self.act(batch, self.inner(batch, counts, totals))

    def filler(self, batch: TokenBatch) -> Tensor:
        return self.inner.filler(batch)

    def whole_step(self, samples: Sequence[TrainingSample], counts: Counts, totals: MetricTotals) -> None:
        self.inner.whole_step(samples, counts, totals)


def keep(batch: TokenBatch, output: MicroBatchOutput) -> MicroBatchOutput:
    return output


@dataclass
class Rank:
    """What a rank trains, and what it ends with."""

    ranks: TorchCollectives
    kind: str
    act: Callable[[TokenBatch, MicroBatchOutput], MicroBatchOutput] = keep
    guard: NumericGuard = field(default_factory=lambda: NumericGuard(max_rows=4))
    cut: MicroBatching = field(default_factory=lambda: MicroBatching(3, 0, False))
    collective_forward: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(5)
        self.model: Any
        if self.kind == "critic":
            self.model = TokenCritic(6, dtype=torch.float64)
            inner: Any = ValueLoss(self.model, ValueObjective(None))
        else:
            self.model = BigramPolicy(6, dtype=torch.float64)
            objective: Any = PolicyObjective(Grpo(kl_place="none", kl_coef=0.0))
            inner = PolicyLoss(self.model, TokenLikelihood() if self.kind == "supervised" else objective)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(7)
            self.model.table.copy_(torch.randn(self.model.table.shape, generator=generator, dtype=torch.float64))
        self.optimizer = DataParallelOptimizer(
            [("table", self.model.table)], self.ranks, betas=(0.9, 0.99), epsilon=1e-8, weight_decay=0.0, max_norm=1.0
        )
        self.loss = Disturbed(inner, self.act)
        self.update = Updater(
            self.loss,
            self.optimizer,
            self.ranks,
            micro_batching=self.cut,
            learning_rate=lambda update: 0.05,
            guard=self.guard,
            trace=FaultTracer(self.model),
            collective_forward=self.collective_forward,
        )

    def train(self, steps: Sequence[Sequence[TrainingSample]]) -> Tensor:
        for number, samples in enumerate(steps):
            totals = MetricTotals()
            self.update(samples, number, totals)
            merged = totals.merged(self.ranks)
            assert all(map(math.isfinite, merged.values())), "no metric holds what was refused"
        return self.model.table.detach().clone()


def on(world_size: int, work: Callable[[TorchCollectives], Any]) -> list[Any]:
    return run_in_threads(world_size, work)


def clean(kind: str, steps: Sequence[Sequence[TrainingSample]], world_size: int) -> Tensor:
    return on(world_size, lambda ranks: Rank(ranks, kind).train(steps))[0]


def spoils(stage: str, value: float, marker: int) -> Callable[[TokenBatch, MicroBatchOutput], MicroBatchOutput]:
    """Put a value that is not finite into the loss or its gradient where a token of the batch is `marker`."""

    def act(batch: TokenBatch, output: MicroBatchOutput) -> MicroBatchOutput:
        if marker not in batch.token_ids_T.tolist():
            return output
        if stage == "loss":
            return MicroBatchOutput(output.loss * value, output.outputs_T)
        output.loss.register_hook(lambda gradient: gradient * value)
        return output

    return act


MARKER = 0
"""A token that no other row has."""


def with_bad_row(step: int, place: int) -> list[TrainingSample]:
    bad = TrainingSample(
        f"bad {step}", (1, 3, MARKER, 4), 1, 1.0, old_logprobs=(-1.8,) * 3, old_values=(0.2,) * 3, returns=(0.4,) * 3
    )
    samples = rows(step)
    return [*samples[:place], bad, *samples[place:]]


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
        assert "7 tokens" in caught.value.problem.what
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
