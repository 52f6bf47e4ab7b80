"""Sets of architectures by path. Everything not named here takes the general path, exact and slower."""

from __future__ import annotations

from dataclasses import dataclass

PACKED_FAMILIES = frozenset(
    {
        "cohere",
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
    }
)
"""`model_type`s whose attention goes through transformers' attention interface with nothing but scaling,
a sliding window and softcapping, and which mix tokens nowhere else. A test compares each with the padded forward."""

PACKED_VISION_FAMILIES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""The same of vision-language models; of LLaVA it is its text part's family that counts."""

FAST_DECODE_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""`model_type`s that `FastDecoder` computes: pre-norm RMSNorm blocks, rotary positions, gated MLP."""

STATIC_ROTARY = frozenset({"default", "linear", "llama3", "yarn"})
"""`rope_type`s whose frequencies do not depend on the length of the sequence."""

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layer types that a key-value cache describes; the others keep a recurrent state or chunk their attention."""


@dataclass(frozen=True, slots=True)
class CustomFamily:
    """Architecture registered by the user, see `custom.register_family`."""

    class_name: str
    packed: bool


CUSTOM_FAMILIES: dict[str, CustomFamily] = {}
"""By `model_type`."""


def packs(model_type: str) -> bool:
    """Return true where models of this type run packed."""
    known = model_type in PACKED_FAMILIES or model_type in PACKED_VISION_FAMILIES
    return known or (model_type in CUSTOM_FAMILIES and CUSTOM_FAMILIES[model_type].packed)


def custom_classes() -> dict[str, str]:
    """Return the names of the classes that the user registered, by `model_type`."""
    return {model_type: family.class_name for model_type, family in CUSTOM_FAMILIES.items()}
