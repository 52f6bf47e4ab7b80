"""H8: texts of others that hold codes for a terminal or a browser are shown as what they are."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from rft.report.page import report
from rft_cli.main import main
from rft_cli.pages import samples_html

STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
HOSTILE = (
    "</td></script><script>alert(1)</script><img src=x onerror=alert(2)>"
    "\x1b[2J\x1b]0;title\x07\x1b]8;;http://x\x1b\\\x9b31m\u202egnp.exe\x08\r[red]bold[/red]{{1}}"
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of which every text that somebody else may have written is hostile."""
    path = tmp_path / "runs" / "odd-\x1b[31m<b>name"
    (path / "rollouts").mkdir(parents=True)
    row = {"prompt": HOSTILE, "prompt_id": HOSTILE, "response": HOSTILE, "label": HOSTILE, "status": HOSTILE, "step": 1}
    rows = [
        row | {"reward": 0.5, "sample": 0, "breakdown": {HOSTILE: 0.5, "b": 0.0}, "advantage": 0.5, "finish": HOSTILE},
        row | {"reward": None, "sample": 1, "failure": HOSTILE, "detail": HOSTILE, "advantage": None},
    ]
    for step in (1, 2, 3):
        text = "".join(json.dumps(row | {"step": step}) + "\n" for row in rows)
        (path / "rollouts" / f"step_{step:06d}.jsonl").write_text(text)
    metrics = [{"step": n, "reward/mean": 0.5, HOSTILE: 1.0, f"reward/unscored_{HOSTILE}": 1} for n in (1, 2, 3)]
    evaluations = [{"step": n, "name": HOSTILE, "eval/accuracy": 0.5, "eval/n": 2, HOSTILE: 1} for n in (0, 3)]
    summary = {"outcome": HOSTILE, "stopped": HOSTILE, "eval": {"before": {"accuracy": 0.1}, "after": {HOSTILE: 1}}}
    (path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in metrics))
    (path / "evals.jsonl").write_text("".join(json.dumps(one) + "\n" for one in evaluations))
    (path / "summary.json").write_text(json.dumps(summary))
    settings = f"pretrain: {HOSTILE!r}   # {HOSTILE!r}\nseed: \x1b[2J # x\x1b[2J\n"
    (path / "config.yaml").write_text(f"recipe:\n  command: rl\n{settings}")
    (path / "command.txt").write_text(f"rft-train rl --x {HOSTILE}")
    return path


@pytest.mark.parametrize("words", [["runs"], ["runs", "show"], ["rollouts"], ["rollouts", "--prompt", "0"]])
def test_a_terminal_is_steered_by_nothing(
    run: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parents[1])
    place = [str(run.parent)] if words == ["runs"] else [str(run)]
    code = main([*words[:2], *place] if words[0] == "runs" else [words[0], *place, *words[1:]])
    shown = capsys.readouterr()
    assert code in (0, 2, 4)
    assert STEERING.findall(shown.out.replace("\r\n", "\n") + shown.err) == []
    if words == ["runs", "show"]:
        assert "\\x1b[2J" in shown.out


def test_a_browser_runs_nothing(run: Path) -> None:
    samples_html.write(run)
    for page in (report(run), (run / "samples.html").read_text()):
        assert "<script>alert" not in page
        assert "<img src=x" not in page
        assert "</td></script>" not in page
        assert html.escape("<img src=x onerror=alert(2)>") in page
