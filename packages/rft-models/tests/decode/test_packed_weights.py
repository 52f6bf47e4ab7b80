"""Decoders with matrices that are laid out for oneDNN follow their weights, and the layouts are counted and freed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rft_models.decode.fast_decoder import DecodableModel, FastDecoder
from rft_models.decode.weight_copy import GenerationCopy
from rft_models.layers import fast_linear
from rft_models.policy.causal_policy import CausalPolicy

Build = Callable[..., PreTrainedModel]
pytestmark = pytest.mark.skipif(not fast_linear._onednn_packs(), reason="this build of torch has no layout of its own")


@pytest.fixture
def policy(tiny_model: Build, monkeypatch: pytest.MonkeyPatch) -> CausalPolicy:
    """In float32, and every product of it goes to oneDNN."""
    monkeypatch.setattr(fast_linear, "_FEW_PRODUCTS", 1)
    monkeypatch.setattr(fast_linear, "_SMALL_WEIGHT", 0)
    return CausalPolicy(tiny_model("qwen2", num_hidden_layers=2), None, packed=False)


def logits(decoder: DecodableModel) -> list[Tensor]:
    """Of two prompts and a step behind them."""
    cache = decoder.new_cache(2, 8)
    first = decoder.prefill(cache, torch.tensor([[3, 9, 4], [8, 2, 5]]), torch.tensor([3, 2]), [1, 1])
    return [first.clone(), decoder.step(cache, torch.tensor([6, 1])).clone()]


def test_a_refresh_takes_over_changed_weights(policy: CausalPolicy) -> None:
    decoder = FastDecoder(policy)
    before = logits(decoder)
    assert decoder.packed_bytes() > 0
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.25)
    decoder.refresh()
    assert decoder.packed_bytes() == 0
    after, fresh = logits(decoder), logits(FastDecoder(policy))
    for one, other, old in zip(after, fresh, before, strict=True):
        assert torch.equal(one, other)
        assert not torch.allclose(one, old)


def test_a_copy_takes_over_what_is_written_and_counts_its_layouts(policy: CausalPolicy) -> None:
    twin = GenerationCopy(policy)
    for factor in (1.0, 1.25):
        twin.begin()
        for name, tensor in policy.merged_parameters():
            twin.write(name, tensor.detach() * factor)
        twin.finish()
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(factor)
        without = twin.num_bytes
        found = logits(twin)
        assert twin.num_bytes > without
        for one, other in zip(found, logits(FastDecoder(policy)), strict=True):
            assert torch.equal(one, other)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.div_(factor)
    twin.drop()
    assert twin.num_bytes == 0
