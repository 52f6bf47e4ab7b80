"""The reward `code` with a double of the sandbox: whose fault a missing result is, and what a program is worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import OptionsError
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.rules.table import RuleContext
from rft_trainer.rewards.unit_tests import code
from rft_trainer.rewards.unit_tests.code import CodeLimits, CodeReward, program_of
from rft_trainer.sandbox.cage import CageEnd, CageLimits, CageRun
from rft_trainer.sandbox.cage_main import encode
from rft_trainer.sandbox.interpreter import CagedPython

PYTHON = CagedPython(Path("/nowhere"), "/lib/loader")
TESTS = [{"call": "f", "args": [1], "expected": 10}, {"call": "f", "args": [2], "expected": 20}]


class Cages:
    """What each program gives, by its text: results, or how its run ends."""

    def __init__(self, **runs: Any) -> None:
        self.runs, self.asked = runs, []

    def __call__(self, python: CagedPython, work: Sequence[Any], *, at_once: int) -> list[CageRun]:
        self.asked.append((python, list(work), at_once))
        return [self._run(program) for _, program, _ in work]

    def _run(self, program: str) -> CageRun:
        found = self.runs[program]
        if isinstance(found, CageRun):
            return found
        return CageRun({index: {"value": encode(value)} for index, value in enumerate(found)}, CageEnd.DONE)


def item(response: str, label: Any = None) -> RewardItem:
    return RewardItem("rows:7", "?", response, TESTS if label is None else label, "stop", 1)


def scores(monkeypatch: pytest.MonkeyPatch, cages: Cages, *items: RewardItem, **options: Any) -> list[Score]:
    monkeypatch.setattr(code, "run_cages", cages)
    reward = CodeReward(isolation=lambda: PYTHON, **options)
    found = reward(items)
    reward.close()
    return found


def test_a_program_is_worth_1_where_it_passes_all_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    cages = Cages(right=[10, 20], half=[10, 0], wrong=[0, 0])
    found = scores(monkeypatch, cages, item("right"), item("half"), item("wrong"))
    assert [(score.value, score.breakdown) for score in found] == [
        (1.0, {"correctness": 1.0, "tests": 1.0}),
        (0.0, {"correctness": 0.0, "tests": 0.5}),
        (0.0, {"correctness": 0.0, "tests": 0.0}),
    ]
    assert [score.detail for score in found] == [
        "",
        "1 of 2 tests passed; test 2: returned something else",
        "0 of 2 tests passed; test 1: returned something else",
    ]


def test_limits_inputs_and_no_expected_value_go_into_the_cage_and_equal_programs_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cages = Cages(a=[10, 20], b=[1, 2])
    options: dict[str, Any] = {"num_workers": 3, "timeout": 9.0, "limits": CodeLimits(2, 1 << 28)}
    found = scores(monkeypatch, cages, item("a"), item("b"), item("a"), **options)
    assert [score.value for score in found] == [1.0, 0.0, 1.0]
    [(python, work, at_once)] = cages.asked
    requests = [{"call": "f", "args": [encode(x)], "kwargs": []} for x in (1, 2)]
    assert (python, at_once) == (PYTHON, 3)
    assert work == [(CageLimits(2, 1 << 28, 9.0), program, requests) for program in "ab"]


def test_what_ends_a_program_by_its_own_fault_is_worth_0_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = {0: {"value": encode(10)}}
    cages = Cages(loop=CageRun(replies, CageEnd.PROGRAM, "ended by the limit"), bad=CageRun({}, CageEnd.DONE))
    cages.runs["bad"].replies = {0: {"error": "NameError: x"}, 1: {"error": "NameError: x"}}
    found = scores(monkeypatch, cages, item("loop"), item("bad"))
    assert [(score.value, score.status, score.breakdown["tests"]) for score in found] == [
        (0.0, RewardStatus.OK, 0.5),
        (0.0, RewardStatus.OK, 0.0),
    ]
    assert found[0].detail == "1 of 2 tests passed; test 2: ended by the limit"
    assert found[1].detail == "0 of 2 tests passed; test 1: NameError: x"


@pytest.mark.parametrize(
    ("end", "status"), [(CageEnd.LATE, RewardStatus.TIMEOUT), (CageEnd.BROKEN, RewardStatus.FAILED)]
)
def test_what_is_no_fault_of_the_program_is_a_status_even_with_results(
    monkeypatch: pytest.MonkeyPatch, end: CageEnd, status: RewardStatus
) -> None:
    results = {0: {"value": encode(10)}, 1: {"value": encode(20)}}
    [score] = scores(monkeypatch, Cages(a=CageRun(results, end, "the reason")), item("a"))
    assert score == Score(None, status, detail="the reason")


def test_tests_that_cannot_be_read_are_a_status_with_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    cages = Cages(a=[10, 20])
    first, second = scores(monkeypatch, cages, item("a", ["assert g(f(1)) == 2"]), item("a"))
    assert (first.value, first.status) == (None, RewardStatus.UNPARSABLE)
    assert first.detail.startswith("rows:7: 'assert g(f(1)) == 2' is not of a form")
    assert second.value == 1.0


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("x = 1", "x = 1"),
        ("So:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\na\n```\nbetter:\n```py\nb\n```", "b\n"),
        ("```python\nx = 1\ny =", "x = 1\ny ="),
        ("inline ```x``` is no block", "inline ```x``` is no block"),
        ("  ```python\n  x = 1\n  ```", "  x = 1\n"),
        ("", ""),
    ],
)
def test_the_program_is_the_last_fenced_block_or_the_whole_response(response: str, program: str) -> None:
    assert program_of(response) == program


def test_a_clock_that_ends_loops_before_their_processor_time_is_refused() -> None:
    with pytest.raises(OptionsError, match="code_seconds = 10, reward_timeout = 10") as caught:
        CodeReward(timeout=10.0, limits=CodeLimits(cpu_seconds=10), isolation=lambda: PYTHON)
    assert caught.value.problem.do == "--reward_timeout 20"


def test_the_settings_of_the_rule_are_the_limits_of_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, object]] = []
    monkeypatch.setattr(code, "CodeReward", lambda **options: made.append(options))
    code.build(RuleContext(num_workers=2, timeout=7.0, options={"code_seconds": 3, "code_memory": 0.25}))
    assert made == [{"num_workers": 2, "timeout": 7.0, "limits": CodeLimits(cpu_seconds=3, memory_bytes=1 << 28)}]
