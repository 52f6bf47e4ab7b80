"""Supervised fine-tuning: samples, micro-batches, optimizer and checkpoints of the RL loop, with a likelihood loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from rft_algos.algorithms.published import Sft
from rft_algos.objectives import LossOutput, supervised_loss, token_weights
from rft_core.fault_points import declare, fault_point
from rft_trainer.batches.packing import filler_batches, pack, rank_micro_batches, split_in_order
from rft_trainer.batches.prompt_ledger import EntryState, Ledger
from rft_trainer.evaluation.ema_evaluator import SwapInEma
from rft_trainer.evaluation.evaluator import Evaluator
from rft_trainer.metrics.phase_timer import Phase, PhaseTimer
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.protocols import Collectives, Engine, Policy
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample
from rft_trainer.runs.best_weights import BestWeights
from rft_trainer.runs.checkpointing import Progress, Saver, save_and_stop
from rft_trainer.runs.step_report import Reporter
from rft_trainer.runs.stop_signals import StopSignals, agree
from rft_trainer.update.nonfinite_checks import refuse_more_steps
from rft_trainer.update.optimizer_step import Updater, scale_metrics

POINT_LOGGED = declare("sft.logged", "the row of a step is written, its checkpoint is not")


class TokenLikelihood:
    """Mean negative log-likelihood of the response tokens over the whole optimizer step."""

    needs_entropy = False
    logs_entropy = False
    by_token = True

    def token_losses(self, batch: TokenBatch, counts: Counts) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return a function (log-probs [N], entropies [N], token indices [N]) -> their shares [N] of the loss."""
        weights_T = token_weights(
            Sft(),
            loss_mask_T=batch.loss_mask_T,
            segment_ids_T=batch.segment_ids_T,
            num_loss_tokens=counts.num_loss_tokens,
            num_sequences=counts.num_sequences,
            dtype=torch.float64,
        )
        return lambda logprobs_N, entropy_N, tokens_N: -weights_T[tokens_N].to(logprobs_N.dtype) * logprobs_N

    def __call__(self, batch: TokenBatch, logprobs_T: Tensor, entropy_T: Tensor | None, counts: Counts) -> LossOutput:
        """Compute the SFT loss of a micro-batch with the denominators of the whole optimizer step."""
        return supervised_loss(
            Sft(),
            logprobs_T=logprobs_T,
            loss_mask_T=batch.loss_mask_T,
            segment_ids_T=batch.segment_ids_T,
            num_loss_tokens=counts.num_loss_tokens,
            num_sequences=counts.num_sequences,
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


@dataclass(slots=True)
class EarlyStop:
    """Early stopping on the validation loss after `patience` evaluations without a fall; 0 never ends a run.

    A fall counts for patience where it is more than `min_improvement` (nats a token) below the last one
    that counted; `best` is the lowest loss of all. A loss at or below `target` ends it at once; 0 never does.
    """

    patience: int
    min_improvement: float = 0.0
    target: float = 0.0
    best: float = math.inf
    best_step: int = 0
    mark: float = math.inf
    waited: int = 0

    @property
    def stopped(self) -> bool:
        """Return whether patience is used up, or the target is reached."""
        return 0 < self.patience <= self.waited or (self.target > 0 and self.best <= self.target)

    def observe(self, loss: float, step: int) -> bool:
        """Record the validation loss of `step` and return whether to stop."""
        if loss < self.best:
            self.best, self.best_step = loss, step
        if loss < self.mark - self.min_improvement:
            self.mark, self.waited = loss, 0
        else:
            self.waited += 1
        return self.stopped

    def state(self) -> dict[str, Any]:
        """Return the state as plain JSON; `best` and `mark` are null before the first loss."""
        best, mark = (None if math.isinf(value) else value for value in (self.best, self.mark))
        return {"best": best, "best_step": self.best_step, "mark": mark, "waited": self.waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state()` returned."""
        self.best, self.mark = (math.inf if state[name] is None else float(state[name]) for name in ("best", "mark"))
        self.best_step, self.waited = int(state["best_step"]), int(state["waited"])


@dataclass(slots=True, kw_only=True)
class SftLoop:
    """The supervised fine-tuning loop of a run, with its collaborators as fields.

    With `best` the run ends with the weights of the lowest validation loss; what it evaluates as "after" are these.
    """

    ledger: Ledger
    samples: Sequence[TrainingSample]
    held_out: Sequence[TrainingSample]
    policy: Policy
    updater: Updater
    evaluator: Evaluator | None
    engine: Engine | None
    saver: Saver
    reporter: Reporter
    collectives: Collectives
    progress: Progress
    timer: PhaseTimer
    early_stop: EarlyStop
    train_batch_size: int
    max_steps: int
    eval_every: int
    max_refused_in_a_row: int
    eval_max_sequences: int
    eval_max_tokens: int
    resume_command: str
    device: str = "cpu"
    best: BestWeights | None = None
    data_ranks: Collectives | None = None
    """The ranks over which samples are sharded; None = `collectives`."""
    collective_forward: bool = False
    """Whether every forward is a collective operation, so that all ranks must run equally many."""
    averages: SwapInEma | None = None
    """Swaps the moving averages of the weights in, to be evaluated too."""

    def run(self, signals: StopSignals) -> None:
        """Train until the epochs, `max_steps` or patience end."""
        if self.saver.saved_step is None:  # a resume from step 0 has its evaluation already
            self._watch("before")
            self.saver.save(0, episode=0)
        while not self.finished:
            entries = self.ledger.reserve(self.train_batch_size)
            batch = [self.samples[entry.prompt_index] for entry in entries]
            record = self._learn(batch)
            # nothing is sampled or scored here, but the ledger accepts the states in this order alone
            for state in (EntryState.GENERATED, EntryState.SCORED, EntryState.TRAINED):
                self.ledger.advance(entries, state)
            self.progress.step += 1
            ended = self.ledger.epoch if self.ledger.epoch > entries[-1].epoch else None
            self._finish_step(record, batch, ended)
            if not self.finished and agree(self.collectives, signals.received is not None)[0]:
                self._save_and_stop(signals)

    @property
    def finished(self) -> bool:
        """Return whether nothing is left to train."""
        at_limit = bool(self.max_steps and self.progress.step >= self.max_steps)
        return self.early_stop.stopped or at_limit or self.ledger.finished

    def _learn(self, batch: Sequence[TrainingSample]) -> dict[str, object]:
        totals = MetricTotals()
        with self.timer.phase(Phase.TRAIN):
            outcome = self.updater(batch, self.progress.updates, totals)
            merged = totals.merged(self.collectives)
        self.progress.updates += 1
        self.progress.refused_in_a_row = 0 if outcome.sound else self.progress.refused_in_a_row + 1
        refuse_more_steps(
            self.progress.refused_in_a_row,
            self.max_refused_in_a_row,
            where=f"step {self.progress.step + 1}; samples " + ", ".join(s.sample_id for s in batch[:3]),
            saved_step=self.saver.saved_step,
            do=f"{self.resume_command} --learning_rate <a tenth of the present one>",
        )
        return {
            **merged,
            "policy/gradient_norm": outcome.gradient_norm,
            "policy/learning_rate": outcome.learning_rate,
            "policy/micro_batches": outcome.num_micro_batches,
            "data/samples": len(batch),
            **scale_metrics("policy", [outcome]),
        }

    def _finish_step(
        self,
        record: dict[str, object],
        batch: Sequence[TrainingSample],
        ended_episode: int | None,
    ) -> None:
        step, at_end = self.progress.step, self.finished
        tokens = sum(sample.num_tokens for sample in batch)
        self.reporter.step(record, self.progress, self.timer, num_tokens=tokens, num_samples=len(batch))
        fault_point(POINT_LOGGED)
        due = bool(self.eval_every) and step % self.eval_every == 0
        if at_end or due or (not self.eval_every and ended_episode is not None):
            self._watch("after" if at_end and self.best is None else f"step {step}")
        # `at_end` is older than the evaluation, which may have ended the run by early stopping; at the planned end the
        # last weights are evaluated already, unless better ones are put back now
        if self.finished and not (at_end and self.best is None):
            self._conclude()
        # after `_conclude`, so that the last checkpoint holds the weights that the run ends with
        if self.saver.due(step, ended_episode=ended_episode) or self.finished:
            with self.timer.phase(Phase.SAVE):
                self.saver.save(step, episode=self.ledger.epoch)

    def _watch(self, name: str) -> None:
        """Evaluate, update early stopping with the loss, and keep the weights of the lowest loss."""
        loss = self._evaluate(name)
        if loss is None:
            return
        self.early_stop.observe(loss, self.progress.step)
        # kept before the save of the same step, so that a resume finds the best weights in it
        if self.best is not None and self.early_stop.best_step == self.progress.step:
            self.best.keep()

    def _conclude(self) -> None:
        """Restore the best weights where they are kept, and run the final evaluation."""
        if self.best is None:
            self._evaluate("after")
            return
        self.best.put_back()
        self._evaluate("after", **{"eval/best_step": self.early_stop.best_step})

    def _evaluate(self, name: str, **extra: object) -> float | None:
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

    def _save_and_stop(self, signals: StopSignals) -> NoReturn:
        save_and_stop(
            self.saver,
            signals,
            self.progress,
            episode=self.ledger.epoch,
            rank=self.collectives.rank,
            resume_command=self.resume_command,
        )
