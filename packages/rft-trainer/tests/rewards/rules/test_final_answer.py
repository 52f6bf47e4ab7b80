"""The answer that a response marks."""

from __future__ import annotations

import pytest

from rft_trainer.rewards.rules.final_answer import final_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 5 </answer>", "5"),
        ("<answer>4</answer> <answer>5</answer>", "5"),
        (r"<answer>so \boxed{5}</answer> \boxed{6}", "5"),
        (r"\boxed{5} or \boxed{6}", "6"),
        ("#### 5\n", "5"),
        ("<answer></answer>", ""),
        ("<answer>5", None),
        ("</answer>5<answer>", None),
        ("5", None),
    ],
)
def test_tags_come_before_boxes_outside_of_them(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer
