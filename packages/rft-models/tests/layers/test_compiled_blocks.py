"""Layers that are compiled: what they compute, what their names are, and how they fall back to eager."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_models.layers.compiled_blocks import CompiledBlocks, choose


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.tanh(self.linear(hidden_states)) + hidden_states


def blocks(count: int = 2) -> nn.ModuleList:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return nn.ModuleList(Block() for _ in range(count))


def forward(layers: nn.ModuleList, rows: int = 3) -> Tensor:
    hidden = torch.linspace(-1, 1, rows * 4).view(rows, 4)
    for layer in layers:
        hidden = layer(hidden)
    return hidden


def test_compiled_layers_compute_the_same_and_keep_their_names() -> None:
    plain, layers = blocks(), blocks()
    compiled = CompiledBlocks(layers, backend="aot_eager")
    for _ in range(2):
        forward(layers).sum().backward()
        forward(plain).sum().backward()
    assert compiled.failure is None
    assert list(layers.state_dict()) == list(plain.state_dict())
    for found, expected in zip(layers.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def breaks(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no such operator\nand much more")


def breaks_when_run(graph: Any, inputs: Any) -> Any:
    def run(*arguments: Any) -> Any:
        raise ValueError("kernel failed")

    return run


def is_wrong(graph: Any, inputs: Any) -> Any:
    return lambda *arguments: tuple(1.01 * each for each in graph.forward(*arguments))


@pytest.mark.parametrize(
    ("backend", "reason"),
    [(breaks, "no such operator"), (breaks_when_run, "kernel failed"), (is_wrong, "apart from eager")],
)
def test_layers_that_cannot_be_compiled_compute_in_eager_with_one_warning(
    backend: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, layers = blocks(), blocks()
    compiled = CompiledBlocks(layers, backend=backend)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(forward(layers), forward(plain))
    [told] = [record.getMessage() for record in caplog.records if "compile:" in record.getMessage()]
    assert reason in told
    assert reason in (compiled.failure or "")
    assert all(layer._compiled_call_impl is None for layer in layers)


def test_another_shape_that_is_compiled_anew_is_told_with_both() -> None:
    layers = blocks(1)
    compiled = CompiledBlocks(layers, backend="eager")
    forward(layers, rows=3)
    forward(layers, rows=3)
    assert compiled.recompilations == []
    forward(layers, rows=5)
    assert compiled.recompilations == [((3, 4), (5, 4))]


def test_forwards_without_gradients_are_eager() -> None:
    layers, graphs = blocks(1), list[Any]()
    CompiledBlocks(layers, backend=lambda graph, inputs: (graphs.append(graph), graph.forward)[1])
    with torch.no_grad():
        forward(layers)
    assert graphs == []
    forward(layers)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("asked", "device", "on"),
    [("on", "cpu", True), ("off", "cuda", False), ("auto", "cuda", True), ("auto", "cpu", False)],
)
def test_what_is_compiled_is_said_with_its_reason(asked: str, device: str, on: bool) -> None:
    found, reason = choose(asked, device)
    assert found is on
    assert reason
