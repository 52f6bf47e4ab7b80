"""Settings of images that have no effect, because no column of images is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rft_cli.config.origins import Origin
from rft_cli.config.values import as_text

_OF_ROWS = ("limit_mm_image_per_prompt", "mixed_mm_data", "shuffle_images")
_OF_ANY = ("max_pixels", "min_pixels")


def idle_image_settings(
    values: Mapping[str, Any], origins: Mapping[str, Origin], defaults: Mapping[str, Any]
) -> list[str]:
    """One line for each that was asked for; a command without images has none."""
    if "images_key" not in values or values["images_key"]:
        return []
    names = _OF_ROWS if values.get("image") else (*_OF_ROWS, *_OF_ANY)
    return [
        f"{name} = {as_text(values[name])} ({origins[name]}) has no effect: images_key is empty "
        f"({origins['images_key']})"
        for name in names
        if name in values and origins[name].kind != "default" and values[name] != defaults[name]
    ]
