"""`rft-train conformance`: the log-probabilities of every engine beside the trainer's, on a model of your own."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from rft.conformance import Comparison, compare_engines, full_record
from rft.process.machine import Machine, open_machine
from rft.settings import ConformanceSettings
from rft.stages.answer_file import refuse_unwritable
from rft_cli.config.resolve import resolve
from rft_cli.diagnostics.console import SafeConsole
from rft_cli.pages.conformance import facts, failure, page


def run(argv: list[str]) -> int:
    """Resolve, compare, print the page; an engine that is apart or failed ends it with an error."""
    settings = resolve("conformance", argv).settings
    refuse_unwritable(settings.output.output)
    with open_machine(settings.model.device) as machine:
        with Console(stderr=True).status("") as status:  # seen on a terminal alone
            compared = compare_engines(settings, machine, status.update)
        prompts = _prompts_line(settings, compared)
        if settings.output.output:
            record = full_record(settings, machine, compared, prompts)
            Path(settings.output.output).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
        console = SafeConsole(highlight=False)
        # output into a pipe is not wrapped at 80 columns
        console = console if console.is_terminal else SafeConsole(highlight=False, width=200)
        head = facts(settings.model.pretrain, _kind(compared, machine), prompts, compared.limits, compared.dtype)
        console.print(page(compared.results, head, compared.prompts.prompts, compared.tokenizer))
    asked = bool(settings.engine.engines)
    # after the page, so that a comparison that fails shows what it measured
    error = failure(
        compared.results,
        asked,
        settings.engine.engine_fp8,
        settings.model.bf16,
        compared.prompts.prompts,
        compared.tokenizer,
    )
    if error is not None:
        raise error
    return 0


def _prompts_line(settings: ConformanceSettings, compared: Comparison) -> str:
    number = len(compared.prompts.prompts)
    noun = "prompt" if number == 1 else "prompts"
    each = f"{settings.data.n_samples_per_prompt} samples each of at most {settings.lengths.generate_max_len} tokens"
    return f"{compared.prompts.source}: {number} {noun}, {each}, seed {settings.output.seed}"


def _kind(compared: Comparison, machine: Machine) -> str:
    parameters = f"{compared.policy.num_parameters:,} parameters"
    return f"{compared.model_type}, {parameters}, {compared.dtype}; {machine.describe()}"
