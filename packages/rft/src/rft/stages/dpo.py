"""Composition of a run on preferences: from resolved settings to its rows, its reference, and its loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rft.build.images import refuse_beside_images, tokenizer_with_images
from rft.build.lora import counting
from rft.build.shared_parts import (
    balanced_forward,
)
from rft.checkpoints.initial_weights import load_initial_weights
from rft.front_end import SILENT, FrontEnd
from rft.identity.contents import records_content, rows_content, run_contents
from rft.identity.record import Content
from rft.parallel.frozen_policy import load_frozen, require_same_tokenizer, share_frozen
from rft.parallel.parallelize import ParallelModel, held_dtype, is_sharded
from rft.planning.start_plan import DPO_START
from rft.process.machine import Machine
from rft.resolved import Resolved
from rft.run_lifecycle import RunStart, TrainedRun
from rft.settings import DpoSettings
from rft.stages.preference_data import PreferenceData, preference_data
from rft.stages.supervised.parts import RowOrder, policy_state
from rft.stages.supervised.row_training import ReadRun, held_out_records, train_on_rows
from rft_algos.algorithms.preference import PreferenceLoss, weighted_losses
from rft_models.loading.context_length import model_facts
from rft_models.lora.adapters import BaseModelView
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.evaluation.preferences import LabelledEvaluator, PairEvaluator
from rft_trainer.loops.preference_loop import PreferenceLoop
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.scoring.logprobs import LogprobScorer
from rft_trainer.scoring.preference_rows import PreferenceRows
from rft_trainer.scoring.reference_logprobs import ReferenceLogprobs, Score
from rft_trainer.settings.preference_training import PreferenceLossSettings
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.preference_objective import LabelledObjective, PairObjective

REFERENCE_FILE = Path("reference") / "logprobs.safetensors"
"""Log-probs of the reference policy, in the directory of the run."""


def loss_record(settings: PreferenceLossSettings) -> PreferenceLoss:
    """Return the loss that the settings choose."""
    names = {field.name for field in fields(PreferenceLoss)}
    values: dict[str, Any] = {name: getattr(settings, name) for name in names}
    values["loss_weights"] = weighted_losses(settings.loss_weights)
    return PreferenceLoss(**values)


def build_dpo(
    settings: DpoSettings,
    started: RunStart,
    tokenizer: HfTokenizer,
    data: PreferenceData,
    contents: dict[str, Content],
) -> PreferenceLoop:
    """Build the run, ready to begin; where it continues from a checkpoint, exactly in that state."""
    machine = started.machine
    rows_in_order = RowOrder(data.mixture, data.data_hash, data.training.num_rows, data.num_steps)
    state = policy_state(settings, started, tokenizer, rows_in_order)
    parallel = state.parallel
    config = loss_record(settings.loss)
    score = _scorer(settings, machine, parallel.model, parallel.data, parallel.collective_forward)
    rows = _rows(settings, started, data, config, _reference_score(settings, started, parallel, score), contents)
    objective, prepare = _objective(config, rows, score)
    loss = PolicyLoss(parallel.model, objective, balanced=balanced_forward(settings.model, parallel.model, machine))
    return PreferenceLoop(
        **state.loop_parts(loss, counting(parallel.model, state.learning_rates())),
        rows=rows,
        evaluator=_evaluator(config, rows, score),
        prepare=prepare,
    )


def _objective(
    config: PreferenceLoss, rows: PreferenceRows, score: Score
) -> tuple[PairObjective | LabelledObjective, Callable[[Sequence[int]], dict[str, float]] | None]:
    """Return the objective of the loss, and what gives it the numbers of a whole step, where it needs some."""
    if not config.is_labelled:
        return PairObjective(config), None
    labelled = LabelledObjective(config)
    return labelled, lambda chosen: labelled.measure_from(rows.reference_point(score, chosen))


def _rows(
    settings: DpoSettings,
    started: RunStart,
    data: PreferenceData,
    config: PreferenceLoss,
    score: Score,
    contents: dict[str, Content],
) -> PreferenceRows:
    """Make the rows of the run, with the reference where the loss compares with one."""
    training, held_out, reference = data.training, data.held_out, None
    if config.needs_reference:
        names = ("reference_pretrain",) if "reference_pretrain" in contents else ("model", "weights", "ckpt_path")
        made_of = {name: contents[name].digest for name in names if name in contents}
        dtype = held_dtype(settings.strategy, bf16=settings.model.bf16)
        reference = ReferenceLogprobs(
            started.directory.path / REFERENCE_FILE,
            score,
            started.machine.collectives,
            {**made_of, "dtype": str(dtype)},
        )
    return PreferenceRows(
        samples=training.samples,
        held_out=held_out.samples if held_out else [],
        samples_a_row=training.samples_a_row,
        mismatched=training.mismatched,
        held_out_mismatched=held_out.mismatched if held_out else [],
        reference=reference,
    )


def _scorer(settings: DpoSettings, machine: Machine, policy: Any, data: Any, collective: bool) -> Score:
    """Return the function from samples to their log-probs under a policy, with twice the micro-batches of training."""
    chosen = settings.training
    return LogprobScorer(
        policy,
        data,
        # pairs are two sequences
        max_sequences=2 * chosen.micro_train_batch_size,
        max_tokens=chosen.max_tokens_per_micro_batch,
        temperature=1.0,
        device=machine.device,
        collective_forward=collective,
    ).of_samples


def _reference_score(
    settings: DpoSettings, started: RunStart, parallel: ParallelModel[CausalPolicy], policy_score: Score
) -> Score:
    """Return the log-probs under the reference: the start of the run, or the model that the settings name.

    A run that begins is its own reference, and a policy with adapters is it without them; a second model is loaded
    where one is named or a resumed run has lost its file, and goes when the log-probs are computed.
    """
    machine = started.machine
    other = settings.loss.reference_pretrain
    if not other and parallel.model.adapters is not None:
        view = BaseModelView(parallel.model)
        return _scorer(settings, machine, view, parallel.data, parallel.collective_forward)
    if not other and started.restored is None:
        return policy_score

    def of_another_model(samples: Sequence[TrainingSample]) -> Sequence[Sequence[float]]:
        policy = load_frozen(other or settings.model.pretrain, settings.model, settings.strategy, machine)
        if not other:
            load_initial_weights(policy, settings.checkpoint, show=False)
        reference = share_frozen(policy, settings.strategy, machine)
        return _scorer(settings, machine, policy, reference.data, is_sharded(settings.strategy))(samples)

    return of_another_model


def _evaluator(config: PreferenceLoss, rows: PreferenceRows, score: Score) -> Callable[[], Any] | None:
    """Make the evaluator of the held-out rows, where there are any."""
    if not rows.held_out:
        return None
    if not config.is_labelled:
        return PairEvaluator(config, rows.held_out, score, rows.held_out_table)
    point = rows.held_out_reference_point
    return LabelledEvaluator(config, rows.held_out, score, rows.held_out_table, lambda: point(score))


def dpo_contents(resolved: Resolved[DpoSettings], data: PreferenceData) -> dict[str, Content]:
    """Return what the rows, files and code of a run hold."""
    chosen, training = resolved.settings.data, data.training
    rows = rows_content(data.data_hash, training.num_rows, chosen.prompt_data)
    samples: Sequence[TrainingSample] = data.held_out.samples if data.held_out else []
    held_out = records_content(held_out_records(samples), chosen.eval_data)
    return run_contents(resolved, rows, held_out)


def read_dpo(resolved: Resolved[DpoSettings]) -> ReadRun:
    """Read what a run needs before any weights."""
    settings = resolved.settings
    tokenizer = tokenizer_with_images(settings.model, settings.images)
    refuse_beside_images(settings.images, settings.strategy, settings.model, tokenizer)
    if settings.loss.reference_pretrain:
        require_same_tokenizer(settings.loss.reference_pretrain, tokenizer, "--reference_pretrain")
    data = preference_data(settings, tokenizer, model_facts(settings.model.pretrain).max_positions)
    contents = dpo_contents(resolved, data)
    return ReadRun(
        data, data.num_steps, contents, lambda started: build_dpo(settings, started, tokenizer, data, contents)
    )


def train(
    resolved: Resolved[DpoSettings],
    command: Sequence[str],
    *,
    in_place: Path | None = None,
    signals: StopSignals | None = None,
    front: FrontEnd = SILENT,
) -> TrainedRun:
    """Run preference training from its settings to its end, as `train_on_rows` describes."""
    return train_on_rows(read_dpo, resolved, command, in_place=in_place, signals=signals, front=front, fit=DPO_START)
