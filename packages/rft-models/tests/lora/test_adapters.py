"""Adapters give peft's own numbers through every forward, and without them the model is what it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from rft_core.errors import OptionsError
from rft_core.packed_tokens import PackedTokens
from rft_models.decode.fast_decoder import FastDecoder, decoder_for
from rft_models.keyed_masks.keyed_dropout import KeyedDropout, RowKeys, mix
from rft_models.lora.adapters import AdapterRules, BaseModelView, preview
from rft_models.policy.adaptation import add_adapters
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.freezing import FreezeRules
from rft_models.policy.load import load_policy, load_reference, make_policy
from rft_models.settings import AdapterKind

Build = Callable[..., Any]
VOCAB, LENGTHS = 61, (7, 1, 12, 3, 9)
KINDS: list[AdapterKind] = ["lora", "rslora", "dora"]


def batch(seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (sum(LENGTHS),), generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    segments = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return ids, positions, segments, positions > 0


def shake(policy: CausalPolicy, size: float = 0.3) -> None:
    """Values that an adapter has after training, so that every part of it is seen."""
    assert policy.adapters is not None
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for _, parameter in policy.adapters.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * size)


def adapted(model: Any, packed: bool = True, **rules: Any) -> CausalPolicy:
    policy = make_policy(model, None, packed=packed)
    add_adapters(policy, AdapterRules(**{"rank": 3, "alpha": 5.0} | rules), seed=4)
    shake(policy)
    return policy


def peft_twin(model: Any, policy: CausalPolicy) -> Any:
    """peft's own model with the same adapter, given through the names of its files."""
    assert policy.adapters is not None
    config = copy.deepcopy(policy.adapters.config)
    config.base_model_name_or_path = None
    twin = peft.get_peft_model(model, config)
    tensors = policy.adapters.tensors(policy.model.state_dict().items())
    given = {name: tensor.clone() for name, tensor in tensors.items()}
    report = peft.set_peft_model_state_dict(twin, given)
    assert not report.unexpected_keys
    assert not [name for name in report.missing_keys if "lora" in name]
    return twin.eval()


def peft_logprobs(twin: Any) -> Tensor:
    """One sequence at a time by the model's own attention."""
    ids, _, segments, _ = batch()
    found = []
    for number in range(len(LENGTHS)):
        tokens = ids[segments == number]
        logits = twin(input_ids=tokens[None], use_cache=False).logits[0].float()
        each = torch.zeros(len(tokens))
        each[1:] = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        found.append(each)
    return torch.cat(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma2", "qwen3_moe", "qwen2_moe", "phi3"])
def test_packed_log_probs_and_gradients_are_those_of_peft(family: str, kind: AdapterKind, tiny_model: Build) -> None:
    policy = adapted(tiny_model(family), kind=kind)
    twin = peft_twin(tiny_model(family), policy)
    found, _ = policy.token_logprobs(PackedTokens(*batch()))
    expected = peft_logprobs(twin)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weights = torch.linspace(-1, 1, len(found))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert policy.adapters is not None
    theirs = {name.removeprefix("base_model.model."): p for name, p in twin.named_parameters()}
    names = [name for name, parameter in policy.trainable_parameters()]
    assert names == [name for name, _ in policy.adapters.named_parameters()]
    for name, parameter in policy.trainable_parameters():
        ours, other = parameter.grad, theirs[name].grad
        assert ours is not None
        # float32 sums in another order differ by about 1e-5 of the norm; which ones do depends on the CPU
        assert (ours - other).norm() <= 5e-5 * other.norm() + 1e-6, name
        assert other.norm() > 0, name


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "qwen3"])
def test_the_models_own_attention_and_transposed_layers_too(family: str, tiny_model: Build) -> None:
    policy = adapted(tiny_model(family), packed=False)
    twin = peft_twin(tiny_model(family), policy)
    with torch.no_grad():
        torch.testing.assert_close(
            policy.token_logprobs(PackedTokens(*batch()))[0], peft_logprobs(twin), atol=1e-5, rtol=1e-5
        )


def test_the_fused_loss_and_the_split_one_have_the_same_gradients(tiny_model: Build) -> None:
    policy = adapted(tiny_model("qwen2"))
    ids, _, _, wanted = batch()
    weights = torch.linspace(-1, 1, len(ids))
    policy.fused_loss(
        PackedTokens(*batch()), lambda logprobs, entropy, tokens: logprobs * weights[tokens]
    ).loss.backward()
    fused = [parameter.grad.clone() for _, parameter in policy.trainable_parameters() if parameter.grad is not None]
    policy.model.zero_grad()
    (policy.token_logprobs(PackedTokens(*batch()))[0] * weights * wanted).sum().backward()
    for ours, (name, parameter) in zip(fused, policy.trainable_parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_a_shared_prompt_gives_what_separate_prompts_give(tiny_model: Build) -> None:
    policy = adapted(tiny_model("qwen2"))
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, VOCAB, (9,), generator=generator)
    answers = [torch.randint(0, VOCAB, (4,), generator=generator) for _ in range(3)]
    ids = torch.cat([part for answer in answers for part in (prompt, answer)])
    positions, segments = torch.arange(13).repeat(3), torch.arange(3).repeat_interleave(13)
    together, _ = policy.token_logprobs(PackedTokens(ids, positions, segments, positions > 8))
    for number in range(3):
        rows = segments == number
        alone, _ = policy.token_logprobs(PackedTokens(ids[rows], positions[rows], segments[rows], positions[rows] > 8))
        torch.testing.assert_close(together[rows], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "qwen3_moe"])
def test_decoding_gives_the_log_probs_of_the_packed_forward(family: str, kind: AdapterKind, tiny_model: Build) -> None:
    policy = adapted(tiny_model(family), kind=kind)
    decoder = decoder_for(policy)
    assert isinstance(decoder, FastDecoder) == (family != "qwen3_moe")
    for _ in range(2):
        tokens = torch.arange(12) * 7 % VOCAB
        cache = decoder.new_cache(2, 12)
        rows = [decoder.prefill(cache, tokens[None, :6], torch.tensor([6]), [2])[0]]
        rows += [decoder.step(cache, tokens[place].repeat(2))[1] for place in range(6, 11)]
        found = torch.stack(rows).log_softmax(-1).gather(1, tokens[6:, None])[:, 0]
        given = (tokens, torch.arange(12), torch.zeros(12, dtype=torch.int64), torch.arange(12) > 5)
        with torch.no_grad():
            torch.testing.assert_close(found, policy.token_logprobs(PackedTokens(*given))[0][6:], atol=1e-5, rtol=1e-5)
        shake(policy, 0.05)
        decoder.refresh()


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_tensors_are_a_model_that_computes_the_same(kind: AdapterKind, tiny_model: Build) -> None:
    policy = adapted(tiny_model("qwen2"), kind=kind)
    plain = make_policy(tiny_model("qwen2", seed=8), None, packed=True)
    held = dict(plain.named_parameters())
    for name, tensor in policy.merged_parameters():
        held.pop(name).data.copy_(tensor)
    assert not held
    with torch.no_grad():
        found, expected = (
            plain.token_logprobs(PackedTokens(*batch()))[0],
            policy.token_logprobs(PackedTokens(*batch()))[0],
        )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_first_values_change_nothing_and_follow_from_the_seed(tiny_model: Build) -> None:
    with torch.no_grad():
        before = make_policy(tiny_model("qwen2"), None, packed=True).token_logprobs(PackedTokens(*batch()))[0]
    found: list[dict[str, Tensor]] = []
    for seed in (1, 1, 2):
        policy = make_policy(tiny_model("qwen2"), None, packed=True)
        state = torch.random.get_rng_state()
        adapters = add_adapters(policy, AdapterRules(rank=2, kind="dora"), seed=seed)
        assert torch.equal(torch.random.get_rng_state(), state)
        with torch.no_grad():
            torch.testing.assert_close(policy.token_logprobs(PackedTokens(*batch()))[0], before, atol=1e-6, rtol=0)
        found.append({name: parameter.detach() for name, parameter in adapters.named_parameters()})
    drawn = [name for name in found[0] if ".lora_A." in name]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not any(torch.equal(found[0][name], found[2][name]) for name in drawn)
    width = 32
    assert all(0.8 < float(found[0][name].abs().max() * width**0.5) <= 1 for name in drawn if "mlp.down" not in name)


def test_bfloat16_weights_have_float32_adapters_and_keep_their_bits(tiny_model: Build) -> None:
    policy = make_policy(tiny_model("qwen2", dtype=torch.bfloat16), None, packed=True)
    add_adapters(policy, AdapterRules(rank=2), seed=0)
    before = {name: parameter.detach().clone() for name, parameter in policy.base_parameters()}
    trained = [parameter for _, parameter in policy.trainable_parameters()]
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    assert policy.dtype is torch.bfloat16
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    policy.train()
    for _ in range(3):
        (-policy.token_logprobs(PackedTokens(*batch()))[0].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.base_parameters())
    assert all(parameter.grad is None for _, parameter in policy.base_parameters())
    assert policy.adapters is not None
    assert any(bool(p.abs().max() > 0) for name, p in policy.adapters.named_parameters() if "lora_B" in name)


def test_without_its_adapters_the_policy_is_a_reference_loaded_apart(character_directory: Path) -> None:
    policy = load_policy(character_directory).train()
    add_adapters(policy, AdapterRules(rank=4), seed=0)
    shake(policy)
    apart = load_reference(character_directory)
    ids, positions, segments, wanted = batch()
    given = (ids % 13, positions, segments, wanted)
    view = BaseModelView(policy)
    with torch.no_grad():
        expected, entropy = apart.token_logprobs(PackedTokens(*given), with_entropy=True)
        trained = policy.token_logprobs(PackedTokens(*given))[0]
    found, found_entropy = view.token_logprobs(PackedTokens(*given), with_entropy=True)
    assert (found - expected).abs().max() <= 1e-6
    assert entropy is not None
    assert found_entropy is not None
    assert (found_entropy - entropy).abs().max() <= 1e-6
    assert not found.requires_grad
    assert (trained - expected).abs().max() > 0.01
    again, _ = policy.token_logprobs(PackedTokens(*given))
    assert again.requires_grad
    assert torch.equal(again.detach(), trained)
    assert all(parameter.requires_grad for _, parameter in policy.trainable_parameters())


@pytest.mark.parametrize(
    ("targets", "what", "remedy"),
    [
        (("q_prj",), "matches none of the 14 linear layers", "--target_modules q_proj"),
        (("q_proj", "lm_head"), "not a linear layer", "--target_modules"),
        (("self_attn",), "not a linear layer", "--target_modules"),
        (("embed_tokens",), "not a linear layer", "--target_modules"),
        (("all-linear", "q_proj"), "'all-linear' matches none", "--target_modules"),
    ],
)
def test_a_target_that_cannot_be_meant_is_refused(
    targets: tuple[str, ...], what: str, remedy: str, tiny_model: Build
) -> None:
    policy = make_policy(tiny_model("qwen2"), None, packed=True)
    with pytest.raises(OptionsError) as caught:
        add_adapters(policy, AdapterRules(rank=2, targets=targets), seed=0)
    assert caught.value.problem.code == "adapters.no_such_layer"
    assert what in caught.value.problem.what
    assert caught.value.problem.do.startswith(remedy)
    assert policy.adapters is None


def test_named_targets_are_all_that_is_adapted(tiny_model: Build) -> None:
    policy = make_policy(tiny_model("qwen2"), None, packed=True)
    adapters = add_adapters(policy, AdapterRules(rank=2, targets=("q_proj", "mlp.down_proj")), seed=0)
    assert adapters.layers == [
        f"model.layers.{n}.{end}" for n in range(2) for end in ("self_attn.q_proj", "mlp.down_proj")
    ]
    every = make_policy(tiny_model("qwen2"), None, packed=True)
    names = add_adapters(every, AdapterRules(rank=2), seed=0).layers
    assert len(names) == 14
    assert not any("lm_head" in name for name in names)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_told_before_loading_is_what_is_made(kind: AdapterKind, character_directory: Path) -> None:
    rules = AdapterRules(rank=3, alpha=6.0, kind=kind, targets=("q_proj", "gate_proj"))
    adapters = add_adapters(load_policy(character_directory), rules, seed=0)
    first, second = preview(str(character_directory), rules)
    assert f"{adapters.num_parameters:,} weights are trained" in first
    assert f"on {len(adapters.layers)} layers: gate_proj, q_proj" == second


def test_adapters_and_frozen_parts_keep_out_of_each_others_way(tiny_model: Build) -> None:
    policy = adapted(tiny_model("qwen2"))
    assert FreezeRules().freezes is False
    assert {name.split(".")[-3] for name, _ in policy.trainable_parameters()} == {"lora_A", "lora_B"}


def dropped(policy: CausalPolicy, rows: Tensor) -> Tensor:
    ids, positions, segments, wanted = batch()
    return policy.token_logprobs(PackedTokens(ids[rows], positions[rows], segments[rows], wanted[rows]))[0]


def test_dropout_does_not_depend_on_how_a_batch_is_cut_and_differs_between_updates(tiny_model: Build) -> None:
    policy = adapted(tiny_model("qwen2"), dropout=0.4).train()
    segments = batch()[2]
    everything = torch.ones_like(segments, dtype=torch.bool)
    together = dropped(policy, everything).detach()
    alone = torch.cat([dropped(policy, segments == number).detach() for number in range(len(LENGTHS))])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        read = dropped(policy, everything)
    plain = dropped(policy.eval(), everything).detach()
    torch.testing.assert_close(read, plain, atol=1e-5, rtol=1e-5)
    assert (together - plain).abs().max() > 1e-3
    assert policy.adapters is not None
    policy.train()
    policy.adapters.begin_update(1)
    assert (dropped(policy, everything).detach() - together).abs().max() > 1e-3


def test_dropout_keeps_its_share_and_its_scale(tiny_model: Build) -> None:
    policy = adapted(tiny_model("qwen2"), dropout=0.25).train()
    policy.token_logprobs(PackedTokens(*batch()))
    assert policy.adapters is not None
    module = policy.model.get_decoder().layers[0].mlp.up_proj.lora_dropout["default"]
    ones = torch.ones(1, sum(LENGTHS), 4000)
    found = module(ones)
    assert set(found.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(float((found == 0).float().mean()) - 0.25) < 0.01
    other = policy.model.get_decoder().layers[1].mlp.up_proj.lora_dropout["default"](ones)
    assert abs(float(((found == 0) & (other == 0)).float().mean()) - 0.0625) < 0.01


def test_rows_without_token_ids_do_not_get_the_masks_of_an_earlier_forward() -> None:
    rows = RowKeys()
    dropout = KeyedDropout(0.5, 1, rows).train()
    positions = torch.arange(6)[None]
    rows.hook(dropout, (), {"input_ids": torch.ones_like(positions), "position_ids": positions})
    keys_T = rows.keys_T
    assert keys_T is not None
    with torch.no_grad():  # in between forward and backward, which may need the masks again
        rows.hook(dropout, (), {"inputs_embeds": torch.ones(1, 6, 4), "position_ids": positions})
    assert rows.keys_T is keys_T
    rows.hook(dropout, (), {"inputs_embeds": torch.ones(1, 6, 4), "position_ids": positions})
    with pytest.raises(AssertionError):
        dropout(torch.ones(1, 6, 4))


def test_dropout_wants_the_packed_forward(tiny_model: Build) -> None:
    with pytest.raises(OptionsError) as caught:
        adapted(tiny_model("qwen2"), packed=False, dropout=0.1)
    assert caught.value.problem.code == "adapters.dropout_native"


def test_a_word_is_mixed_as_splitmix64_mixes_it() -> None:
    word, mask = 0x0123456789ABCDEF, 2**64 - 1
    expected = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    expected = ((expected ^ (expected >> 27)) * 0x94D049BB133111EB) & mask
    expected ^= expected >> 31
    assert int(mix(torch.tensor(word))) & mask == expected
