"""A package of a few lines adds a task: rows, a reward, a constraint and an evaluation, each chosen by a flag."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from additions.installation import install
from support.trainer_task import TrainerTask

from rft_cli.diagnostics import bundle
from rft_cli.main import main
from rft_trainer.runs.reader import read_run, rows

SOURCE = Path(__file__).with_name("sum_task.py")
MOST_LINES = 40

Say = Callable[..., str]


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package as it is after an installation."""
    with pytest.MonkeyPatch.context() as patch:
        folder, rows = tmp_path_factory.mktemp("site"), "[rft.tasks]\nsums = sum_task:SUMS\n"
        install(patch, folder, SOURCE, package="sum-task", entry_points=rows)
        yield
    sys.modules.pop("sum_task", None)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Say:
    """What `rft-train WORDS...` prints; it ends well."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            assert main([str(word) for word in words]) == 0, out.getvalue()
        bundle.remember_run_directory(None)
        return out.getvalue()

    return run


def words_of(task: TrainerTask) -> list[object]:
    chosen = task.settings | {"prompt_data": "sums:6", "eval_data": "sums:6-9", "reward": "sums", "max_steps": 2}
    chosen |= {"constraint": "sums:20", "rollout_log_interval": 1, "eval_metrics": "sums"}
    return [word for name, value in chosen.items() for word in (f"--{name}", value)]


def test_it_is_short() -> None:
    lines = [line for line in SOURCE.read_text().splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES


def test_the_first_page_lists_it(say: Say) -> None:
    assert "  sums         rows, reward, constraint, evaluation (sum-task 1.0)" in say("--help").splitlines()


def test_its_rows_and_reward_are_checked_and_trained_on(say: Say, trainer_task: TrainerTask, tmp_path: Path) -> None:
    words = words_of(trainer_task)
    checked = say("check", "rl", *words)
    assert "source sums:6: 6 prompts from sums:6 (a task of sum-task 1.0)" in checked
    assert "held out: 3 prompts" in checked
    assert "sums (a task of sum-task 1.0), 1 process" in checked
    assert "prompt sums:6:0 as the model sees it" in checked
    assert "every response is one of the sequences of the task sums:20" in checked

    say("rl", *words, "--save_path", tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert run.outcome == "finished"
    rewards = run.series("reward/mean")
    assert len(rewards) == 2
    assert any(0.0 < reward < 1.0 for reward in rewards)
    assert run.evaluations[-1]["eval/n"] == 3
    assert run.evaluations[-1]["eval/unscored"] == 0
    assert run.evaluations[-1]["eval/truncated"] == 0
    assert all(1 <= row["eval/digits"] <= 2 and 0 <= row["eval/right_length"] <= 1 for row in run.evaluations)
    responses = {row["response"] for file in run.rollout_files for row in rows(file)}
    assert len(responses) > 1
    assert responses <= {str(number) for number in range(0, 20, 2)}
    answers = say(
        "eval",
        tmp_path / "run",
        "--eval_metrics",
        "sums",
        "--constraint",
        "sums:20",
        "--output",
        tmp_path / "answers.jsonl",
    )
    [last] = [json.loads(line) for line in answers.splitlines() if line.startswith("{")]
    lengths = [len(row["response"]) for row in rows(tmp_path / "answers.jsonl")]
    assert last["eval/digits"] == sum(lengths) / 3
    assert f"digits    {last['eval/digits']:.4f}" in answers.splitlines()
    assert {row["response"] for row in rows(tmp_path / "answers.jsonl")} <= {str(number) for number in range(0, 20, 2)}
