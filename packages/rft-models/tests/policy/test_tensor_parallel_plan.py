"""Which matrices are cut: names of the plan, what is refused by name, and the comparison that guards it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rft_core.errors import OptionsError, PreflightError
from rft_models.lora.adapters import AdapterRules
from rft_models.policy.adaptation import add_adapters
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import make_policy
from rft_models.policy.tensor_parallel_plan import apply_tensor_parallel, tensor_plan

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
}


def made(model_type: str, **changes: Any) -> CausalPolicy:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(TINY | changes))
    return make_policy(AutoModelForCausalLM.from_config(config), None, packed=True)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_heads_and_columns_are_cut_and_norms_are_not(model_type: str) -> None:
    policy = made(model_type, tie_word_embeddings=model_type == "qwen3")
    plan = tensor_plan(policy, 2)
    layer = "model.layers.1"
    assert {name for name in plan.by_outputs if name.startswith(layer)} == {
        f"{layer}.{name}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    }
    assert plan.by_inputs[-2:] == (f"{layer}.self_attn.o_proj", f"{layer}.mlp.down_proj")
    gains = tuple(f"model.layers.{i}.self_attn.{name}.weight" for i in range(2) for name in ("q_norm", "k_norm"))
    assert plan.of_heads == (gains if model_type == "qwen3" else ())
    assert plan.vocabulary == ("model.embed_tokens", "lm_head")
    named = dict(policy.model.named_parameters())
    rest = [n for n in named if not n.startswith((*plan.by_outputs, *plan.by_inputs, *plan.vocabulary))]
    assert all(named[name].ndim == 1 for name in rest)


def test_the_factor_of_an_adapter_that_touches_what_is_cut_is_cut_with_it() -> None:
    policy = made("llama", tie_word_embeddings=False)
    add_adapters(policy, AdapterRules(2), seed=0)
    plan = tensor_plan(policy, 2)
    attention = "model.layers.1.self_attn"
    assert [name for name in plan.by_outputs if name.startswith(f"{attention}.q_proj")] == [
        f"{attention}.q_proj.base_layer",
        f"{attention}.q_proj.lora_B.default",
    ]
    assert [name for name in plan.by_inputs if name.startswith(attention)] == [
        f"{attention}.o_proj.base_layer",
        f"{attention}.o_proj.lora_A.default",
    ]
    assert plan.of_heads == ()


def test_adapters_with_lengths_of_rows_are_not_cut() -> None:
    policy = made("llama")
    add_adapters(policy, AdapterRules(2, kind="dora"), seed=0)
    with pytest.raises(PreflightError, match="dora") as caught:
        tensor_plan(policy, 2)
    assert caught.value.problem.code == "tensor.architecture"


def test_an_embedding_that_does_more_than_look_up_stays_whole() -> None:
    assert tensor_plan(made("gemma", head_dim=8), 2).vocabulary == ()


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "experts"),
        ("phi3", {}, "o_proj is cut as"),
        ("qwen2", {"attention_dropout": 0.1}, "has dropout"),
    ],
)
def test_what_is_not_known_to_be_cut_is_refused_by_name(model_type: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(PreflightError) as caught:
        tensor_plan(made(model_type, **changes), 2)
    assert caught.value.problem.code == "tensor.architecture"
    assert named in caught.value.problem.what


def test_a_matrix_beside_the_plan_is_refused() -> None:
    policy = made("llama")
    policy.layers[0].extra = nn.Linear(32, 32)
    with pytest.raises(PreflightError, match=r"layers\.0\.extra\.weight") as caught:
        tensor_plan(policy, 2)
    assert caught.value.problem.code == "tensor.architecture"


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(OptionsError, match="num_attention_heads 4, num_key_value_heads 2") as caught:
        tensor_plan(made("llama"), 3)
    assert caught.value.problem.code == "tensor.uneven"


class Alone:
    rank, world_size = 0, 1

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    max = sum


def wrong(policy: CausalPolicy) -> Callable[[], None]:
    def cut() -> None:
        with torch.no_grad():
            policy.model.model.layers[0].mlp.down_proj.weight.mul_(2)

    return cut


def test_parts_that_compute_something_else_are_refused() -> None:
    policy = made("llama")
    apply_tensor_parallel(policy, lambda: None, Alone(), shares_head=False)
    with pytest.raises(PreflightError) as caught:
        apply_tensor_parallel(policy, wrong(policy), Alone(), shares_head=False)
    assert caught.value.problem.code == "models.forward_differs"
