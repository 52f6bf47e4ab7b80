"""Checkpointing changes no gradient and what it keeps is less; memory is counted in live bytes, not timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rft_core.errors import OptionsError
from rft_core.packed_tokens import PackedTokens
from rft_models.layers.gradient_checkpointing import Checkpointing, apply
from rft_models.policy.load import make_policy

Build = Callable[..., Any]
FULL, SELECTIVE, ALTERNATE = Checkpointing(), Checkpointing(selective=True), Checkpointing(every=2)
LAYERS = 4


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators made and that are still held."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = StorageWeakRef(tensor.untyped_storage())
                self._seen[storage.cdata] = (storage, tensor.untyped_storage().nbytes())
        return made

    def count(self) -> int:
        """Of those alive now."""
        return sum(size for storage, size in self._seen.values() if not storage.expired())


def one_step(model: Any, chosen: Checkpointing | None) -> tuple[int, int, dict[str, Tensor]]:
    """(live bytes after the forward, layers run again, gradients)."""
    policy = make_policy(model, None, packed=True, gradient_checkpointing=chosen).train()
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(count)
    tokens = torch.arange(240)
    positions = tokens % 60
    live = LiveBytes()
    with live:
        loss = policy.token_logprobs(PackedTokens(tokens * 7 % 61, positions, tokens // 60, positions > 0))[0].sum()
    held = live.count()
    once = forwards
    loss.backward()
    return held, forwards - once, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", ["gemma2", "qwen2", "qwen3_moe"])
def test_equal_gradients_and_less_memory(model_type: str, tiny_model: Build) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 192}
    found = {c: one_step(tiny_model(model_type, **sizes), c) for c in (None, FULL, SELECTIVE, ALTERNATE)}
    plain, _, expected = found[None]
    for chosen in (FULL, SELECTIVE, ALTERNATE):
        assert found[chosen][2].keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.equal(found[chosen][2][name], gradient), (str(chosen), name)
    assert [found[chosen][1] for chosen in (None, FULL, SELECTIVE, ALTERNATE)] == [0, LAYERS, LAYERS, LAYERS // 2]
    full, selective, alternate = (found[chosen][0] for chosen in (FULL, SELECTIVE, ALTERNATE))
    assert full < 0.25 * plain
    # what a selective layer keeps are its products; beside them the norms of most families keep little
    assert full < selective < 0.75 * plain
    assert full < alternate < 0.65 * plain


def test_saved_tensors_are_the_inputs_of_the_layers(tiny_model: Build) -> None:
    sizes: list[int] = []
    for chosen in (None, FULL):
        policy = make_policy(tiny_model("qwen2"), None, packed=True, gradient_checkpointing=chosen).train()
        saved = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal saved
            saved += tensor.numel() * tensor.element_size()
            return tensor

        tokens = torch.arange(60)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            policy.hidden_states(PackedTokens(tokens, tokens, torch.zeros_like(tokens)))
        sizes.append(saved)
    assert sizes[1] < 0.2 * sizes[0]


def test_evaluation_recomputes_nothing(tiny_model: Build) -> None:
    policy = make_policy(tiny_model("qwen2"), None, packed=True, gradient_checkpointing=True)
    assert policy.model.is_gradient_checkpointing
    tokens = torch.arange(12)
    calls: list[int] = []
    policy.model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    policy.token_logprobs(PackedTokens(tokens, tokens, torch.zeros_like(tokens), tokens > 0))[0].sum().backward()
    assert len(calls) == 1


def test_frozen_layers_below_are_not_gone_through_again(tiny_model: Build) -> None:
    """With nothing to train below a layer, its input needs no gradient and the backward pass stops there."""
    from rft_models.policy.freezing import FreezeRules, freeze

    policy = make_policy(tiny_model("qwen2"), None, packed=True, gradient_checkpointing=True).train()
    freeze(policy, FreezeRules.of("model.embed_tokens,model.layers.0"))
    calls: list[int] = []
    policy.model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    tokens = torch.arange(12)
    policy.token_logprobs(PackedTokens(tokens, tokens, torch.zeros_like(tokens), tokens > 0))[0].sum().backward()
    assert len(calls) == 1


def test_settings_become_a_choice() -> None:
    assert Checkpointing.of(False, "selective", 2) is None
    assert Checkpointing.of(True) == FULL
    assert Checkpointing.of(True, "selective", 3) == Checkpointing(selective=True, every=3)
    assert str(FULL) == "full: every layer (all again)"
    assert str(ALTERNATE) == "full: one layer in 2 (all again)"
    assert "matrix products and attention kept" in str(SELECTIVE)


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(OptionsError, match="Linear") as caught:
        apply(torch.nn.Linear(2, 2), FULL)
    assert caught.value.problem.code == "models.no_checkpointing"
