"""Metrics of installed tasks: the functions that are named, what they are given, and what is no metric."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rft_core.errors import DataError, OptionsError
from rft_trainer.evaluation import task_metrics
from rft_trainer.evaluation.evaluator import EvaluationResult
from rft_trainer.evaluation.task_metrics import BUILT_IN, TaskMetrics
from rft_trainer.installed_tasks import discovery
from rft_trainer.installed_tasks.record import InstalledTask


@pytest.fixture(autouse=True)
def tasks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Functions of two tasks by their references, which a test replaces."""
    functions: dict[str, Any] = {
        "a:f": lambda responses, labels, rewards: {"hits": float(responses == labels), "n_rewards": len(rewards)},
        "b:f": lambda responses, labels, rewards: {"letters": len("".join(responses))},
    }
    known = {name: InstalledTask(name=name, evaluation=f"{name}:f") for name in "ab"}

    def find(name: str, *, flag: str, part: str) -> InstalledTask:
        assert (flag, part) == ("--eval_metrics", "evaluation")
        return known[name]

    monkeypatch.setattr(task_metrics, "find_task", find)
    monkeypatch.setattr(discovery, "function", functions.__getitem__)
    monkeypatch.setattr(discovery, "entry_text", lambda name: name)
    return functions


def test_every_named_task_adds_its_metrics() -> None:
    metrics = TaskMetrics.of("a, b")
    assert metrics is not None
    assert metrics(["x", "yz"], ["x", "yz"], (1.0, None)) == {"hits": 1.0, "n_rewards": 2.0, "letters": 3.0}
    assert TaskMetrics.of("") is None


def test_a_task_is_named_once() -> None:
    with pytest.raises(OptionsError) as caught:
        TaskMetrics.of("a,b,a")
    assert caught.value.problem.code == "task.named_twice"
    assert caught.value.problem.do == "--eval_metrics a,b"


@pytest.mark.parametrize(
    "given",
    [
        {"x": math.nan},
        {"x": math.inf},
        {"x": "0.5"},
        {"x": None},
        {3: 1.0},
        {"accuracy": 1.0},
        {"letters": 1.0},
        {},
        [0.5],
        None,
    ],
)
def test_what_is_no_metric_is_refused(tasks: dict[str, Any], given: Any) -> None:
    tasks["a:f"] = lambda responses, labels, rewards: given
    metrics = TaskMetrics.of("b,a")
    assert metrics is not None
    with pytest.raises(DataError) as caught:
        metrics(["x"], ["x"], [1.0])
    assert caught.value.problem.code == "task.evaluation"
    assert "a:f" in str(caught.value)


def test_the_lists_of_a_function_are_its_own(tasks: dict[str, Any]) -> None:
    tasks["a:f"] = lambda responses, labels, rewards: {"popped": len(responses.pop())}
    metrics = TaskMetrics.of("a,b")
    assert metrics is not None
    assert metrics(["xy", "z"], ["", ""], [0.0, 0.0]) == {"popped": 1.0, "letters": 3.0}


def test_no_name_of_an_evaluation_can_be_taken() -> None:
    own = {name.removeprefix("eval/") for name in EvaluationResult((1.0,), (True,), 0, 1.0).as_record()}
    assert own <= BUILT_IN
