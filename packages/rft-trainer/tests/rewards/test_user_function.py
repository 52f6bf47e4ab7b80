from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rft_core.errors import DataError, OptionsError
from rft_trainer.records.scores import RewardItem, RewardStatus
from rft_trainer.rewards.registry import reward_by_name

MakeItem = Callable[..., RewardItem]
WriteReward = Callable[[str], Path]


def test_a_file_scores_all_responses_of_a_prompt_in_one_call(write_reward: WriteReward, make_item: MakeItem):
    path = write_reward(
        "def reward_fn(responses, labels, *, prompts, num_tokens):\n"
        "    assert len(responses) == len(labels) == len(prompts) == len(num_tokens)\n"
        "    return [len(responses) + 0.1 * (r == l) for r, l in zip(responses, labels)]\n"
    )
    reward = reward_by_name(f"{path}:reward_fn")
    items = [make_item("18", prompt_id="a"), make_item("17", prompt_id="a"), make_item("18", prompt_id="b")]
    assert [score.value for score in reward(items)] == [2.1, 2.0, 1.1]
    reward.close()


def test_files_may_import_their_neighbours(write_reward: WriteReward, make_item: MakeItem):
    path = write_reward("import my_rules\ndef reward_fn(responses, labels):\n    return [my_rules.ONE]\n")
    path.with_name("my_rules.py").write_text("ONE = 1\n")
    reward = reward_by_name(f"{path}:reward_fn")
    assert reward([make_item("x")])[0].value == 1.0
    reward.close()


def test_what_is_not_a_finite_number_is_a_status(write_reward: WriteReward, make_item: MakeItem):
    path = write_reward(
        "def reward_fn(responses, labels):\n    return [1.0, True, None, float('nan'), float('inf'), 'high']\n"
    )
    reward = reward_by_name(f"{path}:reward_fn")
    scores = reward([make_item("x")] * 6)
    reward.close()
    assert [score.value for score in scores] == [1.0, 1.0, None, None, None, None]
    assert [score.status for score in scores[2:]] == [RewardStatus.FAILED] * 4
    assert "'nan'" in scores[3].detail


@pytest.mark.parametrize(
    ("returned", "detail"),
    [
        ("[1.0]", "returned 1 values for 2 responses"),
        ("1.0", "returned float 1.0, expected a list of 2 numbers"),
        ("responses[5]", "IndexError"),
    ],
)
def test_a_wrong_answer_leaves_the_prompt_unscored(
    write_reward: WriteReward, make_item: MakeItem, returned: str, detail: str
):
    path = write_reward(f"def reward_fn(responses, labels):\n    return {returned}\n")
    reward = reward_by_name(f"{path}:reward_fn")
    scores = reward([make_item("x"), make_item("y")])
    reward.close()
    assert [(score.value, score.status) for score in scores] == [(None, RewardStatus.FAILED)] * 2
    assert detail in scores[0].detail


def test_a_prompt_that_takes_too_long_leaves_the_others_scored(write_reward: WriteReward, make_item: MakeItem):
    path = write_reward(
        "def reward_fn(responses, labels):\n"
        "    while responses[0] == 'loop':\n"
        "        pass\n"
        "    return [1.0 for _ in responses]\n"
    )
    reward = reward_by_name(f"{path}:reward_fn", timeout=0.5)
    items = [make_item("loop", prompt_id="a"), make_item("x", prompt_id="b"), make_item("y", prompt_id="b")]
    scores = reward(items)
    reward.close()
    assert [score.status for score in scores] == [RewardStatus.TIMEOUT, RewardStatus.OK, RewardStatus.OK]
    assert [score.value for score in scores] == [None, 1.0, 1.0]


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        ("def reward_fun(responses, labels): ...", "reward_fn", "has no function 'reward_fn'; it has: reward_fun"),
        ("reward_fn = 3", "reward_fn", "it has: none"),
        ("def reward_fn(texts): ...", "reward_fn", r"reward_fn\(texts\): none of its arguments"),
        ("def reward_fn(a, b, c): ...", "reward_fn", r"reward_fn\(a, b, c\): none of its arguments"),
        ("def reward_fn(a, b, *, colour): ...", "reward_fn", "its argument colour"),
        ("async def reward_fn(a): ...", "reward_fn", "async def reward_fn"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_when_it_is_loaded(
    write_reward: WriteReward, source: str, function: str, message: str
):
    path = write_reward(source)
    with pytest.raises(OptionsError, match=message) as caught:
        reward_by_name(f"{path}:{function}")
    assert caught.value.problem.code == ("reward.function_missing" if "it has" in message else "reward.signature")
    assert caught.value.problem.do


@pytest.mark.parametrize(
    ("source", "message", "line"),
    [
        ("def reward_fn(responses, labels)\n    return []", "SyntaxError", 1),
        ("\nimport no_such_library", "No module named 'no_such_library'", 2),
        ("x = 1\ny = 2\nx / 0 * y", "ZeroDivisionError", 3),
    ],
)
def test_a_file_that_does_not_import_is_named_with_its_line(
    write_reward: WriteReward, source: str, message: str, line: int
):
    path = write_reward(source)
    with pytest.raises(DataError, match=message) as caught:
        reward_by_name(f"{path}:reward_fn")
    assert (caught.value.problem.code, caught.value.problem.where) == ("reward.import", f"{path}:{line}")


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(OptionsError, match=r"reward file .*nowhere\.py does not exist") as caught:
        reward_by_name(f"{tmp_path}/nowhere.py:reward_fn")
    assert caught.value.problem.code == "reward.file_missing"


def test_what_is_no_file_is_told_by_its_kind(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "folder.py").mkdir()
    for name, kind in (("pipe", "a pipe"), ("folder", "a directory")):
        with pytest.raises(OptionsError, match=rf"reward file .*{name}\.py is {kind}") as caught:
            reward_by_name(f"{tmp_path}/{name}.py:reward_fn")
        assert caught.value.problem.code == "reward.file_missing"


def test_keyword_arguments_of_any_name_receive_all_extras(write_reward: WriteReward, make_item: MakeItem):
    path = write_reward("def reward_fn(responses, labels, **extras):\n    return [float(len(extras))]\n")
    reward = reward_by_name(f"{path}:reward_fn")
    assert reward([make_item("x")])[0].value == 5.0
    reward.close()
