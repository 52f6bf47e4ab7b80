"""The output matrix slab after slab: sums and gradients of the whole, what is kept, and in which type it is added."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_models.logprobs import vocab_slabs as module
from rft_models.logprobs.backend import KernelEpilogue
from rft_models.logprobs.epilogue import EagerEpilogue, Shape
from rft_models.logprobs.row_statistics import SlabSums, VocabularyShard, to_logprobs
from rft_models.logprobs.vocab_slabs import (
    ChunkSums,
    Gradients,
    Matrix,
    OutputFlags,
    add_hidden,
    chunk_sums,
    log_shares,
    row_terms,
    sum_dtype,
)

ROWS, WIDTH, VOCAB = 5, 4, 9
TARGETS = torch.tensor([0, 8, 4, 3, 7])
SHAPES = [Shape(1.0, None), Shape(0.7, None), Shape(0.7, 2.0)]


class Alone:
    """A rank that meets nobody."""

    rank, world_size = 0, 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Over ranks."""
        return tensor

    max = sum


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    shapes = ((ROWS, WIDTH), (VOCAB, WIDTH), (VOCAB,))
    hidden, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return hidden, weight, bias


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
    found = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    return (found if shape.softcap is None else shape.softcap * torch.tanh(found / shape.softcap)) / shape.temperature


class Noted(EagerEpilogue):
    """Plain torch that keeps the products it was handed."""

    def sums(self, products_RC: Tensor, *words: Any, **options: Any) -> tuple[SlabSums, Tensor]:
        """As plain torch."""
        handed.append(products_RC)
        return EagerEpilogue.sums(self, products_RC, *words, **options)


handed: list[Tensor] = []


def test_slabs_cover_the_rows_in_order() -> None:
    _, weight, bias = inputs()
    assert list(Matrix(weight, bias, 4).starts()) == [(0, 0, 4), (1, 4, 8), (2, 8, 9)]
    assert list(Matrix(weight, bias, 9).starts()) == [(0, 0, 9)]
    assert not list(Matrix(weight[:0], bias[:0], 4).starts())
    assert Matrix(weight, bias, 4).offset == 0
    assert Matrix(weight, bias, 4, VocabularyShard(7, Alone())).offset == 7


def test_only_what_is_asked_for_is_computed_by_default() -> None:
    assert OutputFlags(moment=True) == OutputFlags(True, argmax=False, top_k=0, hold=False)


@pytest.mark.parametrize("slab", [1, 4, 9, 20])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_of_all_slabs_are_those_of_the_whole(slab: int, shape: Shape, with_bias: bool, dtype: torch.dtype) -> None:
    hidden, weight, bias = inputs(dtype)
    matrix = Matrix(weight, bias if with_bias else None, slab, VocabularyShard(100, Alone()))
    handed.clear()
    flags = OutputFlags(moment=True, argmax=True, top_k=6, hold=True)
    found = chunk_sums(matrix, hidden, TARGETS + 100, shape, Noted(""), flags)
    logits = logits_of(hidden, weight, bias if with_bias else None, shape)
    near: dict[str, Any] = {"rtol": 0, "atol": {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]}
    rows, wide = found.rows, sum_dtype(hidden)
    assert rows.moment is not None
    assert rows.argmax is not None
    logprobs = torch.log_softmax(logits, 1)
    torch.testing.assert_close(rows.highest.double(), logits.max(1).values, **near)
    torch.testing.assert_close(rows.highest.double() + rows.total.double().log(), logits.logsumexp(1), **near)
    torch.testing.assert_close(rows.target.double(), logits.gather(1, TARGETS[:, None])[:, 0], **near)
    entropy = rows.total.log() - rows.moment / rows.total
    torch.testing.assert_close(entropy.double(), -(logprobs.exp() * logprobs).sum(1), **near)
    assert {x.dtype for x in (rows.highest, rows.total, rows.moment, rows.target, found.log_masses_SR)} == {wide}
    cuts = logits.split(slab, 1)
    masses = torch.stack([cut.logsumexp(1) for cut in cuts])
    torch.testing.assert_close(found.log_masses_SR.double(), masses, **near)
    shares = log_shares(found, to_logprobs(rows, TARGETS))
    torch.testing.assert_close(shares.double(), masses - logits.logsumexp(1), **near)
    assert found.top is not None
    values, ids = found.top
    assert (values.dtype, ids.dtype) == (wide, torch.int64)
    torch.testing.assert_close(values.double(), logits.topk(6, 1).values, **near)
    for held, cut, products in zip(found.held_SRC, cuts, handed, strict=True):
        torch.testing.assert_close(held.double(), cut if shape.softcap else cut.softmax(1), **near)
        assert held.dtype is wide
        assert (held.data_ptr() == products.data_ptr()) == (dtype is wide), "in the memory of the products if it fits"
    if dtype is not torch.bfloat16:  # there several logits are rounded to one number
        assert rows.argmax.tolist() == (logits.argmax(1) + 100).tolist()
        assert ids.tolist() == (logits.topk(6, 1).indices + 100).tolist()


def test_what_is_not_asked_for_is_not_there() -> None:
    hidden, weight, bias = inputs()
    for epilogue in (EagerEpilogue(""), kernels([])):
        matrix = Matrix(weight, bias, 4)
        found = chunk_sums(matrix, hidden, TARGETS, SHAPES[0], epilogue, OutputFlags(moment=False))
        assert found.rows.moment is found.rows.argmax is found.top is None
        assert not found.held_SRC


def test_a_matrix_without_rows_has_sums_without_entries() -> None:
    hidden, weight, bias = inputs()
    flags = OutputFlags(moment=True, argmax=True)
    found = chunk_sums(Matrix(weight[:0], bias[:0], 4), hidden, TARGETS, SHAPES[0], EagerEpilogue(""), flags)
    nothing = [-torch.inf] * ROWS
    assert found.rows.highest.tolist() == found.rows.target.tolist() == nothing
    assert found.rows.moment is not None
    assert found.rows.total.tolist() == found.rows.moment.tolist() == [0.0] * ROWS
    assert found.log_masses_SR.tolist() == [nothing]
    assert found.rows.argmax is not None
    assert found.rows.argmax.dtype is torch.int64


def kernels(calls: list[str]) -> KernelEpilogue:
    """Kernels in plain torch, which say which of them was called."""
    ops = ModuleType("ops")

    def slab_sums(
        products_RC: Tensor, targets_R: Tensor, start: int, *, temperature: float, softcap: float | None
    ) -> Any:
        calls.append("slab")
        shape = Shape(temperature, softcap)
        return EagerEpilogue("").sums(products_RC.clone(), targets_R, start, shape, moment=True, argmax=True)[0]

    def fused_sums(
        hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, *, bias_V: Tensor, start: int, **shape: Any
    ) -> SlabSums:
        calls.append("fused")
        products = torch.nn.functional.linear(hidden_RD, weight_VD, bias_V)
        sums = EagerEpilogue("").sums(products, targets_R, start, Shape(**shape), moment=True, argmax=True)[0]
        return SlabSums(*(column[None] for column in sums if column is not None))

    ops.slab_sums, ops.fused_sums = slab_sums, fused_sums  # type: ignore[attr-defined]
    return KernelEpilogue(ops, "a test")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (OutputFlags(moment=True), ["fused"]),
        (OutputFlags(moment=True, hold=True), ["slab"] * 3),
        (OutputFlags(moment=True, top_k=2), ["slab"] * 3),
    ],
)
def test_one_kernel_forms_products_and_sums_where_no_logit_is_wanted(flags: OutputFlags, expected: list[str]) -> None:
    hidden, weight, bias = inputs()
    matrix = Matrix(weight, bias, 4, VocabularyShard(100, Alone()))
    calls: list[str] = []
    found = chunk_sums(matrix, hidden, TARGETS + 100, SHAPES[2], kernels(calls), flags)
    assert calls == expected
    plain = chunk_sums(matrix, hidden, TARGETS + 100, SHAPES[2], EagerEpilogue(""), flags)
    for ours, theirs in zip(found.rows[:4], plain.rows[:4], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert len(found.held_SRC) == (3 if flags.hold else 0)
    calls.clear()
    wide = (torch.zeros(ROWS, 2049, dtype=torch.float64), torch.zeros(VOCAB, 2049, dtype=torch.float64))
    chunk_sums(Matrix(wide[1], bias, 4), wide[0], TARGETS, SHAPES[2], kernels(calls), OutputFlags(moment=True))
    assert calls == ["slab"] * 3, "too wide to gain by it"


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill memory that nobody has written with NaN, so that what reads it shows."""
    monkeypatch.setattr(torch, "empty_like", lambda like, **options: torch.full_like(like, torch.nan, **options))


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize("slab", [3, 4, 9])
@pytest.mark.parametrize("num_chunks", [0, 1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_of_slabs_and_chunks_add_up(slab: int, num_chunks: int, dtype: torch.dtype) -> None:
    _, weight, bias = inputs(dtype)
    matrix = Matrix(weight, bias, slab)
    generator = torch.Generator().manual_seed(2)
    chunks = [
        (torch.randn(3, VOCAB, generator=generator).to(dtype), torch.randn(3, WIDTH, generator=generator).to(dtype))
        for _ in range(num_chunks)
    ]
    gradients = Gradients(matrix, needs_weight=True, needs_bias=True, num_additions=num_chunks)
    for _, start, stop in matrix.starts():
        for number, (slopes, hidden) in enumerate(chunks):
            gradients.add(slopes[:, start:stop].contiguous(), hidden, start, stop, first=number == 0)
    expected = sum((slopes.double().T @ hidden.double() for slopes, hidden in chunks), torch.zeros(VOCAB, WIDTH))
    found, bias_found = gradients.weight(), gradients.bias()
    assert found is not None
    assert bias_found is not None
    assert found.dtype is bias_found.dtype is dtype
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)
    bias_expected = sum((slopes.double().sum(0) for slopes, _ in chunks), torch.zeros(VOCAB, dtype=torch.float64))
    torch.testing.assert_close(bias_found.double(), bias_expected, rtol=1e-5, atol=1e-5)
    assert gradients.weight() is None, "handed over once"


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize(("num_ones", "expected"), [(3, 256.0), (4, 260.0)])
def test_more_than_four_additions_are_summed_in_float32(num_ones: int, expected: float) -> None:
    """256 + 1 is 256 in bfloat16, so each one that is added alone is lost."""
    matrix = Matrix(torch.zeros(2, 1, dtype=torch.bfloat16), None, 2)
    gradients = Gradients(matrix, needs_weight=True, needs_bias=False, num_additions=1 + num_ones)
    for number, value in enumerate([256.0] + num_ones * [1.0]):
        slopes = torch.full((1, 2), value, dtype=torch.bfloat16)
        gradients.add(slopes, torch.ones(1, 1, dtype=torch.bfloat16), 0, 2, first=number == 0)
    found = gradients.weight()
    assert found is not None
    assert found.dtype is torch.bfloat16
    assert found.tolist() == [[expected], [expected]]
    assert gradients.bias() is None


def test_the_gradient_of_the_bias_is_summed_in_float32() -> None:
    matrix = Matrix(torch.zeros(1, 1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16), 1)
    gradients = Gradients(matrix, needs_weight=False, needs_bias=True, num_additions=2)
    for values in ([256.0, 1.0], [1.0]):
        slopes = torch.tensor(values, dtype=torch.bfloat16)[:, None]
        gradients.add(slopes, torch.ones_like(slopes), 0, 1, first=len(values) == 2)
    found = gradients.bias()
    assert gradients.weight() is None
    assert found is not None
    assert (found.dtype, found.tolist()) == (torch.bfloat16, [258.0])


def test_the_only_product_is_the_gradient_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.ones(VOCAB, WIDTH, dtype=torch.float64)
    monkeypatch.setattr(module, "product_tn", lambda *_: product)
    _, weight, bias = inputs()
    matrix = Matrix(weight, bias, VOCAB)
    gradients = Gradients(matrix, needs_weight=True, needs_bias=False, num_additions=1)
    gradients.add(torch.ones(3, VOCAB), torch.ones(3, WIDTH), 0, VOCAB, first=True)
    assert gradients.weight() is product
    assert gradients.bias() is None


def test_products_that_torch_adds_itself_are_not_added_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Tensor, ...]] = []

    def adds(*factors: Tensor) -> bool:
        asked.append(factors)
        return True

    slopes, hidden, weight = torch.ones(3, 2), torch.full((3, 1), 5.0), torch.ones(2, 1)
    sums = torch.zeros(3, 1)
    add_hidden(sums, slopes, weight)
    assert sums.tolist() == [[2.0]] * 3
    add_hidden(sums, slopes, weight)
    assert sums.tolist() == [[4.0]] * 3
    monkeypatch.setattr(module, "add_product", adds)
    add_hidden(sums, slopes, weight)
    assert sums.tolist() == [[4.0]] * 3
    assert [x is y for x, y in zip(asked[0], (sums, slopes, weight), strict=True)] == [True] * 3
    gradients = Gradients(Matrix(weight, None, 2), needs_weight=True, needs_bias=True, num_additions=2)
    for number in range(2):
        gradients.add(slopes, hidden, 0, 2, first=number == 0)
    found = gradients.weight()
    assert found is not None
    assert found.tolist() == [[15.0]] * 2, "the first one alone"
    total, left, right = asked[1]
    assert total.tolist() == found.tolist()
    assert (left.shape, right is hidden) == ((2, 3), True)
    assert gradients.bias() is None


def test_terms_of_rows_are_taken_from_their_sums() -> None:
    hidden, weight, bias = inputs()
    sums: ChunkSums = chunk_sums(
        Matrix(weight, bias, 4), hidden, TARGETS, SHAPES[1], EagerEpilogue(""), OutputFlags(moment=True)
    )
    rows, grad, entropy_grad = to_logprobs(sums.rows, TARGETS), torch.ones(ROWS), torch.zeros(ROWS)
    found = row_terms(rows, TARGETS, grad, entropy_grad)
    expected = (TARGETS, rows.logprobs, rows.highest, rows.log_total, rows.entropy, grad, entropy_grad)
    names = ("targets", "logprobs", "highest", "log_total", "entropy", "grad", "entropy_grad")
    assert all(getattr(found, name) is value for name, value in zip(names, expected, strict=True))
