"""Policy and critic as strategies take them: which of their parts, and in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rft.parallel.shardable import ShardableCritic, ShardablePolicy
from rft_models.policy import tensor_parallel_plan


def test_a_policy_hands_on_its_own_parts(calls: Any) -> None:
    inner = calls.double("inner", adapters=None)
    policy = ShardablePolicy(inner)
    assert (policy.inner, policy.module, policy.layers, policy.dtype) == (
        "inner",
        "inner.model",
        "inner.layers",
        "inner.dtype",
    )
    assert policy.named_parameters() == "inner.named_parameters()"
    assert policy.trainable_parameters() == "inner.trainable_parameters()"
    assert policy.cross_module_reads() == ()
    inner.adapters = calls.double("adapters")
    assert policy.cross_module_reads() == "adapters.cross_module_reads()"
    calls.taken()
    policy.wrap_forward(calls.double("wrapper"))
    policy.enable_sequence_parallel(calls.double("group"), "ring")
    assert calls.taken() == ["inner.wrap_forward(wrapper)", "inner.enable_sequence_parallel(group, 'ring')"]


def test_weights_that_wait_are_read_closed_and_verified(calls: Any) -> None:
    inner = calls.double("inner", pending_weights=None)
    policy, load, device = ShardablePolicy(inner), calls.double("load"), torch.device("meta")
    policy.load_pending(load, device, torch.bfloat16)
    assert calls.taken() == []
    inner.pending_weights = calls.double("files")
    policy.load_pending(load, device, torch.bfloat16)
    assert calls.taken() == [
        "load(files.block)",
        "files.close()",
        "inner.verify(device=device(type='meta'), dtype=torch.bfloat16)",
    ]
    assert inner.pending_weights is None


@pytest.mark.parametrize("vocabulary", [["head"], []])
def test_matrices_are_cut_by_one_plan_and_compared(calls: Any, vocabulary: list[str]) -> None:
    plan = SimpleNamespace(vocabulary=vocabulary)
    calls.put(tensor_parallel_plan, tensor_plan=plan)

    def apply(inner: Any, shard: Any, group: Any, *, shares_head: bool) -> None:
        shard()
        calls.made.append(f"applied {inner} {group} {shares_head}")

    calls.replace(tensor_parallel_plan, apply_tensor_parallel=apply)
    cut: list[Any] = []
    group = calls.double("group", size=2)
    assert ShardablePolicy(calls.double("inner")).enable_tensor_parallel(group, cut.append) is plan
    assert cut == [plan]
    assert calls.taken() == ["tensor_plan(inner, 2)", f"applied inner group {bool(vocabulary)}"]


class Critic:
    """A decoder of two layers, and a head that is trained while one layer is not."""

    def __init__(self) -> None:
        layers = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
        layers[0].requires_grad_(False)
        self.model: Any = layers
        self.model.get_decoder = lambda: SimpleNamespace(layers=list(layers))
        self.head = nn.Linear(1, 1, bias=False)
        self.dtype, self.adapters, self.gathered = torch.bfloat16, None, 0

    def named_parameters(self) -> Any:
        yield from [("0", self.model[0].weight), ("1", self.model[1].weight), ("head", self.head.weight)]

    def gather_always(self) -> None:
        self.gathered += 1

    def values(self, tokens: Any) -> Any:
        return f"values of {tokens}"


def test_a_critic_is_decoder_and_head_as_one_module(calls: Any) -> None:
    critic: Any = Critic()
    shardable = ShardableCritic(critic)
    assert shardable.layers == [*critic.model, critic.head]
    assert shardable.dtype is torch.bfloat16
    assert {name for name, _ in shardable.module.named_parameters()} == {
        "model.0.weight",
        "model.1.weight",
        "head.weight",
    }
    assert [name for name, _ in shardable.named_parameters()] == ["0", "1", "head"]
    assert [name for name, _ in shardable.inner.named_parameters()] == ["0", "1", "head"]
    assert [name for name, _ in shardable.trainable_parameters()] == ["1", "head"]
    assert shardable.cross_module_reads() == ()
    critic.adapters = calls.double("adapters")
    assert shardable.cross_module_reads() == "adapters.cross_module_reads()"
    shardable.load_pending(calls.double("load"), torch.device("cpu"), None)
    shared = (shardable.enable_sequence_parallel, shardable.enable_tensor_parallel, shardable.enable_expert_parallel)
    for refused in shared:
        with pytest.raises(AssertionError):
            refused(calls.double("group"), calls.double("other"))


def test_values_are_computed_inside_the_wrapper_of_a_strategy() -> None:
    critic: Any = Critic()
    shardable, tokens = ShardableCritic(critic), "tokens"
    assert shardable.inner.values(tokens) == "values of tokens"  # type: ignore[arg-type]
    assert critic.gathered == 0
    shardable.wrap_forward(lambda forward, *given: f"gathered {forward(*given)}")  # type: ignore[arg-type]
    assert critic.gathered == 1
    assert shardable.inner.values(tokens) == "gathered values of tokens"  # type: ignore[arg-type]
