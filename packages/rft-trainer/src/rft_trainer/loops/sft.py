"""Supervised fine-tuning: samples, micro-batches, optimizer and checkpoints of the RL loop, with a likelihood loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rft_algos.algorithms.published import Sft
from rft_algos.objectives import LossOutput, supervised_loss, token_weights
from rft_core.fault_points import declare
from rft_trainer.batches.packing import filler_batches, pack, rank_micro_batches
from rft_trainer.batches.prompt_ledger import EntryState, LedgerEntry
from rft_trainer.batches.training_batch import TrainingBatch
from rft_trainer.batches.units import split_in_order
from rft_trainer.evaluation.ema_evaluator import SwapInEma
from rft_trainer.evaluation.evaluator import Evaluator
from rft_trainer.loops.trainer import Trainer
from rft_trainer.loops.training_loop import Limits, StepSize, TrainingLoop
from rft_trainer.metrics.phase_timer import Phase
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.protocols import Collectives, Engine, Policy
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.update.optimizer_step import Updater, scale_metrics
from rft_trainer.update.supervised_loss import denominator

POINT_LOGGED = declare("sft.logged", "the row of a step is written, its checkpoint is not")


class TokenLikelihood:
    """Mean negative log-likelihood of the response tokens over the whole optimizer step.

    Where rows have weights r, the mean is sum_t r_t l_t / sum_t r_t over all response tokens t of the step.
    """

    needs_entropy = False
    logs_entropy = False
    by_token = True

    def check(self, samples: Sequence[TrainingSample]) -> None:
        """Take any samples: the likelihood needs no log-probs but the policy's."""

    def token_losses(self, batch: TokenBatch, counts: Counts) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return a function (log-probs [N], entropies [N], token indices [N]) -> their shares [N] of the loss."""
        weights_T = token_weights(
            Sft(),
            loss_mask_T=batch.loss_mask_T,
            segment_ids_T=batch.segment_ids_T,
            num_loss_tokens=denominator(counts),
            num_sequences=counts.num_sequences,
            dtype=torch.float64,
        )
        row_weights_T = batch.row_weights_T
        if row_weights_T is not None:
            weights_T = weights_T * row_weights_T
        return lambda logprobs_N, entropy_N, tokens_N: -weights_T[tokens_N].to(logprobs_N.dtype) * logprobs_N

    def __call__(self, batch: TokenBatch, logprobs_T: Tensor, entropy_T: Tensor | None, counts: Counts) -> LossOutput:
        """Compute the SFT loss of a micro-batch with the denominators of the whole optimizer step."""
        return supervised_loss(
            Sft(),
            logprobs_T=logprobs_T,
            loss_mask_T=batch.loss_mask_T,
            segment_ids_T=batch.segment_ids_T,
            num_loss_tokens=denominator(counts),
            num_sequences=counts.num_sequences,
            row_weights_T=batch.row_weights_T,
        )


@torch.no_grad()
def mean_loss(
    policy: Policy,
    samples: Sequence[TrainingSample],
    collectives: Collectives,
    *,
    max_sequences: int,
    max_tokens: int,
    device: str = "cpu",
    collective_forward: bool = False,
) -> float:
    """Compute the mean negative log-likelihood a response token over `samples`, in nats, over all ranks.

    `collective_forward`: every forward is a collective operation, so all ranks must run equally many.
    """

    def cut(num_tokens: Sequence[int]) -> list[list[int]]:
        return split_in_order(num_tokens, max_sequences, max_tokens)

    own = [
        pack(chosen, device) for chosen in rank_micro_batches(samples, collectives.rank, collectives.world_size, cut)
    ]
    idle = filler_batches(samples, collectives, cut, device) if collective_forward else []
    total = torch.zeros(2, dtype=torch.float64)
    for number, batch in enumerate([*own, *idle]):
        logprobs_T, _ = policy.token_logprobs(batch.tokens)
        if number < len(own):  # filler batches only match the other ranks' collectives
            total += torch.stack([-logprobs_T.double().sum(), batch.loss_mask_T.sum().double()]).cpu()
    summed, num_tokens = collectives.sum(total).tolist()
    return summed / num_tokens if num_tokens else math.nan


@dataclass(slots=True, kw_only=True)
class SftLoop(TrainingLoop[Sequence[TrainingSample]]):
    """The supervised fine-tuning loop of a run, with its collaborators as fields."""

    samples: Sequence[TrainingSample]
    held_out: Sequence[TrainingSample]
    policy: Policy
    updater: Updater
    evaluator: Evaluator | None
    engine: Engine | None
    train_batch_size: int
    max_steps: int
    eval_every: int
    max_refused_in_a_row: int
    eval_max_sequences: int
    eval_max_tokens: int
    device: str = "cpu"
    data_ranks: Collectives | None = None
    """The ranks over which samples are sharded; None = `collectives`."""
    collective_forward: bool = False
    """Whether every forward is a collective operation, so that all ranks must run equally many."""
    averages: SwapInEma | None = None
    """Swaps the moving averages of the weights in, to be evaluated too."""
    trainer: Trainer = field(init=False)

    def __post_init__(self) -> None:
        self.trainer = Trainer(self.updater, self.progress, self.collectives)

    def run(self, signals: StopSignals) -> None:
        """Train until the epochs, `max_steps` or patience end."""
        self.steps(signals)

    @property
    def limits(self) -> Limits:
        """Return how long the run goes on; without an interval every epoch ends with an evaluation."""
        return Limits(
            max_steps=self.max_steps,
            eval_every=self.eval_every,
            max_refused_in_a_row=self.max_refused_in_a_row,
            eval_each_epoch=True,
        )

    @property
    def logged_point(self) -> str:
        """The fault point of supervised runs."""
        return POINT_LOGGED

    def _stop_before_learning(self) -> bool:
        return False  # a step reads rows that are in memory: nothing is collected that takes time

    def _collect(self) -> tuple[list[LedgerEntry], Sequence[TrainingSample]]:
        entries = self.ledger.reserve(self.train_batch_size)
        # nothing is sampled or scored here, but the ledger accepts the states in this order alone
        for state in (EntryState.GENERATED, EntryState.SCORED):
            self.ledger.advance(entries, state)
        return entries, [self.samples[entry.prompt_index] for entry in entries]

    def _learn(self, data: Sequence[TrainingSample]) -> dict[str, object]:
        totals, update = MetricTotals(), self.progress.updates
        with self.timer.phase(Phase.TRAIN):
            self.trainer.accumulate(TrainingBatch.of(data), totals)
            outcome = self.trainer.step()
            merged = totals.merged(self.collectives)
        self._count_refused("policy", outcome, [sample.sample_id for sample in data], "--learning_rate", update)
        return {
            **merged,
            "policy/gradient_norm": outcome.gradient_norm,
            "policy/learning_rate": outcome.learning_rate,
            "policy/micro_batches": outcome.num_micro_batches,
            "data/samples": len(data),
            **scale_metrics("policy", [outcome]),
        }

    def _size(self, data: Sequence[TrainingSample]) -> StepSize:
        return StepSize(sum(sample.num_tokens for sample in data), len(data))

    def _evaluate(self, name: str, extra: Mapping[str, object]) -> float | None:
        """Evaluate: validation loss (returned, where rows are held out), greedy answers where there is an evaluator."""
        measured: dict[str, object] = dict(extra)
        lists: dict[str, object] = {}
        loss: float | None = None
        with self.timer.phase(Phase.EVAL):
            if self.held_out:
                measured["eval/loss"] = loss = self._loss()
                if self.averages is not None and self.progress.step:  # they begin as the weights
                    with self.averages():
                        measured["eval_ema/loss"] = self._loss()
            if self.evaluator is not None and self.engine is not None:
                # only an evaluation samples here, so the engine gets new weights for it and not at every step
                self.engine.load_weights(self.progress.step)
                self.engine.wake()
                result = self.evaluator()
                measured |= result.as_record()
                lists = {"rewards": result.rewards, "correct": result.correct}
        self.reporter.evaluation(name, measured, self.progress, **lists)
        return loss

    def _loss(self) -> float:
        """Compute the mean loss of the held-out rows, in nats a response token."""
        return mean_loss(
            self.policy,
            self.held_out,
            self.data_ranks or self.collectives,
            max_sequences=self.eval_max_sequences,
            max_tokens=self.eval_max_tokens,
            device=self.device,
            collective_forward=self.collective_forward,
        )
