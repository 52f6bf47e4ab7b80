"""Pictures of the README, drawn from what was printed and measured: a terminal, and curves of the reward.

docs/pictures/quickstart.txt              what a run of `rft-train quickstart` printed, without the plan
benchmarks/results/learning_matrix.json   mean reward of GRPO and of its control, four steps a point, three seeds

    (echo '$ rft-train quickstart'; rft-train quickstart) | python ci/pictures.py     keeps what a run printed
    python ci/generate_reference.py                                                   draws docs/pictures/*.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
MATRIX = ROOT / "benchmarks" / "results" / "learning_matrix.json"
CURVES = {"grpo": "GRPO", "shuffled rewards (control)": "GRPO, rewards shuffled"}
STEPS_A_POINT = 4
SHOWN = ("$ ", "1. ", "2. ", "step ", "eval ", "done ")
"""Beginnings of the lines that are kept of what stands before the end page."""
END_PAGE, AFTER_END_PAGE = "held out: ", "next:"
MOST_COLUMNS = 100
WIDTH_OF_A_CHARACTER, HEIGHT_OF_A_LINE = 7.83, 18
TERMINAL_FONT = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:13px;white-space:pre"
COLOURS = {"$ ": "#7ee787", "step ": "#8b949e", "eval ": "#8b949e", "1. ": "#79c0ff", "2. ": "#79c0ff"}
"""Of lines that begin so; all others are light grey."""


def pages() -> dict[Path, str]:
    """Both pictures by their files."""
    printed = (FOLDER / "quickstart.txt").read_text().splitlines()
    return {
        FOLDER / "terminal.svg": terminal(printed),
        FOLDER / "learning.svg": learning(json.loads(MATRIX.read_text())),
    }


def terminal(lines: Sequence[str]) -> str:
    """A window with these lines; what is longer than the window is cut, with a mark."""
    shown = [line if len(line) <= MOST_COLUMNS else line[: MOST_COLUMNS - 1] + "…" for line in lines]
    width = round(max(map(len, shown)) * WIDTH_OF_A_CHARACTER + 32)
    height = HEIGHT_OF_A_LINE * len(shown) + 52
    buttons = enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))
    parts = [
        *_opening(width, height, lines[0]),
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
        *(f'<circle cx="{20 + 18 * place}" cy="18" r="6" fill="{colour}"/>' for place, colour in buttons),
    ]
    for number, line in enumerate(shown):
        colour = next((colour for start, colour in COLOURS.items() if line.startswith(start)), "#c9d1d9")
        at = f'x="16" y="{52 + HEIGHT_OF_A_LINE * number}" style="{TERMINAL_FONT}" fill="{colour}"'
        if line.strip():
            parts.append(f'<text {at} xml:space="preserve">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def learning(matrix: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]]) -> str:
    """The mean reward over steps: a thin line a seed, a thick one for the mean of the seeds."""
    width, height, left, right, top, bottom = 640, 280, 52, 180, 16, 40
    points = len(matrix["grpo"]["seeds"]["0"]["curve"])
    last = points * STEPS_A_POINT
    text = 'style="font-family:sans-serif;font-size:12px"'

    def x(step: float) -> float:
        return left + (width - left - right) * step / last

    def y(reward: float) -> float:
        return top + (height - top - bottom) * (1 - reward)

    def line(curve: Sequence[float], colour: str, thickness: float, opacity: float) -> str:
        middles = [STEPS_A_POINT * (place + 0.5) for place in range(points)]
        where = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(middles, curve, strict=True))
        look = f'fill="none" stroke="{colour}" stroke-width="{thickness:g}" stroke-opacity="{opacity:g}"'
        return f'<polyline points="{where}" {look}/>'

    parts = _opening(width, height, "Mean reward over the steps of a run")
    for reward in (0, 0.25, 0.5, 0.75, 1):
        ends = f'x1="{x(0):.1f}" y1="{y(reward):.1f}" x2="{x(last):.1f}" y2="{y(reward):.1f}"'
        parts.append(f'<line {ends} stroke="#8b949e" stroke-opacity="0.35"/>')
        at = f'x="{left - 8}" y="{y(reward) + 4:.1f}" text-anchor="end"'
        parts.append(f'<text {at} {text} fill="#8b949e">{reward:g}</text>')
    for step in (0, last // 2, last):
        at = f'x="{x(step):.1f}" y="{height - bottom + 18}" text-anchor="middle"'
        parts.append(f'<text {at} {text} fill="#8b949e">{step}</text>')
    parts.append(f'<text x="{x(last / 2):.1f}" y="{height - 6}" text-anchor="middle" {text} fill="#8b949e">step</text>')
    for (name, title), colour in zip(CURVES.items(), ("#1f6feb", "#cf222e"), strict=True):
        curves = [seed["curve"] for seed in matrix[name]["seeds"].values()]
        mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
        parts += [*(line(curve, colour, 1, 0.35) for curve in curves), line(mean, colour, 2.5, 1)]
        at = f'x="{x(last) + 6:.1f}" y="{y(mean[-1]) + 4:.1f}"'
        parts.append(f'<text {at} {text} fill="{colour}">{escape(title)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _opening(width: int, height: int, title: str) -> list[str]:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<title>{escape(title)}</title>"]


def without_the_plan(printed: str) -> list[str]:
    """The command, the lines of steps and evaluations, and the end page of the last stage."""
    lines = [line.rstrip() for line in printed.splitlines()]
    end = next(number for number, line in enumerate(lines) if line.startswith(END_PAGE))
    stop = next((number for number, line in enumerate(lines) if line == AFTER_END_PAGE), len(lines))
    kept = [line for line in lines[:end] if line.startswith(SHOWN) and "eval   step " not in line]
    return [*kept, "", *lines[end:stop]]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    text = "\n".join(without_the_plan(sys.stdin.read())).strip()
    (FOLDER / "quickstart.txt").write_text(text + "\n")
