"""What an engine refuses of a call before it draws: prompts, keys, budgets, media."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rft_core.errors import OptionsError
from rft_engine.request_checks import check_budgets, check_keys, check_media, check_prompts, refusal, unknown_token


def refused(ask: Callable[[], object]) -> Any:
    with pytest.raises(OptionsError) as caught:
        ask()
    assert caught.value.problem.state == "nothing was generated"
    return caught.value.problem


@pytest.mark.parametrize(("prompts", "keys"), [(1, 2), (2, 1), (0, 1), (1, 0)])
def test_every_prompt_has_its_keys_and_its_entry_of_media(prompts: int, keys: int) -> None:
    texts, lists = [[1]] * prompts, [[5]] * keys
    problem = refused(lambda: check_keys(texts, lists))
    assert problem.code == "engine.sample_keys"
    assert [int(number) for number in re.findall(r"\d+", problem.what)] == [prompts, keys]
    problem = refused(lambda: check_media(texts, [None] * keys))
    assert problem.code == "engine.media"
    assert [int(number) for number in re.findall(r"\d+", problem.what)] == [prompts, keys]
    check_keys(texts, [[5]] * prompts)
    check_media(texts, [None] * prompts)
    check_media(texts, None)


def test_budgets_come_prompt_after_prompt() -> None:
    keys = [[1, 2], [], [3]]
    assert check_budgets(keys, None, 7) == [7, 7, 7]
    assert check_budgets(keys, [[1, 7], [], [3]], 7) == [1, 7, 3]
    assert check_budgets([], [], 7) == []


@pytest.mark.parametrize("budgets", [[[1], [2, 3]], [[1, 2]], [[1, 2], [3], [4]], [[1, 2], []]])
def test_every_sample_has_its_budget(budgets: Sequence[Sequence[int]]) -> None:
    assert refused(lambda: check_budgets([[1, 2], [3]], budgets, 7)).code == "engine.budgets"


@pytest.mark.parametrize(("budget", "most"), [(0, 7), (-1, 7), (8, 8)])
def test_a_budget_is_one_to_the_limit_of_the_call(budget: int, most: int) -> None:
    problem = refused(lambda: check_budgets([[1, 2], [3]], [[7, budget], [1]], 7))
    assert (problem.code, problem.do) == ("engine.budgets", f"max_new_tokens={most}")
    assert problem.what == f"a budget of {budget} tokens"


def test_prompts_that_fit_are_taken() -> None:
    check_prompts([], 4, 4, 1)
    check_prompts([[0], [0, 4, 4, 0]], 6, 10, 5)
    # one token more, or a vocabulary of one token less, and they do not
    assert refused(lambda: check_prompts([[0], [0, 4, 4, 0, 0]], 6, 10, 5)).code == "engine.prompt_too_long"
    assert refused(lambda: check_prompts([[0], [0, 4, 4, 0]], 6, 10, 4)).code == "engine.unknown_token"


@pytest.mark.parametrize(
    ("prompt", "code", "do"),
    [
        ([], "engine.empty_prompt", "leave prompt 1 out"),
        ([0] * 5, "engine.prompt_too_long", "max_len=11"),
        ([0] * 9, "engine.prompt_too_long", "max_len=15"),
        ([5], "engine.unknown_token", "tokenizer"),
        ([4, -1], "engine.unknown_token", "tokenizer"),
    ],
)
def test_the_first_prompt_that_cannot_be_served_is_named(prompt: list[int], code: str, do: str) -> None:
    problem = refused(lambda: check_prompts([[1], prompt, []], 6, 10, 5))
    assert problem.code == code
    assert "prompt 1" in problem.what
    assert do in problem.do


@pytest.mark.parametrize(("prompt", "token"), [([5], 5), ([-3, 9], -3), ([0, 7, 9], 9)])
def test_the_token_that_the_model_does_not_have_is_named(prompt: list[int], token: int) -> None:
    problem = refused(lambda: check_prompts([prompt], 1, 10, 5))
    assert problem.what == unknown_token("prompt", "prompt 0", token, 5).problem.what
    assert f"token {token};" in problem.what
    assert "0 to 4" in problem.what


def test_a_refusal_says_what_why_and_what_to_do() -> None:
    problem = refusal("engine.x", "what", "why", "do").problem
    assert (problem.code, problem.what, problem.why, problem.do) == ("engine.x", "what", "why", "do")
