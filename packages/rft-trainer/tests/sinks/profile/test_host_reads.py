"""Reads of tensors are counted with their lines, and nothing else is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from rft_trainer.sinks.profile.host_reads import ON_CPU, ON_GPU, ReadCalls, SyncWarnings, read_counter


def read_all(x: torch.Tensor) -> list[Any]:
    """Twelve reads on as many lines."""
    return [
        x[0].item(),
        x.tolist(),
        x.numpy(),
        float(x[0]),
        int(x[0]),
        bool(x[0]),
        x.cpu(),
        x.nonzero(),
        torch.equal(x, x),
        x.masked_select(x > 1),
        x.unique(),
        torch.allclose(x, x),
    ]


def test_every_read_is_counted_at_its_line_and_changes_nothing() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    expected = read_all(x)
    own = dict(vars(torch.Tensor))
    reads = ReadCalls()
    reads.open()
    first, second = read_all(x), read_all(x)
    # work of which the host needs no value
    (x @ x + x.softmax(0).sum()).detach()
    reads.close()
    assert dict(vars(torch.Tensor)) == own
    # a tensor without dimensions is a number as before, and no sequence
    assert torch.tensor([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    x.item() if x.numel() == 1 else x.tolist()
    assert [str(value) for value in first] == [str(value) for value in second] == [str(value) for value in expected]
    places = reads.places()
    assert len(places) == 12
    assert {place.count for place in places} == {2}
    assert {place.code for place in places} >= {"x[0].item(),", "x.tolist(),", "torch.equal(x, x),"}
    assert all("test_host_reads.py:" in place.place and place.place.endswith("(read_all)") for place in places)
    assert reads.how == ON_CPU


def test_reads_in_a_backward_pass_are_counted() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0] * (2 if grads[0].sum().item() else 0)

    x = torch.ones(2, requires_grad=True)
    reads = ReadCalls()
    reads.open()
    Reads.apply(x).sum().backward()
    reads.close()
    assert [place.count for place in reads.places()] == [1]
    assert "grads[0].sum().item()" in reads.places()[0].code


def test_waits_of_a_gpu_are_taken_from_torchs_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    counter = read_counter("cuda:1")
    assert isinstance(counter, SyncWarnings)
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        counter.open()
        for _ in range(3):
            warnings.warn(
                "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:155.)", stacklevel=1
            )
        warnings.warn("something else", stacklevel=1)
        counter.close()
    assert modes == ["warn", "default"]
    assert [str(warning.message) for warning in others] == ["something else"]
    (place,) = counter.places()
    assert place.count == 3
    assert "test_waits_of_a_gpu" in place.place
    assert counter.how == ON_GPU
    assert isinstance(read_counter("cpu"), ReadCalls)
