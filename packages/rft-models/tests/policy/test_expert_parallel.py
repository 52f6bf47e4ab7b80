"""Experts that two ranks hold: what a mixture computes, and its gradients, as where one rank holds all of them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Dots1Config, MixtralConfig, Qwen3Config, Qwen3MoeConfig

from rft_core.errors import OptionsError, PreflightError
from rft_core.packed_tokens import PackedTokens
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.expert_parallel import divide_experts, expert_layers

SIZES: dict[str, Any] = {"vocab_size": 13, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "pad_token_id": None, "head_dim": 4}
CONFIGS: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=8),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, intermediate_size=8),
    "dots1": Dots1Config(
        **SIZES, n_routed_experts=4, moe_intermediate_size=8, n_shared_experts=1, n_group=1, first_k_dense_replace=0
    ),
}


class Part(nn.Parameter):
    """This rank's experts of a parameter, as a distributed tensor gives them."""

    def to_local(self) -> Tensor:
        return self + 0


class Exchange:
    """Two ranks in threads, which meet at a barrier."""

    def __init__(self) -> None:
        self.barrier, self.given = threading.Barrier(2, timeout=60), [[], []]

    def of(self, rank: int) -> Any:
        return Ranks(self, rank)

    def swap(self, rank: int, rows: Tensor, sent: Sequence[int]) -> Tensor:
        self.given[rank] = list(rows.split(list(sent)))
        self.barrier.wait()
        came = torch.cat([each[rank] for each in self.given])
        self.barrier.wait()
        return came


class Ranks:
    world_size = 2

    def __init__(self, between: Exchange, rank: int) -> None:
        self.between, self.rank = between, rank

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        came = Swap.apply(rows, self, sent, received)
        assert len(came) == sum(received)
        return came


class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        ctx.way_back = (ranks, received)
        return ranks.between.swap(ranks.rank, rows.detach(), sent)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ranks, received = ctx.way_back
        return ranks.between.swap(ranks.rank, gradients[0], received), None, None, None


def policy_of(config: Any, std: float = 0.4) -> CausalPolicy:
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return CausalPolicy(model, None, packed=False)


def keep_own(policy: CausalPolicy, rank: int) -> Any:
    def divide(names: Sequence[str]) -> None:
        for name in names:
            path, _, own = name.rpartition(".")
            layer = policy.model.get_submodule(path)
            layer.register_parameter(own, Part(layer.get_parameter(own).detach().chunk(2)[rank].clone()))

    return divide


def tokens_of(rank: int) -> PackedTokens:
    """One token again and again on rank 1: rank 0 or 1 may have no row of a layer."""
    ids = torch.tensor([4, 4, 4, 4] if rank else [1, 5, 2, 9, 11, 3, 7])
    return PackedTokens.of_segments([ids])


def gradients(policy: CausalPolicy) -> dict[str, Tensor]:
    named = policy.model.named_parameters()
    return {name: torch.zeros_like(each) if each.grad is None else each.grad.clone() for name, each in named}


@pytest.mark.parametrize("family", CONFIGS)
def test_values_and_gradients_are_those_of_whole_experts(family: str) -> None:
    whole = policy_of(CONFIGS[family])
    expected = [whole.token_logprobs(tokens_of(rank))[0] for rank in range(2)]
    sum(each.sin().sum() for each in expected).backward()  # type: ignore[union-attr]
    between, found = Exchange(), [dict[str, Any](), dict[str, Any]()]

    def work(rank: int) -> None:
        policy = policy_of(CONFIGS[family])
        divide_experts(policy, between.of(rank), keep_own(policy, rank))
        logprobs_T, _ = policy.token_logprobs(tokens_of(rank))
        logprobs_T.sin().sum().backward()
        found[rank] = {"logprobs": logprobs_T.detach(), "gradients": gradients(policy)}

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(2):
        assert torch.allclose(found[rank]["logprobs"], expected[rank], atol=1e-5)
    for name, gradient in gradients(whole).items():
        parts = [each["gradients"][name] for each in found]
        together = torch.cat(parts) if parts[0].shape != gradient.shape else parts[0] + parts[1]
        assert (together - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name


def test_what_cannot_be_divided_is_refused_by_name() -> None:
    def refused(policy: CausalPolicy) -> Any:
        with pytest.raises((OptionsError, PreflightError)) as caught:
            divide_experts(policy, Exchange().of(0), lambda names: None)
        return caught.value.problem

    dense = policy_of(Qwen3Config(**{**SIZES, "intermediate_size": 8}))
    assert (refused(dense).code, refused(dense).do) == ("expert.uneven", "--ep_size 1")
    odd = policy_of(Qwen3MoeConfig(**SIZES, num_experts=3, moe_intermediate_size=8))
    assert refused(odd).what == "ep_size = 2, but the model has 3 experts"
    several = policy_of(CONFIGS["qwen3_moe"])
    path, layer = next(expert_layers(several.model))
    layer.extra = nn.Parameter(torch.ones(3, 2))
    assert refused(several).code == "expert.architecture"
    assert refused(several).what == f"{path}.extra is no tensor of one part an expert"
    del layer.extra
    layer.num_experts = 2
    assert refused(several).what.endswith("have [2, 4] experts")
