"""A function as an objective: what it is given, what becomes of its result, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.errors import OptionsError
from rft_trainer.batches.packing import count, pack
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample
from rft_trainer.update.function_objective import FunctionObjective

SAMPLES = [TrainingSample("a", (1, 2, 3), 1, 1.0), TrainingSample("b", (1, 2), 1, 1.0)]
BATCH, COUNTS = pack(SAMPLES[:1]), count(SAMPLES)
LOGPROBS = torch.tensor([0.0, -1.0, -2.0], requires_grad=True)


def test_a_function_gets_the_micro_batch_and_the_counts_of_the_step() -> None:
    seen: list[Any] = []

    def loss(logprobs: Tensor, batch: TokenBatch, counts: Counts) -> tuple[Tensor, dict[str, tuple[Tensor, int]]]:
        seen.extend([logprobs, batch, counts])
        return -logprobs.sum() / counts.num_loss_tokens, {"own/tokens": (batch.loss_mask_T.sum(), 1)}

    objective = FunctionObjective.of(loss)
    assert not objective.needs_entropy
    output = objective(BATCH, LOGPROBS, None, COUNTS)
    assert seen[0] is LOGPROBS
    assert (seen[1] is BATCH, seen[2]) == (True, Counts(3, 2, 2))
    assert output.loss.item() == 1.0
    assert {name: (float(total), float(number)) for name, (total, number) in output.metrics.items()} == {
        "policy/loss": (1.0, pytest.approx(2 / 3)),
        "own/tokens": (2.0, 1.0),
    }


def test_a_parameter_of_that_name_asks_for_entropies() -> None:
    objective = FunctionObjective.of(lambda logprobs, batch, counts, entropy: (logprobs + entropy).sum())
    assert objective.needs_entropy
    assert objective(BATCH, LOGPROBS, torch.ones(3), COUNTS).loss.item() == 0.0
    assert (objective.logs_entropy, objective.by_token) == (False, False)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (lambda logprobs, batch, counts: logprobs, "loss.shape"),
        (lambda logprobs, batch, counts: logprobs.sum(0, keepdim=True), "loss.shape"),
        (lambda logprobs, batch, counts: 1.0, "loss.no_tensor"),
        (lambda logprobs, batch, counts: None, "loss.no_tensor"),
        (lambda logprobs, batch, counts: logprobs.detach().sum(), "loss.no_gradient"),
        (lambda logprobs, batch, counts: (logprobs.sum(), {"own/x": logprobs.mean()}), "loss.metric"),
    ],
)
def test_what_is_no_number_with_a_gradient_is_refused(wrong: Callable[..., Any], code: str) -> None:
    with pytest.raises(OptionsError) as caught:
        FunctionObjective.of(wrong)(BATCH, LOGPROBS, None, COUNTS)
    assert caught.value.problem.code == code


def test_a_loss_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(OptionsError) as caught:
        FunctionObjective.of("grpo")  # pyright: ignore[reportArgumentType]
    assert caught.value.problem.code == "loss.not_callable"
