"""The whole page: head, sections, the data of its curves, and the scripts that draw them."""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from rft.config.commands import full_record
from rft.report import sections
from rft.report.columns import columns
from rft.report.sampled import samples
from rft_core.secrets import scrub_text
from rft_trainer.health.watch import replay
from rft_trainer.runs.reader import RunFiles, read_run
from rft_trainer.runs.verdict import evidence_of, verdict

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""The page loads nothing, and what it holds loads nothing."""


def report(path: Path) -> str:
    """Return the report on the run in a directory, in any state: finished, running, or cut off."""
    run = read_run(path)
    evidence = evidence_of(run)
    main, less_is_better, curves = measures_of(run)
    body = "".join(
        [
            f"<p>{html.escape(sections.sentence(run, main, less_is_better=less_is_better))}</p>",
            sections.findings(verdict(evidence)),
            sections.health(replay(run.metrics, run.evaluations, run.verb, evidence.rollouts)),
            sections.evaluations(run),
            _curves(),
            sections.phases(run),
            sections.left_out(run),
            samples(run),
            sections.settings(run),
            _origin(run),
        ]
    )
    training, held_out = columns(run.metrics), columns(run.evaluations, prefix="eval/")
    drawn = [name for name in curves if name in training.series]
    # settings, findings and samples quote addresses and what servers said
    body = scrub_text(body)
    data = {"curves": drawn, "training": asdict(training), "evaluations": asdict(held_out)}
    return _page(run.name, body, data)


def measures_of(run: RunFiles) -> tuple[str, bool, list[str]]:
    """Return the main number of the command that made a run, whether less of it is better, and its curves."""
    training = getattr(full_record(run.verb), "training", None)
    if training is None:
        return "", False, []
    return training.measure.name, training.measure.less_is_better, training.curves.split()


def _curves() -> str:
    pick = '<label>another curve <select id="more"><option value="">choose</select></label>'
    body = f'<p class="dim" id="points"></p><div id="curves"></div><p>{pick}</p>'
    return sections.section("curves-section", "Curves", body + "<noscript>Curves need JavaScript.</noscript>")


def _origin(run: RunFiles) -> str:
    """Return the command of the run, and where its files are."""
    command = html.escape(scrub_text(run.command))
    return sections.section("command", "Command", f"<pre>{command}</pre><p class=dim>{html.escape(str(run.path))}</p>")


def _page(name: str, body: str, data: dict[str, Any]) -> str:
    asset = {file: _asset(file) for file in ("uPlot.min.css", "report.css", "uPlot.iife.min.js", "report.js")}
    # within a script `<` could end it, or begin a comment
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(name)}</title><style>{asset['uPlot.min.css']}{asset['report.css']}</style></head>"
        f"<body><h1>{html.escape(name)}</h1>{body}"
        f'<script type="application/json" id="data">{text}</script>'
        f"<script>{asset['uPlot.iife.min.js']}</script><script>{asset['report.js']}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return files("rft.report").joinpath("assets", name).read_text(encoding="utf-8")
