"""Reinforcement fine-tuning: sample, score, estimate advantages, update; read `RlLoop` from top to bottom.

All collaborators are passed in ready-built. Nothing here depends on a flag, a device or the name of an algorithm.
What every kind of training does around a step is in `TrainingLoop`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rft_core.errors import ServiceError
from rft_core.fault_points import declare, fault_point
from rft_trainer.batches.prompt_ledger import EntryState, LedgerEntry
from rft_trainer.batches.training_batch import TrainingBatch
from rft_trainer.evaluation.ema_evaluator import EmaEvaluator, averaged_record
from rft_trainer.evaluation.evaluator import EvaluationResult, Evaluator
from rft_trainer.loops.trainer import Trainer
from rft_trainer.loops.training_loop import Limits, StepSize, TrainingLoop
from rft_trainer.loops.update_metrics import update_metrics
from rft_trainer.metrics.phase_timer import Phase
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import Prompt, RolloutGroup, TrainingSample
from rft_trainer.records.scores import remedy_of
from rft_trainer.rollout_files.token_recorder import TokenRecorder
from rft_trainer.rollouts.source import RolloutSource
from rft_trainer.runs.rollout_signs import batch_signs, credit_signs
from rft_trainer.runs.step_report import rollout_metrics
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.scoring.advantages import AdvantageEstimator, PolicyScores
from rft_trainer.scoring.finite_scores import non_finite_scores, without_rollouts
from rft_trainer.scoring.logprobs import LogprobScorer
from rft_trainer.scoring.samples import (
    FilterResult,
    drop_zero_variance_groups,
    flat_rollouts,
    has_signal,
    keep_scored,
    sample_name,
)
from rft_trainer.update.critic import ValueAnnotator
from rft_trainer.update.mismatch_monitor import MismatchMonitor
from rft_trainer.update.nonfinite_checks import refuse_non_finite_samples
from rft_trainer.update.numeric_guard import RowFault
from rft_trainer.update.optimizer_step import UpdateOutcome, Updater
from rft_trainer.update.pretraining_loss import PretrainingTerm

POINT_ROLLED_OUT = declare("rl.rolled_out", "rollouts are scored, no weight has changed")
POINT_UPDATED = declare("rl.updated", "one optimizer step of a training step is applied")
POINT_LOGGED = declare("rl.logged", "the row of a step is written, its checkpoint is not")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig(Limits):
    """The numbers of one training step, and how many there are.

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
    update: Updater


@dataclass(slots=True, kw_only=True)
class RlLoop(TrainingLoop[Sequence[RolloutGroup]]):
    """The reinforcement learning loop of a run, with its collaborators as fields."""

    prompts: Sequence[Prompt]
    rollouts: RolloutSource
    assign_credit: AdvantageEstimator
    reference: LogprobScorer | None
    old_policy: OldPolicyScorer | None
    critic: CriticTrainer | None
    control: Callable[[Sequence[RolloutGroup]], list[RolloutGroup]] | None
    updater: Updater
    evaluator: Evaluator | None
    rules: StepConfig
    sleep_engine: bool
    check_engine: Callable[[int], dict[str, tuple[float, float]]] | None = None
    """After every load of weights of a version, awake: whether the engine serves them; metrics as (total, count), or
    an error."""
    routes: Callable[[int, Sequence[RolloutGroup]], dict[str, float]] | None = None
    """Of some steps, by number and groups, before the engine sleeps: whether its routers agree with the policy's, as
    metrics."""
    gaps: MismatchMonitor | None = None
    """Whether the samples are the policy's own, seen at the first update of a step."""
    tokens: TokenRecorder | None = None
    """Records the tokens of some steps."""
    averaged: EmaEvaluator | None = None
    """Evaluates the moving averages of the weights beside them."""
    teacher: LogprobScorer | None = None
    """The model that the policy is distilled from."""
    pretraining: PretrainingTerm | None = None
    """Added to the loss of every update of the policy."""
    keeps_best: bool = False
    """Keeps the checkpoint of the highest held-out reward."""
    results: dict[str, EvaluationResult] = field(default_factory=dict[str, EvaluationResult])
    """The evaluations so far, by name."""
    advantages: dict[str, float] = field(default_factory=dict[str, float], init=False)
    """Mean advantage of each sample that the present step trains on, by its name."""
    routed: dict[str, float] = field(default_factory=dict[str, float], init=False)
    """What `routes` measured of the present step."""
    trainer: Trainer = field(init=False)

    def __post_init__(self) -> None:
        # looked up at each call: what stands in the place of the source is what gets the weights
        self.trainer = Trainer(
            self.updater,
            self.progress,
            self.collectives,
            load_weights=lambda version: self.rollouts.load_weights(version),
        )

    def run(self, signals: StopSignals) -> Mapping[str, EvaluationResult]:
        """Train until the ledger or `max_steps` ends; the evaluations before and after by name."""
        self.steps(signals)
        return self.results

    @property
    def limits(self) -> Limits:
        """Return how long the run goes on: part of the numbers of its step."""
        return self.rules

    @property
    def logged_point(self) -> str:
        """The fault point of reinforcement learning runs."""
        return POINT_LOGGED

    def _stop_before_learning(self) -> bool:
        return True  # sampling may take minutes

    def _collect(self) -> tuple[list[LedgerEntry], Sequence[RolloutGroup]]:
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
        if self.routes is not None:
            with self.timer.phase(Phase.LOGPROB):
                self.routed = self.routes(self.progress.step + 1, groups)
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

    def _learn(self, data: Sequence[RolloutGroup]) -> dict[str, object]:
        """Compute advantages, then take `epochs_per_step` passes of optimizer steps over the samples."""
        groups = data
        kept = self._keep(groups)
        if self.tokens is not None:
            with self.timer.phase(Phase.LOGPROB):
                self.tokens.score(self.progress.step + 1, groups)
        samples, credited = self._annotate(kept)
        if self.tokens is not None:
            self.tokens.credit(samples)
        self.advantages = {sample.sample_id: sample.mean_advantage for sample in samples}
        totals = MetricTotals()
        outcomes: list[UpdateOutcome] = []
        critic_outcomes: list[UpdateOutcome] = []
        # the critic learns alone first: advantages from an untrained one would mislead the policy
        trains_policy = self.progress.step >= self.rules.frozen_steps
        with self.timer.phase(Phase.TRAIN):
            for _ in range(self.rules.epochs_per_step):
                for batch in TrainingBatch.of(samples).split(self.rules.train_batch_size):
                    update = self.progress.updates
                    if self.critic is not None:
                        critic_outcomes.append(self.critic.update(batch.samples, update, totals))
                        self._check("critic", critic_outcomes[-1], batch, "--critic_learning_rate", update)
                    if trains_policy:
                        trained = batch.without_zero_advantages() if self.rules.skip_zero_advantage else batch
                        # only the first update still has the weights that drew the samples
                        gaps = self._begin_gaps() if not outcomes else None
                        self.trainer.accumulate(trained, totals, monitor=gaps)
                        self._add_pretraining(update, totals)
                        outcomes.append(self.trainer.step())
                        self._check("policy", outcomes[-1], batch, "--actor_learning_rate", update)
                    # also for an update of the critic alone: both learning rates follow this number
                    self.progress.updates = update + 1
                    fault_point(POINT_UPDATED)
            # still in the phase: reading the totals waits for the device, and that is time of training
            merged = totals.merged(self.collectives, worked=self.timer.worked(), memory=self.memory.take()) | credited
        for updater in (self.updater, *([self.critic.update] if self.critic is not None else [])):
            updater.see(merged)
        # before the new weights are loaded: staleness counts from the version that this step started with
        sampling = self.rollouts.metrics(groups)
        with self.timer.phase(Phase.SYNC):
            self.trainer.publish(self.progress.step + 1)
            checked = self._checked_engine(self.progress.step + 1)
        return {
            **checked,
            **sampling,
            **rollout_metrics(groups, kept),
            **batch_signs(groups),
            # a teacher's advantages follow no reward
            **({} if self.teacher else credit_signs(kept.groups, samples)),
            **merged,
            **(self.gaps.metrics if self.gaps and outcomes else {}),
            **self.routed,
            **self.assign_credit.control(merged, len(samples)),
            **update_metrics("policy", outcomes),
            **(update_metrics("critic", critic_outcomes) if self.critic is not None else {}),
        }

    def _add_pretraining(self, update: int, totals: MetricTotals) -> None:
        """Add the gradient of the pre-training term, of the rows that belong to this update."""
        if self.pretraining is not None:
            self.trainer.accumulate(self.pretraining.rows.batch(update), totals, loss=self.pretraining.loss)

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
                what=f"{unscored} of {total} rollouts of step {self.progress.step + 1} have no reward "
                f"({_failure_counts(groups)})",
                where=f"reward function; first: {_first_unscored(groups)}",
                why=f"more than the share {self.rules.max_unscored_share} that --max_unscored_share allows",
                state=f"no weight was changed by this step; resume: {self.resume_command}",
                do=remedy_of(_unscored_statuses(groups), self.resume_command, is_resumed=True),
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
            teacher = self.teacher(kept.groups) if self.teacher else []
            scores = PolicyScores(old, behaviour, reference, values, entropy, teacher)
            # before advantages are made of them: one score that is not finite would spread over the batch
            groups, scores = self._without_bad_scores(kept.groups, scores)
            if not groups:
                return [], {}
            samples, metrics = self.assign_credit(groups, scores, step=self.progress.step)
        return samples, {name: float(total / count) for name, (total, count) in metrics.items() if float(count)}

    def _without_bad_scores(
        self, groups: Sequence[RolloutGroup], scores: PolicyScores
    ) -> tuple[Sequence[RolloutGroup], PolicyScores]:
        """Leave rollouts with a score that is not finite out, within the budget of the policy's guard."""
        bad = non_finite_scores(scores)
        guard = self.progress.guards.get("policy")
        if not bad or guard is None:
            return groups, scores
        flat = flat_rollouts(groups)
        faults = [
            RowFault((sample_name(*flat[index]),), f"{name} of the trainer", self.collectives.rank)
            for index, name in bad.items()
        ]
        if not guard.refuse_scores(faults, where=f"step {self.progress.step + 1}"):
            return groups, scores  # the update that they lead to is refused
        return without_rollouts(groups, scores, bad, self.rules.smallest_group)

    def _check(self, part: str, outcome: UpdateOutcome, batch: TrainingBatch, flag: str, update: int) -> None:
        self._count_refused(part, outcome, [sample.sample_id for sample in batch], flag, update)

    def _size(self, data: Sequence[RolloutGroup]) -> StepSize:
        flat = flat_rollouts(data)
        return StepSize(sum(len(group.prompt.token_ids) + len(one.completion_ids) for group, one in flat), len(flat))

    def _report(self, data: Sequence[RolloutGroup]) -> None:
        self.reporter.rollouts(data, self.progress, self.advantages)
        if self.tokens is not None:
            self.tokens.write()

    def _evaluate(self, name: str, extra: Mapping[str, object]) -> None:
        if self.evaluator is None:
            return
        self.progress.owed_evaluation = name
        with self.timer.phase(Phase.EVAL):
            self.rollouts.wake()
            result = self.results[name] = self.evaluator()
            looks = self.averaged if self.progress.step else None  # the averages begin as the weights
            averages = averaged_record(looks()) if looks else {}
        lists = {"rewards": result.rewards, "correct": result.correct}
        if self.keeps_best and result.num_scored:
            if self.progress.observe(result.mean_reward):
                self.saver.keep(self.progress.step)
            extra = {**extra, "eval/best_step": self.progress.best_step}
        self.reporter.evaluation(name, {**result.as_record(), **averages, **extra}, self.progress, **lists)
        self.progress.owed_evaluation = ""


def _failure_counts(groups: Sequence[RolloutGroup]) -> str:
    """Return the kinds of failures with their numbers, the most frequent first."""
    missing = [rollout for _, rollout in flat_rollouts(groups) if rollout.reward is None]
    kinds = Counter(rollout.failure or str(rollout.status) for rollout in missing)
    return ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())


def _unscored_statuses(groups: Sequence[RolloutGroup]) -> list[str]:
    return [str(rollout.status) for _, rollout in flat_rollouts(groups) if rollout.reward is None]


def _first_unscored(groups: Sequence[RolloutGroup]) -> str:
    for _, rollout in flat_rollouts(groups):
        if rollout.reward is None:
            response = f"response {rollout.response_text[:80]!r}"
            reason = f"{rollout.detail}; {response}" if rollout.detail else response
            return f"{rollout.prompt_id}#{rollout.sample_index} ({rollout.status}): {reason}"
    return "none"
