"""Routes of settings: their grammar, and rows to which none leads."""

from __future__ import annotations

import pytest

from rft_core.errors import DataError, OptionsError
from rft_trainer.data.rendering import RenderedPrompt
from rft_trainer.rewards.routes import require_routes, routes_of
from rft_trainer.settings.rewards import RewardSettings


def settings(routes: str, key: str = "data_source") -> RewardSettings:
    return RewardSettings(reward_routes=routes, reward_source_key=key)


def row(source: str | None, file: str = "train") -> RenderedPrompt:
    columns = {} if source is None else {"data_source": source}
    return RenderedPrompt(f"{file}:0", "?", (1,), "1", None, file, 0, columns=columns, place="train.jsonl:7")


def test_routes_are_sources_with_their_rewards() -> None:
    routes = routes_of(settings(" openai/gsm8k=gsm8k , arc = choice+format+choice,*=own.py:f"))
    assert routes is not None
    assert routes.by_source == {
        "openai/gsm8k": ("gsm8k",),
        "arc": ("choice", "format"),
        "*": ("own.py:f",),
    }
    assert routes.names == ("gsm8k", "choice", "format", "own.py:f")
    assert routes_of(settings("")) is None
    require_routes(settings(""), [row("anything")])


@pytest.mark.parametrize(
    ("routes", "what", "do"),
    [
        ("gsm8k", "holds 'gsm8k'", "--reward_routes 'gsm8k=math,*=exact'"),
        ("=math", "holds '=math'", "--reward_routes 'gsm8k=math,*=exact'"),
        ("a=", "holds 'a='", "--reward_routes 'a=math,*=exact'"),
        ("a=math,a=exact+math", "names 'a' twice", "a=math+exact in the place of both"),
        ("a=maht,*=exact", "no reward is named 'maht'", "--reward_routes 'a=math,*=exact'"),
        ("a=zzzz", "no reward is named 'zzzz'", "--reward_routes with one of these names"),
    ],
)
def test_what_is_no_route_is_refused(routes: str, what: str, do: str) -> None:
    with pytest.raises(OptionsError) as caught:
        routes_of(settings(routes))
    assert what in caught.value.problem.what
    assert (caught.value.problem.where, caught.value.problem.do) == ("--reward_routes", do)


def test_a_row_without_a_route_is_refused_by_its_place_with_the_nearest() -> None:
    chosen = settings("openai/gsm8=math+format,arc=choice")
    require_routes(chosen, [row("arc")])
    with pytest.raises(DataError) as caught:
        require_routes(chosen, [row("openai/gsm8k")])
    problem = caught.value.problem
    assert (problem.code, problem.where) == ("reward.no_route", "train.jsonl:7:data_source")
    assert "'openai/gsm8k'" in problem.what
    assert problem.do == "--reward_routes openai/gsm8=math+format,arc=choice,openai/gsm8k=math+format"


def test_rows_without_the_column_have_the_name_of_their_file_or_no_route() -> None:
    chosen = settings("train=math")
    require_routes(chosen, [row(None)])
    with pytest.raises(DataError):
        require_routes(chosen, [row(None, file="test")])
    chosen = settings("train=math", key="level")
    with pytest.raises(DataError) as caught:
        require_routes(chosen, [row(None)])
    assert caught.value.problem.where == "train.jsonl:7"
    assert caught.value.problem.do == "--reward_routes 'train=math,*=math'"


def test_every_row_has_a_route_where_one_stands_for_the_rest() -> None:
    chosen = settings("a=math,*=exact")
    require_routes(chosen, [row("anything")])
    routes = routes_of(chosen)
    assert routes is not None
    assert routes.of("anything") == routes.of("else") != routes.of("a")
    unread = iter([row("anything")])
    require_routes(chosen, unread)
    assert len(list(unread)) == 1, "millions of rows are not read where none can lack a route"
