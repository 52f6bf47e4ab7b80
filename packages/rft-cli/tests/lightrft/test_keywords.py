"""Keyword arguments as settings that were given, and as the flags that mean the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.config.schema import schema
from rft.library.keyword_settings import as_texts, givens
from rft_cli.lightrft.keywords import BUILT, command_words, refuse_objects, resolved
from rft_core.errors import OptionsError


@pytest.mark.parametrize(
    ("name", "value", "setting", "texts", "is_null"),
    [
        ("seed", 3, "seed", ("3",), False),
        ("adam_betas", (0.9, 0.95), "adam_betas", ("0.9", "0.95"), False),
        ("adam_betas", [0.9, 0.95], "adam_betas", ("0.9", "0.95"), False),
        ("bf16", True, "bf16", ("true",), False),
        ("bf16", False, "bf16", ("false",), False),
        ("no_bf16", True, "bf16", ("false",), False),
        ("disable_engine_sleep", True, "enable_engine_sleep", ("false",), False),
        ("disable_engine_sleep", False, "enable_engine_sleep", ("true",), False),
        ("use_wandb", True, "use_wandb", ("rft",), False),
        ("use_wandb", False, "use_wandb", ("",), False),
        ("use_wandb", "mine", "use_wandb", ("mine",), False),
        ("max_len", None, "max_len", ("none",), True),
        ("pretrain", Path("a/b"), "pretrain", ("a/b",), False),
        ("logging_steps", 5, "log_interval", ("5",), False),
        ("unknown_name", True, "unknown_name", ("true",), False),
    ],
)
def test_a_keyword_is_a_setting_as_it_would_be_written(
    name: str, value: Any, setting: str, texts: tuple[str, ...], is_null: bool
) -> None:
    (option,) = givens("rl", {"config": "left out", name: value})
    assert (option.written, option.name, option.texts, option.is_null) == (name, setting, texts, is_null)
    assert option.origin.kind == "keyword argument"
    assert command_words({name: value}) == [f"--{setting}", *texts]


def test_a_value_without_a_setting_is_its_text() -> None:
    assert as_texts(True) == ("true",)
    assert as_texts(1.5, schema("rl")["temperature"]) == ("1.5",)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("a.yaml", ["--config", "a.yaml"]),
        (Path("a.yaml"), ["--config", "a.yaml"]),
        (["a.yaml", Path("b.yaml")], ["--config", "a.yaml", "--config", "b.yaml"]),
        ((), []),
    ],
)
def test_files_of_settings_are_named_first(config: Any, words: list[str]) -> None:
    assert command_words({"seed": 3, "config": config}) == [*words, "--seed", "3"]
    assert command_words({}) == []


def test_a_reward_function_is_the_reward_unless_another_is_named() -> None:
    assert resolved({"pretrain": "m"}).values["reward"] == ""
    by_function = resolved({"pretrain": "m"}, "in-process:mine")
    assert by_function.values["reward"] == "in-process:mine"
    assert by_function.origins["reward"].kind == "keyword argument"
    with pytest.raises(OptionsError) as caught:
        resolved({"pretrain": "m", "reward": "exact"}, "in-process:mine")
    assert caught.value.problem.code == "lightrft.two_rewards"


@pytest.mark.parametrize("name", BUILT)
def test_a_built_object_is_refused_under_each_of_its_names(name: str) -> None:
    with pytest.raises(OptionsError) as caught:
        resolved({"pretrain": "m", name: None})
    assert caught.value.problem.code == "lightrft.object"
    refuse_objects([])
