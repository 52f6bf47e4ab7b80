"""A reward function of a user's file: how it is called, what it may return, and what is refused."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_core.errors import OptionsError
from rft_trainer.workers.user_file import EXTRAS, handler_of, import_file, load

PAYLOAD = {"responses": ["a", "b"], "labels": ["x", None], "images": ["1.png"]}
PAYLOAD |= {name: [name, name] for name in EXTRAS if name != "images"}


def called(function: Any) -> object:
    return handler_of(function, "own.py", "reward_fn")(PAYLOAD)


def refused(function: Any) -> OptionsError:
    with pytest.raises(OptionsError) as caught:
        handler_of(function, "own.py", "reward_fn")
    assert caught.value.problem.code == "reward.signature"
    return caught.value


def test_responses_and_labels_are_given_by_position() -> None:
    seen: list[Any] = []

    def function(responses: Any, labels: Any) -> list[float]:
        seen.append((responses, labels))
        return [1.0, 0.5]

    assert called(function) == [1.0, 0.5]
    assert seen == [(["a", "b"], ["x", None])]
    assert called(lambda *both: [len(both), len(both[0])]) == [2.0, 2.0]
    assert called(lambda first, second, third=3: [third, 0]) == [3.0, 0.0]
    assert called(lambda first, *rest: [len(rest), 0]) == [1.0, 0.0]


def test_extras_are_given_by_the_names_that_are_asked_for() -> None:
    def function(responses: Any, labels: Any, *, prompts: Any, images: Any, own: int = 3) -> list[float]:
        assert prompts == ["prompts", "prompts"]
        assert images == [["1.png"], ["1.png"]]
        return [own, own]

    assert called(function) == [3.0, 3.0]
    taken: dict[str, Any] = {}

    def everything(responses: Any, labels: Any, **extras: Any) -> list[float]:
        taken.update(extras)
        return [0.0, 0.0]

    called(everything)
    assert set(taken) == set(EXTRAS)


def test_a_function_that_cannot_be_called_so_is_refused() -> None:
    async def later(responses: Any, labels: Any) -> list[float]:
        return [0.0, 0.0]

    assert "async def" in refused(later).problem.what
    for function in (
        lambda one: [0, 0],
        lambda one, two, three: [0, 0],
        lambda one, two, *, unknown: [0, 0],
        lambda *, prompts: [0, 0],
    ):
        assert " def " in f" {refused(function).problem.what.partition(': ')[2]}"


def test_what_is_returned_must_be_as_many_numbers() -> None:
    assert called(lambda r, w: (True, 2)) == [1.0, 2.0]
    assert called(lambda r, w: torch.tensor([0.5, 1.5])) == [0.5, 1.5]
    assert called(lambda r, w: [torch.tensor(0.5), torch.tensor(1)]) == [0.5, 1.0]
    for value in (1.0, "10", {"a": 1.0, "b": 0.0}, None):
        with pytest.raises(TypeError):
            called(lambda r, w, value=value: value)
    for number in (1, 3):
        with pytest.raises(ValueError, match=f"{number} values for 2"):
            called(lambda r, w, number=number: [0.0] * number)


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None, [1.0]])
def test_what_is_no_finite_number_becomes_a_text_for_its_response_alone(value: Any) -> None:
    first, second = called(lambda r, w: [value, 1.0])  # type: ignore[misc]
    assert isinstance(first, str)
    assert repr(str(value)) in first
    assert second == 1.0


def test_a_mapping_has_a_reward_its_parts_and_its_steps() -> None:
    whole = {"reward": 1, "parts": {"format": True, 3: 0.5}, "steps": [(4, 0.25), [9, 1]]}
    found, plain = called(lambda r, w: [whole, {"reward": 2.0}])  # type: ignore[misc]
    assert found == {"reward": 1.0, "parts": {"format": 1.0, "3": 0.5}, "steps": [(4.0, 0.25), (9.0, 1.0)]}
    assert plain == {"reward": 2.0, "parts": {}, "steps": []}


@pytest.mark.parametrize(
    "value",
    [
        {"parts": {}},
        {"reward": 1.0, "other": 2},
        {"reward": math.nan},
        {"reward": 1.0, "parts": {"a": math.inf}},
        {"reward": 1.0, "steps": [(math.nan, 1.0)]},
        {"reward": 1.0, "steps": [(1.0, "x")]},
    ],
)
def test_a_mapping_that_is_not_so_becomes_a_text(value: Any) -> None:
    first, _ = called(lambda r, w: [value, 1.0])  # type: ignore[misc]
    assert isinstance(first, str)


def test_a_function_is_loaded_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("from beside import VALUE\ndef reward_fn(responses, labels): return [VALUE for _ in responses]\n")
    (tmp_path / "beside.py").write_text("VALUE = 0.75\n")
    assert load(str(file), "reward_fn")(PAYLOAD) == [0.75, 0.75]


def test_a_function_may_take_apart_what_it_is_given() -> None:
    def function(responses: Any, labels: Any, *, prompts: Any, images: Any) -> list[float]:
        found: list[float] = []
        while responses:
            responses.pop()
            labels.clear()
            prompts.pop()
            images.pop().append("mine")
            found.append(1.0)
        return found

    before = copy.deepcopy(PAYLOAD)
    assert called(function) == [1.0, 1.0]
    assert before == PAYLOAD


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("def reward(a, b): return []\ndef zzz(a, b): return []\n", "reward"),
        ("def _hidden(a, b): return []\n", "reward_fn"),
        ("reward_fn = 3\n", "reward_fn"),
    ],
)
def test_a_function_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path, text: str, remedy: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(text)
    with pytest.raises(OptionsError) as caught:
        load(str(file), "reward_fn")
    assert caught.value.problem.code == "reward.function_missing"
    assert caught.value.problem.do == f"--reward {file}:{remedy}"


def test_a_file_that_is_missing_or_no_python_is_refused_by_the_flag(tmp_path: Path) -> None:
    with pytest.raises(OptionsError) as caught:
        import_file(str(tmp_path / "own.py"), "--environment", "Class")
    assert caught.value.problem.code == "environment.file_missing"
    assert caught.value.problem.where == "--environment"
    assert caught.value.problem.do.startswith("--environment own.py:Class")
    (tmp_path / "own.txt").write_text("")
    with pytest.raises(OptionsError) as caught:
        import_file(str(tmp_path / "own.txt"))
    assert caught.value.problem.code == "reward.not_python"
    assert caught.value.problem.do == f"--reward {tmp_path / 'own.py'}:reward_fn"
