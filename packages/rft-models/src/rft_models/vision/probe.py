"""Two short segments with an image each, that a forward is tried on."""

from __future__ import annotations

import torch

from rft_models.backbone import Probe
from rft_models.vision.rows import MediaInputs
from rft_models.vision.tower import VisionTower

_NUM_TEXT = (4, 3)
"""Text tokens of the segments."""


def media_probe(tower: VisionTower, vocab_size: int, device: torch.device) -> tuple[Probe, MediaInputs]:
    """The segments, and the images of each."""
    media = [tower.probe(seed) for seed in range(len(_NUM_TEXT))]
    segments: list[torch.Tensor] = []
    for one, length in zip(media, _NUM_TEXT, strict=True):
        text = (torch.arange(length, device=device) * 5 + 2) % (tower.image_token_id or vocab_size)  # no placeholder
        images = torch.full((one.num_tokens,), tower.image_token_id, device=device)
        segments.append(torch.cat([text[:1], images, text[1:]]))
    return Probe.of_segments(segments), media
