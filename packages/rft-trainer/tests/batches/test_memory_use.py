"""Who holds the memory where it runs out."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from rft_trainer.batches.memory_use import memory_use

MIB = 2**20


@dataclass(slots=True)
class Moments:
    """State in records, mappings and lists, beside the parameters that it belongs to."""

    parameters: list[nn.Parameter]
    kept: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class Optimizer:
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.moments = Moments(parameters, {"exp_avg": [torch.zeros(p.shape) for p in parameters]})
        self.me = self
        self.step = lambda: None


def test_weights_gradients_moments_and_what_code_keeps_are_told_apart() -> None:
    before = memory_use(MemoryError(), None, "cpu").owners
    model = nn.Linear(1024, 1024, bias=False)
    model.weight.grad = torch.zeros(1024, 1024)
    optimizer = Optimizer(list(model.parameters()))
    kept = torch.zeros(3, MIB)
    views = [kept[0], kept.view(-1)]
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 1")
    use = memory_use(error, optimizer, "cpu")
    more = {name: size - before.get(name, 0) for name, size in use.owners.items()}
    # objects of tests that ran before may go in between
    assert more["weights"] <= 4 * MIB
    assert more["gradients"] <= 4 * MIB
    assert use.owners["weights"] >= 4 * MIB
    assert use.owners["gradients"] >= 4 * MIB
    assert use.owners["optimizer"] == 4 * MIB
    assert use.owners["other tensors"] >= 12 * MIB
    assert use.asked == int(2.5 * 2**30)
    assert len(views) == 2
    largest = [(tensor.owner, tensor.shape, tensor.num_bytes) for tensor in use.largest]
    assert ("optimizer", (1024, 1024), 4 * MIB) in largest
    assert largest == sorted(largest, key=lambda row: -row[2])
    assert str(use).startswith("asked for 2,560.0 MiB; held: ")
    assert "optimizer 4.0 MiB" in str(use)
    json.dumps(use.as_record())


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0", 20 * MIB),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 40960 bytes. Error code 12", 40960),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", None),
    ],
)
def test_what_was_asked_for_is_what_the_allocator_says(text: str, asked: int | None) -> None:
    use = memory_use(RuntimeError(text), None, "cpu")
    assert use.asked == asked
    assert ("asked for" in str(use)) == (asked is not None)


def test_a_gpu_has_activations_holes_and_an_account_without_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    block: dict[str, Any] = {"size": 512, "requested_size": 500, "state": "active_allocated"}
    frames = [{"filename": "a.py", "line": 3, "name": "f"}]
    segment = {"address": 1, "total_size": 1024, "allocated_size": 512, "stream": 0, "segment_type": "large"}
    snapshot = {"segments": [segment | {"blocks": [block | {"frames": frames}, block]}]}
    told = {
        "memory_allocated": lambda: 900 * MIB,
        "memory_reserved": lambda: 1000 * MIB,
        "mem_get_info": lambda: (24 * MIB, 1024 * MIB),
    }
    for name, function in told.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    use = memory_use(RuntimeError("Tried to allocate 1.00 GiB"), None, "cuda:0")
    # no tensor of this process is on a GPU
    assert use.owners == {"activations": 900 * MIB, "unused": 100 * MIB}
    assert str(use) == (
        "asked for 1,024.0 MiB; 24.0 MiB of 1,024.0 MiB are free; held: activations 900.0 MiB, unused 100.0 MiB"
    )
    record = json.loads(json.dumps(use.as_record()))
    assert record["segments"][0]["blocks"][0]["frames"] == ["a.py:3 (f)"]
    assert record["segments"][0]["blocks"][1]["frames"] == []
