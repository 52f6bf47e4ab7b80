"""Table of text architectures: one row each. Everything not named here takes the general path, exact and slower."""

from __future__ import annotations

from dataclasses import dataclass

from rft_models.families.vision import VISION_FAMILIES
from rft_models.own_decoder.architecture import CLASS_NAME, MODEL_TYPE


@dataclass(frozen=True, slots=True)
class TextFamily:
    """One text architecture: the paths that are exact for it. Without a row it takes the general ones."""

    class_name: str
    """Its class with a head for the next token: known here, since transformers' table of them imports for seconds."""
    packed: bool = True
    """Whether its attention goes through transformers' attention interface with nothing but scaling, a sliding window
    and softcapping, and tokens meet nowhere else. A test compares each with the padded forward."""
    fast_decode: bool = False
    """Whether `FastDecoder` computes its layers: pre-norm RMSNorm blocks, rotary positions, gated MLP."""


TEXT_FAMILIES: dict[str, TextFamily] = {
    "cohere": TextFamily("CohereForCausalLM"),
    "dots1": TextFamily("Dots1ForCausalLM"),
    "gemma": TextFamily("GemmaForCausalLM"),
    "gemma2": TextFamily("Gemma2ForCausalLM"),
    "gemma3_text": TextFamily("Gemma3ForCausalLM"),
    "granite": TextFamily("GraniteForCausalLM"),
    "llama": TextFamily("LlamaForCausalLM", fast_decode=True),
    "mistral": TextFamily("MistralForCausalLM", fast_decode=True),
    "mixtral": TextFamily("MixtralForCausalLM"),
    "olmo2": TextFamily("Olmo2ForCausalLM"),
    "phi3": TextFamily("Phi3ForCausalLM"),
    "qwen2": TextFamily("Qwen2ForCausalLM", fast_decode=True),
    "qwen2_moe": TextFamily("Qwen2MoeForCausalLM"),
    "qwen3": TextFamily("Qwen3ForCausalLM", fast_decode=True),
    "qwen3_moe": TextFamily("Qwen3MoeForCausalLM"),
    "rft_decoder": TextFamily(CLASS_NAME),
    "smollm3": TextFamily("SmolLM3ForCausalLM"),
}
"""By `model_type`."""

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


def packed_families() -> frozenset[str]:
    """Return the `model_type`s of text architectures that run packed, those of the user apart."""
    return frozenset(model_type for model_type, family in TEXT_FAMILIES.items() if family.packed)


def fast_decode_families() -> frozenset[str]:
    """Return the `model_type`s of text architectures that `FastDecoder` computes."""
    return frozenset(model_type for model_type, family in TEXT_FAMILIES.items() if family.fast_decode)


def packs(model_type: str) -> bool:
    """Return true where models of this type run packed."""
    tables = (TEXT_FAMILIES, VISION_FAMILIES, CUSTOM_FAMILIES)
    return any(model_type in table and table[model_type].packed for table in tables)


def custom_classes() -> dict[str, str]:
    """Return the names of the classes that transformers does not have, by `model_type`: this project's, the user's."""
    registered = {model_type: family.class_name for model_type, family in CUSTOM_FAMILIES.items()}
    return {MODEL_TYPE: CLASS_NAME, **registered}
