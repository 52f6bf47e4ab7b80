"""Positions on three axes against each architecture's own `get_rope_index`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rft_models.families.mrope import position_offset, positions_of
from rft_models.policy.load import load_policy
from rft_models.vision.media import ImageInputs, Media

IMAGE = 99


def media_of(grids: list[tuple[int, int]], gaps: list[int]) -> tuple[list[int], Media]:
    """Tokens with text of these lengths before each image and behind the last, and the images."""
    tokens, spans, images = list[int](), list[tuple[int, int]](), list[ImageInputs]()
    for (rows, columns), gap in zip(grids, gaps, strict=False):
        tokens += [5] * gap
        number = rows * columns
        spans.append((len(tokens), number))
        images.append(ImageInputs(torch.zeros(1), (1, 2 * rows, 2 * columns), number, str(len(images))))
        tokens += [IMAGE] * number
    return tokens + [5] * gaps[-1], Media(tuple(images), tuple(spans), IMAGE)


def test_the_example_by_hand() -> None:
    tokens, media = media_of([(2, 3)], [2, 1])
    assert positions_of(len(tokens), media.placed, 2).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    assert position_offset(media.placed, 2) == 5 - 8
    assert position_offset((), 2) == 0


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_they_are_the_models_own(vision_directory: Callable[[str], Path], model_type: str) -> None:
    model = load_policy(vision_directory(model_type)).model.model
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        number = int(torch.randint(1, 4, (1,), generator=generator))
        grids = [tuple(torch.randint(1, 6, (2,), generator=generator).tolist()) for _ in range(number)]
        gaps = torch.randint(1, 5, (number + 1,), generator=generator).tolist()
        tokens, media = media_of(grids, gaps)  # type: ignore[arg-type]
        ids = torch.tensor([tokens])
        own, delta = model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == IMAGE).int(),
            image_grid_thw=torch.tensor([image.grid for image in media.images]),
        )
        assert torch.equal(positions_of(len(tokens), media.placed, 2), own[:, 0])
        assert position_offset(media.placed, 2) == int(delta)
