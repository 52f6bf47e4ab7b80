"""Pictures of the README, drawn from records of real runs: a terminal, and curves of held-out accuracy.

docs/pictures/quickstart.txt    what `rft-train quickstart` printed, as it was piped into the file
docs/pictures/quickstart.json   held-out accuracy by step of that run and of its control

    python ci/pictures.py record RUN [CONTROL] < printed     keeps both records; the command is the first line printed
    python ci/generate_reference.py                          draws docs/pictures/*.svg from them
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
STYLE = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:13px;white-space:pre"
WIDTH_OF_A_CHARACTER, HEIGHT_OF_A_LINE = 7.83, 18
COLOURS = {"$ ": "#7ee787", "step ": "#8b949e", "1. ": "#79c0ff", "2. ": "#79c0ff"}
"""Of lines that begin so; all others are light grey."""
MOST_COLUMNS = 118


def pages() -> dict[Path, str]:
    """Both pictures by their files."""
    printed = (FOLDER / "quickstart.txt").read_text()
    curves = json.loads((FOLDER / "quickstart.json").read_text())
    return {FOLDER / "terminal.svg": terminal(printed.splitlines()), FOLDER / "accuracy.svg": accuracy(curves)}


def terminal(lines: Sequence[str]) -> str:
    """A window with these lines; what is longer than the window is cut, with a mark."""
    shown = [line if len(line) <= MOST_COLUMNS else line[: MOST_COLUMNS - 1] + "…" for line in lines]
    width = round(max(map(len, shown)) * WIDTH_OF_A_CHARACTER + 32)
    height = HEIGHT_OF_A_LINE * len(shown) + 52
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>{escape(lines[0])}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
        *(
            f'<circle cx="{20 + 18 * i}" cy="18" r="6" fill="{c}"/>'
            for i, c in enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))
        ),
    ]
    for number, line in enumerate(shown):
        colour = next((colour for start, colour in COLOURS.items() if line.startswith(start)), "#c9d1d9")
        y = 52 + HEIGHT_OF_A_LINE * number
        if line.strip():
            parts.append(
                f'<text x="16" y="{y}" style="{STYLE}" fill="{colour}" xml:space="preserve">{escape(line)}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def accuracy(curves: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Held-out accuracy over steps, a line for each name, named at its end."""
    width, height, left, right, top, bottom = 640, 300, 52, 170, 16, 40
    last = max(step for points in curves.values() for step, _ in points)

    def place(step: float, share: float) -> str:
        x = left + (width - left - right) * step / last
        return f"{x:.1f},{top + (height - top - bottom) * (1 - share):.1f}"

    text = 'style="font-family:sans-serif;font-size:12px" fill="#6e7781"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        "<title>Held-out accuracy over the steps of rft-train quickstart</title>",
    ]
    for percent in (0, 25, 50, 75, 100):
        start, end = place(0, percent / 100), place(last, percent / 100)
        x1, y1 = start.split(",")
        x2, y2 = end.split(",")
        parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#8b949e" stroke-opacity="0.35"/>')
        parts.append(f'<text x="{left - 8}" y="{float(y1) + 4:.1f}" text-anchor="end" {text}>{percent} %</text>')
    for step in (0, last / 2, last):
        x, _ = place(step, 0).split(",")
        parts.append(f'<text x="{x}" y="{height - bottom + 18}" text-anchor="middle" {text}>{step:,.0f}</text>')
    middle = left + (width - left - right) / 2
    parts.append(f'<text x="{middle:.0f}" y="{height - 6}" text-anchor="middle" {text}>step</text>')
    for (name, points), colour in zip(curves.items(), ("#1f6feb", "#cf222e", "#2da44e"), strict=False):
        line = " ".join(place(step, share) for step, share in points)
        x, y = place(*points[-1]).split(",")
        label = text.replace("#6e7781", colour)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{float(x) + 8:.1f}" y="{float(y) + 4:.1f}" {label}>{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def record(run: Path, control: Path | None, printed: str) -> None:
    """Keep what a run printed and its held-out accuracy, beside that of its control."""
    curves = {"GRPO": _evaluations(run)}
    if control is not None:
        curves["rewards shuffled (control)"] = _evaluations(control)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "quickstart.json").write_text(json.dumps(curves) + "\n")
    (FOLDER / "quickstart.txt").write_text(printed)


def _evaluations(run: Path) -> list[tuple[int, float]]:
    rows = map(json.loads, (run / "evals.jsonl").read_text().splitlines())
    return [(row["step"], row["eval/accuracy"]) for row in rows]


if __name__ == "__main__":
    _, verb, run_path, *more = sys.argv
    assert verb == "record", __doc__
    record(Path(run_path), Path(more[0]) if more else None, sys.stdin.read())
