"""Check that a decoder's packed states equal its own and do not depend on later tokens."""

from __future__ import annotations

from typing import Any

import torch

from rft_core.errors import PreflightError
from rft_models.backbone.backbone import Backbone
from rft_models.backbone.forward_check import Probe, difference, require_equal_logits, tolerance
from rft_models.layers.eval_mode import eval_mode


def check_states(model: Any, backbone: Backbone, *, device: torch.device, dtype: torch.dtype, where: str) -> None:
    """Compare the packed forward with the decoder's own on two short segments; look for states that see later tokens.

    Raises:
        PreflightError: the states differ by more than the weights' precision explains, or a token's state
            depends on tokens behind it.
    """
    with torch.no_grad(), eval_mode(model):
        probe = Probe.of(model.get_input_embeddings().weight.shape[0], device)
        expected = torch.cat([backbone.own_states(tokens) for tokens in probe.segments])
        packed = backbone.hidden_states(probe.tokens)
        # the last segment without its last token: no state of the others may differ from before
        beginning = backbone.own_states(probe.segments[-1][:-1])
    name = type(model).__name__
    require_equal_logits(expected, packed, of=f"hidden states of {name}", dtype=dtype, where=where)
    if not difference(expected[-1 - len(beginning) : -1], beginning) <= tolerance(dtype):
        raise PreflightError(
            code="models.looks_ahead",
            what=f"the state of a token in {name} changes with later tokens",
            where=where,
            why="a value is an estimate from the tokens so far, before the next is sampled",
            do="use the directory of a causal language model",
        )
