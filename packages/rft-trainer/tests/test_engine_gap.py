from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rft_trainer.engine_gap import Draw, Gap, measure_gap
from rft_trainer.testing import BigramEngine, BigramPolicy


class Counted(BigramPolicy):
    """Off by `error` nats at token number `error_at` of every sequence; counts its forwards."""

    def __init__(self, error: float = 0.0, error_at: int = 3) -> None:
        super().__init__(9)
        with torch.no_grad():
            self.table.copy_(torch.randn(9, 9, generator=torch.Generator().manual_seed(5)))
        self.error, self.error_at, self.forwards = error, error_at, 0

    def token_logprobs(
        self, token_ids_T: Tensor, positions_T: Tensor, segment_ids_T: Tensor, wanted_T: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        self.forwards += 1
        assert options["temperature"] > 0
        found_T, _ = super().token_logprobs(token_ids_T, positions_T, segment_ids_T, wanted_T, **options)
        return found_T + self.error * (positions_T == self.error_at), None


def measured(policy: Counted, draw: Draw, **options: int) -> Gap:
    return measure_gap(BigramEngine(policy), policy, [[1], [2, 3]], [[5, 6], [7, 8, 9]], draw, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_same_weights_have_no_gap_at_any_temperature(temperature: float) -> None:
    policy = Counted()
    gap = measured(policy, Draw(temperature=temperature), sequences_at_once=2)
    assert gap.num_tokens == 5 * 32
    assert gap.largest < 1e-5
    assert gap.verdict == "equal"
    assert policy.forwards == 3


def test_a_gap_is_of_drawn_tokens_alone() -> None:
    gap = measured(Counted(error=-0.25), Draw(max_new_tokens=10))
    assert gap.mean == pytest.approx(0.025, abs=1e-5)  # one of the ten new tokens of every sequence
    assert gap.largest == pytest.approx(0.25, abs=1e-5)
    assert gap.p99 == pytest.approx(0.25, abs=1e-5)
    assert gap.verdict == "apart"
    assert measured(Counted(error=9.0, error_at=0), Draw()).largest < 1e-5  # the prompt's


@pytest.mark.parametrize(
    ("mean", "largest", "verdict"),
    [(0.0, 1e-4, "equal"), (0.0, 1.1e-4, "close"), (0.02, 0.3, "close"), (0.021, 0.3, "apart"), (0.001, 0.31, "apart")],
)
def test_verdicts(mean: float, largest: float, verdict: str) -> None:
    assert Gap(10, mean, mean, largest).verdict == verdict
