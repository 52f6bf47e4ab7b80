"""Composition of a supervised run: from resolved settings to its samples, collaborators and loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rft.build.images import ImageReading, refuse_beside_images, row_images, tokenizer_with_images
from rft.build.lora import counting
from rft.build.models import check_routers
from rft.build.prompt_data import (
    PreparedPrompts,
    all_left_out,
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
)
from rft.front_end import SILENT, FrontEnd
from rft.identity.contents import records_content, rows_content, run_contents
from rft.identity.record import Content
from rft.parallel.parallelize import ParallelModel
from rft.parallel.policy_weights import fused_policy
from rft.planning.start_plan import SFT_START
from rft.process.machine import Machine
from rft.resolved import Resolved
from rft.run_lifecycle import RunStart, TrainedRun
from rft.settings import PretrainSettings, SftSettings
from rft.stages.supervised.parts import RowOrder, policy_state
from rft.stages.supervised.row_training import ReadRun, held_out_records, train_on_rows
from rft.tokenizing.demonstrations import WEIGHTLESS, StoredText
from rft.tokenizing.kinds import StoredRowsText
from rft.tokenizing.row_store import StoredRows, open_store, stored_sources, wants_store
from rft_algos.algorithms.published import Sft
from rft_core.keyed_random import derive_key
from rft_models.layers.embedding_noise import EmbeddingNoise
from rft_models.loading.context_length import model_facts
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.mixture import Mixture
from rft_trainer.data.rendering import RenderedPrompt
from rft_trainer.loops.sft import SftLoop, TokenLikelihood
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.settings.sft import SequenceTrainingSettings
from rft_trainer.update.optimizer_step import MicroBatchLoss
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.supervised_loss import SupervisedLoss


@dataclass(frozen=True, slots=True)
class SftData:
    """Training and held-out samples of a supervised run."""

    training: PreparedPrompts | None
    """The rendered rows; None where they are in a store."""
    samples: Sequence[TrainingSample]
    left_out: list[tuple[str, int]]
    held_out: list[TrainingSample]
    num_steps: int
    mixture: Mixture
    num_loss_tokens: int
    """Learned tokens of the training samples."""
    data_hash: str
    """Of the training rows."""
    notes: tuple[str, ...] = ()
    """What a person should know of the data before training on them."""
    stored: StoredRows | None = None
    """The store of the training rows, where they are in one."""
    held_out_sets: tuple[str, ...] = ()
    """The set of each held-out row, where `eval_data` names several."""


def sft_data(settings: SftSettings, tokenizer: HfTokenizer, max_positions: int) -> SftData:
    """Read, render and count; needs a tokenizer and no weights."""
    data, chosen = settings.data, settings.training
    max_len = chosen.max_len or max_positions
    check_routers(settings.model, settings.routers)
    refuse_beside_images(settings.images, settings.strategy, settings.model, tokenizer)
    images = row_images(settings.images, settings.run.seed)
    turns = trained_turns(data)
    if wants_store(data, tokenizer, images_key=settings.images.images_key):
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
    return SftData(
        training,
        samples,
        left_out,
        held_out,
        num_steps,
        mixture,
        num_loss_tokens,
        training.data_hash,
        notes,
        held_out_sets=_sets_of(held_out, rendered),
    )


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


def _sets_of(held_out: Sequence[TrainingSample], rendered: Sequence[RenderedPrompt]) -> tuple[str, ...]:
    """Return the set of each held-out sample; empty where all rows are of one."""
    sources = {row.prompt_id: row.source for row in rendered}
    if len(set(sources.values())) < 2:
        return ()
    return tuple(sources[sample.sample_id] for sample in held_out)


def _num_steps(chosen: SequenceTrainingSettings, num_samples: int) -> int:
    num_steps = -(-num_samples // chosen.train_batch_size) * chosen.max_epochs
    return min(num_steps, chosen.max_steps) if chosen.max_steps else num_steps


def _stored_data(settings: SftSettings, tokenizer: HfTokenizer, max_len: int) -> SftData:
    """Build or open the store of the training rows; held-out rows are read into memory."""
    data, chosen = settings.data, settings.training
    stored = open_store(
        data,
        tokenizer,
        StoredRowsText("demonstrations", _stored_text(settings, max_len)),
        lambda too_long, counts: all_left_out(too_long, counts[WEIGHTLESS], max_len),
    )
    samples: Sequence[TrainingSample] = stored.samples
    num_loss_tokens = stored.num_loss_tokens
    held_out: list[TrainingSample] = []
    apart: list[TrainingSample] = []
    rendered: Sequence[RenderedPrompt] = ()
    if data.eval_data:
        held_out, rendered = _held_out(settings, tokenizer, max_len, row_images(settings.images, settings.run.seed))
    elif data.held_out_rows:
        chosen_out, kept = held_out_indices(len(samples), data.held_out_rows, settings.run.seed)
        held_out = apart = [samples[index] for index in chosen_out]
        num_loss_tokens -= sum(sample.num_loss_tokens for sample in held_out)
        samples = stored.samples.picked(kept)
    notes = data_notes(data, tokenizer, ())
    weightless = stored.counts[WEIGHTLESS]
    notes += (f"{weightless:,} rows have weight 0 and are left out",) if weightless else ()
    mixture = stored.mixture(sample.sample_id for sample in apart)
    num_steps = _num_steps(chosen, len(samples))
    left_out = [*stored.too_long]
    return SftData(
        None,
        samples,
        left_out,
        held_out,
        num_steps,
        mixture,
        num_loss_tokens,
        stored.data_hash,
        notes,
        stored,
        _sets_of(held_out, rendered),
    )


def _stored_text(settings: SftSettings, max_len: int) -> StoredText:
    data, turns = settings.data, trained_turns(settings.data)
    return StoredText(
        sources=[spec.name for spec in stored_sources(data)],
        input_key=data.input_key,
        output_key=data.output_key,
        weight_key=data.weight_key,
        input_template=data.input_template,
        system_prompt=data.system_prompt,
        apply_chat_template=data.apply_chat_template,
        roles=list(turns.roles),
        last_only=turns.last_only,
        max_len=max_len,
    )


def build_sft(settings: SftSettings, started: RunStart, tokenizer: HfTokenizer, data: SftData) -> SftLoop:
    """Build the supervised run, ready to begin; where it continues from a checkpoint, exactly in that state."""
    machine, chosen = started.machine, settings.training
    rows = RowOrder(data.mixture, data.data_hash, len(data.samples), data.num_steps)
    state = policy_state(settings, started, tokenizer, rows)
    parallel = state.parallel
    terms = Sft(label_smoothing=chosen.label_smoothing, z_loss_coef=chosen.z_loss_coef)
    loss = supervised_loss_of(settings, parallel, machine, terms=terms, passed=state.progress.passed(data.num_steps))
    parallel.model.key_dropout(settings.run.seed)
    noisy = with_noise(parallel.model, state.learning_rates(), alpha=chosen.neftune_noise_alpha, seed=settings.run.seed)
    return SftLoop(
        **state.loop_parts(loss, counting(parallel.model, noisy)),
        samples=data.samples,
        held_out=data.held_out,
        held_out_sets=data.held_out_sets,
        policy=parallel.model,
        data_ranks=parallel.data,
        collective_forward=parallel.collective_forward,
        eval_max_sequences=chosen.micro_train_batch_size,
        eval_max_tokens=chosen.max_tokens_per_micro_batch,
        device=machine.device,
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


def supervised_loss_of(
    settings: SftSettings | PretrainSettings,
    parallel: ParallelModel[CausalPolicy],
    machine: Machine,
    *,
    terms: Sft,
    passed: Callable[[], float],
) -> MicroBatchLoss:
    """Make the loss of a micro-batch: the fused or split likelihood, or the one with terms over the vocabulary.

    `passed` is the share of the run's updates that are done.
    """
    if terms.label_smoothing or terms.z_loss_coef:
        return SupervisedLoss(parallel.model, terms)
    return PolicyLoss(
        parallel.model,
        TokenLikelihood(),
        balanced=balanced_forward(settings.model, parallel.model, machine, settings.routers, passed),
        fused=fused_policy(parallel),
    )


def sft_contents(resolved: Resolved[SftSettings], data: SftData) -> dict[str, Content]:
    """Return what the rows, files and code of a run hold."""
    chosen = resolved.settings.data
    rows = rows_content(data.data_hash, len(data.samples), chosen.prompt_data)
    held_out = records_content(held_out_records(data.held_out), chosen.eval_data)
    return run_contents(resolved, rows, held_out)


def read_sft(resolved: Resolved[SftSettings]) -> ReadRun:
    """Read what a run needs before any weights."""
    settings = resolved.settings
    tokenizer = tokenizer_with_images(settings.model, settings.images)
    data = sft_data(settings, tokenizer, model_facts(settings.model.pretrain).max_positions)
    return ReadRun(
        data,
        data.num_steps,
        sft_contents(resolved, data),
        lambda started: build_sft(settings, started, tokenizer, data),
    )


def train(
    resolved: Resolved[SftSettings],
    command: Sequence[str],
    *,
    in_place: Path | None = None,
    signals: StopSignals | None = None,
    front: FrontEnd = SILENT,
) -> TrainedRun:
    """Run supervised fine-tuning from its settings to its end, as `train_on_rows` describes."""
    return train_on_rows(read_sft, resolved, command, in_place=in_place, signals=signals, front=front, fit=SFT_START)
