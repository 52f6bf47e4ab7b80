"""Contradictions between image settings and the others, and image settings that have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rft.config.rules.sourced_values import MakeProblem
from rft.config.values import as_text
from rft.resolved import Origin
from rft_core.errors import Problem
from rft_engine.registry import REFERENCE_ENGINE, engine_kind

_OF_ROWS = ("mixed_mm_data", "shuffle_images")
_OF_ANY = ("limit_mm_image_per_prompt", "max_pixels", "min_pixels")


def image_problems(values: Mapping[str, Any], make_problem: MakeProblem) -> Iterator[Problem]:
    """Contradictions; a command without images has none."""
    setting = next((name for name in ("images_key", "image") if values.get(name)), None)
    engine = engine_kind(values.get("engine_type", REFERENCE_ENGINE))
    if setting and not engine.can.supports_images:
        why = f"{engine.title} is given token ids here, not images"
        yield make_problem(
            f"engine.{engine.name}.images", [setting, "engine_type"], why, "--engine_type native, or vllm"
        )
    if values.get("image") and values.get("prompt_data"):
        why = "image goes with the one text of prompt; rows name theirs in a column"
        yield make_problem("images.of_rows", ["image", "prompt_data"], why, "--images_key image, without --image")


def idle_image_settings(
    values: Mapping[str, Any], origins: Mapping[str, Origin], defaults: Mapping[str, Any]
) -> list[str]:
    """Return one line for each image setting without effect that was asked for; none for a command without images."""
    if "images_key" not in values:
        return []
    lines: list[str] = []
    if values["images_key"] and values.get("prompt"):
        lines.append(
            f"images_key = {values['images_key']} ({origins['images_key']}) has no effect: "
            f"prompt is one text ({origins['prompt']}), whose images are named by image"
        )
    elif values["images_key"]:
        return []
    names = _OF_ROWS if values.get("image") else (*_OF_ROWS, *_OF_ANY)
    state = f"images_key is empty ({origins['images_key']})" if not values["images_key"] else "no row is read"
    return lines + [
        f"{name} = {as_text(values[name])} ({origins[name]}) has no effect: {state}"
        for name in names
        if name in values and origins[name].kind != "default" and values[name] != defaults[name]
    ]
