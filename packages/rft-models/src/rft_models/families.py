"""Which architectures take which path. Everything not named here takes the general one, exact and slower."""

from __future__ import annotations

PACKED_FAMILIES = frozenset(
    {
        "cohere",
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "llama",
        "mistral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
    }
)
"""`model_type`s whose attention goes through transformers' attention interface with nothing but scaling,
a sliding window and softcapping, and which mix tokens nowhere else. Each is held to the padded forward by a test."""

FAST_DECODE_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""`model_type`s that `FunctionalDecoder` computes: pre-norm RMSNorm blocks, rotary positions, gated MLP."""

STATIC_ROTARY = frozenset({"default", "linear", "llama3", "yarn"})
"""`rope_type`s whose frequencies do not depend on the length of the sequence."""

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layer types that a key-value cache describes; the others keep a recurrent state or chunk their attention."""
