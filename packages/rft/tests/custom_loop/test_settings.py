"""Keywords of a loop are flags of `rft-train rl`, with their defaults and bounds; what has no effect is refused."""

from __future__ import annotations

import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from rft.config.errors import SettingsError
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
        ("micro_train_batch_size", 0),
        ("micro_train_batch_size", True),
        ("temperature", -1.0),
        ("adam_betas", (0.9, 1.0)),
        ("adam_betas", 0.9),
        ("lr_schedule", "step"),
        ("device", "tpu"),
        ("seed", None),
    ],
)
def test_a_value_out_of_its_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(SettingsError) as caught:
        loop_settings("model", {name: value})
    assert caught.value.problem.code == "option.value"
    assert caught.value.problem.what.startswith(f"{name} = ")


@pytest.mark.parametrize(
    "given",
    [
        {"zero_stage": 2, "fsdp": True},
        {"fp16": True, "bf16": True},
        {"fp16": True, "use_mp_opt": True},
        {"meta_init": True},
        {"load_in_4bit": True},
        {"load_in_4bit": True, "lora_rank": 4, "tp_size": 2},
        {"lora_rank": 4, "lora_type": "dora", "tp_size": 2},
        {"lora_rank": 4, "train_only_tokens_from": 9},
        {"enable_ema": True, "train_only_tokens_from": 9},
        {"engine_type": "hf", "fsdp": True},
        {"freeze_prefix": "a", "train_only_tokens_from": 9},
    ],
    ids=lambda given: " ".join(given),
)
def test_settings_that_exclude_one_another_are_refused_as_those_of_rl(given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as caught:
        loop_settings("model", given)
    assert {*given} & {*re.findall(r"\w+", caught.value.problem.what)}
    assert caught.value.problem.do


@pytest.mark.parametrize(
    "given",
    [
        {"shard_size": 2},
        {"overlap_comm": True},
        {"lora_alpha": 8.0},
        {"chunk_size": 8},
        {"ema_decay": 0.9},
    ],
    ids=lambda given: " ".join(given),
)
def test_a_setting_without_effect_is_refused(given: dict[str, Any]) -> None:
    name = next(iter(given))
    with pytest.raises(OptionsError, match=f"leave {name} out") as caught:
        loop_settings("model", given)
    assert caught.value.problem.code == "loop.no_effect"


@pytest.mark.parametrize(
    ("name", "do"),
    [("actor_learning_rte", "actor_learning_rate=1"), ("zzz", "leave zzz out")],
)
def test_a_name_that_has_no_effect_is_refused(name: str, do: str) -> None:
    with pytest.raises(OptionsError) as caught:
        loop_settings("model", {name: 1})
    assert caught.value.problem.code == "loop.unknown_setting"
    assert caught.value.problem.do == do


@pytest.mark.parametrize(
    "given",
    [
        {"fsdp": True, "shard_size": 2, "meta_init": True, "fsdp_cpu_offload": True},
        {"zero_stage": 3, "zpg": 2, "overlap_comm": True},
        {"lora_rank": 4, "lora_type": "dora"},
        {"enable_ema": True, "ema_decay": 0.9, "bf16": True},
        {"sp_size": 2, "sp_mode": "ring", "engine_type": "native"},
    ],
)
def test_settings_that_go_together_are_taken(given: dict[str, Any]) -> None:
    found = loop_settings("model", given)
    groups = [asdict(getattr(found, name)) for name in ("strategy", "optimizer", "adapter", "model", "engine")]
    taken = {name: value for group in groups for name, value in group.items() if name in given}
    assert taken == given


def test_completions_a_prompt_are_said_where_they_are_sampled() -> None:
    with pytest.raises(OptionsError) as caught:
        loop_settings("model", {"num_generations": 4})
    assert caught.value.problem.do == "policy.sample(prompts, n=4)"
