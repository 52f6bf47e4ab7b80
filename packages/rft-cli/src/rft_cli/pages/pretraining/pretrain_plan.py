"""Plan page of a pre-training run: texts, decoder, arithmetic in tokens."""

from __future__ import annotations

from rft.pretraining.new_decoder import decoder_line
from rft.pretraining.stage import PretrainData
from rft.resolved import Resolved
from rft.settings import PretrainSettings
from rft_cli.pages.run_plan import cut_line, early_end, notes_on, saving_line
from rft_cli.pages.run_plan_layout import strategy_line


def pretrain_lines(resolved: Resolved[PretrainSettings], data: PretrainData) -> list[tuple[str, list[str]]]:
    """Titled groups of lines: the resolved plan of a pre-training run."""
    settings, chosen = resolved.settings, resolved.settings.training
    return [
        ("data", [*_text_lines(data), *notes_on(resolved, data.rows.notes)]),
        ("decoder", [decoder_line(settings)]),
        (
            "batches",
            [
                _arithmetic(settings, data),
                *_early_end(resolved, data),
                *_rate_lines(resolved, data),
                cut_line(
                    chosen.micro_train_batch_size,
                    chosen.max_tokens_per_micro_batch,
                    chosen.packing_samples,
                    kind=("window", "windows"),
                ),
            ],
        ),
        ("layout", [strategy_line(settings.strategy, bf16=settings.model.bf16)]),
        ("saving", [saving_line(settings.checkpoint)]),
    ]


def _text_lines(data: PretrainData) -> list[str]:
    rows = data.rows
    training = rows.training
    lines = [
        f"{training.num_tokens:,} tokens in {len(training):,} windows of {data.window:,} "
        f"({_bytes_a_token(training.num_bytes, training.num_tokens)})"
    ]
    held_out = rows.held_out
    if held_out is None:
        return [*lines, "held out: nothing (--held_out_share 0.1 or --eval_data FILE)"]
    return [*lines, f"held out: {held_out.num_tokens:,} tokens in {len(held_out):,} windows"]


def _early_end(resolved: Resolved[PretrainSettings], data: PretrainData) -> list[str]:
    chosen = resolved.settings.training
    if chosen.train_tokens:  # the smaller of two numbers of steps is then the end that was asked for
        return []
    return early_end(resolved, chosen.max_steps, data.num_steps, chosen.max_epochs)


def _bytes_a_token(num_bytes: int, num_tokens: int) -> str:
    return f"{num_bytes / max(num_tokens, 1):.2f} bytes a token"


def _rate_lines(resolved: Resolved[PretrainSettings], data: PretrainData) -> list[str]:
    """Say how many steps a length of the learning rate in tokens is, and where the tokens came from."""
    a_step = data.train_batch_size * (data.window - 1)
    lengths = (
        ("rises in the first", "lr_warmup_tokens", data.rates.warmup_steps),
        ("falls in the last", "lr_decay_tokens", data.rates.decay_steps),
    )
    return [
        f"the learning rate {how} {steps:,} of {data.num_steps:,} steps: {name} = {resolved.values[name]:,} "
        f"({resolved.origins[name]}) at {a_step:,} tokens a step"
        for how, name, steps in lengths
        if steps is not None
    ]


def _arithmetic(settings: PretrainSettings, data: PretrainData) -> str:
    """Say how tokens, windows, steps and epochs belong together."""
    batch, windows = data.train_batch_size, len(data.rows.training)
    a_step = batch * (data.window - 1)
    an_epoch = -(-windows // batch)
    epochs = data.num_steps / an_epoch
    return (
        f"{batch:,} windows = {a_step:,} tokens a step; {an_epoch:,} steps an epoch; {data.num_steps:,} steps in all = "
        f"{min(data.num_steps * a_step, round(epochs * data.rows.training.num_tokens)):,} tokens = {epochs:.2f} epochs"
    )
