"""Reinforcement fine-tuning: sample, score, estimate advantages, update; read `RlLoop.run` from top to bottom.

All collaborators are passed in ready-built. Nothing here depends on a flag, a device or the name of an algorithm.
A step is atomic for checkpoints: it is either complete in the saved state or not in it at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from rft_core.errors import ServiceError
from rft_core.fault_points import declare, fault_point
from rft_trainer.batches.packing import count
from rft_trainer.batches.prompt_ledger import EntryState, Ledger, LedgerEntry
from rft_trainer.evaluation.ema_evaluator import EmaEvaluator, averaged_record
from rft_trainer.evaluation.evaluator import EvaluationResult, Evaluator
from rft_trainer.metrics.phase_timer import Phase, PhaseTimer
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.protocols import Collectives
from rft_trainer.records.rollouts import Prompt, RolloutGroup, TrainingSample
from rft_trainer.rollouts.source import RolloutSource
from rft_trainer.runs.checkpointing import Progress, Saver, save_and_stop
from rft_trainer.runs.step_report import Reporter, rollout_metrics
from rft_trainer.runs.stop_signals import StopSignals, agree
from rft_trainer.scoring.advantages import AdvantageEstimator, PolicyScores
from rft_trainer.scoring.logprobs import LogprobScorer
from rft_trainer.scoring.samples import (
    FilterResult,
    drop_zero_advantage,
    drop_zero_variance_groups,
    flat_rollouts,
    has_signal,
    keep_scored,
    optimizer_batches,
)
from rft_trainer.update.critic import CriticUpdater, ValueAnnotator
from rft_trainer.update.mismatch_monitor import MismatchMonitor
from rft_trainer.update.nonfinite_checks import refuse_more_steps, refuse_non_finite_samples
from rft_trainer.update.optimizer_step import UpdateOutcome, Updater, scale_metrics

POINT_ROLLED_OUT = declare("rl.rolled_out", "rollouts are scored, no weight has changed")
POINT_UPDATED = declare("rl.updated", "one optimizer step of a training step is applied")
POINT_LOGGED = declare("rl.logged", "the row of a step is written, its checkpoint is not")


@dataclass(frozen=True, slots=True)
class StepConfig:
    """The numbers of one training step.

    `skip_zero_advantage` holds where the objective's only term is the advantage's: samples of
    advantage zero then have a gradient of exactly zero and take part in the denominators alone.
    """

    prompts_per_rollout: int
    rollouts_per_step: int
    train_batch_size: int
    epochs_per_step: int
    skip_zero_advantage: bool
    filter_groups: bool
    refill_rounds: int
    """How often groups without signal are replaced by sampling more prompts; 0 = they are not."""
    smallest_group: int
    needs_baseline: bool
    frozen_steps: int
    """Steps at the start in which only the critic is trained."""
    max_steps: int
    eval_every: int
    max_refused_in_a_row: int
    max_unscored_share: float
    max_staleness: int = 0
    """Versions that the weights which drew a sample may lag."""


@dataclass(frozen=True, slots=True)
class OldPolicyScorer:
    """The policy at the start of the step, scored again by the trainer: log-probs, or entropy, or both."""

    annotate: LogprobScorer
    logprobs: bool
    entropy: bool

    def scores(
        self, groups: Sequence[RolloutGroup], behaviour: list[tuple[float, ...]]
    ) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        """Return log-probs and entropies as far as they are asked for; `behaviour` stands in for log-probs."""
        if self.logprobs and self.entropy:
            return self.annotate.with_entropies(groups)  # one forward pass for both
        old = self.annotate(groups) if self.logprobs else behaviour
        return old, self.annotate.entropies(groups) if self.entropy else []


@dataclass(frozen=True, slots=True)
class CriticTrainer:
    """The critic of a run: the estimator of token values, and the updater that trains it."""

    values: ValueAnnotator
    update: CriticUpdater


@dataclass(frozen=True, slots=True)
class StepDone:
    """Result of one training step: the sampled groups, and the step's metrics by name."""

    groups: Sequence[RolloutGroup]
    metrics: Mapping[str, object]


@dataclass(slots=True, kw_only=True)
class RlLoop:
    """The reinforcement learning loop of a run, with its collaborators as fields."""

    ledger: Ledger
    prompts: Sequence[Prompt]
    rollouts: RolloutSource
    assign_credit: AdvantageEstimator
    reference: LogprobScorer | None
    old_policy: OldPolicyScorer | None
    critic: CriticTrainer | None
    control: Callable[[Sequence[RolloutGroup]], list[RolloutGroup]] | None
    updater: Updater
    evaluator: Evaluator | None
    saver: Saver
    reporter: Reporter
    collectives: Collectives
    rules: StepConfig
    progress: Progress
    timer: PhaseTimer
    resume_command: str
    sleep_engine: bool
    check_engine: Callable[[int], dict[str, tuple[float, float]]] | None = None
    """After every load of weights of a version, awake: whether the engine serves them; metrics as (total, count), or
    an error."""
    gaps: MismatchMonitor | None = None
    """Whether the samples are the policy's own, seen at the first update of a step."""
    averaged: EmaEvaluator | None = None
    """Evaluates the moving averages of the weights beside them."""

    def run(self, signals: StopSignals) -> Mapping[str, EvaluationResult]:
        """Train until the ledger or `max_steps` ends; the evaluations before and after by name."""
        results: dict[str, EvaluationResult] = {}
        self.begin(results)
        while not self.finished:
            self.train_step(signals, results)
        return results

    def begin(self, results: dict[str, EvaluationResult]) -> None:
        """Evaluate and save before the first step; a resumed run has done so already, also one resumed from step 0."""
        if self.saver.saved_step is None:
            self._evaluate(results, "before")
            self.saver.save(0, episode=0)

    def train_step(self, signals: StopSignals, results: dict[str, EvaluationResult]) -> StepDone:
        """Run one step: sample, train, write the metrics row, then evaluate and save where they are due."""
        entries, groups = self._collect()
        # before any weight changes: these prompts are in no saved step, so the ledger hands them out again
        if agree(self.collectives, signals.received is not None)[0]:
            self._save_and_stop(signals)
        record = self._learn(groups)
        # only now: until here a checkpoint holds these prompts as in flight, and a resume samples them again
        self.ledger.advance(entries, EntryState.TRAINED)
        self.progress.step += 1
        ended = self.ledger.epoch if self.ledger.epoch > entries[-1].epoch else None
        self._finish_step(record, groups, results, ended)
        # a run that is finished saves by itself, and ends as complete rather than as stopped
        if not self.finished and agree(self.collectives, signals.received is not None)[0]:
            self._save_and_stop(signals)
        return StepDone(groups, record)

    @property
    def finished(self) -> bool:
        """Return whether nothing is left to train."""
        return self.ledger.finished or bool(self.rules.max_steps and self.progress.step >= self.rules.max_steps)

    def _collect(self) -> tuple[list[LedgerEntry], list[RolloutGroup]]:
        """Sample the rollouts of one step; refill until enough groups have a signal, the rounds or the epoch end.

        Every round samples exactly the prompts that are missing, so nothing sampled is surplus.
        """
        self.rollouts.wake()
        entries = self.rollouts.reserve(self.rules.prompts_per_rollout * self.rules.rollouts_per_step)
        groups = self._roll_out(entries)
        wanted = len(entries)
        for _ in range(self.rules.refill_rounds):
            missing = wanted - sum(has_signal(group) for group in groups)
            more = self.ledger.reserve(missing) if missing > 0 else []
            # a step never spans two epochs, so prompts of the next one are given back
            if more and more[0].epoch != entries[-1].epoch:
                self.ledger.give_back(more)
                more = []
            if not more:
                break
            groups += self._roll_out(more)
            entries += more
        # scored already, so nothing more is sampled before the update, which may need the memory
        if self.sleep_engine:
            self.rollouts.sleep(1)
        fault_point(POINT_ROLLED_OUT)
        return entries, groups

    def _roll_out(self, entries: Sequence[LedgerEntry]) -> list[RolloutGroup]:
        size = self.rules.prompts_per_rollout
        groups: list[RolloutGroup] = []
        # a step of several rollouts samples them one after the other, none larger than rollout_batch_size
        for start in range(0, len(entries), size):
            batch = entries[start : start + size]
            groups += self.rollouts.collect(batch, [self.prompts[entry.prompt_index] for entry in batch], self.timer)
        # after the exchange, when every rank has all groups: all of them raise, and none waits for another
        refuse_non_finite_samples(
            (group.rollouts for group in groups), during=f"step {self.progress.step + 1}", do=self.resume_command
        )
        self._refuse_other_versions(groups)
        self.ledger.advance(entries, EntryState.GENERATED)
        self.ledger.advance(entries, EntryState.SCORED)
        return groups

    def _learn(self, groups: Sequence[RolloutGroup]) -> dict[str, object]:
        """Compute advantages, then take `epochs_per_step` passes of optimizer steps over the samples."""
        kept = self._keep(groups)
        samples, credited = self._annotate(kept)
        totals = MetricTotals()
        outcomes: list[UpdateOutcome] = []
        critic_outcomes: list[UpdateOutcome] = []
        # the critic learns alone first: advantages from an untrained one would mislead the policy
        trains_policy = self.progress.step >= self.rules.frozen_steps
        with self.timer.phase(Phase.TRAIN):
            for _ in range(self.rules.epochs_per_step):
                for batch in optimizer_batches(samples, self.rules.train_batch_size):
                    if self.critic is not None:
                        critic_outcomes.append(self.critic.update(batch, self.progress.updates, totals))
                        self._check_critic_applied(critic_outcomes[-1].applied, batch)
                    if trains_policy:
                        trained = drop_zero_advantage(batch) if self.rules.skip_zero_advantage else batch
                        # only the first update still has the weights that drew the samples
                        gaps = self._begin_gaps() if not outcomes else None
                        outcomes.append(self.updater(trained, self.progress.updates, totals, count(batch), gaps))
                        self._check_applied(outcomes[-1].sound, batch)
                    # also for an update of the critic alone: both learning rates follow this number
                    self.progress.updates += 1
                    fault_point(POINT_UPDATED)
            # still in the phase: reading the totals waits for the device, and that is time of training
            merged = totals.merged(self.collectives) | credited
        # before the new weights are loaded: staleness counts from the version that this step started with
        sampling = self.rollouts.metrics(groups)
        with self.timer.phase(Phase.SYNC):
            self.rollouts.load_weights(self.progress.step + 1)
            checked = self._checked_engine(self.progress.step + 1)
        return {
            **checked,
            **sampling,
            **rollout_metrics(groups, kept),
            **merged,
            **(self.gaps.metrics if self.gaps and outcomes else {}),
            **self.assign_credit.control(merged, len(samples)),
            **_update_metrics("policy", outcomes),
            **(_update_metrics("critic", critic_outcomes) if self.critic is not None else {}),
        }

    def _begin_gaps(self) -> MismatchMonitor | None:
        """Start the mismatch monitor for the update whose weights are still those that drew the samples."""
        if self.gaps is not None:
            state = f"this step changed no weight of the policy; last checkpoint: step {self.saver.saved_step}"
            self.gaps.begin(f"step {self.progress.step + 1}", state)
        return self.gaps

    def _refuse_other_versions(self, groups: Sequence[RolloutGroup]) -> None:
        """Raise `ServiceError` for samples of weight versions not allowed; version n is the weights after n steps."""
        step = self.progress.step
        oldest = step - self.rules.max_staleness
        for _, rollout in flat_rollouts(groups):
            fits = oldest <= rollout.weight_version <= rollout.newest_version <= step
            if rollout.num_sampled and not fits:  # a conversation that failed before a word has no version
                drawn = f"v{rollout.weight_version}" + ("" if oldest == step else f" to v{rollout.newest_version}")
                raise ServiceError(
                    code="engine.stale",
                    what=f"the engine serves weights {drawn}, the trainer is at v{step}",
                    where=f"step {step + 1}, {rollout.prompt_id}#{rollout.sample_index}",
                    why="its tokens would be trained as if the present policy had sampled them",
                    state=f"no sample of this step was used; last checkpoint: step {self.saver.saved_step}",
                    do=self.resume_command,
                )

    def _checked_engine(self, version: int) -> dict[str, float]:
        if self.check_engine is None:
            return {}
        self.rollouts.wake()
        return {name: total / number for name, (total, number) in self.check_engine(version).items()}

    def _keep(self, groups: Sequence[RolloutGroup]) -> FilterResult:
        # shuffled before any filter, so that the filters see the rewards that are trained on
        controlled = self.control(groups) if self.control else groups
        kept = keep_scored(
            controlled, smallest_group=self.rules.smallest_group, needs_baseline=self.rules.needs_baseline
        )
        total = sum(len(group.rollouts) for group in groups)
        unscored = kept.reasons.get("unscored", 0)
        if total and unscored / total > self.rules.max_unscored_share:
            raise ServiceError(
                code="reward.too_many_failed",
                what=f"{unscored} of {total} rollouts of step {self.progress.step + 1} have no reward",
                where=f"reward function; first: {_first_unscored(groups)}",
                why=f"more than the share {self.rules.max_unscored_share} that --max_unscored_share allows",
                state=f"no weight was changed by this step; resume: {self.resume_command}",
                do=f"repair the reward, then {self.resume_command}",
            )
        return drop_zero_variance_groups(kept) if self.rules.filter_groups else kept

    def _annotate(self, kept: FilterResult) -> tuple[list[TrainingSample], dict[str, float]]:
        """Build the training samples with all scores that the algorithm needs; return them with the metrics."""
        # every rank holds the same groups, so all of them skip the forwards or none does
        if not kept.groups:
            return [], {}
        behaviour = [rollout.behaviour_logprobs for _, rollout in flat_rollouts(kept.groups)]
        # without a scorer the engine's log-probs stand for those of the policy at the start of the step
        old, entropy = behaviour, []
        with self.timer.phase(Phase.LOGPROB):
            if self.old_policy is not None:
                old, entropy = self.old_policy.scores(kept.groups, behaviour)
            reference = self.reference(kept.groups) if self.reference else []
            values = self.critic.values(kept.groups) if self.critic else []
            scores = PolicyScores(old, behaviour, reference, values, entropy)
            samples, metrics = self.assign_credit(kept.groups, scores, step=self.progress.step)
        return samples, {name: float(total / count) for name, (total, count) in metrics.items() if float(count)}

    def _check_applied(self, applied: bool, batch: Sequence[TrainingSample]) -> None:
        """Count refused steps in a row and raise `NumericsError` above the limit; a refused step changes no weight."""
        self.progress.refused_in_a_row = 0 if applied else self.progress.refused_in_a_row + 1
        self._refuse_more_steps(self.progress.refused_in_a_row, batch, "--actor_learning_rate")

    def _check_critic_applied(self, applied: bool, batch: Sequence[TrainingSample]) -> None:
        """Do the same for the critic, in a count of its own: the policy's good steps say nothing about it."""
        self.progress.critic_refused_in_a_row = 0 if applied else self.progress.critic_refused_in_a_row + 1
        self._refuse_more_steps(self.progress.critic_refused_in_a_row, batch, "--critic_learning_rate")

    def _refuse_more_steps(self, num_in_a_row: int, batch: Sequence[TrainingSample], flag: str) -> None:
        samples = ", ".join(sample.sample_id for sample in batch[:3])
        refuse_more_steps(
            num_in_a_row,
            self.rules.max_refused_in_a_row,
            where=f"step {self.progress.step + 1}, update {self.progress.updates + 1}; samples {samples}",
            saved_step=self.saver.saved_step,
            do=f"{self.resume_command} {flag} <a tenth of the present one>",
        )

    def _finish_step(
        self,
        record: dict[str, object],
        groups: Sequence[RolloutGroup],
        results: dict[str, EvaluationResult],
        ended_episode: int | None,
    ) -> None:
        step, last = self.progress.step, self.finished
        flat = flat_rollouts(groups)
        tokens = sum(len(group.prompt.token_ids) + len(rollout.completion_ids) for group, rollout in flat)
        # the row before the checkpoint: a resume cuts rows beyond its checkpoint, but cannot write one that is missing
        self.reporter.step(record, self.progress, self.timer, num_tokens=tokens, num_samples=len(flat))
        self.reporter.rollouts(groups, self.progress)
        fault_point(POINT_LOGGED)
        # before the save: a resume from it neither repeats this evaluation nor lacks it
        if last or (self.rules.eval_every and step % self.rules.eval_every == 0):
            self._evaluate(results, "after" if last else f"step {step}")
        if self.saver.due(step, ended_episode=ended_episode) or last:
            with self.timer.phase(Phase.SAVE):
                self.saver.save(step, episode=self.ledger.epoch)

    def _evaluate(self, results: dict[str, EvaluationResult], name: str) -> None:
        if self.evaluator is None:
            return
        with self.timer.phase(Phase.EVAL):
            self.rollouts.wake()
            result = results[name] = self.evaluator()
            looks = self.averaged if self.progress.step else None  # the averages begin as the weights
            averages = averaged_record(looks()) if looks else {}
        lists = {"rewards": result.rewards, "correct": result.correct}
        self.reporter.evaluation(name, result.as_record() | averages, self.progress, **lists)

    def _save_and_stop(self, signals: StopSignals) -> NoReturn:
        save_and_stop(
            self.saver,
            signals,
            self.progress,
            episode=self.ledger.epoch,
            rank=self.collectives.rank,
            resume_command=self.resume_command,
        )


def _update_metrics(part: str, outcomes: Sequence[UpdateOutcome]) -> dict[str, object]:
    """Summarize the optimizer steps of one training step on the policy or on the critic, as metrics by name."""
    # refused steps have norms that are not finite, which would take the mean with them
    applied = [outcome for outcome in outcomes if outcome.applied]
    norms = [outcome.gradient_norm for outcome in applied]
    return {
        **scale_metrics(part, outcomes),
        f"{part}/gradient_norm": sum(norms) / len(norms) if norms else math.nan,
        f"{part}/learning_rate": outcomes[-1].learning_rate if outcomes else math.nan,
        f"{part}/updates": len(applied),
        f"{part}/updates_refused": len(outcomes) - len(applied),
        f"{part}/micro_batches": sum(outcome.num_micro_batches for outcome in outcomes),
    }


def _first_unscored(groups: Sequence[RolloutGroup]) -> str:
    for _, rollout in flat_rollouts(groups):
        if rollout.reward is None:
            response = f"response {rollout.response_text[:80]!r}"
            reason = f"{rollout.detail}; {response}" if rollout.detail else response
            return f"{rollout.prompt_id}#{rollout.sample_index} ({rollout.status}): {reason}"
    return "none"
