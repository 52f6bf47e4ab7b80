"""The kernel that forms the products itself against the float64 reference, in the interpreter or compiled."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rft_kernels import ops
from rft_kernels.reference import vocab_slabs
from rft_kernels.row_statistics import IGNORED, RowSums, SlabSums
from rft_kernels.tiles import HOPPER, Tiles
from rft_kernels.triton import fused_logprobs, merge

SMALL = Tiles(16, 64, 16, num_warps=1, num_stages=1, programs_per_sm=1, group=2)
OPTIONS: dict[str, Any] = {"temperature": 0.7, "softcap": 30.0}
NO_CAP: dict[str, Any] = {"temperature": 0.7}


class Case(NamedTuple):
    """Views of larger matrices whose further rows and columns are NaN, so that reading them shows."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor


def random_case(
    vocab_size: int,
    dtype: torch.dtype,
    device: str,
    *,
    num_rows: int = 37,
    width: int = 40,
    scale: float = 0.5,
    shift: float = 0.0,
    margin: int = 8,
) -> Case:
    """First target 0, second the last, the others anywhere, 30 % ignored."""
    generator = torch.Generator().manual_seed(vocab_size + width)

    def inside_nan(rows: int) -> Tensor:
        buffer = torch.full((rows + 3, width + margin), torch.nan)
        buffer[:rows, :width] = scale * torch.randn(rows, width, generator=generator)
        return buffer.to(dtype).to(device)[:rows, :width]

    targets = torch.randint(0, vocab_size, (num_rows,), generator=generator)
    targets[torch.rand(num_rows, generator=generator) < 0.3] = IGNORED
    targets[0], targets[1] = 0, vocab_size - 1
    bias = torch.full((vocab_size + 9,), torch.nan)
    bias[:vocab_size] = torch.randn(vocab_size, generator=generator) + shift
    return Case(
        inside_nan(num_rows), inside_nan(vocab_size), targets.to(device), bias.to(dtype).to(device)[:vocab_size]
    )


def exact(case: Case) -> Case:
    """The same numbers in float64 on the CPU."""
    return Case(*(x.cpu() if x is case.targets else x.cpu().double() for x in case))


def by_kernel(case: Case, **options: Any) -> SlabSums:
    if case.hidden.device.type == "cpu":
        options = {"tiles": SMALL} | options
    return fused_logprobs.fused_sums(case.hidden, case.weight, case.targets, bias_V=case.bias, **options)


def expected_rows(case: Case, **options: Any) -> RowSums:
    twin = exact(case)
    sums = vocab_slabs.fused_sums(twin.hidden, twin.weight, twin.targets, bias_V=twin.bias, **options)
    return vocab_slabs.merge_sums(sums)


def assert_rows_equal(found: RowSums, expected: RowSums, tolerance: float = 1e-5) -> None:
    for name, f, e in zip(found._fields, found, expected, strict=True):
        assert f.dtype == (torch.int64 if name == "argmax" else torch.float32)
        torch.testing.assert_close(
            f.cpu().to(e.dtype), e, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("descriptors", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 31, 64, 1000, 1025])
def test_any_vocabulary_gives_the_reference(vocab_size: int, dtype: torch.dtype, descriptors: bool, device: str):
    case = random_case(vocab_size, dtype, device)
    sums = by_kernel(case, descriptors=(descriptors and device == "cpu") or None, **OPTIONS)
    assert_rows_equal(merge.merge_sums(sums), expected_rows(case, **OPTIONS))


@pytest.mark.parametrize("descriptors", [True, False])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 16), (16, 64), (17, 8), (50, 3)])
def test_any_number_of_rows_and_any_width_gives_the_reference(
    num_rows: int, width: int, descriptors: bool, device: str
):
    # a margin that keeps the rows of float32 at multiples of 16 bytes, as descriptors need
    case = random_case(200, torch.float32, device, num_rows=max(2, num_rows), width=width, margin=8 - width % 4)
    case = case._replace(hidden=case.hidden[:num_rows], targets=case.targets[:num_rows])
    sums = by_kernel(case, descriptors=(descriptors and device == "cpu") or None, **NO_CAP)
    assert_rows_equal(merge.merge_sums(sums), expected_rows(case, **NO_CAP))


@pytest.mark.parametrize("splits", [1, 2, 5, 17, 400])
def test_any_number_of_splits_gives_the_reference(splits: int, device: str):
    case = random_case(1025, torch.float32, device, num_rows=70)
    sums = by_kernel(case, splits=splits, **NO_CAP)
    assert 1 <= sums.highest.shape[0] <= min(splits, 17)
    assert_rows_equal(merge.merge_sums(sums), expected_rows(case, **NO_CAP))


@pytest.mark.parametrize(("scale", "shift"), [(0.0, 0.0), (0.05, -120.0), (3.0, 0.0), (0.5, 80.0)])
@pytest.mark.parametrize("descriptors", [True, False])
def test_flat_peaked_and_far_logits_give_the_reference(scale: float, shift: float, descriptors: bool, device: str):
    # padded columns have products of 0, which would win over logits of -120
    case = random_case(1000, torch.float32, device, scale=scale, shift=shift)
    sums = by_kernel(case, descriptors=(descriptors and device == "cpu") or None, **NO_CAP)
    assert_rows_equal(merge.merge_sums(sums), expected_rows(case, **NO_CAP), 2e-5)


def test_without_bias_and_temperature_log_softmax_is_found(device: str):
    case = random_case(100, torch.float32, device)
    tiles = SMALL if device == "cpu" else None
    sums = fused_logprobs.fused_sums(case.hidden, case.weight, case.targets, temperature=1.0, tiles=tiles)
    rows = merge.merge_sums(sums)
    log_probs = (exact(case).hidden @ exact(case).weight.t()).log_softmax(-1)
    kept = case.targets.cpu() != IGNORED
    expected = log_probs.gather(1, case.targets.cpu().clamp(min=0)[:, None])[:, 0] * kept
    torch.testing.assert_close(rows.logprob.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        rows.entropy.cpu().double(), -(log_probs.exp() * log_probs).sum(-1), rtol=1e-5, atol=1e-5
    )


def test_shards_of_the_vocabulary_merge_into_the_whole(device: str):
    case = random_case(1000, torch.float32, device)
    shards = []
    for first, last in ((0, 333), (333, 1000)):
        shard = case._replace(weight=case.weight[first:last], bias=case.bias[first:last])
        shards.append(merge.join_sums(by_kernel(shard, start=first, **NO_CAP)))
    assert_rows_equal(merge.merge_sums(shards), expected_rows(case, **NO_CAP))


def test_equal_inputs_give_equal_bits(device: str):
    case = random_case(1025, torch.bfloat16, device)
    for one, other in zip(by_kernel(case, splits=3, **OPTIONS), by_kernel(case, splits=3, **OPTIONS), strict=True):
        assert torch.equal(one, other)


def test_equal_logits_give_the_lowest_id_over_tiles_and_splits(device: str):
    hidden, weight = torch.ones(2, 16, device=device), torch.zeros(300, 16, device=device)
    weight[[70, 71, 200]] = 1.0
    targets = torch.zeros(2, dtype=torch.int64, device=device)
    for splits in (1, 5):
        sums = fused_logprobs.fused_sums(hidden, weight, targets, temperature=1.0, splits=splits, tiles=SMALL)
        assert merge.merge_sums(sums).argmax.tolist() == [70, 70]


@pytest.mark.parametrize("vocab_size", [50257, 151936])
def test_real_vocabularies_give_the_reference(vocab_size: int, device: str):
    case = random_case(vocab_size, torch.bfloat16, device, num_rows=5, width=24)
    tiles = Tiles(16, 2048, 16, num_warps=1, num_stages=1, programs_per_sm=1)
    sums = fused_logprobs.fused_sums(
        case.hidden,
        case.weight,
        case.targets,
        bias_V=case.bias,
        tiles=tiles if device == "cpu" else None,
        splits=4,
        **OPTIONS,
    )
    assert_rows_equal(merge.merge_sums(sums), expected_rows(case, **OPTIONS))


@pytest.mark.parametrize("group", [1, 2, 3, 64])
def test_every_row_meets_every_part_whatever_the_order_of_programs(group: int, device: str):
    case = random_case(200, torch.float32, device, num_rows=75)  # 5 row tiles: the last group is not full
    tiles = Tiles(16, 64, 16, num_warps=1, num_stages=1, programs_per_sm=1, group=group)
    sums = by_kernel(case, tiles=tiles, splits=3, **NO_CAP)
    assert_rows_equal(merge.merge_sums(sums), expected_rows(case, **NO_CAP))


def test_no_rows_give_empty_sums(device: str):
    case = random_case(100, torch.float32, device)
    sums = by_kernel(case._replace(hidden=case.hidden[:0], targets=case.targets[:0]), **NO_CAP)
    assert [x.shape[1] for x in sums] == [0] * 5
    assert merge.merge_sums(sums).logprob.shape == (0,)


def test_the_entry_gives_the_same_rows_by_the_fused_and_by_the_slab_operations(device: str):
    case = random_case(500, torch.float32, device)
    fused = ops.merge_sums(ops.fused_sums(case.hidden, case.weight, case.targets, bias_V=case.bias, **OPTIONS))
    products = case.hidden @ case.weight.t()
    slabs = [
        ops.slab_sums(products[:, c : c + 128], case.targets, c, bias_C=case.bias[c : c + 128], **OPTIONS)
        for c in range(0, 500, 128)
    ]
    for f, s in zip(fused, ops.merge_sums(slabs), strict=True):
        torch.testing.assert_close(f, s, rtol=1e-5, atol=1e-5)


def test_matrices_of_different_types_are_refused():
    with pytest.raises(AssertionError, match="bfloat16"):
        fused_logprobs.fused_sums(torch.zeros(1, 4), torch.zeros(2, 4).bfloat16(), torch.tensor([0]), temperature=1.0)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('logits = tl.where(column_inside[None, :], logits, -float("inf"))', "pass"),
        ('highest = tl.full([ROWS], -float("inf"), tl.float32)', "highest = tl.zeros([ROWS], tl.float32)"),
        ("inside = inside & (columns < num_columns)[None, :]", "pass"),
        ("own_columns(targets, start, vocab_size, IGNORED)", "own_columns(targets, start + 1, vocab_size, IGNORED)"),
    ],
    ids=["no column mask", "maximum starts at 0", "no mask of the width", "target off by one"],
)
def test_planted_errors_are_noticed(right: str, wrong: str, tmp_path: Path, device: str):
    source = Path(str(fused_logprobs.__file__)).read_text()
    assert source.count(right) == 1
    path = tmp_path / "planted.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("planted", path)
    assert spec is not None
    assert spec.loader is not None
    broken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    case = random_case(1000, torch.float32, device, scale=0.05, shift=-120.0)
    sums = broken.fused_sums(
        case.hidden, case.weight, case.targets, bias_V=case.bias, tiles=SMALL, descriptors=False, **NO_CAP
    )
    with pytest.raises(AssertionError):
        assert_rows_equal(merge.merge_sums(sums), expected_rows(case, **NO_CAP), 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [None, *HOPPER], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernel_gives_the_reference_at_real_vocabularies(tiles: Tiles | None, dtype: torch.dtype):
    if tiles is not None and (dtype == torch.float32 or torch.cuda.get_device_capability() < (9, 0)):
        pytest.skip("these tiles are for 16-bit inputs on compute capability 9.0")
    for vocab_size, width in ((50257, 768), (151936, 1024)):
        case = random_case(vocab_size, dtype, "cuda", num_rows=300, width=width, scale=0.2)
        for descriptors in (None, False):
            rows = merge.merge_sums(by_kernel(case, tiles=tiles, descriptors=descriptors, **NO_CAP))
            assert_rows_equal(rows, expected_rows(case, **NO_CAP), 3e-5)


@pytest.mark.gpu
def test_the_compiled_kernel_gives_equal_bits_and_no_matrix_of_logits():
    case = random_case(50257, torch.bfloat16, "cuda", num_rows=2048, width=512)
    first = by_kernel(case, **NO_CAP)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        for one, other in zip(first, by_kernel(case, **NO_CAP), strict=True):
            assert torch.equal(one, other)
    assert torch.cuda.max_memory_allocated() - before < 2048 * 50257 * 2 / 10


@pytest.mark.gpu
def test_tiles_are_measured_fastest_first():
    case = random_case(5000, torch.bfloat16, "cuda", num_rows=256, width=256)
    found = fused_logprobs.measure(case.hidden, case.weight)
    assert found
    assert [milliseconds for milliseconds, _ in found] == sorted(milliseconds for milliseconds, _ in found)
