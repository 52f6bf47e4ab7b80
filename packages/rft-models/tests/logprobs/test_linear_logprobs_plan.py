"""Which rows, chunks and slabs of a head are computed and kept, and which outputs carry gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_models.logprobs import linear_logprobs as module
from rft_models.logprobs.epilogue import EagerEpilogue, Shape
from rft_models.logprobs.linear_logprobs import (
    counted_rows,
    linear_logprobs,
    linear_outputs,
    needs_gradient,
    of_one_type,
    slab_for,
)
from rft_models.logprobs.row_statistics import IGNORED
from rft_models.logprobs.vocab_slabs import Matrix, OutputFlags, add_hidden, chunk_sums

ROWS, WIDTH, VOCAB = 7, 5, 23


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, WIDTH), (VOCAB, WIDTH), (VOCAB,))
    hidden, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return hidden, weight, bias, torch.randint(0, VOCAB, (ROWS,), generator=generator)


def table_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float = 1.0) -> Tensor:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    return torch.log_softmax(logits / temperature, -1)


Chunks = list[tuple[Matrix, int, OutputFlags]]


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> Chunks:
    """The matrix, rows and flags of every chunk."""
    found: Chunks = []
    original = chunk_sums

    def noted(matrix: Matrix, hidden: Tensor, targets: Tensor, shape: Any, epilogue: Any, flags: OutputFlags) -> Any:
        found.append((matrix, len(hidden), flags))
        return original(matrix, hidden, targets, shape, epilogue, flags)

    monkeypatch.setattr(module, "chunk_sums", noted)
    return found


def test_slabs_hold_two_million_logits_on_a_cpu_and_more_on_a_gpu() -> None:
    empty: Any = torch.empty(3, 8)
    assert slab_for(empty, 16) == 2**21 // 16
    assert slab_for(empty, 2) == 2**21 // 8, "nor may its rows of the gradient be more"
    assert slab_for(torch.empty(0, 0), 0) == 2**21
    assert slab_for(empty, 2**20) == 256
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), shape=(3, 8))
    assert slab_for(on_gpu, 16) == 2**26 // 16
    assert 4 * module.KEPT_LOGITS == 256 * 2**20, "bytes in float32"


@pytest.mark.parametrize(
    ("chunk_size", "slab_size", "rows", "slab"),
    [
        (None, None, [7], 2**21 // 7),
        (3, 4, [3, 3, 1], 4),
        (100, 0, [7], 1),
        (1, 1, [1] * 7, 1),
        (0, 50, [1] * 7, 50),
        (6, None, [6, 1], 2**21 // 6),
    ],
)
def test_rows_are_cut_into_chunks_and_the_vocabulary_into_slabs(
    chunk_size: int | None, slab_size: int | None, rows: list[int], slab: int, chunks: Chunks
) -> None:
    hidden, weight, bias, targets = inputs()
    found = linear_outputs(hidden, weight, targets, bias=bias, chunk_size=chunk_size, slab_size=slab_size)
    assert [number for _, number, _ in chunks] == rows
    assert {matrix.slab for matrix, _, _ in chunks} == {slab}
    torch.testing.assert_close(found.logprobs, table_of(hidden, weight, bias)[torch.arange(ROWS), targets])
    chunks.clear()
    assert linear_outputs(hidden[:0], weight, targets[:0]).logprobs.shape == (0,)
    assert [number for _, number, _ in chunks] == [0]


@pytest.mark.parametrize(
    ("limit", "chunk_size", "trains", "holds"),
    [
        (ROWS * VOCAB, None, True, True),
        (ROWS * VOCAB - 1, None, True, False),
        (ROWS * VOCAB, ROWS, True, False),
        (ROWS * VOCAB, None, False, False),
    ],
)
def test_few_logits_are_kept_for_the_backward_pass(
    limit: int, chunk_size: int | None, trains: bool, holds: bool, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_LOGITS", limit)
    hidden, weight, _, targets = inputs()
    hidden.requires_grad_(trains)
    linear_outputs(hidden, weight, targets, chunk_size=chunk_size, with_argmax=True, top_k=3)
    assert [flags for _, _, flags in chunks] == [OutputFlags(False, True, 3, holds)]


def test_the_passes_are_chosen_by_the_size_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def chosen(*words: Any) -> EagerEpilogue:
        asked.append(words)
        return EagerEpilogue("a test")

    monkeypatch.setattr(module, "choose_epilogue", chosen)
    hidden, weight, _, targets = inputs()
    linear_outputs(hidden, weight, targets, temperature=0.7, softcap=1.5, epilogue="compiled")
    [(like, *rest)] = asked
    assert like is hidden
    assert rest == [ROWS * VOCAB, Shape(0.7, 1.5), "compiled"]


def test_log_probabilities_and_entropies_are_those_of_all_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def outputs(*words: Any, **options: Any) -> Any:
        asked.append((words, options))
        return SimpleNamespace(logprobs="logprobs", entropy="entropy")

    monkeypatch.setattr(module, "linear_outputs", outputs)
    hidden, weight, bias, targets = inputs()
    options: dict[str, Any] = {"bias": bias, "temperature": 0.7, "softcap": 2.0, "chunk_size": 3, "slab_size": 4}
    options |= {"with_entropy": True, "entropy_gradient": True, "shard": "shard", "epilogue": "eager"}
    assert linear_logprobs(hidden, weight, targets, **options) == ("logprobs", "entropy")
    linear_logprobs(hidden, weight, targets)
    for words, _ in asked:
        assert [x is y for x, y in zip(words, (hidden, weight, targets), strict=True)] == [True] * 3
    plain = dict.fromkeys(options) | {"temperature": 1.0, "with_entropy": False, "entropy_gradient": False}
    assert [given for _, given in asked] == [{**given, "all_counted": False} for given in (options, plain)]


@pytest.mark.parametrize("trains", [True, False])
def test_only_log_probabilities_are_computed_by_default(trains: bool) -> None:
    hidden, weight, _, targets = inputs()
    found = linear_outputs(hidden.requires_grad_(trains), weight, targets)
    torch.testing.assert_close(found.logprobs, table_of(hidden, weight, None)[torch.arange(ROWS), targets])
    assert found.entropy is found.argmax is found.top_logprobs is found.top_ids is None


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("wanted", [{"with_argmax": True}, {"top_k": 2}, {"with_entropy": True}, {}])
def test_rows_without_a_target_are_left_out_only_of_log_probabilities(
    trains: bool, wanted: dict[str, Any], chunks: Chunks
) -> None:
    hidden, weight, bias, targets = inputs()
    targets[[1, 4]] = IGNORED
    found = linear_outputs(hidden.requires_grad_(trains), weight, targets, bias=bias, **wanted)
    assert [number for _, number, _ in chunks] == [ROWS if wanted else ROWS - 2]
    table = table_of(hidden, weight, bias)
    expected = torch.where(targets == IGNORED, 0.0, table[torch.arange(ROWS), targets.clamp(min=0)])
    torch.testing.assert_close(found.logprobs, expected)
    if "with_argmax" in wanted:
        assert found.argmax is not None
        assert found.argmax.tolist() == table.argmax(1).tolist()
    if "top_k" in wanted:
        torch.testing.assert_close(found.top_logprobs, table.topk(2, 1).values)


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_gradients_flow_through_log_probabilities_and_entropies_alone(entropy_gradient: bool) -> None:
    hidden, weight, _, targets = inputs()
    found = linear_outputs(
        hidden.requires_grad_(), weight, targets, with_entropy=True, entropy_gradient=entropy_gradient,
        with_argmax=True, top_k=2,
    )  # fmt: skip
    outputs = (found.logprobs, found.entropy, found.argmax, found.top_logprobs, found.top_ids)
    assert [x is not None and x.requires_grad for x in outputs] == [True, entropy_gradient, False, False, False]


GRAD = torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0, -1.0, 0.0], dtype=torch.float64)
ENTROPY_GRAD = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.5, 0.0], dtype=torch.float64)


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("used", ["both", "logprobs", "entropy"])
@pytest.mark.parametrize("trained", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_without_an_upstream_gradient_cost_nothing_and_change_nothing(
    chunk_size: int | None, used: str, trained: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    *tensors, targets = inputs(dtype)
    given = [tensor.requires_grad_(bool(on)) for tensor, on in zip(tensors, trained, strict=True)]
    leaves = [tensor for tensor in given if tensor.requires_grad]
    added: list[tuple[torch.dtype, int]] = []
    original = add_hidden

    def noted(sum_ND: Tensor, slopes_NC: Tensor, weight_CD: Tensor) -> None:
        added.append((sum_ND.dtype, len(slopes_NC)))
        original(sum_ND, slopes_NC, weight_CD)

    monkeypatch.setattr(module, "add_hidden", noted)
    found = linear_outputs(
        given[0], given[1], targets, bias=given[2], temperature=0.7, with_entropy=True, entropy_gradient=True,
        chunk_size=chunk_size, slab_size=9,
    )  # fmt: skip
    assert found.entropy is not None
    table = table_of(given[0].double(), given[1].double(), given[2].double(), 0.7)
    entropy = -(table.exp() * table).sum(1)
    weights = (GRAD * (used != "entropy"), ENTROPY_GRAD * (used != "logprobs"))
    expected = (table[torch.arange(ROWS), targets] * weights[0]).sum() + (entropy * weights[1]).sum()
    total = torch.zeros((), dtype=torch.float64)
    total = total + (found.logprobs * weights[0]).sum() if used != "entropy" else total
    total = total + (found.entropy * weights[1]).sum() if used != "logprobs" else total
    near = 1e-10 if dtype is torch.float64 else 1e-4
    for _ in range(2):  # what is kept serves a second backward
        added.clear()
        ours = torch.autograd.grad(total, leaves, retain_graph=True)
        theirs = torch.autograd.grad(expected, leaves, retain_graph=True)
        for our, their in zip(ours, theirs, strict=True):
            assert our.dtype is dtype
            torch.testing.assert_close(our, their, atol=near, rtol=near)
        live = int(((weights[0] != 0) | (weights[1] != 0)).sum())
        assert sum(number for _, number in added) == (3 * live if trained[0] else 0)


def test_gradients_of_hidden_states_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: set[torch.dtype] = set()
    monkeypatch.setattr(module, "add_hidden", lambda total, slopes, weight: kinds.add(total.dtype))
    hidden, weight, _, targets = inputs(torch.bfloat16)
    found = linear_outputs(hidden.requires_grad_(), weight, targets).logprobs
    assert found.dtype is torch.float32
    assert torch.autograd.grad(found.sum(), hidden)[0].dtype is torch.bfloat16
    assert kinds == {torch.float32}


def test_all_three_are_of_the_type_of_the_matrix_or_of_autocast() -> None:
    hidden, weight, bias, _ = inputs(torch.float32)
    half = torch.bfloat16
    assert [x.dtype for x in of_one_type(hidden, weight.to(half), bias) if x is not None] == [half] * 3
    assert [x.dtype for x in of_one_type(hidden.to(half), weight, bias) if x is not None] == [torch.float32] * 3
    assert of_one_type(hidden, weight, None)[2] is None
    with torch.autocast("cpu", dtype=half):
        assert [x.dtype for x in of_one_type(hidden, weight, bias) if x is not None] == [half] * 3


def test_a_gradient_is_needed_where_autograd_would_record_one() -> None:
    plain, leaf = torch.zeros(1), torch.zeros(1, requires_grad=True)
    assert [needs_gradient(*given) for given in ((plain, None), (plain, leaf), (leaf,), ())] == [0, 1, 1, 0]
    with torch.no_grad():
        assert not needs_gradient(leaf)


def test_rows_are_counted_only_where_some_have_no_target() -> None:
    assert counted_rows(torch.tensor([0, 5])) is None
    rows = counted_rows(torch.tensor([IGNORED, 5, 0, IGNORED]))
    assert rows is not None
    assert rows.tolist() == [1, 2]


@pytest.mark.parametrize(("chunk_size", "rows"), [(3, [3, 3, 1]), (1, [1] * 7), (None, [])])
def test_the_backward_pass_forms_no_more_rows_at_a_time_than_the_forward(
    chunk_size: int | None, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, _, targets = inputs()
    hidden.requires_grad_()
    found, _ = linear_logprobs(hidden, weight, targets, chunk_size=chunk_size, slab_size=VOCAB)
    formed: list[int] = []
    products = Matrix.products

    def noted(matrix: Matrix, hidden_ND: Tensor, start: int, stop: int) -> Tensor:
        formed.append(len(hidden_ND))
        return products(matrix, hidden_ND, start, stop)

    monkeypatch.setattr(Matrix, "products", noted)
    found.sum().backward()
    assert formed == rows, "logits that were kept are not formed again"
