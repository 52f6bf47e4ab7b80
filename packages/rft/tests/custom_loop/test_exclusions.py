"""Settings of a loop that exclude one another are refused, and so is one that would have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from rft.custom_loop.settings import loop_settings
from rft_core.errors import OptionsError


@pytest.mark.parametrize(
    ("given", "code", "shown"),
    [
        ({"zero_stage": 2, "fsdp": True}, "strategy.two", "fsdp = True, zero_stage = 2"),
        ({"fp16": True, "bf16": True}, "loop.excluded_settings", "fp16 = True, bf16 = True"),
        ({"fp16": True, "use_mp_opt": True}, "loop.excluded_settings", "fp16 = True, use_mp_opt = True"),
        ({"meta_init": True}, "loop.excluded_settings", "meta_init = True"),
        ({"load_in_4bit": True}, "loop.excluded_settings", "load_in_4bit = True"),
        (
            {"load_in_4bit": True, "lora_rank": 4, "tp_size": 2},
            "loop.excluded_settings",
            "load_in_4bit = True, tp_size = 2",
        ),
        (
            {"lora_rank": 4, "lora_dropout": 0.1, "fsdp": True},
            "loop.excluded_settings",
            "lora_dropout = 0.1, fsdp = True",
        ),
        (
            {"lora_rank": 4, "lora_type": "dora", "tp_size": 2},
            "loop.excluded_settings",
            "lora_type = dora, tp_size = 2",
        ),
        ({"lora_rank": 4, "train_only_tokens_from": 9}, "loop.excluded_settings", "train_only_tokens_from = 9"),
        ({"enable_ema": True, "train_only_tokens_from": 9}, "loop.excluded_settings", "enable_ema = True"),
        ({"max_norm_spike": 2.0, "zero_stage": 1}, "loop.excluded_settings", "max_norm_spike = 2.0"),
        ({"engine_type": "hf", "fsdp": True}, "loop.excluded_settings", "engine_type = hf, fsdp = True"),
        ({"freeze_prefix": "a", "train_only_tokens_from": 9}, "freezing.two_ways", "freeze_prefix = a"),
        ({"shard_size": 2}, "loop.no_effect", "shard_size = 2 beside fsdp = False"),
        ({"zpg": 2, "zero_stage": 2}, "loop.no_effect", "zpg = 2 beside zero_stage = 2"),
        ({"overlap_comm": True}, "loop.no_effect", "overlap_comm = True"),
        ({"lora_alpha": 8.0}, "loop.no_effect", "lora_alpha = 8.0 beside lora_rank = 0"),
        ({"chunk_size": 8}, "loop.no_effect", "chunk_size = 8"),
        ({"ema_decay": 0.9}, "loop.no_effect", "ema_decay = 0.9"),
        ({"sp_mode": "ring"}, "loop.no_effect", "sp_mode = ring beside sp_size = 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given: dict[str, Any], code: str, shown: str) -> None:
    with pytest.raises(OptionsError) as caught:
        loop_settings("model", given)
    assert caught.value.problem.code == code
    assert shown in caught.value.problem.what
    assert caught.value.problem.do


@pytest.mark.parametrize(
    "given",
    [
        {"fsdp": True, "shard_size": 2, "meta_init": True, "fsdp_cpu_offload": True},
        {"zero_stage": 3, "zpg": 2, "overlap_comm": True},
        {"lora_rank": 4, "lora_dropout": 0.1, "lora_type": "dora"},
        {"enable_ema": True, "ema_decay": 0.9, "bf16": True},
        {"sp_size": 2, "sp_mode": "ring", "engine_type": "native"},
    ],
)
def test_settings_that_go_together_are_taken(given: dict[str, Any]) -> None:
    loop_settings("model", given)
