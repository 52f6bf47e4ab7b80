"""Optimizer steps of a policy (three losses) and of a critic over replicas, with faults at chosen rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rft_algos.algorithms.published import Grpo, Sft
from rft_core.packed_tokens import PackedTokens
from rft_dist.collectives import TorchCollectives
from rft_dist.strategies.data_parallel import DataParallelOptimizer
from rft_dist.testing.thread_ranks import run_in_threads
from rft_trainer.batches.units import MicroBatching
from rft_trainer.loops.sft import TokenLikelihood
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample
from rft_trainer.testing.bigram import BigramPolicy, TokenCritic
from rft_trainer.update.critic import ValueLoss, ValueObjective
from rft_trainer.update.fault_trace import FaultTracer
from rft_trainer.update.numeric_guard import NumericGuard
from rft_trainer.update.optimizer_step import MicroBatchOutput, UpdateOutcome, Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.policy_objective import PolicyObjective
from rft_trainer.update.supervised_loss import SupervisedLoss

KINDS = ("policy", "supervised", "critic", "pretrain")
NUM_STEPS, BATCH = 6, 6


class PretrainedBigram(BigramPolicy):
    """What pre-training with `--z_loss_coef` asks of a policy."""

    def vocabulary_terms(self, tokens: PackedTokens, *, with_mean: bool) -> tuple[Tensor, Tensor, None]:
        logprobs_T, _ = self.token_logprobs(tokens)
        previous_T = torch.cat([tokens.token_ids_T[:1], tokens.token_ids_T[:-1]])
        return logprobs_T, self.table[previous_T].logsumexp(-1), None


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
        elif self.kind == "pretrain":
            self.model = PretrainedBigram(6, dtype=torch.float64)
            inner = SupervisedLoss(self.model, Sft(z_loss_coef=0.01))
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

    def step(self, samples: Sequence[TrainingSample], number: int) -> UpdateOutcome:
        totals = MetricTotals()
        outcome = self.update(samples, number, totals)
        merged = totals.merged(self.ranks)
        assert all(map(math.isfinite, merged.values())), "no metric holds what was refused"
        return outcome

    def train(self, steps: Sequence[Sequence[TrainingSample]]) -> Tensor:
        for number, samples in enumerate(steps):
            self.step(samples, number)
        return self.weights()

    def weights(self) -> Tensor:
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
