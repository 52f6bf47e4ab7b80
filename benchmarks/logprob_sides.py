"""The ways to a log-probability that `logprob.py` puts beside one another, and the data they share.

Each side has `forward(data) -> log-probabilities [R]` without gradients and
`backward(data) -> (log-probabilities or None, dX, dW)` of sum_i g_i log p_i. A side that only computes a
mean is given g = -1/R for all rows, and says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(slots=True)
class Data:
    """Hidden states, matrix, targets and the gradient of each log-probability."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    grad: Tensor

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Fresh leaves on the same memory."""
        return self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_()


Results = tuple[Tensor | None, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Side:
    """One row of the table."""

    name: str
    forward: Callable[[Data], Tensor] | None
    backward: Callable[[Data], Results] | None
    units: tuple[int, int]
    """Products of [R, D] with [D, V] in a forward, and in a forward with backward."""
    mean_only: bool = False
    ours: bool = False


def make_data(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str, *, peaked: bool = True, zero_share: float = 0.0
) -> Data:
    """Logits of standard deviation 1, or 4 where peaked; targets drawn evenly; advantages normal."""
    rows, width, vocabulary = shape
    generator = torch.Generator(device).manual_seed(7)
    draw: dict[str, Any] = {"generator": generator, "device": device}
    hidden = torch.randn(rows, width, **draw)
    weight = torch.randn(vocabulary, width, **draw).mul_((4.0 if peaked else 1.0) * width**-0.5)
    grad = torch.randn(rows, **draw) / rows
    grad[torch.rand(rows, **draw) < zero_share] = 0.0
    targets = torch.randint(0, vocabulary, (rows,), **draw)
    return Data(hidden.to(dtype), weight.to(dtype), targets, grad)


def sides(device: str) -> list[Side]:
    """All that run on the device, ours first."""
    found = [*_ours(device), _NAIVE, _COMPILED]
    found += [side for side in (_TORCH_CHUNKED, _TRL) if side.name not in _absent()]
    for add in (_liger, _cut_cross_entropy):
        side = add(device)
        if isinstance(side, Side):
            found.append(side)
    return found


def missing(device: str) -> dict[str, str]:
    """Peers that do not run on this device, and why."""
    reasons = {"Liger fused linear CE": _liger(device), "cut-cross-entropy": _cut_cross_entropy(device)}
    return {name: reason for name, reason in reasons.items() if isinstance(reason, str)} | _absent()


def _absent() -> dict[str, str]:
    """Peers that this environment does not have, and why."""
    found: dict[str, str] = {}
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        found[_TORCH_CHUNKED.name] = f"torch {torch.__version__} does not have it"
    if find_spec("trl") is None:
        found[_TRL.name] = "trl is not installed"
    return found


def _split(log_probs: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Data], Results]:
    def run(data: Data) -> Results:
        hidden, weight = data.leaves()
        found = log_probs(hidden, weight, data.targets)
        found.backward(data.grad.to(found.dtype))
        assert hidden.grad is not None
        assert weight.grad is not None
        return found.detach(), hidden.grad, weight.grad

    return run


def _forward(log_probs: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Data], Tensor]:
    def run(data: Data) -> Tensor:
        with torch.no_grad():
            return log_probs(data.hidden, data.weight, data.targets)

    return run


def _naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(F.linear(hidden, weight).float(), -1).gather(1, targets[:, None])[:, 0]


@cache
def _compiled_naive() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return torch.compile(_naive)


_NAIVE = Side("naive log_softmax + gather", _forward(_naive), _split(_naive), (1, 3))
_COMPILED = Side(
    "torch.compile of naive",
    _forward(lambda *given: _compiled_naive()(*given)),
    _split(lambda *given: _compiled_naive()(*given)),
    (1, 3),
)


def _torch_chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return -F.linear_cross_entropy(hidden, weight, targets, reduction="none", options=options)


_TORCH_CHUNKED = Side("F.linear_cross_entropy, chunked", _forward(_torch_chunked), _split(_torch_chunked), (1, 4))


def _trl(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    results: Any = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 8192, None, 1.0, ())
    return results[0]


_TRL = Side("TRL ChunkedLogProbFunction", _forward(_trl), _split(_trl), (1, 4))


def _ours(device: str) -> list[Side]:
    from rft_models.logprobs.backend import EpilogueName
    from rft_models.logprobs.fused_loss import linear_loss
    from rft_models.logprobs.linear_logprobs import linear_logprobs

    def split(epilogue: EpilogueName) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda hidden, weight, targets: linear_logprobs(hidden, weight, targets, epilogue=epilogue)[0]

    def fused(epilogue: EpilogueName) -> Callable[[Data], Results]:
        def run(data: Data) -> Results:
            hidden, weight = data.leaves()
            grad = data.grad

            def objective(logprobs: Tensor, entropy: Tensor, rows: Tensor) -> Tensor:
                return grad[rows] * logprobs

            outputs = linear_loss(hidden, weight, data.targets, objective, epilogue=epilogue)
            outputs.loss.backward()
            assert hidden.grad is not None
            assert weight.grad is not None
            return outputs.logprobs, hidden.grad, weight.grad

        return run

    names: tuple[EpilogueName, ...] = ("eager", "compiled") if device == "cpu" else ("eager", "kernels")
    # on a CPU the logits of the case are kept
    products = (1, 3) if device == "cpu" else (1, 4)
    found = []
    for name in names:
        found.append(Side(f"ours, {name}", _forward(split(name)), _split(split(name)), products, ours=True))
        found.append(Side(f"ours, {name}, loss-fused", None, fused(name), (1, 3), ours=True))
    return found


def _liger(device: str) -> Side | str:
    """Liger's fused linear cross-entropy: the mean of all rows, gradients in its forward."""
    if device == "cpu":
        return "its kernels are Triton, which compiles for GPUs"
    try:
        function = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    except ImportError as error:
        return f"not installed ({error})"

    def run(data: Data) -> Results:
        hidden, weight = data.leaves()
        results = function.LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, data.targets)
        loss = results[0] if isinstance(results, tuple) else results
        loss.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        return None, hidden.grad, weight.grad

    return Side("Liger fused linear CE", None, run, (1, 3), mean_only=True)


def _cut_cross_entropy(device: str) -> Side | str:
    """Apple's cut-cross-entropy with its filter of small gradients off."""
    if device == "cpu":
        return "its kernels are Triton; what it has for a CPU is torch.compile of naive, which is a row"
    try:
        function: Any = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    except (ImportError, RuntimeError) as error:
        return f"not installed, or does not import here ({str(error).splitlines()[0]})"

    def log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return -function(hidden, weight, targets, reduction="none", impl="cce", filter_eps=None)

    return Side("cut-cross-entropy, no filter", _forward(log_probs), _split(log_probs), (1, 4))


def floor_products(data: Data) -> tuple[Callable[[], None], Callable[[], None]]:
    """The products alone, on the same data with torch's own matmul: one unit, and three."""
    rows, vocabulary = data.hidden.shape[0], data.weight.shape[0]
    slab = min(vocabulary, 8192)
    logits = data.hidden.new_empty(rows, slab)
    grad_hidden, grad_weight = torch.empty_like(data.hidden), torch.empty_like(data.weight)

    def one() -> None:
        for start in range(0, vocabulary, slab):
            weight = data.weight[start : start + slab]
            torch.mm(data.hidden, weight.t(), out=logits[:, : weight.shape[0]] if weight.shape[0] == slab else None)

    def three() -> None:
        for start in range(0, vocabulary, slab):
            weight = data.weight[start : start + slab]
            products = torch.mm(data.hidden, weight.t())
            torch.mm(products, weight, out=grad_hidden)
            torch.mm(products.t(), data.hidden, out=grad_weight[start : start + slab])

    return one, three
