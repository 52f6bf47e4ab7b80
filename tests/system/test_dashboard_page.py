"""The dashboard in a browser: its scripts run, draw live curves, and show hostile texts as text."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.dashboard.json_answers import DashboardAnswers
from rft.dashboard.run_folders import RunFolders
from rft.dashboard.web_server import serving
from rft_cli.records.discovery import commands

pytestmark = pytest.mark.system
CONFIG = "# rft-train rl\nrecipe:\n  command: rl\n\n# optimizer\nactor_learning_rate: {rate}   # command line\n"
HOSTILE = "<img src=x onerror=\"document.title='taken'\">\x1b[31m\u202e"
Shown = Callable[..., str]


def make_run(folder: Path, name: str, rate: float) -> None:
    run = folder / name
    (run / "rollouts").mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG.format(rate=rate))
    (run / "metrics.jsonl").write_text("".join(row(step) for step in range(1, 9)))
    answers = [
        {"prompt_id": "p", "sample": 0, "prompt": HOSTILE, "response": HOSTILE, "reward": 1.0},
        {"prompt_id": "p", "sample": 1, "prompt": HOSTILE, "response": "plain", "reward": 0.0},
    ]
    file = run / "rollouts" / "step_000001.jsonl"
    file.write_text("".join(json.dumps(answer) + "\n" for answer in answers))


def row(step: int) -> str:
    return json.dumps({"step": step, "reward/mean": step / 8, "policy/entropy": 1.0, "time/train": 1.0}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    commands()  # the program's records say which curves a command has
    make_run(tmp_path / "runs", "first", 0.001)
    make_run(tmp_path / "runs", "second", 0.01)
    return tmp_path / "runs"


@pytest.fixture
def answers(folder: Path) -> DashboardAnswers:
    return DashboardAnswers(RunFolders([folder]))


@pytest.fixture
def shown(answers: DashboardAnswers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    """The page at an address, as it is after some seconds of the browser's own time."""
    monkeypatch.delenv("RFT_REMOTE_TOKEN", raising=False)
    browser = shutil.which("chromium")
    assert browser, "apt-get install chromium"
    with serving(answers, "127.0.0.1", 0) as url:

        def show(page: str = "", *, seconds: int = 2, width: int = 1200) -> str:
            words = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
            words += [f"--user-data-dir={tmp_path / 'browser'}", f"--virtual-time-budget={1000 * seconds}"]
            ended = subprocess.run(
                [browser, *words, "--dump-dom", f"{url}#/{page}"],
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            return ended.stdout

        yield show


def digests(answers: DashboardAnswers) -> list[str]:
    return sorted(run["id"] for run in answers.of("/api/runs", {})["runs"])


def test_runs_are_listed_and_a_run_that_begins_appears(
    shown: Shown, answers: DashboardAnswers, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = answers.of

    def then_begin(path: str, parameters: Any) -> dict[str, Any]:
        found = original(path, parameters)
        if not (folder / "third").exists():
            make_run(folder, "third", 0.1)
        return found

    monkeypatch.setattr(answers, "of", then_begin)
    page = shown(seconds=20)
    for name in ("first", "second", "third"):
        assert f">{name}</a>" in page
    assert "reward/mean" in page
    assert 'class="state state-running"' in page


def test_curves_of_a_run_grow_while_it_is_seen(
    shown: Shown, answers: DashboardAnswers, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = answers.of

    def then_step(path: str, parameters: Any) -> dict[str, Any]:
        found = original(path, parameters)
        if path == "/api/curves" and "training" in parameters:  # the page has points, and asks for new ones
            for name in ("first", "second"):
                text = (folder / name / "metrics.jsonl").read_text()
                if text.count("\n") < 9:
                    (folder / name / "metrics.jsonl").write_text(text + row(16))
        return found

    monkeypatch.setattr(answers, "of", then_step)
    page = shown(f"run/{digests(answers)[0]}", seconds=30)
    assert 'aria-label="reward/mean: first 0.125, last 2, lowest 0.125, highest 2"' in page
    assert page.count("<canvas") == 2
    assert "Where the time went" in page
    assert "actor_learning_rate" in page


def test_runs_are_compared(shown: Shown, answers: DashboardAnswers) -> None:
    page = shown("compare?" + "&".join(f"run={digest}" for digest in digests(answers)))
    assert "first: first 0.125, last 1, lowest 0.125, highest 1" in page
    assert "second: first 0.125" in page
    assert "<td>0.001</td>" in page
    assert "<td>0.01</td>" in page


def test_samples_are_found_and_their_texts_are_harmless(shown: Shown, answers: DashboardAnswers) -> None:
    digest = digests(answers)[0]
    page = shown(f"samples/{digest}?quantity=none")
    assert "&lt;img src=x" in page
    assert "<img" not in page
    assert "\\x1b[31m\\u202e" in page
    assert "taken" not in page.partition("</title>")[0]
    assert "plain" in page
    assert "plain" not in shown(f"samples/{digest}?quantity=none&reward_min=0.5")


def test_a_page_says_why_it_is_refused(shown: Shown) -> None:
    assert "there is no such run" in shown("run/none")
