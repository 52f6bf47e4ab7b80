"""Why weights do not fit is told by the settings of the model, with both values."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rft.checkpoints.initial_weights import copy_weights
from rft.checkpoints.weight_causes import causes, shapes_of
from rft_core.errors import CheckpointError

SIZES: dict[str, Any] = {
    **{"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False},
}
GPT2: dict[str, Any] = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
EDITS: list[tuple[str, dict[str, Any], str]] = [
    *[("qwen3", {"hidden_size": size}, f"hidden_size {size} (here 16)") for size in (8, 32, 64)],
    *[("qwen2", {"hidden_size": size}, f"hidden_size {size} (here 16)") for size in (8, 32)],
    *[("llama", {"num_hidden_layers": n}, f"num_hidden_layers {n} (here 2)") for n in (1, 3, 60)],
    *[("qwen3", {"vocab_size": n}, f"vocab_size {n} (here 40)") for n in (39, 41, 400)],
    *[("qwen3", {"intermediate_size": n}, f"intermediate_size {n} (here 24)") for n in (8, 48)],
    *[("qwen3", {"num_key_value_heads": n}, f"num_key_value_heads {n} (here 2)") for n in (1, 4)],
    ("qwen3", {"head_dim": 8}, "head_dim 8 (here 4)"),
    ("qwen3", {"num_attention_heads": 8}, "num_attention_heads 8 (here 4)"),
    ("qwen3", {"tie_word_embeddings": True}, "tie_word_embeddings True (here False)"),
    ("llama", {"attention_bias": True}, "attention_bias True (here False)"),
    ("gpt2", {"n_embd": 32}, "hidden_size 32 (here 16)"),
    ("gpt2", {"n_layer": 1}, "num_hidden_layers 1 (here 2)"),
    ("gpt2", {"n_positions": 64}, "max_position_embeddings 64 (here 32)"),
]


def model(kind: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **((GPT2 if kind == "gpt2" else SIZES) | changes))
        )


@pytest.mark.parametrize(("kind", "changes", "told"), EDITS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_setting_that_was_changed_is_named_with_both_values(kind: str, changes: dict[str, Any], told: str) -> None:
    ours, theirs = model(kind), model(kind, **changes)
    target, source = (dict(each.named_parameters()) for each in (ours, theirs))
    because = causes(ours.config, theirs.config, shapes_of(target), shapes_of(source))
    assert because == told
    with pytest.raises(CheckpointError) as caught:
        copy_weights(target, source, [""], because=because)
    problem = caught.value.problem
    assert problem.what.endswith(f"; in the checkpoint: {told}")
    assert len(caught.value.problem.as_text()) <= 2000
    assert re.search(r"[1-9]\d* (missing|unexpected|mismatched)", problem.what)


def test_parts_that_see_are_compared_too() -> None:
    ours, theirs = (
        SimpleNamespace(text_config=SimpleNamespace(hidden_size=size), vision_config=SimpleNamespace(depth=depth))
        for size, depth in ((16, 2), (16, 4))
    )
    assert causes(ours, theirs, {}, {}) == "vision_config.depth 4 (here 2)"


@pytest.mark.parametrize(
    ("ours", "theirs", "told"), [(4, 8, "lora_rank 8 (here 4)"), (4, 0, "lora_rank 0 (here 4)"), (4, 4, "")]
)
def test_the_rank_of_adapters_is_read_off_their_shapes(ours: int, theirs: int, told: str) -> None:
    def shapes(rank: int) -> dict[str, Any]:
        return {"model.q_proj.lora_A.weight": (rank, 16)} if rank else {}

    assert causes(None, None, shapes(ours), shapes(theirs)) == told


def test_many_differences_are_counted() -> None:
    changes = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9, "intermediate_size": 9, "head_dim": 2}
    ours = model("qwen3")
    theirs = model("qwen3", **changes, num_attention_heads=2, num_key_value_heads=1)
    assert causes(ours.config, theirs.config, {}, {}).endswith(" and 1 more")


def test_equal_models_have_no_causes_and_the_checkpoint_is_named() -> None:
    config = model("qwen3").config
    assert causes(config, config, {}, {}) == ""
