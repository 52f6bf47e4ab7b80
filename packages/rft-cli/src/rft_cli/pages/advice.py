"""Advice at the end of a page: the findings on a run, and commands worth trying next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rich.text import Text

from rft_cli.records.discovery import find_command, training_of, with_training
from rft_trainer.health.watch import replay
from rft_trainer.runs.reader import RunFiles, as_object, read_run, rows
from rft_trainer.runs.verdict import evidence_of, verdict


def next_lines(commands: Sequence[tuple[str, str]]) -> list[str]:
    """Return the lines that show commands with their purposes."""
    return ["next:", *(line for command, purpose in commands for line in (f"  {command}", f"      {purpose}"))]


def after_model(directory: Path) -> list[tuple[str, str]]:
    """Return how each command that trains goes on from a model; those of other packages have rows of their own."""
    return [
        (f"rft-train {name} --pretrain {directory} --prompt_data train.jsonl", training_of(name).purpose)
        for name in with_training()
        if not find_command(name).extends
    ]


def after_sft(directory: Path) -> list[tuple[str, str]]:
    """Return commands worth trying after supervised training."""
    from rft.run_lifecycle import final_model  # here, so that pages do not wait for torch

    model = final_model(directory)
    return [
        (f"rft-train generate --pretrain {model} --prompt 'your text'", "see what it answers"),
        (f"rft-train rl --pretrain {model} --prompt_data train.jsonl", "go on with reinforcement learning from it"),
        (f"rft-train runs show {directory}", "curves, settings and files of this run"),
    ]


def after_pretrain(directory: Path) -> list[tuple[str, str]]:
    """Return commands worth trying after pre-training."""
    from rft.run_lifecycle import final_model

    model, run = shlex.quote(str(final_model(directory))), shlex.quote(str(directory))
    read = read_run(directory)
    # a text of the run has only characters that its tokenizer knows
    kept = rows(read.rollout_files[-1]) if read.rollout_files else []
    prompt = next((str(row["prompt"]) for row in kept if str(row.get("prompt", "")).isprintable()), "") or "your text"
    measured = any("eval/loss" in row for row in read.evaluations)
    return [
        (f"rft-train generate --pretrain {model} --prompt {shlex.quote(prompt)}", "see how it continues a text"),
        (
            f"rft-train eval --perplexity {run}{'' if measured else ' --eval_data test.txt'}",
            f"measure it on {'the same held-out text' if measured else 'a text that it has not seen'}",
        ),
        (
            f"rft-train sft --pretrain {model} --prompt_data train.jsonl",
            "go on with demonstrations: rows with the columns input and output",
        ),
        (f"rft-train runs show {run}", "curves, settings and files of this run"),
    ]


def after_rm(directory: Path) -> list[tuple[str, str]]:
    """Return commands worth trying after the training of a reward model."""
    from rft.run_lifecycle import final_model

    model = final_model(directory)
    return [
        (f"rft-train runs show {directory}", "curves, held-out accuracy and calibration of this run"),
        (f"rft-train rl --pretrain POLICY --prompt_data train.jsonl --reward_pretrain {model}", "train a policy on it"),
        (f"rft-train serve-reward --reward_pretrain {model}", "answer requests for its scores over HTTP"),
    ]


def after_rl(directory: Path) -> list[tuple[str, str]]:
    """Return commands worth trying after reinforcement learning."""
    # without held-out rows an evaluation needs some
    scored = any("eval/accuracy" in row for row in read_run(directory).evaluations)
    again = (f"rft-train eval {directory}", "score the saved checkpoint again, on the same held-out problems")
    first = (f"rft-train eval {directory} --eval_data test.jsonl", "score it on problems that it has not seen")
    return [
        again if scored else first,
        (f"rft-train runs show {directory}", "curves, settings and files of this run"),
        ("rft-train rl --help", "train your own model on your own data and reward"),
    ]


def verdict_of_run(run: RunFiles) -> Text | None:
    """Return the findings on a run in any state; None where there is none."""
    if not run.live and "verdict" in run.summary:
        return verdict_lines(run.summary)
    return verdict_lines({"verdict": [finding.as_record() for finding in verdict(evidence_of(run))]})


def verdict_lines(summary: Mapping[str, Any]) -> Text | None:
    """Return the findings of a summary, two lines each; None where there is none."""
    listed = _list(summary.get("verdict"))
    lines = [
        Text.assemble(
            ("found   ", "bold yellow"), str(finding.get("what")), ("\n   do   ", "dim"), str(finding.get("do"))
        )
        for finding in map(as_object, listed)
        if finding
    ]
    return Text("\n").join(lines) if lines else None


def health_of_run(run: RunFiles) -> Text | None:
    """Return what the detectors found in a run in any state; None where they found nothing."""
    if not run.live and "health" in run.summary:
        return health_lines(run.summary)
    found = replay(run.metrics, run.evaluations, run.verb, evidence_of(run).rollouts)
    return health_lines({"health": [alarm.as_record() for alarm in found]})


def health_lines(summary: Mapping[str, Any], *, beyond_verdict: bool = False) -> Text | None:
    """Return the alarms and warnings of a summary, two lines each; None where there is none.

    With `beyond_verdict` without those that its verdict has already.
    """
    listed = [as_object(one) for one in _list(summary.get("health"))]
    said = {as_object(one).get("code") for one in _list(summary.get("verdict"))} if beyond_verdict else set[object]()
    lines = [
        Text.assemble(
            (f"{alarm.get('level')!s:8}", "bold red" if alarm.get("level") == "alarm" else "bold yellow"),
            f"step {alarm.get('step')}, {alarm.get('name')}: {alarm.get('what')}",
            ("\n   do   ", "dim"),
            str(alarm.get("do")),
        )
        for alarm in listed
        if alarm and alarm.get("name") not in said
    ]
    return Text("\n").join(lines) if lines else None


def _list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def speed_line(summary: Mapping[str, Any]) -> Text | None:
    """Return what bounds the speed of a run and what would change it, one line; None where its steps are too few."""
    bound = as_object(summary.get("speed"))
    if not bound:
        return None
    return Text.assemble(("speed   ", "dim"), str(bound.get("what")), ("; ", "dim"), str(bound.get("do")))
