"""Registry of vision-language architectures, with what each needs of a packed row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rft_core.errors import DataError


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """Properties in which the vision-language architectures differ."""

    name: str
    """For people."""
    marker: str
    """Text of a prompt where an image stands, with one placeholder in it."""
    three_axes: bool
    """Positions are (frame, row, column) triples, as `mrope.positions_of` computes them; false: one number a token."""


_QWEN_MARKER = "<|vision_start|><|image_pad|><|vision_end|>"

VISION_FAMILIES: dict[str, VisionFamily] = {
    "qwen2_vl": VisionFamily("Qwen2-VL", _QWEN_MARKER, True),
    "qwen2_5_vl": VisionFamily("Qwen2.5-VL", _QWEN_MARKER, True),
    "qwen3_vl": VisionFamily("Qwen3-VL", _QWEN_MARKER, True),
    "llava": VisionFamily("LLaVA", "<image>", False),
}
"""By `model_type`. A test compares each with its own forward, one sequence at a time, gradients of the tower too."""

VISION_TEXT_TYPES = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""`model_type` of a vision-language model's text part -> the text family whose layers it has."""


def is_vision(model_type: str) -> bool:
    """Return true where models of this type take images here."""
    return model_type in VISION_FAMILIES


def text_type(config: Mapping[str, Any]) -> str:
    """`model_type` of the decoder that a vision-language model's config.json describes; "" where it is plain."""
    text: Mapping[str, Any] = config.get("text_config") or {}
    return str(text.get("model_type") or ("llama" if config.get("model_type") == "llava" else ""))


def text_family(model_type: str) -> str:
    """Return the text family of a decoder: of "qwen2_5_vl_text" it is "qwen2", of a plain one its own."""
    return VISION_TEXT_TYPES.get(model_type, model_type)


def is_unknown_vision(config: Mapping[str, Any]) -> bool:
    """Return true where a config.json describes a vision-language model of an unknown architecture."""
    return "vision_config" in config and not is_vision(str(config.get("model_type", "")))


def unknown_family(config: Mapping[str, Any], where: str) -> DataError:
    """Return the error for a vision-language model of an unknown architecture."""
    known = ", ".join(f"{family.name} ({model_type})" for model_type, family in VISION_FAMILIES.items())
    text: Mapping[str, Any] = config.get("text_config") or {}
    more = ""
    if text.get("num_experts") or text.get("num_local_experts"):
        more = ", and a mixture of experts under a vision tower is not"
    return DataError(
        code="vision.unknown_family",
        what=f"model_type {config.get('model_type')!r} takes images, and is none of the architectures known here",
        where=where,
        why=f"each places features and positions its own way; held to their own forward by tests are {known}{more}",
        do="use a model of one of these architectures, or the directory of a text model",
    )
