"""Evaluation mode for a while: a check or a generation that raises leaves the model in the mode that it found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rft_models.backbone.causality_check import check_states
from rft_models.decode.hf_decoder import HfDecoder
from rft_models.layers.eval_mode import eval_mode
from rft_models.layers.moe_router import Router, verify_router
from rft_models.policy.load import make_policy
from rft_models.policy.tensor_parallel_plan import apply_tensor_parallel

Build = Callable[..., Any]


class Interrupted(Exception):
    """What a forward raises here."""


class Alone:
    rank, world_size = 0, 1

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    max = sum


def fails(*_: Any) -> None:
    raise Interrupted


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_comes_back_also_after_an_error(training: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.5)).train(training)
    with eval_mode(model):
        assert not model[0].training
    assert model[0].training is training
    with pytest.raises(Interrupted), eval_mode(model):
        fails()
    assert model[0].training is training


def decodes(policy: Any) -> None:
    decoder = HfDecoder(policy)
    decoder.prefill(decoder.new_cache(1, 8), torch.tensor([[3, 4]]), torch.tensor([2]), [1])


CALLS: dict[str, Callable[[Any], object]] = {
    "logits": lambda policy: policy.verify(),
    "states": lambda policy: check_states(
        policy.model.get_decoder(), policy.backbone, device=policy.device, dtype=policy.dtype, where="here"
    ),
    "decode": decodes,
    "cut": lambda policy: apply_tensor_parallel(policy, lambda: None, Alone(), shares_head=False),
    "router": lambda policy: verify_router(policy.model, Router(4, 2), "here"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_forward_that_raises_leaves_the_model_in_training_mode(call: str, tiny_model: Build) -> None:
    policy = make_policy(tiny_model("mixtral"), None, packed=True)
    policy.train()
    policy.model.get_decoder().layers[0].register_forward_hook(fails)
    with pytest.raises(Interrupted):
        CALLS[call](policy)
    assert policy.model.training
    assert policy.model.get_decoder().layers[0].training
