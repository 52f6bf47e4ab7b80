"""One slab by plain torch against the definitions: its sums, its gradients, and which memory they take."""

from __future__ import annotations

import pytest
import torch
from slab_reference import ENTROPY_GRAD, GRAD, ROWS, SHAPES, START, STOP, TARGETS, Reference, products
from torch import Tensor

from rft_models.logprobs.epilogue import EagerEpilogue, RowTerms, Shape

EAGER = EagerEpilogue("a test")
PLAIN, CAPPED = Shape(0.7, None), Shape(0.7, 1.5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("start", "stop"), [(START, STOP), (START, START + 1), (0, 11)])
def test_sums_are_those_of_the_definition(shape: Shape, start: int, stop: int) -> None:
    reference = Reference(products(), shape)
    found, held = EAGER.sums(products()[:, start:stop].clone(), TARGETS, start, shape, moment=True, argmax=True)
    for ours, theirs in zip(found, reference.sums(start, stop), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    logits = reference.logits()[:, start:stop]
    kept = logits.softmax(1) if shape.softcap is None else logits
    torch.testing.assert_close(held, kept, rtol=1e-13, atol=1e-13)
    again = EAGER.held(products()[:, start:stop].clone(), shape)
    torch.testing.assert_close(again, kept, rtol=1e-13, atol=1e-13)


def test_sums_that_are_not_asked_for_are_left_out() -> None:
    found, _ = EAGER.sums(products(), TARGETS, 0, PLAIN, moment=False, argmax=False)
    assert found.moment is found.argmax is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("entropy_grad", [None, ENTROPY_GRAD])
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(START, STOP), (START, START + 1), (0, 11)])
def test_gradients_are_those_of_autograd(
    shape: Shape, entropy_grad: Tensor | None, free: bool, start: int, stop: int
) -> None:
    reference = Reference(products(), shape)
    held = EAGER.held(products()[:, start:stop].clone(), shape)
    before = held.clone()
    rows, share = reference.terms(GRAD, entropy_grad), reference.log_share(start, stop)
    found = EAGER.gradients(held, rows, share, start, shape, torch.float64, free=free)
    expected = reference.slopes(GRAD, entropy_grad)[:, start:stop]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if not free:
        assert torch.equal(held, before)


@pytest.mark.parametrize("shape", [PLAIN, CAPPED])
@pytest.mark.parametrize("entropy_grad", [None, ENTROPY_GRAD])
def test_narrow_products_have_float32_sums_and_gradients_of_their_own_type(
    shape: Shape, entropy_grad: Tensor | None
) -> None:
    narrow = products().bfloat16()
    reference = Reference(narrow.double(), shape)
    found, held = EAGER.sums(narrow.clone(), TARGETS, 0, shape, moment=True, argmax=False)
    assert held.dtype is torch.float32
    for ours, theirs in zip(found[:4], reference.sums(0, 11)[:4], strict=True):
        assert ours is not None
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    rows, share = reference.terms(GRAD, entropy_grad, torch.float32), torch.zeros(ROWS)
    for free in (False, True):
        slopes = EAGER.gradients(held.clone(), rows, share, 0, shape, torch.bfloat16, free=free)
        assert slopes.dtype is torch.bfloat16
        expected = reference.slopes(GRAD, entropy_grad)
        torch.testing.assert_close(slopes.double(), expected, rtol=2**-8, atol=1e-6)


def test_a_slab_that_is_free_gives_its_memory_to_the_gradient() -> None:
    rows, share = Reference(products(), PLAIN).terms(GRAD, None), torch.zeros(ROWS, dtype=torch.float64)
    held = EAGER.held(products(), PLAIN)
    assert EAGER.gradients(held, rows, share, 0, PLAIN, held.dtype, free=True).data_ptr() == held.data_ptr()
    assert EAGER.gradients(held, rows, share, 0, PLAIN, held.dtype, free=False).data_ptr() != held.data_ptr()


def test_rows_are_selected_and_split_in_every_term() -> None:
    names: tuple[str, ...] = tuple(RowTerms.__dataclass_fields__)
    columns = [torch.arange(5) + 10 * number for number in range(len(names))]
    rows = RowTerms(*columns)
    selected = rows.select(torch.tensor([3, 0]))
    assert [getattr(selected, name).tolist() for name in names] == [[10 * n + 3, 10 * n] for n in range(len(names))]
    parts = rows.split(2)
    assert [len(part.targets) for part in parts] == [2, 2, 1]
    for name, column in zip(names, columns, strict=True):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), column)
    bare = RowTerms(*columns[:-1], None)
    assert bare.select(torch.tensor([1])).entropy_grad is None
    assert [part.entropy_grad for part in bare.split(4)] == [None, None]
    empty = RowTerms(*[column[:0] for column in columns])
    assert [len(part.targets) for part in empty.split(1)] == [0], "one part, as torch splits hidden states"
