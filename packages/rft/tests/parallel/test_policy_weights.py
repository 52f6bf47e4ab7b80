"""Weights of a distributed policy: what engines are sent, and what each rank saves of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rft.checkpoints.parts import FullWeights
from rft.parallel import policy_weights
from rft.parallel.policy_weights import ShardedPolicyWeights
from rft_models.lora import files


def parallel(calls: Any, *, shards: bool = False, collective: bool = False, adapters: Any = None) -> Any:
    return calls.double(
        "parallel",
        shards_weights=shards,
        collective_forward=collective,
        model=calls.double("model", adapters=adapters),
    )


@pytest.mark.parametrize("shards", [True, False])
@pytest.mark.parametrize("adapters", ["adapters", None])
def test_an_engine_is_sent_whole_tensors_where_a_rank_has_parts(calls: Any, shards: bool, adapters: Any) -> None:
    given = parallel(calls, shards=shards, adapters=adapters)
    weights, alone = policy_weights.engine_weights(given), policy_weights.engine_adapters(given)
    assert (weights is not None) is shards
    assert (alone is not None) is (shards and adapters is not None)
    assert calls.taken() == []
    if weights is not None:
        assert weights() == "model.merged_parameters()"
        assert calls.taken() == [
            "parallel.weights.full_tensors()",
            "model.merged_parameters(parallel.weights.full_tensors())",
        ]
    if alone is not None:
        alone()
        assert calls.taken() == ["parallel.weights.full_tensors(trained=True)"]


@pytest.mark.parametrize(
    ("dtype", "fused"), [(torch.float16, None), (torch.float32, "model"), (torch.bfloat16, "model")]
)
def test_gradients_of_float16_are_not_made_in_the_forward(calls: Any, dtype: torch.dtype, fused: Any) -> None:
    given = parallel(calls)
    given.compute_dtype = dtype
    assert policy_weights.fused_policy(given) == fused


@pytest.mark.parametrize(
    ("shards", "collective", "together"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_all_ranks_save_together_where_each_keeps_a_part(
    calls: Any, shards: bool, collective: bool, together: bool
) -> None:
    given, ranks = parallel(calls, shards=shards, collective=collective), calls.double("ranks")
    parts: Any = policy_weights.checkpoint_parts(given, ranks)
    if together:
        assert isinstance(parts, ShardedPolicyWeights)
        assert (parts.policy, parts.weights, parts.ranks) == (given.model, "parallel.weights", ranks)
    else:
        assert parts == FullWeights(given.model)


class Adapters:
    """One adapter, whose tensor has another name in files."""

    def tensors(self, named: Any) -> dict[str, Any]:
        return {f"file {name}": tensor for name, tensor in named if name == "lora"}


class Policy:
    """Three matrices and, with adapters, their one tensor."""

    def __init__(self, adapters: Any) -> None:
        self.adapters, self.model = adapters, "model"
        self.described: list[Path] = []
        self.tensors = {"a": torch.ones(4), "b": torch.ones(3), "c": torch.ones(2)}

    def base_parameters(self) -> Any:
        return [(name, nn.Parameter(tensor)) for name, tensor in self.tensors.items()]

    def merged_parameters(self, named: Any) -> Any:
        for name, tensor in named:
            if name != "lora":
                yield name, tensor

    def save_description(self, directory: Path) -> None:
        self.described.append(directory)


def saved(monkeypatch: pytest.MonkeyPatch, rank: int, adapters: Any = None) -> tuple[Any, Policy, list[str]]:
    monkeypatch.setattr(
        policy_weights,
        "to_checkpoint_names",
        lambda model, named: lambda: ((f"{model}.{name}", tensor) for name, tensor in named()),
    )
    monkeypatch.setattr(policy_weights, "saved_buffers", lambda model: [("buffer", torch.ones(2))])
    policy, gathered = Policy(adapters), list[str]()

    def full_tensors() -> Any:
        for name, tensor in [*policy.tensors.items(), *([("lora", torch.zeros(1))] if adapters else [])]:
            gathered.append(name)
            yield name, tensor

    weights = SimpleNamespace(full_tensors=full_tensors, local_shards=lambda: iter([("a", "block")]))
    ranks = SimpleNamespace(rank=rank, world_size=2)
    return ShardedPolicyWeights(policy, weights, ranks), policy, gathered  # type: ignore[arg-type]


def test_ranks_write_about_as_much_each_and_all_gather_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    # the first writes the buffers, which every rank has whole
    for rank, names in ((0, {"model.a", "model.buffer"}), (1, {"model.b", "model.c"})):
        parts, policy, gathered = saved(monkeypatch, rank)
        written = parts.local_weights()
        assert set(written) == names
        assert gathered == ["a", "b", "c"]
        # training goes on while they are written
        for tensor in policy.tensors.values():
            tensor.zero_()
        assert all(bool((tensor == 1.0).all()) for tensor in written.values())
        assert list(parts.named_parameters()) == [("a", "block")]


def test_adapters_are_kept_for_the_directory_as_they_were(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[Any] = []
    monkeypatch.setattr(files, "save", lambda *given: written.append(given))
    parts, policy, gathered = saved(monkeypatch, 0, Adapters())
    parts.adapters["of the last save"] = torch.zeros(1)
    parts.local_weights()
    assert gathered[-1] == "lora"
    write, copied = parts.directory_writer(), parts.snapshot(None)
    parts.adapters.clear()
    for each in (write, copied):
        each(tmp_path)
        adapters, folder, tensors = written.pop()
        assert (adapters, folder) == (policy.adapters, tmp_path / files.FOLDER)
        assert list(tensors) == ["file lora"]
    assert policy.described == [tmp_path] * 2
    parts, policy, _ = saved(monkeypatch, 0)
    parts.directory_writer()(tmp_path)
    assert (policy.described, written) == ([tmp_path], [])


def test_the_size_of_a_tensor_in_parts_is_that_of_the_whole() -> None:
    whole, part = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(0))
    marked: Any = part
    marked.ds_numel = 12
    assert policy_weights.full_sizes([("a", whole), ("b", part)]) == {"a": 6, "b": 12}
