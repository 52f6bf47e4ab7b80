"""Table of vision-language architectures: one row each.

A row needs a new file beside this one where images of the architecture become features in a way of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rft_core.errors import DataError
from rft_models.families import llava, qwen_vl
from rft_models.families.image_layout import ImageLayout
from rft_models.families.llava import LlavaImages, TinyLlava
from rft_models.families.qwen_vl import QwenImages, TinyQwenVl
from rft_models.families.tiny_vision import TinyVision


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """One vision-language architecture: what differs between it and others."""

    name: str
    """For people."""
    marker: str
    """Text of a prompt where an image stands, with one placeholder in it."""
    layout: type[ImageLayout]
    """How its images become features, and where these stand in a row."""
    tiny: TinyVision
    """Maker of small models of it."""
    packed: bool = True
    """Whether its decoder runs packed, see `registry.TextFamily`; false: it does where its text part's family does."""
    text_types: Mapping[str, str] = field(default_factory=dict[str, str])
    """`model_type` of its text part -> the text family whose layers it has."""
    default_text_type: str = ""
    """`model_type` of its text part where config.json does not name it."""


VISION_FAMILIES: dict[str, VisionFamily] = {
    "qwen2_vl": VisionFamily(
        name="Qwen2-VL",
        marker=qwen_vl.MARKER,
        layout=QwenImages,
        tiny=TinyQwenVl("qwen2_vl", "Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
        text_types={"qwen2_vl_text": "qwen2"},
    ),
    "qwen2_5_vl": VisionFamily(
        name="Qwen2.5-VL",
        marker=qwen_vl.MARKER,
        layout=QwenImages,
        tiny=TinyQwenVl("qwen2_5_vl", "Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
        text_types={"qwen2_5_vl_text": "qwen2"},
    ),
    "qwen3_vl": VisionFamily(
        name="Qwen3-VL",
        marker=qwen_vl.MARKER,
        layout=QwenImages,
        tiny=TinyQwenVl("qwen3_vl", "Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
        text_types={"qwen3_vl_text": "qwen3"},
    ),
    "llava": VisionFamily(
        name="LLaVA",
        marker=llava.MARKER,
        layout=LlavaImages,
        tiny=TinyLlava(),
        packed=False,
        default_text_type="llama",
    ),
}
"""By `model_type`. A test compares each with its own forward, one sequence at a time, gradients of the tower too."""


def is_vision(model_type: str) -> bool:
    """Return true where models of this type take images here."""
    return model_type in VISION_FAMILIES


def text_type(config: Mapping[str, Any]) -> str:
    """`model_type` of the decoder that a vision-language model's config.json describes; "" where it is plain."""
    text: Mapping[str, Any] = config.get("text_config") or {}
    family = VISION_FAMILIES.get(str(config.get("model_type", "")))
    return str(text.get("model_type") or (family.default_text_type if family is not None else ""))


def text_family(model_type: str) -> str:
    """Return the text family of a decoder: of "qwen2_5_vl_text" it is "qwen2", of a plain one its own."""
    layers = (family.text_types.get(model_type) for family in VISION_FAMILIES.values())
    return next((name for name in layers if name is not None), model_type)


def is_unknown_vision(config: Mapping[str, Any]) -> bool:
    """Return true where a config.json describes a vision-language model of an unknown architecture."""
    return "vision_config" in config and not is_vision(str(config.get("model_type", "")))


def unknown_family(config: Mapping[str, Any], where: str) -> DataError:
    """Return the error for a vision-language model of an unknown architecture."""
    known = ", ".join(f"{family.name} ({model_type})" for model_type, family in VISION_FAMILIES.items())
    text: Mapping[str, Any] = config.get("text_config") or {}
    more = ""
    if text.get("num_experts") or text.get("num_local_experts"):
        more = ", and no mixture of experts with a vision tower"
    return DataError(
        code="vision.unknown_family",
        what=f"model_type {config.get('model_type')!r} takes images, but is not one of the architectures known here",
        where=where,
        why=f"each places features and positions in its own way; tests compare {known} with their own forward{more}",
        do="use a model of one of these architectures, or the directory of a text model",
    )
