from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rft_core.errors import OptionsError
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.registry import part_names, reward_by_name

MakeItem = Callable[..., RewardItem]


@pytest.mark.parametrize("name", ["exact", "math", "gsm8k"])
def test_every_name_gives_a_reward_that_tells_right_from_wrong(name: str, make_item: MakeItem):
    reward = reward_by_name(name)
    marked = "" if name == "exact" else "#### "
    right, wrong = reward([make_item(f"{marked}18"), make_item(f"{marked}17")])
    reward.close()
    assert set(part_names(name)) == set(right.breakdown) == set(wrong.breakdown)
    assert right.value == pytest.approx(1.0)
    assert wrong.value is not None
    assert wrong.value < 0.5


def test_a_file_without_a_function_is_refused_with_the_last_function_that_it_has(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for text, remedy in (
        ("def first(responses, labels): ...\nclass A: ...\ndef last(a): ...\ndef _own(): ...\n", f"{file}:last"),
        ("x = 1\n", f"{file}:reward_fn"),
        ("def (", f"{file}:reward_fn"),
    ):
        file.write_text(text)
        with pytest.raises(OptionsError) as caught:
            reward_by_name(str(file))
        assert caught.value.problem.do == f"--reward {remedy}"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("gsm8", "--reward gsm8k"),
        ("not_there.py", "--reward not_there.py:reward_fn"),
        ("zzz", "--reward with one of these names"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, remedy: str):
    with pytest.raises(OptionsError, match="exact, math, gsm8k") as caught:
        reward_by_name(name)
    assert caught.value.problem.code == "reward.unknown"
    assert caught.value.problem.do == remedy


@pytest.mark.parametrize(
    ("response", "label", "expected"), [("072", "072", 1.0), (" 072\n", "072", 1.0), ("72", "072", 0.0), ("", "1", 0.0)]
)
def test_exact_compares_letter_for_letter(make_item: MakeItem, response: str, label: str, expected: float):
    [score] = reward_by_name("exact")([make_item(response, label)])
    assert score == Score(expected, breakdown={"correctness": expected})


def test_exact_without_a_label_is_unparsable(make_item: MakeItem):
    [score] = reward_by_name("exact")([make_item("x", None)])
    assert (score.value, score.status) == (None, RewardStatus.UNPARSABLE)


def test_a_value_goes_with_the_status_ok_alone():
    with pytest.raises(ValueError, match="a value goes with ok alone"):
        Score(0.0, RewardStatus.TIMEOUT)
    with pytest.raises(ValueError, match="a value goes with ok alone"):
        Score(None)
    with pytest.raises(ValueError, match="not finite"):
        Score(float("nan"))
