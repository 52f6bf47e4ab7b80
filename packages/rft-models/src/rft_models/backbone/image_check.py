"""Two short segments with an image each, that a forward is tried on."""

from __future__ import annotations

from typing import Any

import torch

from rft_core.packed_tokens import PackedTokens
from rft_models.attention.hf_interface import native_attention_mode
from rft_models.backbone.backbone import Backbone
from rft_models.backbone.forward_check import Probe, require_equal_logits
from rft_models.layers.eval_mode import eval_mode
from rft_models.vision.media import Media
from rft_models.vision.tower import VisionTower

_NUM_TEXT = (4, 3)
"""Text tokens of the segments."""


def media_probe(tower: VisionTower, vocab_size: int, device: torch.device) -> Probe:
    """Build the probe of two segments with an image each."""
    media = [tower.probe(seed) for seed in range(len(_NUM_TEXT))]
    segments: list[torch.Tensor] = []
    for one, length in zip(media, _NUM_TEXT, strict=True):
        text = (torch.arange(length, device=device) * 5 + 2) % (tower.image_token_id or vocab_size)  # no placeholder
        images = torch.full((one.num_tokens,), tower.image_token_id, device=device)
        segments.append(torch.cat([text[:1], images, text[1:]]))
    return Probe(segments, PackedTokens.of_segments(segments, mm_inputs=media))


def check_image_states(
    model: Any, backbone: Backbone, tower: VisionTower, *, device: torch.device, dtype: torch.dtype, where: str
) -> None:
    """Compare the packed states of two short segments with images with those of the model's own forward.

    Args:
        model: without an output matrix, ...Model of transformers.
        backbone: its decoder.
        tower: its vision tower.
        device, dtype: of the weights.
        where: what an error names.

    Raises:
        PreflightError: they differ by more than the weights' precision explains.
    """
    with torch.no_grad(), eval_mode(model):
        probe = media_probe(tower, model.get_input_embeddings().weight.shape[0], device)
        pairs = zip(probe.segments, probe.mm_inputs, strict=True)
        expected = [_own_states(model, backbone, tower, *pair) for pair in pairs]
        packed = backbone.hidden_states(probe.tokens)
    what = f"hidden states of {type(model).__name__} with images"
    require_equal_logits(torch.cat(expected), packed, of=what, dtype=dtype, where=where)


def _own_states(
    model: Any, backbone: Backbone, tower: VisionTower, tokens_L: torch.Tensor, media: Media | None
) -> torch.Tensor:
    """Compute the [L, D] states of one sequence by the model's own forward."""
    image_inputs = {} if media is None else tower.own_inputs(tokens_L, media)
    with native_attention_mode(model, packed=backbone.packed):
        return model(input_ids=tokens_L[None], use_cache=False, **image_inputs).last_hidden_state[0]
