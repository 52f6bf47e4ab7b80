"""Adapters around weights that are still in their files begin as those around loaded ones do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rft_models.lora import files as adapter_files
from rft_models.lora.adapters import AdapterRules
from rft_models.policy.adaptation import add_adapters
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.policy.load_on_meta import load_on_meta
from rft_models.settings import AdapterKind

KINDS: list[AdapterKind] = ["lora", "dora"]


def fill(policy: CausalPolicy) -> None:
    """Give every parameter memory and its values, two blocks of rows each."""
    files = policy.pending_weights
    assert files is not None
    for name, parameter in list(policy.model.named_parameters()):
        half, rest = parameter.shape[0] // 2, tuple(parameter.shape[1:])
        zeros = (0,) * len(rest)
        blocks = [files.block(name, (0, *zeros), (half, *rest))]
        blocks.append(files.block(name, (half, *zeros), (parameter.shape[0] - half, *rest)))
        owner, _, own = name.rpartition(".")
        value = torch.cat(blocks).to(parameter.dtype)
        setattr(policy.model.get_submodule(owner), own, nn.Parameter(value, requires_grad=parameter.requires_grad))
    policy.model.tie_weights()
    files.close()
    policy.pending_weights = None


def tensors(policy: CausalPolicy) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_begin_with_the_same_bits(character_directory: Path, kind: AdapterKind, dtype: torch.dtype) -> None:
    rules = AdapterRules(2, kind=kind)
    loaded, unread = load_policy(character_directory, dtype=dtype), load_on_meta(character_directory, dtype=dtype)
    expected, found = add_adapters(loaded, rules, seed=3), add_adapters(unread, rules, seed=3)
    assert all(parameter.is_meta for _, parameter in unread.named_parameters())
    assert found.base_fingerprint == expected.base_fingerprint
    fill(unread)
    assert not found.waiting
    ours, theirs = tensors(unread), tensors(loaded)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name
    assert {n for n, p in unread.named_parameters() if p.requires_grad} == {n for n, _ in expected.named_parameters()}
    unread.verify()


def test_saved_adapters_are_taken_over_before_there_is_memory(character_directory: Path, tmp_path: Path) -> None:
    loaded, unread = load_policy(character_directory), load_on_meta(character_directory)
    adapters = add_adapters(loaded, AdapterRules(2, kind="dora"), seed=3)
    with torch.no_grad():
        for _, parameter in adapters.named_parameters():
            parameter.add_(0.5)
    adapter_files.save(adapters, tmp_path, adapters.tensors(loaded.named_parameters()))
    adapter_files.load(add_adapters(unread, AdapterRules(2, kind="dora"), seed=8), tmp_path)
    fill(unread)
    assert all(torch.equal(tensor, tensors(unread)[name]) for name, tensor in tensors(loaded).items())
