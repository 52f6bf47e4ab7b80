"""Arguments of reward functions by their names: what each is given, and what cannot be given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from rft_core.errors import OptionsError
from rft_trainer.workers.reward_arguments import Binding, FunctionFacts, bind, facts_of

COLUMNS = {"word": "", "level": "", "answer": "", "meta": "train:3"}


def bound(function: Callable[..., Any], columns: dict[str, str] | None = COLUMNS) -> Binding:
    facts = facts_of(function, "reward_fn", "own.py")
    assert FunctionFacts.from_json(facts.as_json()) == facts, "it crosses as JSON"
    return bind(facts, columns)


def refused(function: Callable[..., Any], columns: dict[str, str] | None = COLUMNS) -> Any:
    with pytest.raises(OptionsError) as caught:
        bound(function, columns)
    assert caught.value.problem.where.partition(":")[0] == __file__
    return caught.value.problem


def compute_score(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> float: ...
def verl_of_all(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any) -> float: ...
def trl(prompts: Any, completions: Any, **kwargs: Any) -> list[float]: ...


@pytest.mark.parametrize(
    ("function", "sources"),
    [
        (lambda responses, labels: 0, {"responses": "responses", "labels": "labels"}),
        (lambda labels, responses: 0, {"labels": "labels", "responses": "responses"}),
        (lambda texts, right: 0, {"texts": "responses", "right": "labels"}),
        (lambda texts, labels, third=3: 0, {"texts": "responses", "labels": "labels"}),
        (lambda texts, answer: 0, {"texts": "responses", "answer": "labels"}),
        (lambda *both: 0, {"*0": "responses", "*1": "labels"}),
        (lambda first, *rest: 0, {"first": "responses", "*0": "labels"}),
        (lambda a, b, /, *, prompts: 0, {"a": "responses", "b": "labels", "prompts": "prompts"}),
        (trl, {"prompts": "prompts", "completions": "responses"}),
        (lambda completions, label, word: 0, {"completions": "responses", "label": "labels", "word": "column:word"}),
        (lambda completions, answer: 0, {"completions": "responses", "answer": "column:answer"}),
        (lambda completions, ground_truth: 0, {"completions": "responses", "ground_truth": "labels"}),
        (lambda responses, prompt, images: 0, {"responses": "responses", "prompt": "prompts", "images": "images"}),
        (lambda responses, level=1, colour=2: 0, {"responses": "responses", "level": "column:level"}),
        (lambda responses, meta=None: 0, {"responses": "responses", "meta": "column:meta"}),
        (lambda **kwargs: 0, {}),
        (lambda prompts, **kwargs: 0, {"prompts": "prompts"}),
        (lambda x, y, **kwargs: 0, {"x": "responses", "y": "labels"}),
    ],
)
def test_names_say_what_all_responses_are_given_with(function: Any, sources: dict[str, str]) -> None:
    found = bound(function)
    assert found.sources == sources
    assert list(found.sources) == list(sources), "those by position come first"
    assert not found.one_at_a_time


@pytest.mark.parametrize(
    ("function", "sources"),
    [
        (lambda response, label: 0, {"response": "responses", "label": "labels"}),
        (
            lambda prompt, completion, level: 0,
            {"prompt": "prompts", "completion": "responses", "level": "column:level"},
        ),
        (
            compute_score,
            {"data_source": "data_source", "solution_str": "responses", "ground_truth": "labels"},
        ),
        (
            verl_of_all,
            {
                "data_source": "data_source",
                "solution_str": "responses",
                "ground_truth": "labels",
                "extra_info": "extra_info",
            },
        ),
    ],
)
def test_a_singular_name_of_the_response_asks_for_one_at_a_time(function: Any, sources: dict[str, str]) -> None:
    found = bound(function)
    assert (found.sources, found.one_at_a_time) == (sources, True)


def test_a_column_takes_the_place_of_what_rows_need_not_have() -> None:
    sources = bound(compute_score, {"data_source": "", "extra_info": "", "ground_truth": ""}).sources
    assert sources["data_source"] == "column:data_source"
    assert sources["extra_info"] == "column:extra_info"
    assert sources["ground_truth"] == "column:ground_truth"


def test_a_column_called_response_is_one_beside_the_responses() -> None:
    found = bound(lambda completions, response: 0, {"response": ""})
    assert found.sources == {"completions": "responses", "response": "column:response"}
    assert not found.one_at_a_time
    assert bound(lambda response: 0, {"response": ""}).sources == {"response": "responses"}


@pytest.mark.parametrize(
    "function",
    [
        lambda responses, colour: 0,
        lambda one: 0,
        lambda one, two, three: 0,
        lambda *, prompts: 0,
        lambda: 0,
        lambda prompts, labels: 0,
        lambda word, labels: 0,
        lambda texts, prompts: 0,
        lambda responses, completions: 0,
        lambda responses, response: 0,
        lambda response, solution_str: 0,
        lambda response, labels: 0,
        lambda response, finish_reasons: 0,
        lambda *args, **kwargs: 0,
        lambda x, **kwargs: 0,
    ],
)
def test_names_that_do_not_say_it_are_refused_with_the_rule(function: Any) -> None:
    problem = refused(function)
    assert problem.code == "reward.signature"
    assert "columns of the data: word, level, answer, meta" in problem.why
    assert problem.do


def test_an_unknown_argument_is_named_with_the_nearest() -> None:
    def reward_fn(completions: Any, lable: Any) -> None: ...

    problem = refused(reward_fn)
    assert "argument lable" in problem.what
    assert problem.where == f"{__file__}:{reward_fn.__code__.co_firstlineno}"
    assert problem.do == "label in the place of lable"


def test_a_required_column_that_some_rows_lack_is_refused_with_the_row() -> None:
    problem = refused(lambda responses, meta: 0)
    assert problem.code == "reward.column_of_some"
    assert "train:3" in problem.what


def test_any_name_may_be_a_column_before_the_data_are_known() -> None:
    assert bound(lambda response, colour: 0, None).sources == {"response": "responses", "colour": "column:colour"}
    assert bound(lambda colour, **rest: 0, None).sources == {"colour": "column:colour"}
    assert bound(lambda x, y, **rest: 0, None).sources == {"x": "responses", "y": "labels"}


def keeps_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def changes_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(responses: Any, labels: Any) -> Any:
        return function(responses, labels)

    return inner


class Judge:
    def __call__(self, response: Any, label: Any) -> float: ...


async def later(response: Any) -> float: ...


def test_objects_partials_and_decorated_functions_show_their_own_names_and_lines() -> None:
    def inner(completions: Any, level: Any, scale: float) -> None: ...

    place = f"{__file__}:{inner.__code__.co_firstlineno}"
    for function in (functools.partial(inner, scale=2.0), keeps_names(functools.partial(inner, scale=2.0))):
        assert bound(function).sources == {"completions": "responses", "level": "column:level"}
        assert facts_of(function, "f", "own.py").place == place
    assert bound(changes_names(inner)).sources == {"responses": "responses", "labels": "labels"}
    assert bound(Judge()).sources == {"response": "responses", "label": "labels"}
    assert facts_of(Judge(), "f", "own.py").place == f"{__file__}:{Judge.__call__.__code__.co_firstlineno}"
    assert facts_of(Judge().__call__, "f", "own.py").written == "def f(response: 'Any', label: 'Any') -> 'float'"
    assert facts_of(later, "f", "own.py").written.startswith("async def f(")
