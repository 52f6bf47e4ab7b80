from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import pytest

from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards import math as math_rewards
from rft_trainer.rewards.math import Equality, Gsm8kReward, MathReward, Question
from rft_trainer.workers.limits import ProcessLimits
from rft_trainer.workers.pool import Job, Outcome

MakeItem = Callable[..., RewardItem]


@pytest.fixture(scope="module")
def math_reward() -> Iterator[MathReward]:
    reward = MathReward(num_workers=1, timeout=20.0)
    yield reward
    reward.close()


@pytest.fixture(scope="module")
def gsm8k_reward() -> Iterator[Gsm8kReward]:
    reward = Gsm8kReward(num_workers=1, timeout=20.0)
    yield reward
    reward.close()


CASES = [
    ("#### 18", "18", 1.0),
    ("#### 1,234", "1234", 1.0),
    ("#### $18.00.", "18", 1.0),
    ("#### 018", "18", 1.0),
    ("#### 18.5", "18", 0.0),
    ("#### 18", "So 9 * 2 = 18\n#### 18", 1.0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"\boxed{\frac12}", "1/2", 1.0),
    (r"\boxed{1 + x}", "x + 1", 1.0),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1.0),
    (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
    (r"\boxed{x = 5}", "5", 1.0),
    (r"\boxed{\text{Tuesday}}", r"\text{Tuesday}", 1.0),
    (r"\boxed{x - 1}", "x + 1", 0.0),
    (r"first \boxed{17}, then \boxed{18}", "18", 1.0),
    (r"first \boxed{18}, then \boxed{17}", "18", 0.0),
    ("the answer is 18", "18", 0.0),
    ("", "18", 0.0),
    ("####", "18", 0.0),
    (r"\boxed{}", "18", 0.0),
    (r"\boxed{18", "18", 0.0),
    (r"\boxed{\frac{1}{}", "18", 0.0),
    (r"\boxed{9^{9^{9}}}", "18", 0.0),
    ("#### __import__('os')", "18", 0.0),
    (r"\boxed{(} ", "18", 0.0),
]


@pytest.mark.parametrize(("response", "label", "expected"), CASES)
def test_math_compares_the_last_marked_answer_with_the_label(
    math_reward: MathReward, make_item: MakeItem, response: str, label: str, expected: float
):
    [score] = math_reward([make_item(response, label)])
    assert (score.value, score.status) == (expected, RewardStatus.OK)
    assert score.breakdown == {"correctness": expected}


def test_a_batch_gives_the_same_scores_as_its_items_one_by_one(math_reward: MathReward, make_item: MakeItem):
    items = [make_item(response, label) for response, label, _ in CASES]
    assert [score.value for score in math_reward(items)] == [expected for _, _, expected in CASES]
    assert math_reward(items) == math_reward(items)


def test_an_answer_in_the_prompt_does_not_count(math_reward: MathReward, make_item: MakeItem):
    prompt = r"Write the answer as \boxed{18} or #### 18."
    [score] = math_reward([make_item("I do not know", prompt=prompt)])
    assert score.value == 0.0


@pytest.mark.parametrize("label", [None, "", "   ", "9^{9^{9}}", r"\frac{1}{"])
def test_a_label_that_cannot_be_read_is_a_status(
    math_reward: MathReward, gsm8k_reward: Gsm8kReward, make_item: MakeItem, label: str | None
):
    for reward in (math_reward, gsm8k_reward):
        [score] = reward([make_item(r"\boxed{x}", label)])
        assert (score.value, score.status) == (None, RewardStatus.UNPARSABLE)
        assert score.detail


@pytest.mark.parametrize(
    ("response", "finish_reason", "correctness", "well_formed"),
    [
        ("so\n#### 18", "stop", 1.0, 1.0),
        ("so\n#### 18", "length", 1.0, 0.0),
        ("so\n#### 17", "stop", 0.0, 1.0),
        ("so 18", "stop", 0.0, 0.0),
        ("#### 17\n#### 18", "stop", 1.0, 0.0),
        ("#### Step 1\nwork\n#### 18", "stop", 1.0, 1.0),
        ("#### 18 dollars", "stop", 1.0, 0.0),
        ("#### 18%", "stop", 1.0, 0.0),
        (r"#### \boxed{18}", "stop", 1.0, 1.0),
        (r"\boxed{\frac{36}{2}}", "stop", 1.0, 0.0),
        ("#### not a number", "stop", 0.0, 0.0),
    ],
)
def test_gsm8k_weighs_correctness_and_form(
    gsm8k_reward: Gsm8kReward,
    make_item: MakeItem,
    response: str,
    finish_reason: str,
    correctness: float,
    well_formed: float,
):
    [score] = gsm8k_reward([make_item(response, finish_reason=finish_reason)])
    assert score.breakdown == {"correctness": correctness, "format": well_formed}
    assert score.value == pytest.approx(0.9 * correctness + 0.1 * well_formed)


def test_a_comparison_that_does_not_end_is_a_status_and_harms_no_other(make_item: MakeItem):
    reward = MathReward(num_workers=1, timeout=1.0)
    bomb, fine = make_item(r"\boxed{(10^{9})!}"), make_item(r"\boxed{\frac{36}{2}}")
    scores = reward([fine, bomb, fine])
    reward.close()
    assert [score.value for score in scores] == [1.0, None, 1.0]
    assert scores[1].status in (RewardStatus.TIMEOUT, RewardStatus.FAILED)


class RecordedPool:
    """A pool that answers every job with the next of `outcomes`."""

    made: list[RecordedPool]
    outcomes: list[Outcome]

    def __init__(self, name: str, *, num_workers: int, limits: ProcessLimits) -> None:
        self.given, self.jobs, self.closed = (num_workers, limits.address_bytes), list[list[Job]](), 0
        self.made.append(self)

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        self.jobs.append(list(jobs))
        return [self.outcomes.pop(0) for _ in jobs]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[RecordedPool]:
    RecordedPool.made, RecordedPool.outcomes = [], []
    monkeypatch.setattr(math_rewards, "WorkerPool", RecordedPool)
    return RecordedPool.made


def test_only_what_needs_algebra_goes_to_the_processes_and_equal_questions_go_once(pools: list[RecordedPool]) -> None:
    late = Outcome(RewardStatus.TIMEOUT, detail="late")
    RecordedPool.outcomes = [Outcome(RewardStatus.OK, True), late, Outcome(RewardStatus.OK, "unreadable")]
    equality = Equality(lambda text: Fraction(text) if text.isdigit() else None, num_workers=3, timeout=2.5)
    questions = [
        Question("1", "1"),
        Question("1", "2"),
        Question("x", "y"),
        None,
        Question("x + 1", "$x+1$."),
        Question("x", None),
        Question("x", ""),
        Question("x", "y"),
        Question("1", "y"),
        Question("x", "1"),
        Question("x", "9^9^9"),
    ]
    found = equality.judge(questions)
    assert [(one.status, one.result) for one in found] == [
        (RewardStatus.OK, True),
        (RewardStatus.OK, False),
        (RewardStatus.OK, True),
        (RewardStatus.UNPARSABLE, None),
        (RewardStatus.OK, True),
        (RewardStatus.OK, False),
        (RewardStatus.OK, False),
        (RewardStatus.OK, True),
        (RewardStatus.TIMEOUT, None),
        (RewardStatus.UNPARSABLE, None),
        (RewardStatus.OK, False),
    ]
    [pool] = pools
    assert pool.given == (3, 2**30)
    pairs = [("x", "y"), ("1", "y"), ("x", "1")]
    assert pool.jobs == [[Job({"gold": gold, "prediction": told}, 2.5) for gold, told in pairs]]
    equality.close()
    assert pool.closed == 1


@pytest.mark.parametrize("kind", [MathReward, Gsm8kReward])
def test_a_reward_uses_one_process_where_nothing_is_said_and_ends_it(
    kind: Any, pools: list[RecordedPool], make_item: MakeItem
) -> None:
    RecordedPool.outcomes = [Outcome(RewardStatus.CRASHED, detail="died")] * 2
    default, given = kind(), kind(num_workers=4, timeout=3.0)
    for reward in (default, given):
        scores = reward([make_item("\\boxed{x}", "y")])
        assert scores == [Score(None, RewardStatus.CRASHED, detail="died")]
        reward.close()
    assert [(pool.given[0], pool.jobs[0][0].seconds, pool.closed) for pool in pools] == [(1, 10.0, 1), (4, 3.0, 1)]
