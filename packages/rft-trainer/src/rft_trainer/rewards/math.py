"""Rewards for answers that are mathematics: `math` for any, `gsm8k` for numbers with a required form.

Most answers are settled in this process by comparing letters and exact numbers. The rest is
compared by algebra (`math_task`) in processes that can be killed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards import answers
from rft_trainer.rewards.rules.table import RuleContext
from rft_trainer.workers.limits import ProcessLimits
from rft_trainer.workers.pool import Job, Outcome, WorkerPool

_MEMORY_BYTES = 1 << 30
_NO_LABEL = "the label holds no answer that can be read"

CORRECTNESS_WEIGHT = 0.9
FORMAT_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Question:
    """Gold answer and prediction of one item; `prediction` is None where the response marks none."""

    gold: str
    prediction: str | None


class MathReward:
    """Reward of 1 where the last answer that the response marks equals the label, else 0.

    The answer is looked for in the response alone, after `####` or in `\\\\boxed{...}`; the label is
    an answer, or a text that marks one. A response without an answer is wrong; a label without one
    is unparsable.
    """

    def __init__(self, *, num_workers: int = 1, timeout: float = 10.0) -> None:
        """`timeout`: seconds that one comparison may take."""
        self._equality = Equality(answers.parse_number, num_workers=num_workers, timeout=timeout)

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        verdicts = self._equality.judge([question_of(item) for item in items])
        return [_math_score(verdict) for verdict in verdicts]

    def close(self) -> None:
        self._equality.close()


class Gsm8kReward:
    """Reward of 0.9 x correct + 0.1 x well-formed, for word problems whose answer is a number.

    Correct as in `MathReward`, with units after the number ignored (`#### 18 dollars`).
    Well-formed: the response ended with a stop token and marks exactly one number, nothing behind
    it on its line.
    """

    def __init__(self, *, num_workers: int = 1, timeout: float = 10.0) -> None:
        """`timeout`: seconds that one comparison may take."""
        self._equality = Equality(answers.parse_quantity, num_workers=num_workers, timeout=timeout)

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        verdicts = self._equality.judge([question_of(item) for item in items])
        return [_gsm8k_score(verdict, item) for verdict, item in zip(verdicts, items, strict=True)]

    def close(self) -> None:
        self._equality.close()


def build_math(context: RuleContext) -> MathReward:
    """Return the rule `math`."""
    return MathReward(num_workers=context.num_workers, timeout=context.timeout)


def build_gsm8k(context: RuleContext) -> Gsm8kReward:
    """Return the rule `gsm8k`."""
    return Gsm8kReward(num_workers=context.num_workers, timeout=context.timeout)


def is_well_formed(item: RewardItem) -> bool:
    """Return whether the response ended by itself and exactly one of its marked answers is a number."""
    numbers = [
        answer for answer in answers.marked_answers(item.response_text) if answers.parse_number(answer) is not None
    ]
    return item.finish_reason == "stop" and len(numbers) == 1


def question_of(item: RewardItem) -> Question | None:
    """Extract gold answer and prediction of an item; None where its label cannot be read."""
    gold = answers.label_answer(item.label_text or "")
    if not answers.is_readable(gold):
        return None
    marked = answers.marked_answers(item.response_text)
    return Question(gold, marked[-1] if marked else None)


class Equality:
    """Comparison of predictions with gold answers: in this process where that is easy, else in the worker pool."""

    def __init__(self, read: Callable[[str], Fraction | None], *, num_workers: int, timeout: float) -> None:
        """Store `read`, which parses a text to a number or None, and create the worker pool."""
        self._read, self._timeout = read, timeout
        self._pool = WorkerPool("math", num_workers=num_workers, limits=ProcessLimits(address_bytes=_MEMORY_BYTES))

    def judge(self, questions: Sequence[Question | None]) -> list[Outcome]:
        """Compare each question: True or False with status ok, else the status with the reason."""
        # a dict: equal questions of a group are compared once
        settled = {question: self._judge_here(question) for question in questions}
        # all hard ones in one call, so that the pool's processes share them
        hard = [question for question, outcome in settled.items() if outcome is None and question is not None]
        jobs = [Job({"gold": q.gold, "prediction": q.prediction}, self._timeout) for q in hard]
        settled.update(zip(hard, map(_checked, self._pool.run(jobs)), strict=True))
        return [settled[question] or _unreadable() for question in questions]

    def close(self) -> None:
        """Stop the worker processes."""
        self._pool.close()

    def _judge_here(self, question: Question | None) -> Outcome | None:
        """Compare without algebra; None where algebra has to decide."""
        if question is None:
            return _unreadable()
        # wrong rather than unscored: to mark an answer is part of the task
        if question.prediction is None or not question.prediction:
            return Outcome(RewardStatus.OK, False)
        # exact fractions: 0.1 and 1/10 never differ by a rounding
        gold, prediction = self._read(question.gold), self._read(question.prediction)
        if gold is not None and prediction is not None:
            return Outcome(RewardStatus.OK, gold == prediction)
        # letters before algebra: equal texts need no process, and no deadline
        if answers.without_spaces(question.gold) == answers.without_spaces(question.prediction):
            return Outcome(RewardStatus.OK, True)
        return None if answers.is_readable(question.prediction) else Outcome(RewardStatus.OK, False)


def _checked(outcome: Outcome) -> Outcome:
    """Return the pool's outcome if its result is a bool, else an unparsable one."""
    if outcome.status is not RewardStatus.OK or isinstance(outcome.result, bool):
        return outcome
    return _unreadable()


def _unreadable() -> Outcome:
    return Outcome(RewardStatus.UNPARSABLE, detail=_NO_LABEL)


def _math_score(verdict: Outcome) -> Score:
    if verdict.status is not RewardStatus.OK:
        return Score(None, verdict.status, detail=verdict.detail)
    correctness = float(verdict.result is True)
    return Score(correctness, breakdown={"correctness": correctness})


def _gsm8k_score(verdict: Outcome, item: RewardItem) -> Score:
    if verdict.status is not RewardStatus.OK:
        return Score(None, verdict.status, detail=verdict.detail)
    correctness, well_formed = float(verdict.result is True), float(is_well_formed(item))
    value = CORRECTNESS_WEIGHT * correctness + FORMAT_WEIGHT * well_formed
    return Score(value, breakdown={"correctness": correctness, "format": well_formed})
