"""Composition of a supervised run: from resolved settings to its samples, collaborators and loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rft.build.images import ImageReading, refuse_beside_images, row_images, tokenizer_with_images
from rft.build.lora import adapt, counting, weights_directory
from rft.build.models import refuse_unknown_parts
from rft.build.prompt_data import (
    PreparedPrompts,
    data_notes,
    demonstrations,
    held_out_indices,
    held_out_text,
    hold_out,
    read_held_out,
    read_training,
    trained_turns,
    weight_notes,
)
from rft.build.shared_parts import (
    balanced_forward,
    learning_rate_schedule,
    make_ledger,
    make_saver,
    make_tracer,
    micro_batching,
)
from rft.checkpoints.initial_weights import engine_weights_directory, load_initial_weights
from rft.checkpoints.writer import ResumePoint
from rft.front_end import SILENT, FrontEnd
from rft.hub.run_settings import with_local_models
from rft.identity.contents import records_content, rows_content, run_contents
from rft.identity.continuation import continuation, with_commits
from rft.identity.record import Content
from rft.parallel.parallelize import ParallelModel, parallelize, trainable_policy
from rft.parallel.policy_weights import checkpoint_parts, fused_policy
from rft.parallel.shardable import ShardablePolicy
from rft.parallel.step_guards import make_guards, make_weight_check
from rft.process.launching import requested_run
from rft.process.machine import Machine, open_machine
from rft.process.rollbacks import with_rollbacks
from rft.resolved import Resolved
from rft.run_lifecycle import RunStart, TrainedRun, compared_facts, execute, start
from rft.settings import SftSettings
from rft.stages.sft_store import MOST_IN_MEMORY, StoredRows, open_store, wants_store
from rft_algos.algorithms.published import Sft
from rft_core.keyed_random import derive_key
from rft_dist.strategies.weights_snapshot import WeightsSnapshot
from rft_models.layers.embedding_noise import EmbeddingNoise
from rft_models.loading.context_length import model_facts
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.mixture import Mixture
from rft_trainer.data.rendering import RenderedPrompt
from rft_trainer.loops.early_stop import EarlyStop
from rft_trainer.loops.sft import SftLoop, TokenLikelihood
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.runs.checkpointing import Progress
from rft_trainer.runs.rollback import Rollback
from rft_trainer.runs.step_report import Reporter
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.settings.sft import SequenceTrainingSettings
from rft_trainer.update.numeric_guard import NumericGuard
from rft_trainer.update.optimizer_step import MicroBatchLoss, Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.supervised_loss import SupervisedLoss


@dataclass(frozen=True, slots=True)
class SftData:
    """Training and held-out samples of a supervised run."""

    training: PreparedPrompts | StoredRows
    samples: Sequence[TrainingSample]
    left_out: list[tuple[str, int]]
    held_out: list[TrainingSample]
    num_steps: int
    mixture: Mixture
    num_loss_tokens: int
    """Learned tokens of the training samples."""
    notes: tuple[str, ...] = ()
    """What a person should know of the data before training on them."""


def sft_data(settings: SftSettings, tokenizer: HfTokenizer, max_positions: int) -> SftData:
    """Read, render and count; needs a tokenizer and no weights."""
    data, chosen = settings.data, settings.training
    max_len = chosen.max_len or max_positions
    refuse_beside_images(settings.images, settings.strategy, settings.model, tokenizer)
    images = row_images(settings.images, settings.run.seed)
    turns = trained_turns(data)
    if wants_store(settings, tokenizer):
        return _stored_data(settings, tokenizer, max_len)
    training = read_training(
        data,
        data,
        tokenizer,
        label_key=None,
        output_key=data.output_key,
        prompt_max_len=max_len,
        images=images,
        turns=turns,
        limit_flag="--max_len",
        weight_key=data.weight_key,
    )
    samples, left_out = demonstrations(training.rendered, tokenizer, max_len)
    held_out: list[TrainingSample] = []
    rendered: Sequence[RenderedPrompt] = ()
    if data.eval_data:
        held_out, rendered = _held_out(settings, tokenizer, max_len, images)
    elif data.held_out_rows:
        samples, held_out = hold_out(samples, data.held_out_rows, settings.run.seed)
    # counted anew: rows that are too long or held out have left their sources
    mixture = training.mixture_of([sample.sample_id for sample in samples])
    notes = data_notes(data, tokenizer, training.rendered, rendered, unused=training.loaded.unused)
    notes += weight_notes(training.rendered)
    num_loss_tokens = sum(sample.num_loss_tokens for sample in samples)
    num_steps = _num_steps(chosen, len(samples))
    return SftData(training, samples, left_out, held_out, num_steps, mixture, num_loss_tokens, notes)


def _held_out(
    settings: SftSettings, tokenizer: HfTokenizer, max_len: int, images: ImageReading
) -> tuple[list[TrainingSample], Sequence[RenderedPrompt]]:
    """Read the held-out rows of a file."""
    data = settings.data
    rendered = read_held_out(
        data.eval_data,
        data.eval_split,
        data.max_eval_samples,
        held_out_text(data),
        tokenizer,
        label_key=None,
        output_key=data.eval_output_key or data.output_key,
        prompt_max_len=max_len,
        images=images,
        turns=trained_turns(data),
        limit_flag="--max_len",
    )
    return demonstrations(rendered, tokenizer, max_len)[0], rendered


def _num_steps(chosen: SequenceTrainingSettings, num_samples: int) -> int:
    num_steps = -(-num_samples // chosen.train_batch_size) * chosen.max_epochs
    return min(num_steps, chosen.max_steps) if chosen.max_steps else num_steps


def _stored_data(settings: SftSettings, tokenizer: HfTokenizer, max_len: int) -> SftData:
    """Build or open the store of the training rows; held-out rows are read into memory."""
    data, chosen = settings.data, settings.training
    stored = open_store(settings, tokenizer, max_len)
    samples, sizes = stored.samples, stored.sizes
    num_loss_tokens = stored.num_loss_tokens
    held_out: list[TrainingSample] = []
    if data.eval_data:
        held_out, _ = _held_out(settings, tokenizer, max_len, row_images(settings.images, settings.run.seed))
    elif data.held_out_rows:
        chosen_out, kept = held_out_indices(len(samples), data.held_out_rows, settings.run.seed)
        held_out = [samples[index] for index in chosen_out]
        sizes = stored.sizes_without(held_out)
        num_loss_tokens -= sum(sample.num_loss_tokens for sample in held_out)
        samples = samples.picked(kept)
    notes = data_notes(data, tokenizer, ())
    mixture = Mixture(sizes, stored.probabilities, most_in_memory=MOST_IN_MEMORY)
    num_steps = _num_steps(chosen, len(samples))
    left_out = [*stored.too_long]
    return SftData(stored, samples, left_out, held_out, num_steps, mixture, num_loss_tokens, (*notes, *stored.notes))


def build_sft(settings: SftSettings, started: RunStart, tokenizer: HfTokenizer, data: SftData) -> SftLoop:
    """Build the supervised run, ready to begin; where it continues from a checkpoint, exactly in that state."""
    machine, restored, chosen = started.machine, started.restored, settings.training
    source = weights_directory(settings.adapter, settings.model.pretrain, restored)
    policy = trainable_policy(settings.model, settings.strategy, source, machine, tokenizer, settings.adapter)
    if restored is None:
        load_initial_weights(policy, settings.checkpoint, show=machine.is_first)
        source = engine_weights_directory(settings.checkpoint, source, shares_weights=True)
    # before distribution, so that adapters are parameters like any others
    adapt(policy, settings.adapter, restored, base=source, seed=settings.run.seed)
    refuse_unknown_parts(policy, settings.optimizer)
    parallel = parallelize(ShardablePolicy(policy), settings.strategy, settings.optimizer, machine, restored)
    progress, early_stop = Progress(), EarlyStop(chosen.patience, chosen.min_improvement, chosen.target_loss)
    best = best_weights(chosen, parallel, restored)
    # before the saver, which restores what it remembers
    guard = make_guards(settings.run, started, progress, ["policy"], keeps_out=True)["policy"]
    ledger = make_ledger(data.mixture, data.training.data_hash, len(data.samples), chosen.max_epochs, settings.run.seed)
    saver = make_saver(
        started.directory,
        settings.checkpoint,
        started.metadata(data.training.data_hash),
        checkpoint_parts(parallel, machine.collectives),
        parallel.optimizer,
        {"progress": progress, "ledger": ledger, "early_stop": early_stop},
        machine,
        restored,
        {"best_weights": best} if best else None,
        resume_command=started.resume_command,
    )
    # the dropout masks of a resumed run go on with its next update
    if policy.adapters is not None:
        policy.adapters.begin_update(progress.updates)
    return SftLoop(
        ledger=ledger,
        samples=data.samples,
        held_out=data.held_out,
        policy=policy,
        updater=_updater(settings, started, parallel, data.num_steps, guard),
        evaluator=None,
        engine=None,
        saver=saver,
        reporter=Reporter(
            started.directory,
            started.sinks,
            machine.collectives,
            num_steps=data.num_steps,
            rollout_every=0,
            rollouts_kept=0,
            seconds_before=progress.seconds,
        ),
        collectives=machine.collectives,
        data_ranks=parallel.data,
        collective_forward=parallel.collective_forward,
        progress=progress,
        timer=machine.phase_timer(progress),
        early_stop=early_stop,
        max_steps=chosen.max_steps,
        eval_every=max(settings.evaluation.eval_steps, 0),
        max_refused_in_a_row=settings.run.max_refused_steps,
        weight_check=make_weight_check(settings.run, started, [parallel]),
        train_batch_size=chosen.train_batch_size,
        eval_max_sequences=chosen.micro_train_batch_size,
        eval_max_tokens=chosen.max_tokens_per_micro_batch,
        resume_command=started.resume_command,
        device=machine.device,
        best=best,
        averages=parallel.averages,
    )


def _updater(
    settings: SftSettings,
    started: RunStart,
    parallel: ParallelModel[CausalPolicy],
    num_steps: int,
    guard: NumericGuard,
) -> Updater:
    """Make the optimizer steps of the likelihood objective."""
    chosen, machine = settings.training, started.machine
    return Updater(
        _loss(settings, parallel, machine),
        parallel.optimizer,
        parallel.data,
        micro_batching=micro_batching(
            chosen.micro_train_batch_size, chosen.max_tokens_per_micro_batch, chosen.packing_samples
        ),
        learning_rate=counting(
            parallel.model,
            with_noise(
                parallel.model,
                learning_rate_schedule(settings.optimizer, chosen.learning_rate, num_steps),
                alpha=chosen.neftune_noise_alpha,
                seed=settings.run.seed,
            ),
        ),
        guard=guard,
        trace=make_tracer(parallel, machine),
        device=machine.device,
        pin_memory=settings.data.dataloader_pin_memory,
        collective_forward=parallel.collective_forward,
    )


def with_noise(
    policy: CausalPolicy, schedule: Callable[[int], float], *, alpha: float, seed: int
) -> Callable[[int], float]:
    """Put noise on the policy's embeddings; return the learning rate of each step, whose call begins the step's noise.

    Without an `alpha` the schedule is returned as it is.
    """
    if not alpha:
        return schedule
    noise = EmbeddingNoise(alpha, derive_key(seed, "neftune"))
    policy.backbone.noise = noise

    def rate(update: int) -> float:
        noise.update = update
        return schedule(update)

    return rate


def _loss(settings: SftSettings, parallel: ParallelModel[CausalPolicy], machine: Machine) -> MicroBatchLoss:
    """Make the loss of a micro-batch: the fused or split likelihood, or the one with terms over the vocabulary."""
    chosen = settings.training
    if chosen.label_smoothing or chosen.z_loss_coef:
        record = Sft(label_smoothing=chosen.label_smoothing, z_loss_coef=chosen.z_loss_coef)
        return SupervisedLoss(parallel.model, record)
    return PolicyLoss(
        parallel.model,
        TokenLikelihood(),
        balanced=balanced_forward(settings.model, parallel.model, machine),
        fused=fused_policy(parallel),
    )


def best_weights(
    chosen: SequenceTrainingSettings, parallel: ParallelModel[CausalPolicy], restored: ResumePoint | None
) -> WeightsSnapshot | None:
    """Make the copy of the best weights where patience ends the run, since the best evaluation is then not the last."""
    if not chosen.patience:
        return None
    policy = parallel.model
    copied = policy.trainable_parameters() if policy.adapters else policy.named_parameters()
    best = WeightsSnapshot(parallel.weights, [name for name, _ in copied])
    if restored is not None:
        best.restore(restored.checkpoint.component("best_weights"))
    return best


def sft_contents(resolved: Resolved[SftSettings], data: SftData) -> dict[str, Content]:
    """Return what the rows, files and code of a run hold."""
    chosen = resolved.settings.data
    rows = rows_content(data.training.data_hash, len(data.samples), chosen.prompt_data)
    held_out = records_content(([sample.sample_id, *sample.token_ids] for sample in data.held_out), chosen.eval_data)
    return run_contents(resolved, rows, held_out)


def train(
    resolved: Resolved[SftSettings],
    command: Sequence[str],
    *,
    in_place: Path | None = None,
    signals: StopSignals | None = None,
    front: FrontEnd = SILENT,
) -> TrainedRun:
    """Run supervised fine-tuning from its settings to its end; `in_place` continues the run in that directory.

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
        tokenizer = tokenizer_with_images(settings.model, settings.images)
        data = sft_data(settings, tokenizer, model_facts(settings.model.pretrain).max_positions)
        facts = compared_facts(at, machine, sft_contents(resolved, data))
        if machine.is_first:
            front.show_plan(resolved, data, machine)

        def attempt(rollback: Rollback | None) -> TrainedRun:
            now, place = (at, in_place) if rollback is None else (continuation(at.resolved, rollback.run), rollback.run)
            started = start(now, command, machine, data.num_steps, facts, in_place=place, front=front)
            training = build_sft(settings, started, tokenizer, data)
            return execute(training, started, listening, rollback)

        return with_rollbacks(attempt)
