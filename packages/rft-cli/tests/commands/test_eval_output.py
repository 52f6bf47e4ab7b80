"""What `rft-train eval` prints and writes, with a double of the evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_algos.statistics import wilson_interval
from rft_cli.commands import eval as eval_command
from rft_core.errors import OptionsError
from rft_trainer.evaluation.comparison import compare_rows
from rft_trainer.evaluation.evaluator import EvaluationResult

RECORD = {"eval/accuracy": 0.5}
Run = Callable[..., list[Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command on one of the ranks; returns what was asked for."""

    def start(*argv: str, is_first: bool = True, num_unscored: int = 0, **more: Any) -> list[Any]:
        asked: list[Any] = []
        machine = SimpleNamespace(is_first=is_first, collectives="collectives")
        result = SimpleNamespace(
            task_metrics={"digits": 1.5},
            rewards=[1.0, 0.0, 1.0, 0.0],
            accuracy=0.5,
            num_scored=4,
            num_unscored=num_unscored,
            num_samples=more.get("num_samples", 1),
            at_k=more.get("at_k", {}),
            mean_reward=0.25,
            mean_tokens=3.5,
            num_truncated=1,
            as_record=lambda: RECORD,
            by_source=lambda: more.get("by_source", {}),
            intervals=lambda: dict.fromkeys(more.get("at_k", {}), SimpleNamespace(low=0.6, high=0.8)),
        )
        evaluation = SimpleNamespace(
            result=result,
            num_right=2,
            accuracy_interval=SimpleNamespace(low=0.1, high=0.9),
            reward_interval=SimpleNamespace(low=0.2, high=0.3),
            accuracy_by=more.get("accuracy_by", {}),
            comparison=more.get("comparison"),
        )

        @contextmanager
        def open_machine(device: str) -> Iterator[Any]:
            asked.append(device)
            yield machine

        def evaluate(settings: Any, given: Any) -> Any:
            asked.append((settings.model.pretrain, given is machine))
            return evaluation

        monkeypatch.setattr(eval_command, "open_machine", open_machine)
        monkeypatch.setattr(eval_command, "evaluate", evaluate)
        assert eval_command.run(["--pretrain", "m", "--eval_data", "d", "--device", "cpu", *argv]) == 0
        return asked

    return start


def test_the_score_is_printed_for_a_person_and_as_one_line(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == ["cpu", ("m", True)]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["model", "data", "accuracy", "reward", "tokens", "digits"]
    assert lines[5].split() == ["digits", "1.5000"]
    assert json.loads(lines[-1]) == RECORD


def test_answers_without_a_reward_are_counted(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run(num_unscored=1)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("unscored")]
    assert line.split()[1] == "1:"


def test_several_samples_show_what_they_are_the_mean_of_and_the_best_of_k(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run(num_samples=4, at_k={"pass@4": 0.75})
    lines = capsys.readouterr().out.splitlines()
    assert "mean@4; all samples right: 2 of 4" in lines[2]
    assert "pass@4    0.7500  (95 %: 0.6000 to 0.8000)" in lines


def test_several_sets_have_a_line_each(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run(by_source={"aime": EvaluationResult((1.0, 0.0), (True, False), 0, 1.0)})
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("aime")]
    bounds = wilson_interval(1, 2)
    assert " ".join(line.split()[1:]) == f"0.5000 (2 problems; 95 %: {bounds.low:.4f} to {bounds.high:.4f})"


def test_only_the_first_rank_prints(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--output", "rows.jsonl", is_first=False) == ["cpu", ("m", True)]
    assert not capsys.readouterr().out
    run("--output", "rows.jsonl")
    assert "rows      rows.jsonl" in capsys.readouterr().out.splitlines()


def test_the_values_of_a_column_and_a_comparison_have_lines_of_their_own(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [[{"prompt_id": str(n), "label": "", "reward": float(n < right)} for n in range(6)] for right in (1, 5)]
    comparison = compare_rows(rows[0], rows[1], seed=0, where="")
    run("--eval_by", "level", "--compare", "base", accuracy_by={"3": wilson_interval(1, 2)}, comparison=comparison)
    lines = capsys.readouterr().out.splitlines()
    (group,) = [line for line in lines if line.startswith("level 3")]
    assert group.split()[2:5] == ["0.5000", "(2", "problems;"]
    at = lines.index("against   base, 6 prompts in pairs")
    assert lines[at + 1].startswith("  accuracy  0.1667 -> 0.8333  +0.6667  (95 %: ")
    assert "p = 0.125, McNemar's exact test)" in lines[at + 1]
    assert lines[at + 3] == "  prompts   4 with more right answers, 0 with fewer"


def test_a_directory_in_place_of_a_file_is_refused_before_anything_is_answered(run: Run, tmp_path: Path) -> None:
    with pytest.raises(OptionsError) as caught:
        run("--output", str(tmp_path))
    assert caught.value.problem.do == f"--output {tmp_path}/answers.jsonl"
