"""Number of LoRA weights of a decoder, against r (in + out) by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rft.planning.lora_memory import adapter_weights
from rft_dist.planning.memory_estimate import DecoderSizes

H, Q, K, F, L = 48, 40, 24, 104, 5
SIZES = DecoderSizes(vocab=1009, hidden=H, layers=L, query_width=Q, kv_width=K, ffn=F, tied=True)
ATTENTION = {"q_proj": H + Q, "k_proj": H + K, "v_proj": H + K, "o_proj": Q + H}
FEED_FORWARD = {"gate_proj": H + F, "up_proj": H + F, "down_proj": F + H}


def counted(sizes: DecoderSizes = SIZES, **values: Any) -> tuple[int, list[str]]:
    return adapter_weights({"lora_rank": 3, "target_modules": "all-linear", "lora_type": "lora", **values}, sizes)


@pytest.mark.parametrize("rank", [0, None])
def test_without_a_rank_there_are_none(rank: int | None) -> None:
    assert counted(lora_rank=rank) == (0, [])


@pytest.mark.parametrize("name", [*ATTENTION, *FEED_FORWARD])
def test_a_layer_has_its_rank_times_its_widths_in_every_block(name: str) -> None:
    assert counted(target_modules=name) == (L * 3 * (ATTENTION | FEED_FORWARD)[name], [])


def test_all_linear_layers_by_word_or_by_silence() -> None:
    everything = L * 3 * sum((ATTENTION | FEED_FORWARD).values())
    assert counted() == counted(target_modules="") == counted(target_modules=" , ") == (everything, [])


def test_names_count_once_and_by_their_last_part() -> None:
    expected = L * 3 * (ATTENTION["q_proj"] + ATTENTION["v_proj"])
    assert counted(target_modules="self_attn.q_proj, v_proj,q_proj") == (expected, [])


def test_a_layer_that_is_not_known_is_told_and_not_counted() -> None:
    number, [note] = counted(target_modules="q_proj,odd")
    assert number == L * 3 * ATTENTION["q_proj"]
    assert "odd" in note
    assert "q_proj" not in note


def test_dora_has_a_magnitude_a_row() -> None:
    rows = {"k_proj": K, "down_proj": H}
    for name, high in rows.items():
        plain, _ = counted(target_modules=name)
        assert counted(target_modules=name, lora_type="dora") == (plain + L * high, [])


def test_of_a_mixture_the_shared_experts_alone_have_adapters() -> None:
    mixture = replace(SIZES, num_experts=4, experts_per_token=2)
    assert counted(mixture) == (L * 3 * sum(ATTENTION.values()), [])
    shared = replace(mixture, shared_ffn=50)
    assert counted(shared)[0] == L * 3 * (sum(ATTENTION.values()) + 3 * (H + 50))
    gated = replace(shared, shared_gate=True)
    assert counted(gated)[0] == counted(shared)[0] + L * 3 * (H + 1)
