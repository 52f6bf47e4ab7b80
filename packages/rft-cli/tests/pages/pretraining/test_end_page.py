"""The end of a pre-training run: its loss as a curve, the texts that its model continued, and commands that fit."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from rft_cli.pages import run_summary, samples_html
from rft_cli.pages.advice import after_pretrain
from rft_cli.pages.pretraining.end_page import curve_lines, is_continued
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.reader import read_run

TEXTS = [
    {"prompt": "<To> be", "response": " or\nnot [to]", "finish_reason": "length"},
    {"prompt": "that", "response": "", "finish_reason": "stop"},
]
CONFIG = "# settings\n#\n  command: pretrain\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory.create(tmp_path / "my run", config_text=CONFIG, command=["x"], environment={})
    for step, loss in enumerate((4.0, float("nan"), 2.0), start=1):
        made.append_metrics({"step": step, "sft/loss": loss})
    for step, loss in ((0, 4.5), (3, 2.5)):
        made.append_evaluation({"step": step, "name": "held out", "eval/loss": loss})
    made.write_rollouts(3, TEXTS)
    made.close()
    return made


def test_the_page_of_the_terminal_shows_the_loss_and_the_texts(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    run_summary.show(run.path, {"outcome": "finished", "steps": 3}, [])
    page = capsys.readouterr().out
    assert "training  4.0000 " in page
    assert " 2.0000  (steps 1 to 3)" in page
    assert "held out  4.5000 " in page
    for words in ("texts that the model of step 3 continued", "<To> be", "not [to]", "texts and loss, for a browser"):
        assert words in page


def test_the_page_of_the_browser_draws_the_loss_and_escapes_the_texts(run: RunDirectory) -> None:
    file = samples_html.write(run.path)
    assert file is not None
    page = file.read_text()
    assert "&lt;To&gt; be" in page
    assert " or\nnot [to]" in page
    # the highest value is at the top, the lowest at the bottom, and what is no number is left out
    assert 'points="240.0,48.0 720.0,240.0"' in page
    assert 'points="0.0,0.0 720.0,192.0"' in page


def test_a_run_without_steps_has_no_curve(tmp_path: Path) -> None:
    made = RunDirectory.create(tmp_path / "run", config_text=CONFIG, command=["x"], environment={})
    assert curve_lines(read_run(made.path)) == []


def test_answers_with_rewards_are_no_continued_texts() -> None:
    assert is_continued(TEXTS)
    assert not is_continued([{"prompt": "1+1=", "response": "2", "reward": 1.0}])
    assert not is_continued([])


def test_the_commands_name_what_the_run_has(run: RunDirectory) -> None:
    generate, measure, sft, _ = (shlex.split(command) for command, _ in after_pretrain(run.path))
    assert generate[-2:] == ["--prompt", "<To> be"]
    assert measure == ["rft-train", "eval", "--perplexity", str(run.path)]
    assert sft[:2] == ["rft-train", "sft"]


def test_a_run_without_held_out_text_is_measured_on_another(tmp_path: Path) -> None:
    (tmp_path / "evals.jsonl").write_text(json.dumps({"step": 0}) + "\n")
    commands = dict(after_pretrain(tmp_path))
    assert f"rft-train eval --perplexity {tmp_path} --eval_data test.txt" in commands
