"""Reward `code`: the share of a row's unit tests that the program of a response passes, in a sandbox.

A program that is wrong, crashes, loops or takes too much is worth 0, with the reason in the score's detail. What is no
fault of the program (a sandbox that does not start, a machine that is too busy, tests that cannot be read) is a status.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rft_core.errors import OptionsError
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.rules.table import RuleContext
from rft_trainer.rewards.unit_tests.code_asserts import CodeTestError
from rft_trainer.rewards.unit_tests.code_tests import CodeTest, tests_of
from rft_trainer.sandbox.cage import CageEnd, CageLimits, CageRun, run_cages
from rft_trainer.sandbox.interpreter import CagedPython
from rft_trainer.sandbox.isolation import proven_python

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_STATUS = {CageEnd.LATE: RewardStatus.TIMEOUT, CageEnd.BROKEN: RewardStatus.FAILED}


@dataclass(frozen=True, slots=True)
class CodeLimits:
    """Limits of the program of one response, over all of its tests."""

    cpu_seconds: int = 5
    memory_bytes: int = 1 << 29


def code_limits(cpu_seconds: int, memory_gib: float) -> CodeLimits:
    """Return the limits that the settings give."""
    return CodeLimits(cpu_seconds, int(memory_gib * 2**30))


def build(context: RuleContext) -> CodeReward:
    """Build the reward; raise as `CodeReward` does."""
    limits = code_limits(context.options["code_seconds"], context.options["code_memory"])
    return CodeReward(num_workers=context.num_workers, timeout=context.timeout, limits=limits)


@dataclass(frozen=True, slots=True)
class _Question:
    """A program and its tests, or the reason why they cannot be read; equal questions are run once."""

    program: str
    tests: tuple[CodeTest, ...]
    unreadable: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Key that equal questions share."""
        return self.program, repr(self.tests)


class CodeReward:
    """Reward of 1 where a program passes all tests of its row, else 0.

    Parts: `correctness`, which is that, and `tests`, the share of the tests that it passed. The program is the last
    fenced block of the response, or the whole response where there is none. The label of a row has its tests
    (`code_tests.read_tests`); all tests of a response are run in one sandbox of its own.
    """

    def __init__(
        self,
        *,
        num_workers: int = 1,
        timeout: float = 10.0,
        limits: CodeLimits | None = None,
        isolation: Callable[[], CagedPython] | None = None,
    ) -> None:
        """Try the walls of the sandbox.

        Args:
            num_workers: sandboxes at once.
            timeout: seconds by the clock for one response; beyond it the machine is too busy.
            limits: of one response.
            isolation: proves the sandbox, and returns its interpreter; None = `proven_python`.

        Raises:
            OptionsError: the clock ends a program before its processor time does.
            PreflightError: this machine has no sandbox, or one that does not hold.
        """
        self._limits, self._num_workers, self._timeout = limits or CodeLimits(), num_workers, timeout
        if self._limits.cpu_seconds >= timeout:
            raise _no_time(self._limits.cpu_seconds, timeout)
        self._python = (isolation or proven_python)()

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        questions = [_question(item) for item in items]
        asked = {each.key: each for each in questions if not each.unreadable}
        limits = CageLimits(self._limits.cpu_seconds, self._limits.memory_bytes, self._timeout)
        work = [(limits, each.program, [test.request for test in each.tests]) for each in asked.values()]
        runs = dict(zip(asked, run_cages(self._python, work, at_once=self._num_workers), strict=True))
        return [_score(each, runs[each.key]) if not each.unreadable else _unreadable(each) for each in questions]

    def close(self) -> None:
        """Do nothing: no process outlives a call."""


def program_of(response: str) -> str:
    """Return the last fenced block of a response, which may be cut off, or the whole of one without fences."""
    blocks = _FENCE.findall(response)
    return blocks[-1] if blocks else response


def _question(item: RewardItem) -> _Question:
    try:
        tests = tests_of(item.label, item.columns)
    except CodeTestError as error:
        return _Question("", (), f"{item.prompt_id}: {error}")
    return _Question(program_of(item.response_text), tests)


def _score(question: _Question, run: CageRun) -> Score:
    if run.end in _STATUS:
        return Score(None, _STATUS[run.end], detail=run.reason)
    failures = [test.failure(run.replies.get(index)) for index, test in enumerate(question.tests)]
    num_passed = failures.count("")
    share = num_passed / len(failures)
    correctness = float(num_passed == len(failures))
    return Score(correctness, breakdown={"correctness": correctness, "tests": share}, detail=_detail(failures, run))


def _detail(failures: Sequence[str], run: CageRun) -> str:
    """Say which test failed first, and why; empty where all passed."""
    first = next((index for index, failure in enumerate(failures) if failure), None)
    if first is None:
        return ""
    why = run.reason if failures[first] == "no result" and run.reason else failures[first]
    return f"{failures.count('')} of {len(failures)} tests passed; test {first + 1}: {why}"


def _unreadable(question: _Question) -> Score:
    return Score(None, RewardStatus.UNPARSABLE, detail=question.unreadable)


def _no_time(cpu_seconds: int, timeout: float) -> OptionsError:
    return OptionsError(
        code="reward.code_seconds",
        what=f"code_seconds = {cpu_seconds}, reward_timeout = {timeout:g}",
        where="--code_seconds, --reward_timeout",
        why="a program that loops is ended by its processor time and is worth 0; a clock that ends it first would "
        "leave it without a score",
        do=f"--reward_timeout {2 * cpu_seconds}",
    )
