"""Sizes that settings leave open, and settings that do not fit together."""

from __future__ import annotations

from typing import Any

import pytest

from rft_core.errors import OptionsError
from rft_models.new_decoders.sizes import decoder_refusals, decoder_sizes, family_of
from rft_models.settings import DecoderSettings


@pytest.mark.parametrize(
    ("given", "width"),
    [
        ({"hidden_size": 64, "num_heads": 4}, 192),  # 170.7 in whole 64s
        ({"hidden_size": 384, "num_heads": 4}, 1024),
        ({"hidden_size": 64, "num_heads": 4, "use_glu": False}, 256),
        ({"hidden_size": 64, "num_heads": 4, "ffn_hidden_size": 100}, 100),
        ({"hidden_size": 64, "num_heads": 4, "use_moe": True}, 96),  # two experts are as wide as 192
        ({"hidden_size": 64, "num_heads": 4, "use_moe": True, "top_k": 4}, 48),
        ({"hidden_size": 64, "num_heads": 4, "use_moe": True, "shared_experts": 1}, 64),
    ],
)
def test_the_width_of_the_feed_forward_part_follows_from_the_others(given: dict[str, Any], width: int) -> None:
    assert decoder_sizes(DecoderSettings(**given), vocab_size=99).ffn_hidden_size == width


def test_a_mixture_has_eight_experts_and_two_for_a_token_unless_it_is_said() -> None:
    sizes = decoder_sizes(DecoderSettings(use_moe=True), vocab_size=99)
    assert (sizes.num_experts, sizes.top_k) == (8, 2)
    sizes = decoder_sizes(DecoderSettings(use_moe=True, num_experts=1), vocab_size=99)
    assert (sizes.num_experts, sizes.top_k) == (1, 1)
    sizes = decoder_sizes(DecoderSettings(), vocab_size=99)
    assert (sizes.num_experts, sizes.top_k, sizes.num_kv_heads, sizes.vocab_size) == (0, 0, 8, 99)


@pytest.mark.parametrize(
    ("given", "family"),
    [
        ({}, "qwen3"),
        ({"use_moe": True}, "qwen3_moe"),
        ({"use_moe": True, "shared_experts": 1}, "qwen2_moe"),
        ({"use_glu": False}, "own"),
        ({"dropout": 0.1}, "own"),
        ({"family": "llama"}, "llama"),
    ],
)
def test_the_family_follows_from_what_a_decoder_has(given: dict[str, Any], family: str) -> None:
    assert family_of(DecoderSettings(**given)) == family


@pytest.mark.parametrize(
    ("given", "code", "named", "remedy"),
    [
        ({"hidden_size": 66}, "decoder.heads", "hidden_size = 66, num_heads = 8", "--hidden_size 80"),
        ({"hidden_size": 24}, "decoder.heads", "hidden_size = 24", "--hidden_size 32"),  # heads of 3 entries
        ({"num_kv_heads": 3}, "decoder.kv_heads", "num_kv_heads = 3", "--num_kv_heads 2"),
        ({"num_kv_heads": 16}, "decoder.kv_heads", "num_kv_heads = 16", "--num_kv_heads 8"),
        ({"use_moe": True, "top_k": 9}, "decoder.top_k", "top_k = 9", "--top_k 8"),
        ({"num_experts": 4}, "decoder.no_mixture", "num_experts = 4", "--use_moe"),
        ({"use_moe": True, "dropout": 0.1}, "decoder.dense_family", "dropout = 0.1", "dropout 0"),
        ({"family": "qwen3", "use_moe": True}, "decoder.dense_family", "family = qwen3", "--family auto"),
        ({"family": "mixtral"}, "decoder.mixture_family", "use_moe = False", "--use_moe"),
        ({"family": "llama", "dropout": 0.1}, "decoder.dropout", "dropout = 0.1", "--family own"),
        ({"family": "llama", "use_glu": False}, "decoder.use_glu", "use_glu = False", "--family own"),
        (
            {"family": "mixtral", "use_moe": True, "shared_experts": 1},
            "decoder.shared_experts",
            "shared_experts = 1",
            "--family qwen2_moe",
        ),
        ({"family": "dots1", "use_moe": True}, "decoder.shared_experts", "dots1", "--shared_experts 1"),
        ({"vocab_size": 50}, "decoder.vocab_size", "vocab_size = 50, tokenizer = 99 tokens", "--vocab_size 99"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_settings(
    given: dict[str, Any], code: str, named: str, remedy: str
) -> None:
    with pytest.raises(OptionsError) as refused:
        decoder_sizes(DecoderSettings(**given), vocab_size=99)
    problem = refused.value.problem
    assert problem.code == code
    assert named in problem.what
    assert remedy in problem.do


def test_every_fault_is_found_in_one_pass() -> None:
    chosen = DecoderSettings(hidden_size=66, num_kv_heads=3, top_k=2)
    assert [one.code for one in decoder_refusals(chosen)] == ["decoder.heads", "decoder.kv_heads", "decoder.no_mixture"]
    assert decoder_refusals(DecoderSettings()) == []
