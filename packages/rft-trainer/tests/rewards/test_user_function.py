from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rft_core.errors import DataError, OptionsError
from rft_trainer.records.scores import RewardItem, RewardStatus
from rft_trainer.rewards.registry import is_module, reward_by_name
from rft_trainer.rewards.user_function import FileReward

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


def test_a_trial_shows_what_the_function_was_given_gave_and_printed(write_reward: WriteReward, make_item: MakeItem):
    path = write_reward(
        "def reward_fn(response, level, **rest):\n    print('seen', response)\n    return level / (response == 'x')\n"
    )
    reward = FileReward(path, "reward_fn", columns={"level": ""})
    items = [replace(make_item(text, None), columns={"level": 3}) for text in ("x", "y", "z")]
    trial = reward.trial(items)
    reward.close()
    assert (trial.written, trial.place) == ("def reward_fn(response, level, **rest)", f"{path}:1")
    assert (trial.arguments["response"], trial.arguments["level"], trial.arguments["label"]) == ("x", 3, None)
    assert [score.value for score in trial.scores] == [3.0, None, None]
    assert trial.responses == ("x", "y", "z")
    assert trial.traceback.splitlines()[1].strip() == f'File "{path}", line 3, in reward_fn'
    assert trial.printed.split() == ["seen", "x", "seen", "y", "seen", "z"], "tracebacks are no output of the function"


def test_output_and_tracebacks_are_in_the_log_and_every_failure_has_its_kind(
    write_reward: WriteReward, make_item: MakeItem, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = write_reward(
        "import os, sys\n"
        "def reward_fn(responses, labels):\n"
        "    print('out', responses[0])\n"
        "    print('err', responses[0], file=sys.stderr)\n"
        "    if responses[0] == 'exit': sys.exit('bye')\n"
        "    if responses[0] == 'die': os._exit(3)\n"
        "    if responses[0] == 'raise': raise ValueError('my bug')\n"
        "    return [1.0]\n"
    )
    log = tmp_path / "reward-0.log"
    reward = FileReward(path, "reward_fn", log=log)
    scores = reward([make_item(text, prompt_id=text) for text in ("x", "exit", "die", "raise")])
    reward.close()
    assert [(str(score.status), score.failure) for score in scores] == [
        ("ok", ""),
        ("crashed", "exit"),
        ("crashed", ""),
        ("failed", "exception"),
    ]
    assert f"{path}:7" in scores[3].detail
    said = "\n".join(record.getMessage() for record in caplog.records)
    for text in (
        "SystemExit: bye",
        "exit code 3",
        "ValueError: my bug",
        f'File "{path}", line 7, in reward_fn',
        str(log),
    ):
        assert text in said
    assert "user_file.py" not in said, "no frame of this program"
    written = log.read_text()
    for text in ("out x", "err x", "out die", "ValueError: my bug", "SystemExit: bye"):
        assert text in written


def test_a_dotted_name_is_a_module_unless_a_file_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names = ("a.b", "a", "a.py", "a/b", "./a.b", "my-rewards", "in-process")
    assert [is_module(name) for name in names] == [True, True, False, False, False, False, False]
    Path("a").write_text("")
    assert not is_module("a")
    Path("own.py").write_text("def f(responses, labels): return [0.5 for _ in responses]\n")
    reward = reward_by_name("own:f")
    assert reward([RewardItem("p", "?", "x", None, "stop", 1)])[0].value == 0.5
    reward.close()
