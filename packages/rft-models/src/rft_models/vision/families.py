"""Which vision-language architectures are known here, and what each asks of a packed row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """What differs between the architectures."""

    name: str
    """For people."""
    marker: str
    """What a prompt says where an image stands, one placeholder in it."""
    three_axes: bool
    """Positions are (frame, row, column) triples, as `positions.positions_of` gives them; false: one number a token."""


_QWEN_MARKER = "<|vision_start|><|image_pad|><|vision_end|>"

VISION_FAMILIES: dict[str, VisionFamily] = {
    "qwen2_vl": VisionFamily("Qwen2-VL", _QWEN_MARKER, True),
    "qwen2_5_vl": VisionFamily("Qwen2.5-VL", _QWEN_MARKER, True),
    "qwen3_vl": VisionFamily("Qwen3-VL", _QWEN_MARKER, True),
    "llava": VisionFamily("LLaVA", "<image>", False),
}
"""By `model_type`. Each is held to its own forward by a test, one sequence at a time, gradients of the tower too."""

VISION_TEXT_TYPES = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""`model_type` of a vision-language model's text part -> the text family whose layers it has."""


def is_vision(model_type: str) -> bool:
    """Whether models of this type take images here."""
    return model_type in VISION_FAMILIES


def text_type(config: Mapping[str, Any]) -> str:
    """`model_type` of the decoder that a vision-language model's config.json describes; "" where it is plain."""
    text: Mapping[str, Any] = config.get("text_config") or {}
    return str(text.get("model_type") or ("llama" if config.get("model_type") == "llava" else ""))


def text_family(model_type: str) -> str:
    """The text family of a decoder: of "qwen2_5_vl_text" it is "qwen2", of a plain one its own."""
    return VISION_TEXT_TYPES.get(model_type, model_type)
