"""Compare the logits of packed segments with those of the model's own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rft_core.packed_tokens import PackedTokens
from rft_models.attention.hf_interface import native_attention_mode
from rft_models.backbone.forward_check import Probe, require_equal_logits
from rft_models.backbone.image_check import media_probe
from rft_models.layers.eval_mode import eval_mode
from rft_models.vision.media import Media
from rft_models.vision.tower import VisionTower


def check_logits(
    model: Any,
    tower: VisionTower | None,
    packed_logits: Callable[[PackedTokens], Tensor],
    vocab_size: int,
    *,
    packed: bool,
    device: torch.device,
    dtype: torch.dtype,
    where: str,
) -> None:
    """Compare the logits of two short segments, and of two with images where there is a tower.

    Args:
        model: the whole transformers model.
        tower: its vision tower.
        packed_logits: packed tokens -> [T, V] logits.
        vocab_size: V.
        packed: whether its decoder runs with the packed attention.
        device, dtype: of the computation.
        where: what an error names.

    Raises:
        PreflightError: they differ by more than the weights' precision explains.
    """
    probes = [Probe.of(vocab_size, device)]
    if tower is not None:
        probes.append(media_probe(tower, vocab_size, device))
    for probe in probes:
        pairs = zip(probe.segments, probe.mm_inputs, strict=True)
        with torch.no_grad(), eval_mode(model):
            with native_attention_mode(model, packed=packed):
                expected = torch.cat([_native_logits(model, tower, *pair) for pair in pairs])
            logits = packed_logits(probe.tokens)
        what = f"logits of {type(model).__name__}" + (" with images" if any(probe.mm_inputs) else "")
        require_equal_logits(expected, logits, of=what, dtype=dtype, where=where)


def _native_logits(model: Any, tower: VisionTower | None, tokens: Tensor, media: Media | None) -> Tensor:
    image_inputs = {} if media is None or tower is None else tower.own_inputs(tokens, media)
    return model(input_ids=tokens[None], use_cache=False, **image_inputs).logits[0].float()
