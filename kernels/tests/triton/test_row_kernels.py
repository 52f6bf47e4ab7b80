"""The kernels against the reference: in Triton's interpreter without a GPU, compiled with one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_kernels.reference import logprobs
from rft_kernels.triton import row_kernels

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16, so that a vocabulary of some dozens already takes several."""
    if "gpu" not in request.keywords:
        monkeypatch.setattr(row_kernels, "_LARGEST_TILE", 16)


def random_case(num_rows: int, vocab_size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num_rows, vocab_size, generator=generator)
    return logits, torch.randint(0, vocab_size, (num_rows,), generator=generator)


def values_and_gradient(
    function: object, logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[Results, torch.Tensor]:
    """All three results, and the gradient of a sum in which each result of each row has its own weight."""
    assert callable(function)
    leaf = logits.detach().requires_grad_()
    results = function(leaf, targets, temperature)
    weights = torch.randn(3, logits.shape[0], generator=torch.Generator().manual_seed(9)).to(logits.device)
    sum((w * r).sum() for w, r in zip(weights, results, strict=True)).backward()
    assert leaf.grad is not None
    return tuple(r.detach() for r in results), leaf.grad


def assert_kernel_equals_reference(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, gradient_tolerance: float = 2e-6
) -> None:
    expected, expected_gradient = values_and_gradient(
        logprobs.selected_logprob_and_entropy, logits.double(), targets, temperature
    )
    found, gradient = values_and_gradient(row_kernels.selected_logprob_and_entropy, logits, targets, temperature)
    # a log-prob is the difference of two numbers as large as the log-sum-exp, each with half a spacing of float32
    finite = expected[2][expected[2].isfinite()].abs()
    spacing = torch.finfo(torch.float32).eps * float(finite.max()) if finite.numel() else 0.0
    for f, e in zip(found, expected, strict=True):
        assert f.dtype == torch.float32
        torch.testing.assert_close(f.double(), e, rtol=2e-6, atol=max(4e-6, spacing))
    assert gradient.dtype == logits.dtype
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=gradient_tolerance, atol=gradient_tolerance)


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 40, 64, 83])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_any_vocabulary_size_gives_the_reference(vocab_size: int, temperature: float, device: str):
    logits, targets = random_case(3, vocab_size, seed=vocab_size)
    assert_kernel_equals_reference(logits.to(device), targets.to(device), temperature)


@pytest.mark.parametrize("shift", [-120.0, -20.0, 80.0])
def test_logits_far_from_zero_give_the_reference(shift: float, device: str):
    # a padded column read as 0, or a running maximum that starts at 0, would win over every logit
    logits, targets = random_case(2, 37)
    assert_kernel_equals_reference((logits + shift).to(device), targets.to(device), 1.0, gradient_tolerance=1e-4)


def test_a_shift_changes_log_sum_exp_alone(device: str):
    logits, targets = (each.to(device) for each in random_case(2, 37))
    logits = (logits * 8).round() / 8  # so that adding 512 is exact
    near = row_kernels.selected_logprob_and_entropy(logits, targets, 1.0)
    far = row_kernels.selected_logprob_and_entropy(logits + 512.0, targets, 1.0)
    assert torch.equal(far[0], near[0])
    assert torch.equal(far[1], near[1])
    torch.testing.assert_close(far[2], near[2] + 512.0)


@pytest.mark.parametrize("largest_first", [True, False])
def test_the_running_maximum_may_come_first_or_last(largest_first: bool, device: str):
    logits = torch.linspace(0, 60, 50).flip(0) if largest_first else torch.linspace(0, 60, 50)
    # the kept log-sum-exp is 60, whose float32 spacing of 3.8e-6 is the relative error of the gradient
    assert_kernel_equals_reference(
        logits[None].to(device), torch.tensor([20], device=device), 1.0, gradient_tolerance=1e-5
    )


def test_forbidden_tokens_whole_tiles_of_them_included_make_no_nan(device: str):
    logits, targets = random_case(3, 50)
    logits[0, :33] = -torch.inf  # the first two tiles and the start of the third
    logits[1, 16:] = -torch.inf
    logits[2, ::2] = -torch.inf
    targets = torch.tensor([40, 3, 7])
    assert_kernel_equals_reference(logits.to(device), targets.to(device), 0.8)


def test_a_forbidden_target_has_log_prob_minus_infinity_and_a_finite_gradient(device: str):
    logits = torch.tensor([[0.0, -torch.inf, 1.0]], device=device)
    found, gradient = values_and_gradient(
        row_kernels.selected_logprob_and_entropy, logits, torch.tensor([1], device=device), 1.0
    )
    assert found[0].tolist() == [-torch.inf]
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_logits_are_summed_in_float32(dtype: torch.dtype, device: str):
    logits, targets = random_case(2, 70)
    tolerance = {torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]  # the rounding of the gradient itself
    assert_kernel_equals_reference(logits.to(dtype).to(device), targets.to(device), 0.9, gradient_tolerance=tolerance)


@given(
    seed=st.integers(0, 10**6),
    num_rows=st.integers(1, 3),
    vocab_size=st.integers(1, 60),
    temperature=st.floats(0.2, 3.0),
    scale=st.sampled_from([0.0, 0.1, 1.0, 8.0]),
)
def test_random_rows_give_the_reference(
    seed: int, num_rows: int, vocab_size: int, temperature: float, scale: float, device: str
):
    logits, targets = random_case(num_rows, vocab_size, seed)
    assert_kernel_equals_reference(
        (scale * logits).to(device), targets.to(device), temperature, gradient_tolerance=1e-4
    )


def test_strided_rows_and_transposed_logits_are_read_right(device: str):
    logits, targets = (each.to(device) for each in random_case(4, 40))
    assert_kernel_equals_reference(logits[::2, 5:], targets[::2] % 35, 1.0)
    assert_kernel_equals_reference(logits.t()[:5], torch.tensor([0, 1, 2, 3, 0], device=device), 1.0)


def test_no_rows_give_empty_results_and_an_empty_gradient(device: str):
    logits, targets = torch.empty(0, 20, device=device), torch.empty(0, dtype=torch.int64, device=device)
    found, gradient = values_and_gradient(row_kernels.selected_logprob_and_entropy, logits, targets, 1.0)
    assert [tuple(r.shape) for r in found] == [(0,)] * 3
    assert gradient.shape == (0, 20)


def test_types_that_the_kernel_would_round_are_refused():
    with pytest.raises(AssertionError, match="float64"):
        row_kernels.selected_logprob_and_entropy(torch.zeros(1, 4).double(), torch.tensor([0]), 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [50257, 128256, 151669, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_kernels_give_the_reference_at_real_vocabularies(vocab_size: int, dtype: torch.dtype):
    logits, targets = random_case(33, vocab_size)
    tolerance = 8e-3 if dtype == torch.bfloat16 else 1e-4
    for shift in (0.0, -120.0):
        assert_kernel_equals_reference(
            (logits + shift).to(dtype).cuda(), targets.cuda(), 0.7, gradient_tolerance=tolerance
        )


@pytest.mark.gpu
def test_compiled_kernels_reach_rows_beyond_two_billion_elements():
    vocab_size, num_rows = 131072, 16400  # 2.15e9 elements, 4.3 GB
    logits = torch.zeros(num_rows, vocab_size, dtype=torch.bfloat16, device="cuda")
    logits[-1, 5] = 4.0
    targets = torch.full((num_rows,), 5, device="cuda")
    found = row_kernels.selected_logprob_and_entropy(logits, targets, 1.0)
    expected = logprobs.selected_logprob_and_entropy(logits[-1:], targets[-1:], 1.0)
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f[-1:], e)


@pytest.mark.gpu
def test_the_compiled_forward_keeps_no_second_copy_of_the_logits():
    logits, targets = (each.cuda() for each in random_case(512, 32000))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    row_kernels.selected_logprob_and_entropy(logits, targets, 1.0)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < logits.nbytes / 100
