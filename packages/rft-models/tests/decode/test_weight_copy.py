"""A second set of weights: the same logits to the bit, written in place, complete or refused, and really freed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.errors import PreflightError, ServiceError
from rft_core.packed_tokens import PackedTokens
from rft_models.decode.fast_decoder import FastDecoder, decoder_for
from rft_models.decode.hf_decoder import HfDecoder
from rft_models.decode.weight_copy import GenerationCopy, is_sharded, needs_copy
from rft_models.families import patches
from rft_models.families.registry import fast_decode_families, packed_families
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.freezing import FreezeRules, freeze
from rft_models.policy.load import make_policy

Build = Callable[..., Any]
EVERY = sorted({*packed_families(), "gpt2"})


def policy_of(tiny_model: Build, model_type: str, **changes: Any) -> CausalPolicy:
    return make_policy(tiny_model(model_type, **changes), None, packed=model_type in packed_families())


def fill(twin: GenerationCopy, policy: CausalPolicy) -> None:
    twin.begin()
    for name, tensor in policy.named_parameters():
        twin.write(name, tensor)
    twin.finish()


def change(policy: CausalPolicy) -> None:
    """Every parameter moves, as after a step."""
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            parameter.add_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter).to(parameter.dtype))


def logits(model: Any) -> Tensor:
    """[5, V]: two prompts, one of them twice, then a step of three rows."""
    cache = model.new_cache(4, 16)
    first = model.prefill(cache, torch.tensor([[3, 5, 7, 9], [4, 6, 0, 0]]), torch.tensor([4, 2]), [2, 1])
    return torch.cat([first, model.step(cache, torch.tensor([11, 12, 13]))])


def own_logits(policy: CausalPolicy) -> Tensor:
    return logits(decoder_for(policy))


@pytest.mark.parametrize("model_type", EVERY)
def test_the_copy_computes_what_the_policy_computes(tiny_model: Build, model_type: str) -> None:
    policy = policy_of(tiny_model, model_type)
    twin = GenerationCopy(policy)
    fill(twin, policy)
    first = own_logits(policy)
    assert torch.equal(logits(twin), first)
    places = {name: tensor.data_ptr() for name, tensor in twin.named_tensors()}
    assert list(places) == [name for name, _ in policy.named_parameters()]
    change(policy)
    assert torch.equal(logits(twin), first), "it has weights of its own"
    fill(twin, policy)
    assert torch.equal(logits(twin), own_logits(policy))
    assert not torch.equal(logits(twin), first)
    assert {name: tensor.data_ptr() for name, tensor in twin.named_tensors()} == places, "written in place"
    assert not any(tensor.requires_grad for _, tensor in twin.named_tensors())


SEQUENCES = [[3, 5, 7, 9, 2, 8, 1], [4, 6, 11], [2] * 5]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_copy_sends_tokens_where_the_policy_does_until_its_routers_are_others(
    tiny_model: Build, model_type: str, packed: bool
) -> None:
    policy = make_policy(tiny_model(model_type), None, packed=packed).train()
    ours = policy.routes(PackedTokens.of_segments([torch.tensor(one) for one in SEQUENCES]))
    assert ours.shape == (2, 15, 2)
    assert (ours[..., 0] < ours[..., 1]).all(), "in ascending order"
    shared = decoder_for(policy)
    assert isinstance(shared, HfDecoder)
    twin = GenerationCopy(policy)
    fill(twin, policy)
    for theirs in (shared.routes(SEQUENCES), twin.routes(SEQUENCES)):
        assert theirs is not None
        assert torch.equal(theirs, ours)
    assert policy.model.training, "as it was"
    with torch.no_grad():
        for name, tensor in twin.named_tensors():
            if name.endswith("layers.1.mlp.gate.weight"):
                tensor.neg_()
    changed = twin.routes(SEQUENCES)
    assert changed is not None
    same = (changed == ours).all(-1)
    assert same[0].all()
    assert same[1].double().mean() < 0.5, "the experts with the smallest logits, of four"


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2"])
def test_a_dense_model_has_no_routes(tiny_model: Build, model_type: str) -> None:
    policy = policy_of(tiny_model, model_type)
    twin = GenerationCopy(policy)
    fill(twin, policy)
    assert twin.routes(SEQUENCES) is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["qwen2", "gpt2"])
def test_memory_is_that_of_the_parameters_and_nothing_twice(tiny_model: Build, model_type: str, tied: bool) -> None:
    policy = policy_of(tiny_model, model_type, tie_word_embeddings=tied)
    num_bytes = sum(4 * parameter.numel() for _, parameter in policy.named_parameters())
    twin = GenerationCopy(policy)
    assert twin.num_bytes == 0
    fill(twin, policy)
    assert twin.num_bytes == num_bytes
    assert len(dict(twin.named_tensors())) == len(dict(policy.named_parameters()))
    twin.drop()
    assert twin.num_bytes == 0
    fill(twin, policy)
    assert twin.num_bytes == num_bytes
    assert torch.equal(logits(twin), own_logits(policy))


@pytest.mark.parametrize("model_type", ["qwen2", "gemma2", "gpt2"])
def test_a_copy_of_another_type_is_the_policy_rounded(tiny_model: Build, model_type: str) -> None:
    policy = policy_of(tiny_model, model_type)
    twin = GenerationCopy(policy, dtype=torch.bfloat16)
    fill(twin, policy)
    assert twin.dtype is torch.bfloat16
    assert {tensor.dtype for _, tensor in twin.named_tensors()} == {torch.bfloat16}
    rounded = policy_of(tiny_model, model_type, dtype=torch.bfloat16)
    with torch.no_grad():
        for (_, ours), (_, theirs) in zip(policy.named_parameters(), rounded.named_parameters(), strict=True):
            theirs.copy_(ours)
    assert torch.equal(logits(twin), own_logits(rounded))
    assert {parameter.dtype for _, parameter in policy.named_parameters()} == {torch.float32}


def test_tied_matrices_are_one_under_either_name(tiny_model: Build) -> None:
    policy = policy_of(tiny_model, "qwen2", tie_word_embeddings=True)
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    twin = GenerationCopy(policy)
    tensors = dict(policy.named_parameters())
    for names in ([embedding], [head], [embedding, head], [head, embedding]):
        twin.drop()
        twin.begin()
        written = [twin.write(name, tensors[embedding]) for name in names]
        assert {name for name, _ in written} == {embedding} == {twin.own_name(name) for name in names}
        for name, tensor in tensors.items():
            if name != embedding:
                twin.write(name, tensor)
        twin.finish()
        assert torch.equal(logits(twin), own_logits(policy))


def test_what_is_not_the_model_is_refused_by_name(tiny_model: Build) -> None:
    policy = policy_of(tiny_model, "qwen2")
    twin = GenerationCopy(policy)
    tensors = dict(policy.named_parameters())
    norm = "model.norm.weight"

    def write_all(writes: Sequence[tuple[str, Tensor]]) -> None:
        twin.begin()
        for name, tensor in writes:
            twin.write(name, tensor)
        twin.finish()

    def refused(*writes: tuple[str, Tensor]) -> str:
        with pytest.raises(ServiceError) as caught:
            write_all(writes)
        assert caught.value.problem.code == "models.copy_incomplete"
        return caught.value.problem.what

    assert "model.nrom.weight is not a tensor" in refused(("model.nrom.weight", tensors[norm]))
    assert f"{norm} was sent twice" in refused((norm, tensors[norm]), (norm, tensors[norm]))
    assert "[33], the model's has [32]" in refused((norm, torch.ones(33)))
    assert "[32, 1], the model's has [32]" in refused((norm, torch.ones(32, 1)))
    missing = refused(*((name, tensor) for name, tensor in tensors.items() if name != norm))
    assert f"1 of {len(tensors)} tensors were not sent: {norm}" in missing
    assert f"and {len(tensors) - 5} more" in refused()


def test_buffers_are_those_of_the_policy_at_every_load(tiny_model: Build) -> None:
    policy = policy_of(tiny_model, "qwen2")
    policy.model.model.rotary_emb.inv_freq.mul_(0.5)
    twin = GenerationCopy(policy)
    fill(twin, policy)
    assert torch.equal(logits(twin), own_logits(policy))
    assert not torch.equal(logits(twin), own_logits(policy_of(tiny_model, "qwen2")))
    policy = policy_of(tiny_model, "gemma")
    twin = GenerationCopy(policy)
    fill(twin, policy)
    policy.model.model.embed_tokens.embed_scale.mul_(2.0)
    fill(twin, policy)
    assert torch.equal(logits(twin), own_logits(policy))


def test_frozen_parameters_are_copied_like_all(tiny_model: Build) -> None:
    policy = policy_of(tiny_model, "qwen2")
    freeze(policy, FreezeRules(prefixes=("model.embed_tokens",)))
    twin = GenerationCopy(policy)
    fill(twin, policy)
    assert torch.equal(logits(twin), own_logits(policy))


def test_a_patch_acts_on_the_copy_too(tiny_model: Build) -> None:
    def scale(model: Any) -> None:
        model.model.norm.variance_epsilon = 0.5

    patches.register_patch("qwen2", scale)
    try:
        policy = make_policy(patches.apply(tiny_model("qwen2")), None, packed=True)
        twin = GenerationCopy(policy)
    finally:
        patches.unregister_patch("qwen2", scale)
    fill(twin, policy)
    assert torch.equal(logits(twin), own_logits(policy))
    assert not torch.equal(logits(twin), own_logits(policy_of(tiny_model, "qwen2")))


def test_a_model_that_its_configuration_does_not_describe_is_refused(tiny_model: Build) -> None:
    policy = policy_of(tiny_model, "qwen2")
    policy.model.model.layers[0].self_attn.extra = torch.nn.Linear(2, 2)
    with pytest.raises(PreflightError, match=r"layers\.0\.self_attn\.extra\.weight") as caught:
        GenerationCopy(policy)
    assert caught.value.problem.code == "models.no_engine_copy"


def test_nothing_is_drawn_from_the_global_generator(tiny_model: Build) -> None:
    policy = policy_of(tiny_model, "qwen2")
    before = torch.get_rng_state()
    fill(GenerationCopy(policy), policy)
    assert torch.equal(torch.get_rng_state(), before)


class Shard(torch.nn.Parameter):
    """As torch's DTensor says where it is."""

    placements: tuple[Any, ...] = (SimpleNamespace(is_replicate=lambda: False),)


def test_a_copy_is_wanted_for_shards_and_for_another_type(tiny_model: Build) -> None:
    policy = policy_of(tiny_model, "qwen2")
    assert not needs_copy(policy)
    assert not needs_copy(policy, torch.float32)
    assert needs_copy(policy, torch.bfloat16)
    whole = policy.model.model.norm.weight
    whole.placements = (SimpleNamespace(is_replicate=lambda: True),)
    assert not needs_copy(policy), "replicated"
    policy.model.model.norm.weight = Shard(whole.detach())
    assert needs_copy(policy)
    assert is_sharded(policy.model.model.norm.weight)
    twin = GenerationCopy(policy)
    twin.begin()
    with pytest.raises(AssertionError, match=r"shard of model\.norm"):
        twin.write("model.norm.weight", policy.model.model.norm.weight)


def test_the_fast_path_is_taken_where_the_policy_takes_it(tiny_model: Build) -> None:
    for model_type in EVERY:
        policy = policy_of(tiny_model, model_type)
        twin = GenerationCopy(policy)
        fill(twin, policy)
        kind = type(decoder_for(policy).new_cache(1, 8))
        assert type(twin.new_cache(1, 8)) is kind, model_type
        assert (kind.__name__ == "StaticCache") == (model_type in fast_decode_families())


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2"])
def test_memory_of_keys_and_values_is_that_of_the_policy_s_own_decoder(tiny_model: Build, model_type: str) -> None:
    policy = policy_of(tiny_model, model_type)
    twin, decoder = GenerationCopy(policy), decoder_for(policy)
    assert isinstance(decoder, FastDecoder | HfDecoder)
    expected = decoder.cache_bytes(3, 50, num_prompts=2, prompt_len=7)
    assert twin.cache_bytes(3, 50, num_prompts=2, prompt_len=7) == expected
    assert twin.max_positions == decoder.max_positions == 96
    assert twin.vocab_size == decoder.vocab_size == 61
    fill(twin, policy)
    cache = twin.new_cache(1, 5)
    twin.prefill(cache, torch.tensor([[3, 5]]), torch.tensor([2]), [1])
    with pytest.raises(ValueError, match="1 rows of 5 tokens"):
        twin.prefill(cache, torch.tensor([[3, 5]]), torch.tensor([2]), [1])


def test_what_has_two_names_in_one_module_is_still_one_tensor(tiny_model: Build) -> None:
    def give_a_second_name(model: Any) -> None:
        model.model.norm.gain = model.model.norm.weight

    patches.register_patch("qwen2", give_a_second_name)
    try:
        policy = make_policy(patches.apply(tiny_model("qwen2")), None, packed=True)
        twin = GenerationCopy(policy)
    finally:
        patches.unregister_patch("qwen2", give_a_second_name)
    fill(twin, policy)
    assert twin.own_name("model.norm.gain") == "model.norm.weight"
    assert torch.equal(logits(twin), own_logits(policy))
    twin.begin()
    assert twin.write("model.norm.gain", torch.ones(32))[0] == "model.norm.weight"
    assert dict(twin.named_tensors())["model.norm.weight"].tolist() == [1.0] * 32
