"""Sampled answers at the start, in the middle and at the end of a run, with each token coloured by its advantage."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rft.library.run import Run
from rft.library.token_numbers import ShadedTokens, group_tokens
from rft.report.sections import section
from rft_trainer.runs.reader import RunFiles, is_number, rows

_MOST_PROMPTS = 3
_MOST_ANSWERS = 4
_MOST_CHARACTERS = 4000
"""Of one text; the rest is in the file of the step."""


def samples(run: RunFiles) -> str:
    """Return the section of samples; empty where no rollouts were kept."""
    chosen = _start_middle_end(run.rollout_files)
    parts = [part for when, file in chosen if (part := _step(run, file, when))]
    if not parts:
        return ""
    key = (
        '<p class="dim">Colours of tokens: <span style="background:var(--worse)">advantage below 0</span> '
        '<span style="background:var(--better)">above 0</span>, the strongest of an answer the darkest.</p>'
    )
    return section("samples", "Samples", key + "".join(parts))


def _start_middle_end(files: Sequence[Path]) -> list[tuple[str, Path]]:
    if not files:
        return []
    places = {0: "start", len(files) // 2: "middle", len(files) - 1: "end"}
    return [(when, files[place]) for place, when in sorted(places.items())]


def _step(run: RunFiles, file: Path, when: str) -> str:
    step = int(file.stem.removeprefix("step_"))
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows(file):
        if "prompt" in row and "response" in row:
            groups.setdefault(str(row.get("prompt_id", row["prompt"])), []).append(row)
    chosen = list(groups.items())[:_MOST_PROMPTS]
    if not chosen:
        return ""
    body = "".join(_group(run, step, prompt_id, answers) for prompt_id, answers in chosen)
    opened = " open" if when == "end" else ""
    return f"<details{opened}><summary>step {step}, the {when}</summary>{body}</details>"


def _group(run: RunFiles, step: int, prompt_id: str, answers: Sequence[Mapping[str, Any]]) -> str:
    shaded = group_tokens(Run(run.path), step, prompt_id, "advantage")
    first = answers[0]
    wanted = f"<dt>wanted<dd>{_text(first.get('label'))}" if first.get("label") not in (None, "") else ""
    shown = "".join(_answer(row, shaded.answers.get(_sample(row))) for row in answers[:_MOST_ANSWERS])
    more = len(answers) - _MOST_ANSWERS
    rest = f'<p class="dim">and {more} more answers</p>' if more > 0 else ""
    return f"<dl><dt>prompt<dd>{_text(first['prompt'])}{wanted}</dl>{shown}{rest}"


def _sample(row: Mapping[str, Any]) -> int:
    value = row.get("sample")
    return int(value) if is_number(value) else -1


def _answer(row: Mapping[str, Any], tokens: ShadedTokens | None) -> str:
    reward = f"reward {row['reward']:.3g}" if is_number(row.get("reward")) else str(row.get("status") or "no reward")
    text = _text(row["response"]) if tokens is None else _coloured(tokens)
    return f'<div class="answer"><p class="dim">{html.escape(reward)}</p><pre>{text}</pre></div>'


def _coloured(tokens: ShadedTokens) -> str:
    """Return the tokens, each on the colour of its advantage; numbers are shares of the largest of the answer."""
    largest = max((abs(number) for number in tokens.numbers), default=0.0) or 1.0
    parts: list[str] = []
    length = 0
    for piece, number in zip(tokens.pieces, tokens.numbers, strict=True):
        length += len(piece)
        if length > _MOST_CHARACTERS:
            parts.append("...")
            break
        share = round(100 * abs(number) / largest)
        name = "better" if number > 0 else "worse"
        style = f' style="background:color-mix(in srgb, var(--{name}) {share}%, transparent)"' if share else ""
        parts.append(f'<span title="{number:+.3g}"{style}>{html.escape(piece)}</span>')
    return "".join(parts)


def _text(value: object) -> str:
    text = "" if value is None else str(value)
    return html.escape(text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}...")
