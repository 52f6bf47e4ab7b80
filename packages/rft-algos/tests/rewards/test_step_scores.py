from __future__ import annotations

import pytest
import torch

from rft_algos.input_checks import InputError
from rft_algos.rewards.step_scores import StepReduction, step_reward

LOGITS = torch.tensor([0.9, 0.5, 0.8], dtype=torch.float64).logit()


@pytest.mark.parametrize(("reduction", "expected"), [("min", 0.5), ("product", 0.36), ("mean", 2.2 / 3), ("last", 0.8)])
def test_reductions_are_of_the_probabilities(reduction: StepReduction, expected: float) -> None:
    assert float(step_reward(LOGITS, reduction)) == pytest.approx(expected, abs=1e-12)


def test_what_is_no_reduction_or_no_step_is_refused() -> None:
    with pytest.raises(InputError, match="min, product, mean, last"):
        step_reward(LOGITS, "sum")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="empty"):
        step_reward(LOGITS[:0], "min")
