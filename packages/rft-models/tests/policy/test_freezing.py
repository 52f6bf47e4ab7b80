"""What is frozen keeps its bits, what is not is trained as it would be, and what cannot be meant is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.errors import OptionsError
from rft_core.packed_tokens import PackedTokens
from rft_models.decode.fast_decoder import decoder_for
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.freezing import FreezeRules, freeze, preview
from rft_models.policy.load import load_policy, make_policy

Build = Callable[..., Any]
FIRST = 50
"""First of the 61 tokens that counts as new."""


def batch(num_tokens: int = 24) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids = torch.arange(num_tokens) * 17 % 61
    positions = torch.arange(num_tokens) % 12
    return ids, positions, torch.arange(num_tokens) // 12, positions > 2


def train(policy: CausalPolicy, steps: int, learning_rate: float = 1e-2, micro_batches: int = 1) -> None:
    """AdamW with weight decay over what the policy offers."""
    optimizer = torch.optim.AdamW(
        [parameter for _, parameter in policy.trainable_parameters()], lr=learning_rate, weight_decay=0.1
    )
    policy.train()
    for _ in range(steps):
        for _ in range(micro_batches):
            (-policy.token_logprobs(PackedTokens(*batch()))[0].sum()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def snapshot(policy: CausalPolicy) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize("prefixes", ["model.embed_tokens", "model.layers.0, lm_head", "model.norm,model.layers.1.mlp"])
def test_frozen_tensors_keep_their_bits_over_200_steps_with_weight_decay(prefixes: str, tiny_model: Build) -> None:
    policy = make_policy(tiny_model("qwen2"), None, packed=True)
    frozen = freeze(policy, FreezeRules.of(prefixes))
    before = snapshot(policy)
    train(policy, 200, 1e-3)
    stems = tuple(part.strip() for part in prefixes.split(","))
    expected = {name for name in before if name.startswith(stems)}
    assert set(frozen.tensors) == expected != set()
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, before[name]) == (name in expected), name
    assert frozen.num_trained == sum(p.numel() for n, p in before.items() if n not in expected)


def test_a_prefix_ends_at_a_dot_of_the_real_name(tiny_model: Build) -> None:
    policy = make_policy(tiny_model("llama", num_hidden_layers=12), None, packed=True)
    frozen = freeze(policy, FreezeRules.of("model.layers.1"))
    assert {name.split(".")[2] for name in frozen.tensors} == {"1"}


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_trained_and_every_other_weight_keeps_its_bits(tied: bool, tiny_model: Build) -> None:
    policy = make_policy(tiny_model("qwen2", tie_word_embeddings=tied), None, packed=True)
    frozen = freeze(policy, FreezeRules(train_only_tokens_from=FIRST))
    matrices = ["model.embed_tokens.weight"] if tied else ["model.embed_tokens.weight", "lm_head.weight"]
    assert frozen.rows == {name: (FIRST, 11, 32) for name in matrices}
    assert frozen.num_trained == len(matrices) * 11 * 32
    assert [name for name, _ in policy.trainable_parameters()] == [f"{name}[{FIRST}:]" for name in matrices]
    before = snapshot(policy)
    train(policy, 200)
    for name, parameter in policy.named_parameters():
        if name in matrices:
            assert torch.equal(parameter[:FIRST], before[name][:FIRST]), name
            changed = (parameter[FIRST:] != before[name][FIRST:]).any(1)
            assert changed.all(), f"{name}: every new row has moments of its own and decays"
        else:
            assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_of_the_rows_is_that_of_the_matrix_summed_over_micro_batches(
    tied: bool, tiny_model: Build
) -> None:
    plain, rows = (make_policy(tiny_model("llama", tie_word_embeddings=tied), None, packed=True) for _ in range(2))
    freeze(rows, FreezeRules(train_only_tokens_from=FIRST))
    for policy in (plain, rows):
        for _ in range(2):
            policy.token_logprobs(PackedTokens(*batch()))[0].sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in rows.trainable_parameters():
        gradient = expected[name.removesuffix(f"[{FIRST}:]")]
        assert parameter.grad is not None
        assert gradient is not None
        torch.testing.assert_close(parameter.grad, gradient[FIRST:], atol=1e-5, rtol=1e-5)
    assert all(parameter.grad is None for _, parameter in rows.named_parameters())


def test_one_step_on_rows_is_the_step_of_an_optimizer_that_has_only_them(tiny_model: Build) -> None:
    policy, twin = (make_policy(tiny_model("qwen2", tie_word_embeddings=True), None, packed=True) for _ in range(2))
    freeze(policy, FreezeRules(train_only_tokens_from=FIRST))
    twin.token_logprobs(PackedTokens(*batch()))[0].sum().neg().backward()
    matrix = twin.model.get_input_embeddings().weight
    alone = torch.nn.Parameter(matrix.detach()[FIRST:].clone())
    alone.grad = matrix.grad[FIRST:].clone()
    torch.optim.AdamW([alone], lr=1e-2, weight_decay=0.1).step()
    train(policy, 1)
    torch.testing.assert_close(policy.model.get_input_embeddings().weight[FIRST:], alone, atol=1e-6, rtol=1e-6)


def test_engine_and_files_see_the_trained_rows(tiny_model: Build, tmp_path: Path) -> None:
    policy = make_policy(tiny_model("qwen2"), None, packed=True)
    decoder = decoder_for(policy)
    freeze(policy, FreezeRules(train_only_tokens_from=FIRST))
    train(policy, 3)
    decoder.refresh()
    policy.eval()
    ids = torch.tensor([3, 55, 60])
    logits = decoder.prefill(decoder.new_cache(1, 4), ids[None], torch.tensor([3]), [1])
    hidden = policy.hidden_states(PackedTokens(ids, torch.arange(3), torch.zeros(3, dtype=torch.int64)))
    torch.testing.assert_close(logits[0], policy.head.logits(hidden[-1:])[0], atol=1e-5, rtol=1e-5)
    policy.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["model.embed_tokens.weight"], policy.model.get_input_embeddings().weight)
    assert set(saved) == {name for name, _ in policy.named_parameters()}


def test_a_tied_head_is_found_under_both_of_its_names(tiny_model: Build) -> None:
    policy = make_policy(tiny_model("qwen2", tie_word_embeddings=True), None, packed=True)
    assert set(freeze(policy, FreezeRules.of("lm_head")).tensors) == {"model.embed_tokens.weight"}


def test_a_frozen_head_gets_no_gradient(tiny_model: Build) -> None:
    policy = make_policy(tiny_model("qwen2"), None, packed=True)
    freeze(policy, FreezeRules.of("lm_head"))
    policy.token_logprobs(PackedTokens(*batch()))[0].sum().backward()
    assert policy.head.weight.grad is None
    assert policy.model.model.embed_tokens.weight.grad is not None


def test_what_is_frozen_is_listed_with_layers_in_one_line(tiny_model: Build) -> None:
    policy = make_policy(tiny_model("qwen2", num_hidden_layers=4), None, packed=True)
    report = freeze(policy, FreezeRules.of("model.norm,model.layers.0,model.layers.1,model.layers.3"))
    assert (report.num_trained, report.num_weights) == (policy.num_parameters - 3 * 7808 - 32, policy.num_parameters)
    weights = report.tensors_by_pattern()
    assert weights["model.layers.[0-1,3].mlp.up_proj.weight"] == 4608
    assert weights["model.norm.weight"] == 32
    rows = freeze(make_policy(tiny_model("qwen2"), None, packed=True), FreezeRules(train_only_tokens_from=FIRST))
    assert rows.rows["lm_head.weight"] == (50, 11, 32)


def test_a_prefix_that_matches_nothing_names_near_ones(tiny_model: Build) -> None:
    policy = make_policy(tiny_model("qwen2"), None, packed=True)
    with pytest.raises(OptionsError) as caught:
        freeze(policy, FreezeRules.of("embed_tokens"))
    assert caught.value.problem.code == "freezing.no_such_parameter"
    assert caught.value.problem.do == "--freeze_prefix model.embed_tokens"
    with pytest.raises(OptionsError, match=r"model\.layers") as caught:
        freeze(policy, FreezeRules.of("model.layer"))
    assert caught.value.problem.code == "freezing.no_such_parameter"
    with pytest.raises(OptionsError, match="lm_head") as caught:
        freeze(policy, FreezeRules.of("visual"))
    assert caught.value.problem.code == "freezing.no_such_parameter"
    assert all(parameter.requires_grad for _, parameter in policy.named_parameters()), "nothing was frozen"


def test_nothing_left_to_train_is_refused(tiny_model: Build) -> None:
    with pytest.raises(OptionsError, match="train: 0") as caught:
        freeze(make_policy(tiny_model("qwen2"), None, packed=True), FreezeRules.of("model,lm_head"))
    assert caught.value.problem.code == "freezing.nothing_trained"
    with pytest.raises(OptionsError, match="rows 0 to 60") as caught:
        freeze(make_policy(tiny_model("qwen2"), None, packed=True), FreezeRules(train_only_tokens_from=61))
    assert caught.value.problem.code == "freezing.no_new_tokens"


def test_both_ways_at_once_are_refused() -> None:
    with pytest.raises(OptionsError) as caught:
        FreezeRules.of("model.norm", 3)
    assert caught.value.problem.code == "freezing.two_ways"
    assert caught.value.problem.what == "freeze_prefix = model.norm, train_only_tokens_from = 3"
    assert caught.value.problem.do.startswith("--train_only_tokens_from 3")


@pytest.mark.parametrize("rules", [FreezeRules.of("model.layers"), FreezeRules(train_only_tokens_from=9)])
def test_the_preview_needs_no_weights_and_says_what_loading_does(rules: FreezeRules, character_directory: Path) -> None:
    policy = load_policy(character_directory)
    told = preview(character_directory, rules)
    assert told == freeze(policy, rules)
    assert list(told.trained) == [name for name, _ in policy.trainable_parameters()]
    loaded = load_policy(character_directory, freeze=rules)
    trained = [(name, parameter.shape) for name, parameter in loaded.trainable_parameters()]
    assert trained == [(name, parameter.shape) for name, parameter in policy.trainable_parameters()]
    with pytest.raises(OptionsError):
        preview(character_directory, FreezeRules.of("nothing.like.it"))
