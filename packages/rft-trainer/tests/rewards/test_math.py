from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rft_trainer.records.scores import RewardItem, RewardStatus
from rft_trainer.rewards.math import Gsm8kReward, MathReward

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
def test_a_label_that_cannot_be_read_is_a_status(math_reward: MathReward, make_item: MakeItem, label: str | None):
    [score] = math_reward([make_item(r"\boxed{x}", label)])
    assert (score.value, score.status) == (None, RewardStatus.UNPARSABLE)


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
