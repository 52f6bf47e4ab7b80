"""Composition of a reward model's training: from resolved settings to its pairs, collaborators and loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rft.build.models import tokenizer_of
from rft.build.shared_parts import learning_rate_schedule, make_ledger, make_saver, make_tracer, micro_batching
from rft.checkpoints.writer import ResumePoint
from rft.front_end import SILENT, FrontEnd
from rft.hub.run_settings import with_local_models
from rft.identity.contents import records_content, rows_content, run_contents
from rft.identity.continuation import continuation, with_commits
from rft.identity.record import Content
from rft.parallel.parallelize import ParallelModel, held_dtype, parallelize
from rft.parallel.reward_model_weights import reward_checkpoint_parts
from rft.parallel.shardable import ShardableRewardModel, WrappedRewardModel
from rft.parallel.step_guards import make_guards, make_weight_check
from rft.process.launching import requested_run
from rft.process.machine import open_machine
from rft.process.rollbacks import with_rollbacks
from rft.resolved import Resolved
from rft.run_lifecycle import RunStart, TrainedRun, compared_facts, execute, start
from rft.settings import RmSettings
from rft.stages.reward_head import reward_model_to_train, trained_spec
from rft.stages.reward_pairs import RewardData, reward_data
from rft_dist.optim.parameter_groups import require_known_names
from rft_dist.strategies.weights_snapshot import WeightsSnapshot
from rft_models.loading.context_length import model_facts
from rft_models.reward_model.encoding import RewardTextEncoder
from rft_models.reward_model.spec import RewardSpec
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.evaluation.pair_evaluator import PairScoreEvaluator
from rft_trainer.loops.early_stop import EarlyStop
from rft_trainer.loops.reward_training import RewardModelLoop
from rft_trainer.runs.checkpointing import Progress
from rft_trainer.runs.rollback import Rollback
from rft_trainer.runs.step_report import Reporter
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.update.numeric_guard import NumericGuard
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.pair_loss import PairLoss, PairScoreObjective


@dataclass(frozen=True, slots=True)
class RmInputs:
    """Tokenizer, head and pairs of a reward model's run, which it reads before any weights."""

    tokenizer: HfTokenizer
    spec: RewardSpec
    pairs: RewardData


def rm_inputs(settings: RmSettings) -> RmInputs:
    """Read, encode and count; needs a tokenizer and no weights."""
    tokenizer = tokenizer_of(settings.model)
    spec = trained_spec(settings.model.pretrain, settings.head)
    pairs = reward_data(
        settings.data,
        settings.training,
        spec.heads,
        RewardTextEncoder(tokenizer),
        max_positions=model_facts(settings.model.pretrain, without_head=True).max_positions,
        seed=settings.run.seed,
    )
    return RmInputs(tokenizer, spec, pairs)


def build_rm(settings: RmSettings, started: RunStart, inputs: RmInputs) -> RewardModelLoop:
    """Build the run, ready to begin; where it continues from a checkpoint, exactly in that state."""
    machine, restored, chosen, pairs = started.machine, started.restored, settings.training, inputs.pairs
    model = reward_model_to_train(
        settings.model,
        inputs.spec,
        settings.model.pretrain if restored is None else restored.model_directory,
        seed=settings.run.seed,
        dtype=held_dtype(settings.strategy, bf16=settings.model.bf16),
        device=machine.device,
    )
    require_known_names(settings.optimizer, [name for name, _ in model.named_parameters()])
    parallel = parallelize(ShardableRewardModel(model), settings.strategy, settings.optimizer, machine, restored)
    progress, early_stop = Progress(), EarlyStop(chosen.patience, chosen.min_improvement)
    best = _best_weights(settings, parallel, restored)
    # before the saver, which restores what it remembers
    guard = make_guards(settings.run, started, progress, ["policy"], keeps_out=True)["policy"]
    ledger = make_ledger(pairs.mixture, pairs.data_hash, len(pairs.units), chosen.max_epochs, settings.run.seed)
    saver = make_saver(
        started.directory,
        settings.checkpoint,
        started.metadata(pairs.data_hash),
        reward_checkpoint_parts(parallel, machine.collectives),
        parallel.optimizer,
        {"progress": progress, "ledger": ledger, "early_stop": early_stop},
        machine,
        restored,
        {"best_weights": best} if best else None,
        resume_command=started.resume_command,
    )
    objective = pair_objective(settings, inputs.spec)
    return RewardModelLoop(
        ledger=ledger,
        units=pairs.units,
        updater=_updater(settings, started, parallel, objective, pairs.num_steps, guard),
        evaluator=_evaluator(settings, started, parallel, objective, pairs),
        saver=saver,
        reporter=Reporter(
            started.directory,
            started.sinks,
            machine.collectives,
            num_steps=pairs.num_steps,
            rollout_every=0,
            rollouts_kept=0,
            seconds_before=progress.seconds,
        ),
        collectives=machine.collectives,
        progress=progress,
        timer=machine.phase_timer(progress),
        early_stop=early_stop,
        max_steps=chosen.max_steps,
        eval_every=max(settings.evaluation.eval_steps, 0),
        max_refused_in_a_row=settings.run.max_refused_steps,
        weight_check=make_weight_check(settings.run, started, [parallel]),
        train_batch_size=chosen.train_batch_size,
        resume_command=started.resume_command,
        best=best,
        averages=parallel.averages,
    )


def pair_objective(settings: RmSettings, spec: RewardSpec) -> PairScoreObjective:
    """Return the loss that the settings select; the margin is part of the pairs."""
    chosen = settings.training
    return PairScoreObjective(
        heads=spec.heads,
        loss_type=chosen.loss_type,
        tie_margin=chosen.tie_margin,
        centring=chosen.center_rewards_coefficient,
    )


def _updater(
    settings: RmSettings,
    started: RunStart,
    parallel: ParallelModel[WrappedRewardModel],
    objective: PairScoreObjective,
    num_steps: int,
    guard: NumericGuard,
) -> Updater:
    """Make the optimizer steps of the loss of pairs."""
    chosen, machine = settings.training, started.machine
    return Updater(
        PairLoss(parallel.model, objective),
        parallel.optimizer,
        parallel.data,
        micro_batching=micro_batching(
            chosen.micro_train_batch_size, chosen.max_tokens_per_micro_batch, chosen.packing_samples
        ),
        learning_rate=learning_rate_schedule(settings.optimizer, chosen.learning_rate, num_steps),
        guard=guard,
        trace=make_tracer(parallel, machine),
        device=machine.device,
        pin_memory=settings.data.dataloader_pin_memory,
        collective_forward=parallel.collective_forward,
    )


def _evaluator(
    settings: RmSettings,
    started: RunStart,
    parallel: ParallelModel[WrappedRewardModel],
    objective: PairScoreObjective,
    pairs: RewardData,
) -> PairScoreEvaluator | None:
    """Make the evaluator of the held-out pairs, where there are any."""
    if not pairs.held_out:
        return None
    return PairScoreEvaluator(
        parallel.model,
        objective,
        pairs.held_out,
        parallel.data,
        max_sequences=settings.training.micro_train_batch_size,
        max_tokens=settings.training.max_tokens_per_micro_batch,
        device=started.machine.device,
        collective_forward=parallel.collective_forward,
    )


def _best_weights(
    settings: RmSettings, parallel: ParallelModel[WrappedRewardModel], restored: ResumePoint | None
) -> WeightsSnapshot | None:
    """Make the copy of the best weights where patience ends the run, since the best evaluation is then not the last."""
    if not settings.training.patience:
        return None
    best = WeightsSnapshot(parallel.weights, [name for name, _ in parallel.model.named_parameters()])
    if restored is not None:
        best.restore(restored.checkpoint.component("best_weights"))
    return best


def rm_contents(resolved: Resolved[RmSettings], pairs: RewardData) -> dict[str, Content]:
    """Return what the rows and files of a run hold."""
    chosen = resolved.settings.data
    rows = rows_content(pairs.data_hash, len(pairs.units), chosen.prompt_data)
    held_out = records_content(
        ([sample.sample_id, *sample.token_ids, *sample.sequence_numbers] for sample in pairs.held_out),
        chosen.eval_data,
    )
    return run_contents(resolved, rows, held_out)


def train(
    resolved: Resolved[RmSettings],
    command: Sequence[str],
    *,
    in_place: Path | None = None,
    signals: StopSignals | None = None,
    front: FrontEnd = SILENT,
) -> TrainedRun:
    """Train a reward model from its settings to its end; `in_place` continues the run in that directory.

    `command` is what is written into the run directory as the way to start it again. `signals` stop the run.
    """
    # before anything is read: a setting that has changed underneath would be told as another fault
    at = with_commits(continuation(resolved, in_place))
    resolved = with_local_models(at.resolved)
    settings = resolved.settings
    request = requested_run(resolved, in_place)
    with (
        signals or StopSignals() as listening,
        open_machine(
            settings.model.device,
            request,
            settings.watch,
            debug=settings.run.debug,
            command=command,
            show_error=front.show_error,
        ) as machine,
    ):
        inputs = rm_inputs(settings)
        facts = compared_facts(at, machine, rm_contents(resolved, inputs.pairs))
        if machine.is_first:
            front.show_plan(resolved, inputs, machine)

        def attempt(rollback: Rollback | None) -> TrainedRun:
            now, place = (at, in_place) if rollback is None else (continuation(at.resolved, rollback.run), rollback.run)
            started = start(now, command, machine, inputs.pairs.num_steps, facts, in_place=place, front=front)
            return execute(build_rm(settings, started, inputs), started, listening, rollback)

        return with_rollbacks(attempt)
