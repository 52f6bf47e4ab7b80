"""`rft-train perplexity`, also `eval --perplexity`: how well a model predicts texts."""

from __future__ import annotations

import json

from rft.process.machine import open_machine
from rft.settings import PerplexitySettings
from rft_cli.config.resolve import resolve
from rft_cli.config.stored_run import with_run
from rft_core.terminal_text import visible


def run(argv: list[str]) -> int:
    """Resolve, predict every token, print the figures as a person reads them and as one JSON line."""
    from rft.pretraining.perplexity import measure_perplexity  # here, so that pages do not wait for torch

    settings: PerplexitySettings = resolve("perplexity", with_run(argv, "perplexity")).settings
    data = settings.data
    with open_machine(settings.model.device) as machine:
        found = measure_perplexity(settings, machine)
        if machine.is_first:
            share = f"the last {data.held_out_share:.0%} of {data.prompt_data}"
            print(visible(f"model       {settings.model.pretrain}"))
            print(
                visible(
                    f"texts       {data.eval_data or share}: {found.num_tokens:,} tokens, {found.num_bytes:,} bytes, "
                    f"{found.num_windows:,} windows of {found.window:,} tokens"
                )
            )
            print(f"loss        {found.loss:.4f} nats a token")
            print(f"perplexity  {found.perplexity:.4f}")
            print(f"bits        {found.bits_per_byte:.4f} a byte")
            print(json.dumps(found.as_record()))
    return 0
