"""Which chunks an objective is computed in, what it is handed, and which rows and tensors get gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_models.logprobs import fused_loss as module
from rft_models.logprobs.epilogue import EagerEpilogue, Shape
from rft_models.logprobs.fused_loss import TokenObjective, chunk_for, linear_loss
from rft_models.logprobs.row_statistics import IGNORED
from rft_models.logprobs.vocab_slabs import Matrix, OutputFlags, add_hidden, chunk_sums

ROWS, WIDTH, VOCAB = 10, 4, 23


def inputs(dtype: torch.dtype = torch.float64, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = ((rows, WIDTH), (VOCAB, WIDTH), (VOCAB,))
    hidden, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return hidden, weight, bias, torch.randint(0, VOCAB, (rows,), generator=generator)


def plain(given: list[Tensor], targets: Tensor, objective: TokenObjective, temperature: float = 0.7) -> Tensor:
    hidden, weight, bias = (tensor.double() for tensor in given)
    table = torch.log_softmax((hidden @ weight.T + bias) / temperature, 1)
    rows = (targets != IGNORED).nonzero()[:, 0]
    return objective(table[rows, targets[rows]], -(table.exp() * table).sum(1)[rows], rows).sum()


def test_a_chunk_holds_sixteen_million_logits_on_a_cpu_and_more_on_a_gpu() -> None:
    hidden: Any = torch.empty(3, 8)
    for num_entries, expected in ((0, 2**24), (1, 2**24), (1000, 2**24 // 1000), (2**24, 1), (2**25, 1)):
        weight: Any = SimpleNamespace(shape=(num_entries, 8))
        assert chunk_for(hidden, weight) == expected
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    assert chunk_for(on_gpu, torch.empty(100, 8)) == 13_421_772


@pytest.mark.parametrize(
    ("num_rows", "chunk_size", "expected"),
    [
        (10, 4, [4, 4, 2]),
        (9, 4, [3, 3, 3]),
        (41, 40, [21, 20]),
        (5, 5, [5]),
        (3, 1, [1] * 3),
        (5, None, [5]),
        (0, 4, []),
    ],
)
@pytest.mark.parametrize("ignored", [0, 2])
def test_chunks_are_of_one_size(
    num_rows: int, chunk_size: int | None, expected: list[int], ignored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int, OutputFlags]] = []
    original = chunk_sums

    def noted(matrix: Matrix, hidden: Tensor, *words: Any) -> Any:
        found.append((len(hidden), matrix.slab, words[-1]))
        return original(matrix, hidden, *words)

    monkeypatch.setattr(module, "chunk_sums", noted)
    hidden, weight, _, targets = inputs(rows=num_rows + ignored)
    targets[:ignored] = IGNORED
    rows_of_calls: list[int] = []

    def objective(logprobs: Tensor, entropy: Tensor, rows: Tensor) -> Tensor:
        assert rows.dtype is torch.int64
        rows_of_calls.extend(rows.tolist())
        return logprobs

    for trains in (True, False):
        found.clear()
        linear_loss(hidden.requires_grad_(trains), weight, targets, objective, chunk_size=chunk_size)
        assert [number for number, _, _ in found] == expected
        assert {flags for _, _, flags in found} <= {OutputFlags(moment=True, hold=trains)}
        assert {slab for _, slab, _ in found} <= {2**21 // max(*expected[:1], WIDTH, 1)}
    assert rows_of_calls == 2 * list(range(ignored, num_rows + ignored))


def test_the_passes_are_chosen_by_the_size_of_the_counted_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def chosen(*words: Any) -> EagerEpilogue:
        asked.append(words)
        return EagerEpilogue("a test")

    monkeypatch.setattr(module, "choose_epilogue", chosen)
    hidden, weight, _, targets = inputs()
    targets[:3] = IGNORED
    linear_loss(hidden, weight, targets, lambda p, e, r: p, temperature=0.7, softcap=1.5, epilogue="compiled")
    [(like, *rest)] = asked
    assert like is hidden
    assert rest == [(ROWS - 3) * VOCAB, Shape(0.7, 1.5), "compiled"]


def test_the_temperature_is_one_by_default() -> None:
    hidden, weight, bias, targets = inputs()
    found = linear_loss(hidden, weight, targets, lambda p, e, r: p + e, bias=bias)
    expected = plain([hidden, weight, bias], targets, lambda p, e, r: p + e, 1.0)
    torch.testing.assert_close(found.loss, expected)


@pytest.mark.parametrize("trains", [True, False])
def test_an_objective_is_handed_leaves_of_a_graph_of_its_own(trains: bool) -> None:
    hidden, weight, _, targets = inputs()
    seen: list[tuple[bool, bool, bool]] = []

    def objective(logprobs: Tensor, entropy: Tensor, rows: Tensor) -> Tensor:
        for tensor in (logprobs, entropy):
            seen.append((tensor.requires_grad, tensor.is_leaf, torch.is_grad_enabled()))
        return logprobs

    found = linear_loss(hidden.requires_grad_(trains), weight, targets, objective)
    assert seen == [(trains, True, trains)] * 2
    assert [x.requires_grad for x in (found.loss, found.logprobs, found.entropy)] == [trains, False, False]


GRAD = torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0, -1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
ENTROPY_GRAD = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.5, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
OBJECTIVES: dict[str, TokenObjective] = {
    "both": lambda p, e, rows: p * GRAD[rows].to(p.dtype) + e * ENTROPY_GRAD[rows].to(p.dtype),
    "logprobs": lambda p, e, rows: p * GRAD[rows].to(p.dtype),
    "entropy": lambda p, e, rows: e * ENTROPY_GRAD[rows].to(p.dtype),
    "all rows": lambda p, e, rows: p * 3 - e,
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("chunk_size", [4, 100])
@pytest.mark.parametrize("trained", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_and_tensors_without_gradient_cost_no_product(
    name: str, chunk_size: int, trained: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "slab_for", lambda *_: 9)
    added: list[int] = []
    original = add_hidden

    def noted(sum_ND: Tensor, slopes_NC: Tensor, weight_CD: Tensor) -> None:
        added.append(len(slopes_NC))
        original(sum_ND, slopes_NC, weight_CD)

    monkeypatch.setattr(module, "add_hidden", noted)
    *tensors, targets = inputs(dtype)
    targets[2] = IGNORED
    given = [tensor.requires_grad_(bool(on)) for tensor, on in zip(tensors, trained, strict=True)]
    leaves = [tensor for tensor in given if tensor.requires_grad]
    objective = OBJECTIVES[name]
    expected = plain(given, targets, objective)
    near: dict[str, Any] = dict.fromkeys(("atol", "rtol"), 1e-10 if dtype is torch.float64 else 1e-4)
    for upstream in (1.0, 1.1, -2.0):
        added.clear()
        found = linear_loss(
            given[0], given[1], targets, objective, bias=given[2], temperature=0.7, chunk_size=chunk_size
        )
        torch.testing.assert_close(found.loss.double(), expected, **near)
        assert found.loss.dtype is found.logprobs.dtype is found.entropy.dtype is dtype
        ours = torch.autograd.grad(found.loss * upstream, leaves)
        theirs = torch.autograd.grad(expected * upstream, leaves, retain_graph=True)
        for our, their in zip(ours, theirs, strict=True):
            assert our.dtype is dtype
            torch.testing.assert_close(our, their, **near)
        live = {"both": 6, "logprobs": 4, "entropy": 4, "all rows": 9}[name]
        assert sum(added) == (3 * live if trained[0] else 0), "three slabs of the rows that are left"


def test_an_objective_of_constants_gives_no_gradient() -> None:
    hidden, weight, bias, targets = inputs()
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    found = linear_loss(hidden, weight, targets, lambda p, e, rows: torch.ones_like(p.detach()), bias=bias)
    assert found.loss.tolist() == ROWS
    for gradient in torch.autograd.grad(found.loss, leaves):
        assert not gradient.any()


def test_one_loss_for_each_row_is_asked_of_an_objective() -> None:
    hidden, weight, _, targets = inputs()
    with pytest.raises(AssertionError):
        linear_loss(hidden, weight, targets, lambda p, e, rows: p.sum())


def test_sums_are_float32_and_gradients_of_the_type_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: set[torch.dtype] = set()
    monkeypatch.setattr(module, "add_hidden", lambda total, slopes, weight: kinds.add(total.dtype))
    hidden, weight, bias, targets = inputs(torch.bfloat16)
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    found = linear_loss(hidden, weight, targets, lambda p, e, rows: p, bias=bias, chunk_size=1)
    assert {found.loss.dtype, found.logprobs.dtype, found.entropy.dtype} == {torch.float32}
    assert {gradient.dtype for gradient in torch.autograd.grad(found.loss, leaves)} == {torch.bfloat16}
    assert kinds == {torch.float32}
