"""How far two forwards may be apart, and the segments that they are tried on."""

from __future__ import annotations

import pytest
import torch

from rft_core.errors import PreflightError
from rft_models.backbone.forward_check import Probe, difference, require_equal_logits, tolerance


def test_the_probe_is_two_segments_of_other_tokens_apart_and_packed() -> None:
    probe = Probe.of(61, torch.device("cpu"))
    assert [tokens.tolist() for tokens in probe.segments] == [[3, 10, 17], [4, 11, 18, 25, 32]]
    assert probe.tokens.token_ids_T.tolist() == [3, 10, 17, 4, 11, 18, 25, 32]
    assert probe.tokens.segment_ids_T.tolist() == [0] * 3 + [1] * 5
    assert probe.mm_inputs == [None, None]
    small = Probe.of(5, torch.device("cpu"))
    assert [tokens.tolist() for tokens in small.segments] == [[3, 0, 2], [4, 1, 3, 0, 2]]


def test_a_difference_is_measured_by_the_largest_expected_number_and_one() -> None:
    expected = torch.tensor([[0.0, -3.0], [1.0, 2.0]])
    assert difference(expected, expected) == 0.0
    assert difference(expected, expected + torch.tensor([[0.0, 0.0], [-2.0, 1.0]])) == 0.5
    assert difference(torch.zeros(2), torch.tensor([0.0, 7.0])) == 7.0


def test_the_tolerance_is_that_of_the_weights() -> None:
    assert tolerance(torch.float32) == tolerance(torch.float64) == 1e-4
    assert tolerance(torch.bfloat16) == tolerance(torch.float16) == 0.05


@pytest.mark.parametrize(
    ("dtype", "error", "passes"),
    [
        (torch.float32, 2e-4, True),
        (torch.float32, 2.1e-4, False),
        (torch.bfloat16, 0.1, True),
        (torch.bfloat16, 0.1004, False),
        (torch.float32, float("nan"), False),
    ],
)
def test_what_weights_of_this_type_do_not_explain_is_refused(dtype: torch.dtype, error: float, passes: bool) -> None:
    expected = torch.tensor([0.0, 1.0], dtype=torch.float64)
    actual = torch.tensor([0.0, 1.0 + error] if error == 0.1004 else [error, 1.0], dtype=torch.float64)
    if passes:
        require_equal_logits(expected, actual, of="logits", dtype=dtype, where="here")
        return
    with pytest.raises(PreflightError) as caught:
        require_equal_logits(expected, actual, of="logits", dtype=dtype, where="here")
    assert caught.value.problem.code == "models.forward_differs"
