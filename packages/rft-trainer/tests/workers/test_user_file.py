"""A reward function of a user's file: how it is called, what becomes of its errors, and what is refused."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
from calls import call_payload

from rft_core.errors import OptionsError
from rft_trainer.workers.user_file import RewardHandler, import_file, load

ONE = {"response": "responses", "level": "column:level"}


def called(function: Any, *responses: str, keeps_errors: bool = True, **binding: Any) -> list[Any]:
    handler = RewardHandler(function, "own.py", "reward_fn", keeps_errors=keeps_errors)
    return handler(call_payload(*(responses or ("a", "b")), label="x", **binding))


def test_all_responses_are_given_as_lists_by_name_or_by_position() -> None:
    seen: list[Any] = []

    def function(*args: Any, **named: Any) -> list[float]:
        seen.append((args, named))
        return [1.0, 0.5]

    assert called(function) == [1.0, 0.5]
    sources = {"a": "responses", "b": "labels", "tags": "column:tags", "n": "num_tokens"}
    called(function, sources=sources, num_positional=2)
    assert seen == [
        ((), {"responses": ["a", "b"], "labels": ["x", "x"]}),
        ((["a", "b"], ["x", "x"]), {"tags": [["x"], ["x"]], "n": [1, 1]}),
    ]


def test_one_response_at_a_time_is_given_with_values() -> None:
    assert called(lambda response, level: len(response) + level, "a", "bbb", sources=ONE, one_at_a_time=True) == [
        3.0,
        5.0,
    ]


def test_a_function_may_take_what_it_does_not_name() -> None:
    taken: dict[str, Any] = {}

    def everything(responses: Any, **rest: Any) -> list[float]:
        taken.update(rest)
        return [0.0, 0.0]

    called(everything, sources={"responses": "responses"}, takes_rest=True)
    known = {"prompts", "labels", "prompt_ids", "finish_reasons", "num_tokens", "images"}
    assert set(taken) == known | {"level", "tags"}
    assert taken["level"] == [2, 2]
    taken.clear()

    def nothing_by_name(**rest: Any) -> list[float]:
        taken.update(rest)
        return [0.0, 0.0]

    called(nothing_by_name, sources={}, takes_rest=True)
    assert taken["completions"] == taken["responses"] == ["a", "b"]

    def single(response: Any, **rest: Any) -> float:
        taken.update(rest)
        return 0.0

    taken.clear()
    called(single, sources={"response": "responses"}, takes_rest=True, one_at_a_time=True)
    assert {"prompt", "label", "prompt_id", "finish_reason", "level"} <= set(taken)
    assert taken["label"] == "x"


def test_coroutines_are_awaited_beside_one_another() -> None:
    arrived: list[str] = []

    async def together(response: Any, level: Any) -> float:
        arrived.append(response)
        while len(arrived) < 2:  # as long as the other has not begun
            await asyncio.sleep(0)
        return float(level)

    async def whole(responses: Any, labels: Any) -> list[float]:
        await asyncio.sleep(0)
        return [1.0 for _ in responses]

    assert called(together, sources=ONE, one_at_a_time=True) == [2.0, 2.0]
    assert called(whole) == [1.0, 1.0]

    async def in_a_loop() -> list[Any]:
        return called(whole)

    assert asyncio.run(in_a_loop()) == [1.0, 1.0], "as in a notebook"


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_raised_for_one_response_leaves_the_others_scored(
    is_async: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def plain(response: Any, level: Any) -> float:
        return 1 / (response == "a")

    async def later(response: Any, level: Any) -> float:
        return 1 / (response == "a")

    function = later if is_async else plain
    first, second = called(function, sources=ONE, one_at_a_time=True)
    assert first == 1.0
    assert second["failure"] == "exception"
    assert second["detail"].startswith("ZeroDivisionError")
    assert second["place"] == f"{__file__}:{function.__code__.co_firstlineno + 1}"
    assert "own_file" not in second["traceback"]
    assert __file__ in second["traceback"]
    assert second["traceback"] in capsys.readouterr().err, "for the log of the run"
    with pytest.raises(ZeroDivisionError):
        called(function, sources=ONE, one_at_a_time=True, keeps_errors=False)


def test_memory_that_runs_out_and_exits_are_no_matter_of_one_response() -> None:
    def function(response: Any, level: Any) -> float:
        raise MemoryError if response == "memory" else SystemExit

    for response, kind in (("memory", MemoryError), ("exit", SystemExit)):
        with pytest.raises(kind):
            called(function, response, sources=ONE, one_at_a_time=True)


@pytest.mark.parametrize(("value", "kind"), [([1.0], "wrong_length"), (1.0, "not_a_number"), (None, "not_a_number")])
def test_a_wrong_result_of_the_whole_is_a_failure_of_every_response(value: Any, kind: str) -> None:
    def function(responses: Any, labels: Any) -> Any:
        return value

    found = called(function)
    assert [one["failure"] for one in found] == [kind, kind]
    assert found[0]["place"] == f"{__file__}:{function.__code__.co_firstlineno}"
    with pytest.raises((ValueError, TypeError)):
        called(function, keeps_errors=False)


def test_a_class_is_refused_and_its_object_taken() -> None:
    class Judge:
        def __call__(self, responses: Any, labels: Any) -> list[float]:
            return [3.0 for _ in responses]

    assert called(Judge()) == [3.0, 3.0]
    with pytest.raises(OptionsError) as caught:
        called(Judge)
    assert caught.value.problem.code == "reward.is_class"


def test_a_function_is_loaded_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("from beside import VALUE\ndef reward_fn(responses, labels): return [VALUE for _ in responses]\n")
    (tmp_path / "beside.py").write_text("VALUE = 0.75\n")
    assert load(str(file), "reward_fn")(call_payload("a", "b")) == [0.75, 0.75]


def test_a_function_may_take_apart_what_it_is_given() -> None:
    def function(responses: Any, tags: Any, labels: Any) -> list[float]:
        found: list[float] = []
        while responses:
            responses.pop()
            labels.clear()
            tags.pop().append("mine")
            found.append(1.0)
        return found

    given = call_payload("a", "b", sources={"responses": "responses", "tags": "column:tags", "labels": "labels"})
    before = copy.deepcopy(given)
    assert RewardHandler(function, "own.py", "f", keeps_errors=True)(given) == [1.0, 1.0]
    assert before == given


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
