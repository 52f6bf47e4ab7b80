"""Patches act on models of their kind when they are loaded, and on every path that computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rft_core.errors import OptionsError, PreflightError
from rft_core.packed_tokens import PackedTokens
from rft_models.decode.fast_decoder import FastDecoder, decoder_for
from rft_models.decode.hf_decoder import HfDecoder
from rft_models.families import patches
from rft_models.families.patches import is_patched, register_patch, registered_patches, unregister_patch
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy, load_reference


@pytest.fixture(autouse=True)
def only_own_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_PATCHES", {})


def halve_the_mlp(model: Any) -> None:
    """A forward of its own, with the same weights."""
    mlp = model.model.layers[0].mlp
    original = mlp.forward
    mlp.forward = lambda hidden: 0.5 * original(hidden)


def logprobs(policy: CausalPolicy) -> torch.Tensor:
    tokens = torch.tensor([2, 5, 7, 3, 9])
    with torch.no_grad():
        found, _ = policy.token_logprobs(
            PackedTokens(tokens, torch.arange(5), torch.zeros(5, dtype=torch.int64), tokens >= 0)
        )
    return found


def test_a_patch_changes_models_of_its_kind_from_then_on(character_directory: Path) -> None:
    before = load_policy(character_directory)
    register_patch("qwen2", halve_the_mlp)
    after, reference = load_policy(character_directory), load_reference(character_directory)
    assert (is_patched(before.model), is_patched(after.model), is_patched(reference.model)) == (False, True, True)
    assert not torch.allclose(logprobs(before), logprobs(after), atol=1e-3)
    assert torch.equal(logprobs(after), logprobs(reference))
    unregister_patch("qwen2", halve_the_mlp)
    assert torch.equal(logprobs(load_policy(character_directory)), logprobs(before))


def test_models_of_another_kind_are_left_alone(character_directory: Path) -> None:
    register_patch("llama", halve_the_mlp)
    assert not is_patched(load_policy(character_directory).model)


def test_a_patched_model_is_decoded_by_its_own_forward(character_directory: Path) -> None:
    assert isinstance(decoder_for(load_policy(character_directory)), FastDecoder)
    register_patch("qwen2", halve_the_mlp)
    policy = load_policy(character_directory)
    decoder = decoder_for(policy)
    assert isinstance(decoder, HfDecoder)
    tokens = torch.tensor([[2, 5, 7, 3]])
    logits = decoder.prefill(decoder.new_cache(1, 8), tokens, torch.tensor([4]), [1])
    decoded = logits[0].log_softmax(-1)[9]
    assert float(decoded) == pytest.approx(float(logprobs(policy)[4]), abs=1e-5)


def test_patches_act_in_order_and_once(character_directory: Path) -> None:
    acted: list[str] = []

    def first(model: Any) -> None:
        acted.append("first")

    def second(model: Any) -> None:
        acted.append("second")

    for patch in (first, second, first):
        register_patch("qwen2", patch)
    assert registered_patches("qwen2") == (first, second)
    load_policy(character_directory)
    assert acted == ["first", "second"]
    unregister_patch("qwen2", first)
    unregister_patch("qwen2", first)
    unregister_patch("llama", first)
    assert registered_patches("qwen2") == (second,)
    unregister_patch("qwen2", second)
    assert patches.all_registered() == []


def test_a_patch_may_give_another_model(character_directory: Path) -> None:
    made: list[nn.Module] = []

    def rebuilt(model: Any) -> Any:
        made.append(type(model)(model.config))
        return made[0]

    register_patch("qwen2", rebuilt)
    policy = load_policy(character_directory)
    assert policy.model is made[0]
    assert is_patched(policy.model)


def test_a_patch_that_the_packed_forward_would_not_see_is_refused(character_directory: Path) -> None:
    def sharpen(model: Any) -> None:
        original = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            output.logits = output.logits * 3.0
            return output

        model.forward = forward

    register_patch("qwen2", sharpen)
    with pytest.raises(PreflightError):
        load_policy(character_directory)


def test_a_patch_that_would_never_act_is_refused() -> None:
    with pytest.raises(OptionsError, match="'qwen-two' is not one of transformers'") as caught:
        register_patch("qwen-two", halve_the_mlp)
    assert caught.value.problem.code == "models.unknown_patch"
    assert patches.all_registered() == []
