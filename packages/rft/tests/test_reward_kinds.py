"""Kinds of reward: their flags, names and parts, found by reference and only where a flag is given."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from rft import reward_kinds
from rft.reward_kinds import REWARD_KINDS, RewardKind

KIND = RewardKind(
    "mine",
    group="own",
    builder="m:build",
    directory_flags=("a_dir",),
    service_flags=("a_url",),
    other_flags=("on",),
    checker="m:check",
    part_names="m:names",
    settings_type="m:Settings",
)
PLAIN = RewardKind("plain", group="own", builder="m:build", other_flags=("on",))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was called of what a reference stands for."""
    done: list[Any] = []
    found = {
        "m:build": lambda settings, machine: (done.append(("build", settings, machine)), iter(["part"]))[1],
        "m:check": lambda settings: done.append(("check", settings)),
        "m:names": lambda settings: iter([f"{settings.own.on} 1", "2"]),
        "m:Settings": dict,
    }
    monkeypatch.setattr(reward_kinds, "load", found.__getitem__)
    return done


def settings(**given: str) -> Any:
    return SimpleNamespace(own=SimpleNamespace(**{"a_dir": "", "a_url": "", "on": ""} | given))


def test_a_kind_is_there_where_one_of_its_flags_is_given(loaded: list[Any]) -> None:
    assert KIND.flags == ("a_dir", "a_url", "on")
    nothing, given = settings(), settings(a_url="u", on="x")
    assert KIND.values(nothing) == {}
    assert KIND.values(given) == {"a_url": "u", "on": "x"}
    assert (KIND.names(nothing), KIND.names(given), PLAIN.names(given)) == ([], ["x 1", "2"], ["plain"])
    assert KIND.build(nothing, "machine") == []
    assert loaded == []
    assert KIND.build(given, "machine") == ["part"]
    assert loaded.pop() == ("build", given, "machine")
    KIND.check(nothing)
    PLAIN.check(given)
    assert loaded == []
    KIND.check(given)
    assert loaded == [("check", given)]


def test_the_flags_of_all_kinds_are_a_reward() -> None:
    assert reward_kinds.reward_flags() == ("reward_pretrain", "remote_rm_url", "judge_pretrain", "judge_url")
    assert [kind.name for kind in REWARD_KINDS] == ["reward_model", "reward_server", "judge"]
    assert [kind.joins_directories for kind in REWARD_KINDS] == [True, False, False]
    for kind in REWARD_KINDS:
        for reference in filter(None, (kind.builder, kind.checker, kind.part_names)):
            assert callable(reward_kinds.load(reference))


def test_a_server_is_tried_before_a_model_is_loaded() -> None:
    assert [kind.name for kind in reward_kinds.build_order()] == ["reward_server", "reward_model", "judge"]


def test_the_directories_that_are_given_are_found_by_their_kind() -> None:
    model, _, judge = REWARD_KINDS
    assert reward_kinds.given_directories({"judge_pretrain": "j", "reward_pretrain": "", "judge_url": "u"}) == [
        (judge, "judge_pretrain", "j")
    ]
    assert reward_kinds.given_directories({"reward_pretrain": "a,b"}) == [(model, "reward_pretrain", "a,b")]


def test_a_group_that_settings_do_not_list_is_added_to_them(loaded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_kinds, "REWARD_KINDS", (KIND,))

    @dataclass
    @reward_kinds.with_reward_groups
    class Without:
        other: int = 1

    @dataclass
    @reward_kinds.with_reward_groups
    class Lists:
        own: int = 1

    made: Any = Without()
    assert (made.own, made.other) == ({}, 1)
    assert Lists().own == 1
