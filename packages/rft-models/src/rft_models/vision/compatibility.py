"""Check that two models read the same prompt and images alike: what one tokenizer encoded goes to both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rft_core.errors import OptionsError
from rft_models.families.vision import is_vision
from rft_models.files.directories import existing_directory, read_json
from rft_models.vision.image_files import require_pillow
from rft_models.vision.processor import MARKER, HfProcessor, load_vision_processor

_SIDES = (96, 64)
"""Pixels of the image that both prepare."""


def refuse_other_inputs(tokenizer: HfProcessor, directory: str | Path, *, flag: str) -> None:
    """Raise `OptionsError` unless the model in `directory` takes what `tokenizer` prepares; `flag` names it.

    One image of noise is prepared by both: tokens, number of features, pixel values and placeholders must be the same.
    """
    path = existing_directory(directory)
    model_type = read_json(path / "config.json").get("model_type", "")
    if not is_vision(model_type):
        raise _refused(flag, path, f"a {model_type} model, which takes no images")
    other = load_vision_processor(path, pixels=tokenizer.pixels)
    # noise, since processors that scale by other rules agree on an image of one colour
    noise = torch.randint(0, 256, (*_SIDES[::-1], 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    image = require_pillow().fromarray(noise.numpy())
    own, theirs = (_prepared(each, image) for each in (tokenizer, other))
    for name in own:
        if own[name] != theirs[name]:
            raise _refused(flag, path, f"its {name} for one image: {theirs[name]}, the policy's: {own[name]}")


def _prepared(tokenizer: HfProcessor, image: Any) -> dict[str, Any]:
    token_ids, media = tokenizer.encode_media(MARKER, [image])
    assert media is not None
    [inputs] = media.images
    return {
        "placeholder": media.image_token_id,
        "number of features": inputs.num_tokens,
        "shape of pixel values": tuple(inputs.pixel_values.shape),
        "tokens": token_ids,
        "pixel values": inputs.digest[:12],
    }


def _refused(flag: str, path: Path, what: str) -> OptionsError:
    return OptionsError(
        code="images.other_inputs",
        what=f"{flag} {path}: {what}",
        where=f"{flag}, --images_key",
        why="prompts are encoded once, with their images, for policy and critic alike",
        do=f"leave {flag} out: the critic then begins with the policy's weights",
    )
