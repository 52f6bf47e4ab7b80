"""The images of a prompt in a replica's process: the model's own record, made of what the trainer's side sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rft_core.errors import ServiceError
from rft_models.vision.media import ImageInputs, Media


def received_media(plain: Mapping[str, Any], pixel_values: Sequence[Tensor]) -> Media:
    """A `MakeMedia` of `rft_engine.weight_sync.shared_images`.

    Raises:
        ServiceError: the pixel values are not those that were sent.
    """
    pairs = zip(plain["images"], pixel_values, strict=True)
    return Media(
        images=tuple(_image(one, values) for one, values in pairs),
        spans=tuple((int(first), int(number)) for first, number in plain["spans"]),
        image_token_id=int(plain["image_token_id"]),
    )


def _image(plain: Mapping[str, Any], pixel_values: Tensor) -> ImageInputs:
    grid = plain["grid"]
    frames_rows_columns = None if grid is None else (int(grid[0]), int(grid[1]), int(grid[2]))
    image = ImageInputs.of(pixel_values, frames_rows_columns, int(plain["num_tokens"]))
    if image.digest != plain["digest"]:
        raise ServiceError(
            code="engine.replica.image_damaged",
            what=f"an image has the digest {image.digest[:12]}, {plain['digest'][:12]} was sent",
            where=f"engine replica, {plain['path']}",
            why="samples would be drawn after another image than the one that is trained on",
            state="nothing was drawn of this call",
            do="--engine_replicas 1 --max_staleness 0: the engine in this process is given the images themselves",
        )
    return image
