"""`rft-train eval`: score a model on held-out data; `rft-train eval RUN` takes everything from a run."""

from __future__ import annotations

import json

from rft.process.machine import open_machine
from rft.settings import EvalSettings
from rft.stages.answer_file import refuse_unwritable
from rft.stages.evaluate import Evaluation, Interval, PairedChange, PairedComparison, evaluate
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
        if machine.is_first:
            _show(settings, evaluation)
    return 0


def _show(settings: EvalSettings, evaluation: Evaluation) -> None:
    result, share, reward = evaluation.result, evaluation.accuracy_interval, evaluation.reward_interval
    print(visible(f"model     {settings.model.pretrain}"))
    print(visible(f"data      {settings.data.eval_data}: {len(result.rewards):,} problems"))
    count = f"{evaluation.num_right:,} of {result.num_scored:,}"
    if result.num_samples > 1:
        count = f"mean@{result.num_samples}; all samples right: {count}"
    print(f"accuracy  {result.accuracy:.4f}  ({count}; {_bounds(share)})")
    print(f"reward    {result.mean_reward:.4f}  ({_bounds(reward)})")
    print(f"tokens    {result.mean_tokens:.1f} an answer; {result.num_truncated:,} were cut at the limit")
    intervals = result.intervals()
    for name, value in result.at_k.items():
        print(f"{name:<9} {value:.4f}  ({_bounds(intervals[name])})")
    for name, value in result.task_metrics.items():
        print(visible(f"{name:<9} {value:.4f}"))
    for source, one in result.by_source().items():
        bounds = one.intervals().get("accuracy")
        within = f"; {_bounds(bounds)}" if bounds else ""
        print(visible(f"{source:<24} {one.accuracy:.4f}  ({len(one.rewards):,} problems{within})"))
    for value, one in evaluation.accuracy_by.items():
        named = f"{settings.output.eval_by} {value}"
        print(visible(f"{named:<24} {one.estimate:.4f}  ({one.num:,} problems; {_bounds(one)})"))
    if result.num_unscored:
        print(f"unscored  {result.num_unscored:,}: in none of the figures above")
    if evaluation.comparison is not None:
        _show_comparison(settings.output.compare, evaluation.comparison)
    if settings.output.output:
        print(visible(f"rows      {settings.output.output}"))
    print(json.dumps(result.as_record()))


def _show_comparison(other: str, comparison: PairedComparison) -> None:
    print(visible(f"against   {other}, {comparison.num_pairs:,} prompts in pairs"))
    for name, change in (("accuracy", comparison.accuracy), ("reward", comparison.reward)):
        print(f"  {name:<8}  {_change(change)}")
    print(f"  prompts   {comparison.num_better:,} with more right answers, {comparison.num_worse:,} with fewer")
    if comparison.num_unpaired:
        print(f"  unpaired  {comparison.num_unpaired:,} without a reward in one of them")


def _change(change: PairedChange) -> str:
    one = change.interval
    bounds = f"95 %: {one.low:+.4f} to {one.high:+.4f}"
    moved = f"{change.before:.4f} -> {change.after:.4f}  {one.estimate:+.4f}"
    return f"{moved}  ({bounds}; p = {change.p_value:.4g}, {change.test})"


def _bounds(interval: Interval) -> str:
    return f"95 %: {interval.low:.4f} to {interval.high:.4f}"
