"""The report of a run in a browser: its scripts run, and draw every curve."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from rft.report.page import report

pytestmark = pytest.mark.system
CURVES = ("reward/mean", "policy/entropy")


def test_a_browser_draws_the_curves_of_a_report(tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    assert browser, "apt-get install chromium"
    run = tmp_path / "mine"
    run.mkdir()
    rows = [{"step": step, **dict.fromkeys(CURVES, step / 8)} for step in range(1, 9)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "config.yaml").write_text("recipe:\n  command: rl\n")
    page = tmp_path / "report.html"
    import rft_cli.records.discovery  # noqa: F401 - the program's records say which curves a command has

    page.write_text(report(run))
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    ended = subprocess.run([browser, *words], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.count("<canvas") == len(CURVES)
    assert 'aria-label="reward/mean: first 0.125, last 1, lowest 0.125, highest 1"' in ended.stdout
