"""The kernels on slabs against the float64 reference: in Triton's interpreter without a GPU, compiled with one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rft_kernels.reference import vocab_slabs as reference_slabs
from rft_kernels.row_statistics import IGNORED, RowSums, SlabSums
from rft_kernels.triton import merge
from rft_kernels.triton import vocab_slabs as triton_slabs

WIDTHS = [1, 31, 1000, 1025]


@pytest.fixture(autouse=True)
def _small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 256, so that a slab of a thousand columns already takes several."""
    if "gpu" not in request.keywords:
        monkeypatch.setattr(triton_slabs, "_TILE", 256)


class Case(NamedTuple):
    """Products of slabs start .. start + C with what lies right of column C poisoned, and the row's numbers."""

    products: Tensor
    targets: Tensor
    start: int
    bias: Tensor
    grad: Tensor
    entropy_grad: Tensor | None

    def options(self, *, softcap: float | None = 30.0, with_bias: bool = True) -> dict[str, Any]:
        return {"temperature": 0.7, "softcap": softcap, "bias_C": self.bias if with_bias else None}


def random_case(
    width: int, dtype: torch.dtype, device: str, *, num_rows: int = 5, scale: float = 3.0, shift: float = 0.0
) -> Case:
    """First target in the first column, second in the last; the rest anywhere, 30 % ignored; NaN past column C."""
    generator = torch.Generator().manual_seed(width)
    buffer = torch.full((num_rows, width + 7), torch.nan)
    buffer[:, :width] = scale * torch.randn(num_rows, width, generator=generator) + shift
    bias = torch.cat([torch.randn(width, generator=generator), torch.full((9,), torch.nan)])
    start = 50_000
    targets = torch.randint(start, start + width, (num_rows,), generator=generator)
    targets[torch.rand(num_rows, generator=generator) < 0.3] = IGNORED
    targets[0], targets[1] = start, start + width - 1
    if num_rows > 4:
        targets[3], targets[4] = IGNORED, start + width  # the entry right of the slab belongs to another one
    grads = torch.randn(2, num_rows, generator=generator).to(device)
    products = buffer.to(dtype).to(device)[:, :width]
    return Case(products, targets.to(device), start, bias.to(dtype).to(device)[:width], grads[0], grads[1])


def exact(case: Case) -> Case:
    """The same numbers in float64 on the CPU."""

    def moved(x: Any) -> Any:
        return x.cpu().double() if isinstance(x, Tensor) and x.is_floating_point() else x

    return Case(*map(moved, case))._replace(targets=case.targets.cpu())


def assert_sums_equal(found: SlabSums | RowSums, expected: SlabSums | RowSums, tolerance: float = 5e-6) -> None:
    for name, f, e in zip(found._fields, found, expected, strict=True):
        assert f.dtype == (torch.int64 if name == "argmax" else torch.float32)
        torch.testing.assert_close(
            f.cpu().to(e.dtype), e, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def both(case: Case, **which: Any) -> tuple[SlabSums, SlabSums, RowSums, RowSums]:
    """Sums and rows by the kernel, and each by the reference."""
    twin = exact(case)
    found = triton_slabs.slab_sums(case.products, case.targets, case.start, **case.options(**which))
    expected = reference_slabs.slab_sums(twin.products, twin.targets, twin.start, **twin.options(**which))
    return found, expected, merge.merge_sums(found), reference_slabs.merge_sums(expected)


def gradients(case: Case, rows: RowSums, module: ModuleType, **which: Any) -> Tensor:
    numbers = (rows.normalizer, rows.entropy, case.grad, case.entropy_grad)
    return module.slab_gradients(case.products.clone(), case.targets, case.start, *numbers, **case.options(**which))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
def test_sums_of_any_width_are_those_of_the_reference(width: int, dtype: torch.dtype, device: str):
    for which in ({}, {"softcap": None}, {"with_bias": False}):
        sums, expected, rows, expected_rows = both(random_case(width, dtype, device), **which)
        assert_sums_equal(sums, expected)
        assert_sums_equal(rows, expected_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
def test_gradients_of_any_width_are_those_of_the_reference(width: int, dtype: torch.dtype, device: str):
    case = random_case(width, dtype, device)
    tolerance = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]  # rounding of the result
    for which in ({}, {"softcap": None}, {"with_bias": False}):
        *_, rows, expected_rows = both(case, **which)
        found = gradients(case, rows, triton_slabs, **which)
        assert found.dtype == dtype
        expected = gradients(exact(case), expected_rows, reference_slabs, **which)
        torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)
        assert not found[case.targets == IGNORED].any()


@pytest.mark.parametrize(("scale", "shift"), [(0.0, 0.0), (0.1, -120.0), (1.0, -120.0), (30.0, 0.0), (3.0, 80.0)])
@pytest.mark.parametrize("width", [31, 1000])
def test_flat_peaked_and_far_logits_give_the_reference(width: int, scale: float, shift: float, device: str):
    # a padded column read as 0, or a running maximum that starts at 0, would win over logits of -120
    case = random_case(width, torch.float32, device, scale=scale, shift=shift)
    which = {"softcap": None, "with_bias": False}
    _, _, rows, expected_rows = both(case, **which)
    assert_sums_equal(rows, expected_rows)
    # the kept log-sum-exp is up to 200, whose float32 spacing of 1.5e-5 is the relative error of a probability
    expected = gradients(exact(case), expected_rows, reference_slabs, **which)
    torch.testing.assert_close(
        gradients(case, rows, triton_slabs, **which).cpu().double(), expected, rtol=1e-4, atol=5e-5
    )


def test_a_row_of_a_wide_vocabulary_cut_into_slabs_is_the_whole_row(device: str):
    case = random_case(1025, torch.float32, device)
    twin = exact(case)
    parts = [
        triton_slabs.slab_sums(
            case.products[:, first : first + 300],
            case.targets,
            case.start + first,
            temperature=0.7,
            bias_C=case.bias[first : first + 300],
        )
        for first in range(0, 1025, 300)
    ]
    whole = reference_slabs.slab_sums(twin.products, twin.targets, twin.start, temperature=0.7, bias_C=twin.bias)
    assert_sums_equal(merge.merge_sums(parts), reference_slabs.merge_sums(whole))
    of_ranks = [merge.join_sums(parts[:3]), merge.join_sums(parts[3:])]
    assert_sums_equal(
        of_ranks[0],
        reference_slabs.join_sums(
            [SlabSums(*(x.cpu().double() if x.is_floating_point() else x.cpu() for x in part)) for part in parts[:3]]
        ),
    )
    assert_sums_equal(merge.merge_sums(of_ranks), reference_slabs.merge_sums(whole))


def test_gradients_are_written_in_place_and_nowhere_else(device: str):
    case = random_case(31, torch.float32, device)
    buffer = torch.randn(5, 40, device=device)
    buffer[:, 2:33] = case.products
    before = buffer.clone()
    rows = merge.merge_sums(triton_slabs.slab_sums(case.products, case.targets, case.start, **case.options()))
    slab = buffer[:, 2:33]
    returned = triton_slabs.slab_gradients(
        slab,
        case.targets,
        case.start,
        rows.normalizer,
        rows.entropy,
        case.grad,
        case.entropy_grad,
        **case.options(),
    )
    assert returned is slab
    assert torch.equal(slab, gradients(case, rows, triton_slabs))
    slab.copy_(before[:, 2:33])
    assert torch.equal(buffer, before)


def test_without_a_gradient_of_the_entropy_that_of_zero_is_given(device: str):
    case = random_case(31, torch.float32, device)
    rows = both(case)[2]
    zero = case._replace(entropy_grad=torch.zeros_like(case.grad))
    none = case._replace(entropy_grad=None)
    assert torch.equal(gradients(zero, rows, triton_slabs), gradients(none, rows, triton_slabs))


def test_equal_logits_give_the_lowest_id(device: str):
    products = torch.zeros(3, 700, device=device)
    products[0, [299, 300, 650]] = 2.0
    products[1, 699] = 2.0
    targets = torch.zeros(3, dtype=torch.int64, device=device)
    parts = [triton_slabs.slab_sums(products[:, c : c + 350], targets, c, temperature=1.0) for c in (0, 350)]
    assert parts[0].argmax.tolist() == [299, 0, 0]
    assert merge.merge_sums(parts).argmax.tolist() == [299, 699, 0]
    assert merge.merge_sums(parts[::-1]).argmax.tolist() == [299, 699, 0]


def test_forbidden_tokens_whole_tiles_and_slabs_of_them_included_make_no_nan(device: str):
    case = random_case(1000, torch.float32, device)
    case.products[0, 10:] = -torch.inf
    case.products[1, :700] = -torch.inf
    case.products[2, ::2] = -torch.inf
    case.products[4, :300] = -torch.inf
    which = {"softcap": None}
    sums, expected, rows, expected_rows = both(case, **which)
    assert_sums_equal(sums, expected)
    assert_sums_equal(rows, expected_rows)
    found = gradients(case, rows, triton_slabs, **which)
    torch.testing.assert_close(
        found.cpu().double(), gradients(exact(case), expected_rows, reference_slabs, **which), rtol=5e-6, atol=5e-6
    )
    parts = [
        triton_slabs.slab_sums(
            case.products[:, c : c + 300],
            case.targets,
            case.start + c,
            temperature=0.7,
            bias_C=case.bias[c : c + 300],
        )
        for c in range(0, 1000, 300)
    ]
    assert parts[0].highest[4] == -torch.inf
    assert_sums_equal(merge.merge_sums(parts), expected_rows)


@pytest.mark.parametrize("column", [0, 300, 999])
def test_a_logit_that_is_nan_is_not_hidden_and_stays_in_its_row(column: int, device: str):
    case = random_case(1000, torch.float32, device)
    case.products[2, column] = torch.nan
    rows = both(case)[2]
    assert rows.normalizer.isnan().tolist() == [False, False, True, False, False]
    assert rows.entropy.isnan().tolist() == [False, False, True, False, False]


def test_equal_inputs_give_equal_bits(device: str):
    case = random_case(1025, torch.bfloat16, device)
    first, _, rows, _ = both(case)
    second, _, again, _ = both(case)
    for one, other in zip((*first, *rows), (*second, *again), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(gradients(case, rows, triton_slabs), gradients(case, again, triton_slabs))


def test_transposed_products_are_read_and_not_overwritten(device: str):
    products, targets = torch.randn(40, 6, device=device), torch.arange(6, device=device)
    found = triton_slabs.slab_sums(products.t(), targets, 0, temperature=1.0)
    assert_sums_equal(found, reference_slabs.slab_sums(products.t().cpu().double(), targets.cpu(), 0, temperature=1.0))
    numbers = torch.zeros(6, device=device)
    with pytest.raises(AssertionError, match="in place"):
        triton_slabs.slab_gradients(products.t(), targets, 0, numbers, numbers, numbers, None, temperature=1.0)


def test_no_rows_give_empty_sums_and_gradients(device: str):
    case = random_case(20, torch.float32, device, num_rows=2)
    none = {name: getattr(case, name)[:0] for name in ("products", "targets", "grad", "entropy_grad")}
    empty = case._replace(**none)
    sums, _, rows, _ = both(empty)
    assert [tuple(x.shape) for x in (*sums, *rows)] == [(0,)] * 9
    assert gradients(empty, rows, triton_slabs).shape == (0, 20)


def test_types_that_the_kernel_would_round_are_refused():
    with pytest.raises(AssertionError, match="float64"):
        triton_slabs.slab_sums(torch.zeros(1, 4).double(), torch.tensor([0]), 0, temperature=1.0)
    with pytest.raises(AssertionError, match="int64"):
        triton_slabs.slab_sums(torch.zeros(1, 4), torch.tensor([0]).int(), 0, temperature=1.0)


def planted(directory: Path, module: ModuleType, right: str, wrong: str) -> ModuleType:
    """The module with one error planted."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(right) >= 1
    path = directory / "planted.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("planted", path)
    assert spec is not None
    assert spec.loader is not None
    broken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    return broken


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('logits = tl.where(inside, logits, -float("inf"))', "pass"),
        ('highest = tl.full([ROWS], -float("inf"), tl.float32)', "highest = tl.zeros([ROWS], tl.float32)"),
        ("in_slab = own_column >= 0", "in_slab = own_column >= -1"),
    ],
    ids=["no column mask", "maximum starts at 0", "target of another slab"],
)
def test_planted_errors_are_noticed(right: str, wrong: str, tmp_path: Path, device: str):
    broken = planted(tmp_path, triton_slabs, right, wrong)
    case = random_case(1000, torch.float32, device, shift=-120.0)
    twin = exact(case)
    options = {"softcap": None, "with_bias": False}
    found = broken.slab_sums(case.products, case.targets, case.start, **case.options(**options))
    with pytest.raises(AssertionError):
        assert_sums_equal(
            found, reference_slabs.slab_sums(twin.products, twin.targets, twin.start, **twin.options(**options))
        )


@pytest.mark.parametrize("width", [50257, 151936])
@pytest.mark.parametrize("shift", [0.0, -120.0])
def test_real_vocabularies_in_tiles_of_the_real_size_give_the_reference(
    width: int, shift: float, device: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(triton_slabs, "_TILE", 8192)
    case = random_case(width, torch.float32, device, num_rows=3, shift=shift)
    _, _, rows, expected_rows = both(case, softcap=None)
    assert_sums_equal(rows, expected_rows, 1e-5)
    expected = gradients(exact(case), expected_rows, reference_slabs, softcap=None)
    torch.testing.assert_close(
        gradients(case, rows, triton_slabs, softcap=None).cpu().double(), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8192, 16384, 50257, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_kernels_give_the_reference_at_real_widths(width: int, dtype: torch.dtype):
    for shift in (0.0, -120.0):
        case = random_case(width, dtype, "cuda", num_rows=37, shift=shift)
        which = {"softcap": None, "with_bias": False}
        _, _, rows, expected_rows = both(case, **which)
        assert_sums_equal(rows, expected_rows, 2e-5)
        expected = gradients(exact(case), expected_rows, reference_slabs, **which)
        tolerance = 8e-3 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(
            gradients(case, rows, triton_slabs, **which).cpu().double(), expected, rtol=tolerance, atol=tolerance
        )


@pytest.mark.gpu
def test_compiled_kernels_reach_rows_beyond_two_billion_elements():
    num_rows, width = 16400, 131072  # 2.15e9 elements, 4.3 GB
    products = torch.zeros(num_rows, width, dtype=torch.bfloat16, device="cuda")
    products[-1, 5] = 4.0
    targets = torch.full((num_rows,), 5, device="cuda")
    rows = merge.merge_sums(triton_slabs.slab_sums(products, targets, 0, temperature=1.0))
    last = reference_slabs.merge_sums(reference_slabs.slab_sums(products[-1:], targets[-1:], 0, temperature=1.0))
    for f, e in zip(rows, last, strict=True):
        torch.testing.assert_close(f[-1:], e)
    ones = torch.ones(num_rows, device="cuda")
    expected = reference_slabs.slab_gradients(
        products[-1:].clone(), targets[-1:], 0, last.normalizer, last.entropy, ones[-1:], ones[-1:], temperature=1.0
    )
    triton_slabs.slab_gradients(products, targets, 0, rows.normalizer, rows.entropy, ones, ones, temperature=1.0)
    torch.testing.assert_close(products[-1:], expected)
