"""`rft-train eval`: score a model on held-out data; `rft-train eval RUN` takes everything from a run."""

from __future__ import annotations

import json

from rft.process.machine import open_machine
from rft.settings import EvalSettings
from rft.stages.answer_file import refuse_unwritable, write_answers
from rft.stages.evaluate import Evaluation, evaluate
from rft_cli.config.resolve import resolve
from rft_cli.config.stored_run import with_run
from rft_core.terminal_text import visible


def run(argv: list[str]) -> int:
    """Resolve, answer every prompt, print the score as a person reads it and as one JSON line."""
    settings = resolve("eval", with_run(argv, "eval")).settings
    # every answer would be lost at the end
    refuse_unwritable(settings.output.output)
    with open_machine(settings.model.device) as machine:
        evaluation = evaluate(settings, machine)
        # on every rank: each has answered its own share of the prompts
        rows = evaluation.rows(machine.collectives) if settings.output.output else []
        if machine.is_first:
            _show(settings, evaluation)
            if settings.output.output:
                write_answers(settings.output.output, rows)
    return 0


def _show(settings: EvalSettings, evaluation: Evaluation) -> None:
    result, share, interval = evaluation.result, evaluation.accuracy_interval, evaluation.reward_interval
    print(visible(f"model     {settings.model.pretrain}"))
    print(visible(f"data      {settings.data.eval_data}: {len(result.rewards):,} problems"))
    bounds = f"95 %: {share.low:.4f} to {share.high:.4f}"
    count = f"{evaluation.num_right:,} of {result.num_scored:,}"
    if result.num_samples > 1:
        count = f"mean@{result.num_samples}; all samples right: {count}"
    print(f"accuracy  {result.accuracy:.4f}  ({count}; {bounds})")
    print(f"reward    {result.mean_reward:.4f}  (95 %: {interval.low:.4f} to {interval.high:.4f})")
    print(f"tokens    {result.mean_tokens:.1f} an answer; {result.num_truncated:,} were cut at the limit")
    for name, value in {**result.at_k, **result.task_metrics}.items():
        print(visible(f"{name:<9} {value:.4f}"))
    if result.num_unscored:
        print(f"unscored  {result.num_unscored:,}: in none of the figures above")
    print(json.dumps(result.as_record()))
