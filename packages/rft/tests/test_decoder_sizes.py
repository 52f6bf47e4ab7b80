"""Widths of a decoder from its config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft.decoder_sizes import EXACT, IMAGES_NOT_COUNTED, decodes_joined, max_positions, model_sizes
from rft_core.errors import DataError
from rft_dist.planning.memory_estimate import DecoderSizes

LLAMA = {
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 1009,
    "intermediate_size": 104,
}


def sizes(**changes: Any) -> tuple[DecoderSizes, list[str]]:
    config = {name: value for name, value in (LLAMA | changes).items() if value is not None}
    folder = Path("m")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return model_sizes(folder)


def test_a_plain_decoder() -> None:
    found, notes = sizes()
    assert notes == []
    assert found == DecoderSizes(vocab=1009, hidden=48, layers=5, query_width=48, kv_width=16, ffn=104, tied=False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tie_word_embeddings": True}, {"tied": True}),
        ({"head_dim": 10}, {"query_width": 60, "kv_width": 20}),
        ({"num_key_value_heads": None}, {"kv_width": 48}),
        ({"intermediate_size": None}, {"ffn": 192}),
        ({"intermediate_size": None, "n_inner": 77}, {"ffn": 77}),
        ({"attention_bias": True}, {"attention_bias": True, "output_bias": True}),
        ({"mlp_bias": True}, {"ffn_bias": True}),
        ({"model_type": "qwen2"}, {"attention_bias": True, "output_bias": False}),
        ({"model_type": "qwen3", "head_dim": 10}, {"head_norm": 10, "attention_bias": False}),
        ({"hidden_size": None, "n_embd": 48}, {"hidden": 48}),
        ({"hidden_size": None, "d_model": 48}, {"hidden": 48}),
        ({"num_hidden_layers": None, "n_layer": 5}, {"layers": 5}),
        ({"num_attention_heads": None, "n_head": 6}, {"query_width": 48}),
        ({"num_local_experts": 4, "num_experts_per_tok": 2}, {"num_experts": 4, "experts_per_token": 2, "ffn": 104}),
        (
            {
                "model_type": "qwen2_moe",
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 30,
                "shared_expert_intermediate_size": 50,
            },
            {"num_experts": 4, "ffn": 30, "shared_ffn": 50, "shared_gate": True},
        ),
        ({"shared_expert_intermediate_size": 50, "moe_intermediate_size": 30}, {"shared_ffn": 0, "ffn": 104}),
    ],
    ids=str,
)
def test_each_word_of_a_config_sets_its_width(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    found, _ = sizes(**changes)
    assert {name: getattr(found, name) for name in expected} == expected
    assert not found.shared_gate or changes["model_type"] == "qwen2_moe"


@pytest.mark.parametrize("kind", EXACT)
def test_kinds_that_are_counted_exactly_have_no_note(kind: str) -> None:
    assert sizes(model_type=kind)[1] == []


def test_other_kinds_and_images_are_told() -> None:
    [near] = sizes(model_type="gemma")[1]
    assert "gemma" in near
    [unnamed] = sizes(model_type=None)[1]
    assert unnamed != near
    assert sizes(model_type="gpt2")[0].tied
    assert not sizes(model_type="gpt2", tie_word_embeddings=False)[0].tied
    text = {name: value for name, value in LLAMA.items() if name != "model_type"}
    found, notes = sizes(model_type="llama", text_config=text, tie_word_embeddings=True)
    assert notes == [IMAGES_NOT_COUNTED]
    assert found.tied
    assert found.hidden == 48
    other, _ = sizes(model_type="llama", text_config=text | {"hidden_size": 60, "tie_word_embeddings": True})
    assert (other.hidden, other.tied) == (60, True)


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_config_without_a_width_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(DataError) as caught:
        sizes(**{name: None})
    assert caught.value.problem.code == "plan.unknown_sizes"
    assert caught.value.problem.do.startswith(f"add {name} to ")


def test_positions_that_a_model_places() -> None:
    sizes()
    assert max_positions("m") is None
    sizes(max_position_embeddings=512)
    assert max_positions("m") == 512
    sizes(n_positions=256)
    assert max_positions("m") == 256
    sizes(text_config=LLAMA | {"max_position_embeddings": 128}, max_position_embeddings=64)
    assert max_positions("m") == 128


@pytest.mark.parametrize(
    ("changes", "joined"),
    [
        ({}, True),
        ({"model_type": "gemma"}, False),
        ({"model_type": "qwen2_5_vl"}, True),
        ({"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text"}}, True),
        ({"model_type": "llava", "text_config": {"model_type": "gemma"}}, False),
    ],
)
def test_the_families_whose_matrices_are_joined_are_known_by_their_text(changes: dict[str, Any], joined: bool) -> None:
    sizes(**changes | ({"text_config": LLAMA | changes["text_config"]} if "text_config" in changes else {}))
    assert decodes_joined("m") == joined
