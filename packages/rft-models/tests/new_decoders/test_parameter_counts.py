"""Parameters of new decoders, counted by hand."""

from __future__ import annotations

from rft_models.new_decoders.parameter_counts import parameter_counts
from rft_models.new_decoders.sizes import decoder_sizes
from rft_models.settings import DecoderSettings

SMALL = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
# queries and output 32 x 32, keys and values 32 x 16, norms of 8 entries of a head, two norms
ATTENTION = 2 * 32 * 32 + 2 * 32 * 16 + 2 * 8 + 2 * 32


def test_a_dense_decoder_acts_whole() -> None:
    sizes = decoder_sizes(DecoderSettings(**SMALL, ffn_hidden_size=48), vocab_size=50)
    counts = parameter_counts(sizes)
    assert counts.total == counts.active == 50 * 32 + 2 * (ATTENTION + 3 * 32 * 48) + 32
    assert counts.describe(sizes) == f"qwen3: {counts.total:,} parameters"


def test_of_a_mixture_the_chosen_experts_act() -> None:
    chosen = DecoderSettings(**SMALL, ffn_hidden_size=16, use_moe=True, num_experts=6, top_k=2)
    sizes = decoder_sizes(chosen, vocab_size=50)
    counts, expert = parameter_counts(sizes), 3 * 32 * 16
    assert counts.total == 50 * 32 + 2 * (ATTENTION + 6 * expert + 6 * 32) + 32
    assert counts.total - counts.active == 2 * 4 * expert
    assert counts.describe(sizes).endswith("act on a token (2 of 6 experts, each 16 wide)")


def test_experts_of_a_token_are_as_wide_together_as_the_dense_part() -> None:
    dense, mixture = (
        parameter_counts(decoder_sizes(DecoderSettings(hidden_size=96, num_heads=4, **more), vocab_size=50))
        for more in ({}, {"use_moe": True})
    )
    routers = 2 * 8 * 96
    assert mixture.active == dense.active + routers
