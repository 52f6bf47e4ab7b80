"""Keywords of a loop are flags of `rft-train rl`, with their defaults and bounds; what has no effect is refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from rft.custom_loop.settings import LoopKeywords, LoopSettings, loop_settings
from rft.settings import RlSettings
from rft_core.errors import OptionsError


def defaults() -> LoopSettings:
    return loop_settings("model", {})


def test_every_keyword_is_a_setting_of_rl_with_its_type_and_its_default() -> None:
    of_loop = {
        item.name: group.name for group in fields(defaults()) for item in fields(getattr(defaults(), group.name))
    }
    hints = get_type_hints(LoopKeywords)
    of_rl: dict[str, Any] = {}
    for group in fields(RlSettings):
        kind: Any = get_type_hints(RlSettings)[group.name]
        of_rl |= {item.name: (item.default, get_type_hints(kind)[item.name]) for item in fields(kind)}
    for name in LoopKeywords.__annotations__:
        default, hint = of_rl[name]
        assert getattr(getattr(defaults(), of_loop[name]), name) == default, name
        assert name == "engine_type" or hints[name] == hint, name


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("actor_learning_rate", 1, 1.0),
        ("adam_betas", [0.5, 0.9], (0.5, 0.9)),
        ("max_len", None, None),
        ("lora_rank", 8, 8),
        ("model_code", Path("my.py"), "my.py"),
        ("fsdp", True, True),
        ("lr_schedule", "linear", "linear"),
    ],
)
def test_a_value_is_taken_in_the_type_of_its_setting(name: str, value: Any, taken: Any) -> None:
    settings = loop_settings("model", {name: value})
    (found,) = [getattr(part, name) for part in vars(settings).values() if hasattr(part, name)]
    assert found == taken
    assert type(found) is type(taken)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("actor_learning_rate", 0.0),
        ("actor_learning_rate", float("nan")),
        ("actor_learning_rate", "1e-6"),
        ("micro_train_batch_size", 0),
        ("micro_train_batch_size", 2.0),
        ("micro_train_batch_size", True),
        ("temperature", -1.0),
        ("adam_betas", (0.9, 1.0)),
        ("adam_betas", 0.9),
        ("fsdp", 1),
        ("lr_schedule", "step"),
        ("device", "tpu"),
        ("seed", None),
    ],
)
def test_a_value_out_of_its_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionsError) as caught:
        loop_settings("model", {name: value})
    assert caught.value.problem.code == "loop.setting_value"
    assert caught.value.problem.what.startswith(f"{name} = ")


@pytest.mark.parametrize(
    ("name", "do"),
    [("actor_learning_rte", "actor_learning_rate=1"), ("zzz", "leave zzz out")],
)
def test_a_name_that_has_no_effect_is_refused(name: str, do: str) -> None:
    with pytest.raises(OptionsError) as caught:
        loop_settings("model", {name: 1})
    assert caught.value.problem.code == "loop.unknown_setting"
    assert caught.value.problem.do == do
