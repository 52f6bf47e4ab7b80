"""Composition of a pre-training run: from resolved settings to its windows, collaborators and loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rft.build.lora import counting
from rft.front_end import SILENT, FrontEnd
from rft.identity.contents import rows_content, run_contents
from rft.identity.record import Content
from rft.pretraining.continued_texts import ContinuedTexts
from rft.pretraining.memory_fit import fitted_on_all_ranks
from rft.pretraining.new_decoder import with_decoder
from rft.pretraining.rate_lengths import RateLengths, in_steps, rate_lengths
from rft.resolved import Resolved
from rft.run_lifecycle import RunStart, TrainedRun
from rft.settings import PretrainSettings
from rft.stages.sft import supervised_loss_of
from rft.stages.supervised.parts import RowOrder, policy_state
from rft.stages.supervised.row_training import ReadRun, train_on_rows
from rft.tokenizing.pretraining_windows import pretraining_windows
from rft_algos.algorithms.published import Sft
from rft_models.loading.context_length import model_facts
from rft_models.tokenization.tokenizer import HfTokenizer, load_tokenizer
from rft_trainer.data.token_shards.open import PretrainRows
from rft_trainer.loops.pretraining import HeldOutText, PretrainLoop
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.settings.pretraining import PretrainTrainingSettings


@dataclass(frozen=True, slots=True)
class PretrainData:
    """Windows of a pre-training run, and how long it is."""

    rows: PretrainRows
    window: int
    """Tokens of a window."""
    train_batch_size: int
    """Windows of an optimizer step."""
    num_steps: int
    rates: RateLengths
    """What the lengths of the learning rate in tokens are in steps."""


def pretrain_data(settings: PretrainSettings, tokenizer: HfTokenizer, max_positions: int) -> PretrainData:
    """Tokenize what is not yet on disk, and count; needs a tokenizer and no weights."""
    chosen = settings.training
    window = window_of(chosen, max_positions)
    rows = pretraining_windows(settings.data, tokenizer, window=window, seed=settings.run.seed)
    batch = windows_a_step(chosen, window)
    num_steps = -(-len(rows.training) // batch) * chosen.max_epochs
    num_steps = min(num_steps, chosen.max_steps) if chosen.max_steps else num_steps
    if chosen.train_tokens:
        num_steps = min(num_steps, -(-chosen.train_tokens // (batch * (window - 1))))
    rates = rate_lengths(chosen, settings.optimizer.lr_schedule, batch * (window - 1), num_steps)
    return PretrainData(rows, window, batch, num_steps, rates)


def window_of(chosen: PretrainTrainingSettings, max_positions: int) -> int:
    """Return the tokens of a window: `max_len`, or else what the model can place."""
    return min(chosen.max_len or max_positions, max_positions)


def windows_a_step(chosen: PretrainTrainingSettings, window: int) -> int:
    """Return the windows of an optimizer step; a window predicts all of its tokens but the first."""
    tokens = chosen.train_batch_tokens
    return -(-tokens // (window - 1)) if tokens else chosen.train_batch_size


def build_pretrain(
    settings: PretrainSettings, started: RunStart, tokenizer: HfTokenizer, data: PretrainData
) -> PretrainLoop:
    """Build the run, ready to begin; where it continues from a checkpoint, exactly in that state."""
    settings = replace(settings, optimizer=in_steps(settings.optimizer, data.rates, data.num_steps))
    machine, chosen, rows = started.machine, settings.training, data.rows
    order = RowOrder(rows.mixture, rows.data_hash, len(rows.training), data.num_steps)
    state = policy_state(settings, started, tokenizer, order)
    parallel = state.parallel
    parallel.model.key_dropout(settings.run.seed)
    terms, passed = Sft(z_loss_coef=chosen.z_loss_coef), state.progress.passed(data.num_steps)
    loss = supervised_loss_of(settings, parallel, machine, terms=terms, passed=passed)
    parts = state.loop_parts(loss, counting(parallel.model, state.learning_rates()))
    # the length in tokens, and a batch of tokens, are known now that the text is counted
    parts["max_steps"], parts["train_batch_size"] = data.num_steps, data.train_batch_size
    held_out = rows.held_out
    keeps_best, progress = settings.evaluation.keep_best, state.progress
    if keeps_best and progress.best_reward is not None:
        state.saver.keep(progress.best_step)
    texts = ContinuedTexts(settings, started, tokenizer, held_out)
    return PretrainLoop(
        **parts,
        windows=rows.training,
        held_out=None if held_out is None else HeldOutText(held_out, held_out.num_bytes),
        policy=parallel.model,
        data_ranks=parallel.data,
        collective_forward=parallel.collective_forward,
        eval_max_sequences=chosen.micro_train_batch_size,
        eval_max_tokens=chosen.max_tokens_per_micro_batch,
        device=machine.device,
        keeps_best=keeps_best,
        continue_texts=texts if settings.evaluation.sample_texts else None,
    )


def pretrain_contents(resolved: Resolved[PretrainSettings], data: PretrainData) -> dict[str, Content]:
    """Return what the texts, files and code of a run hold."""
    chosen, rows = resolved.settings.data, data.rows
    held_out = rows.held_out
    measured = rows_content(held_out.data_hash, len(held_out), chosen.eval_data) if held_out is not None else None
    return run_contents(resolved, rows_content(rows.data_hash, len(rows.training), chosen.prompt_data), measured)


def read_pretrain(resolved: Resolved[PretrainSettings]) -> ReadRun:
    """Read what a run needs before any weights."""
    settings = resolved.settings
    tokenizer = load_tokenizer(settings.model.pretrain)
    data = pretrain_data(settings, tokenizer, model_facts(settings.model.pretrain).max_positions)
    return ReadRun(
        data,
        data.num_steps,
        pretrain_contents(resolved, data),
        lambda started: build_pretrain(settings, started, tokenizer, data),
    )


def train(
    resolved: Resolved[PretrainSettings],
    command: Sequence[str],
    *,
    in_place: Path | None = None,
    signals: StopSignals | None = None,
    front: FrontEnd = SILENT,
) -> TrainedRun:
    """Run pre-training from its settings to its end, as `train_on_rows` describes."""
    return train_on_rows(
        read_pretrain,
        resolved,
        command,
        in_place=in_place,
        signals=signals,
        front=front,
        prepare=with_decoder,
        fit=fitted_on_all_ranks,
    )
