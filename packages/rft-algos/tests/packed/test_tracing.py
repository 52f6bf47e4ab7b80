"""Every loss under `torch.func.grad`, `vmap` and `torch.compile(fullgraph=True)`: the same value and gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rft_algos import surrogates
from rft_algos.algorithms.published import PUBLISHED, PolicyAlgorithm
from rft_algos.losses import aggregation, off_policy, sequence_corrections
from rft_algos.objectives import policy_loss
from rft_algos.packed.tracing import is_traced

D = torch.float64
MASK = torch.tensor([True, True, False, True, True, True, True, False])
IDS = torch.tensor([0, 0, 0, 1, 1, 1, 2, -1])
SELECTED = torch.tensor([False, True, False, False, True, False, False, False])
OLD = torch.tensor([-1.0, -2.0, -0.5, -1.5, -0.7, -2.5, -1.1, -0.2], dtype=D)
ADVANTAGES = torch.tensor([1.0, 1.0, 0.0, -0.5, -0.5, -0.5, 0.3, 0.0], dtype=D)
CURRENT = OLD + torch.tensor([0.3, -0.2, 9.0, 0.1, -0.4, 0.0, 0.25, 9.0], dtype=D)

Loss = Callable[[Tensor], Tensor]


def reduced(losses_T: Tensor) -> Tensor:
    weights_T = aggregation.sequence_mean_token_mean(MASK, IDS, 3, dtype=D)
    return aggregation.weighted_sum(weights_T, losses_T)


def corrected(correction: Callable[..., Tensor], *bounds: float) -> Loss:
    def loss(logprobs_T: Tensor) -> Tensor:
        weights_T = correction(logprobs_T - OLD, MASK, IDS, *bounds)
        return reduced(weights_T * surrogates.ppo_clip(logprobs_T - OLD, ADVANTAGES, 0.2, 0.2))

    return loss


FUNCTIONS: dict[str, Loss] = {
    "gspo": lambda x: reduced(surrogates.gspo(x - OLD, ADVANTAGES, MASK, IDS, 0.2, 0.2)),
    "gspo_token": lambda x: reduced(surrogates.gspo_token(x - OLD, ADVANTAGES, MASK, IDS, 0.2, 0.2)),
    "gmpo": lambda x: reduced(surrogates.gmpo(x - OLD, ADVANTAGES, MASK, IDS)),
    "dro_sequence": lambda x: reduced(surrogates.dro_sequence(x, x - OLD, ADVANTAGES, MASK, IDS, 0.3)),
    "vespo": lambda x: reduced(surrogates.vespo(x, x - OLD, ADVANTAGES, MASK, IDS)),
    "topr": lambda x: reduced(surrogates.topr(x, x - OLD, ADVANTAGES, MASK, IDS)),
    "geo-tis": corrected(sequence_corrections.truncate_geometric, 1.1),
    "divergence": corrected(sequence_corrections.mask_sequences_divergence, 0.01),
    "seq-tis": corrected(off_policy.truncate_sequences, 1.2),
    "seq-mis": corrected(off_policy.mask_sequences, 0.5, 1.2),
    "geo-mis": corrected(off_policy.mask_sequences_geometric, 0.9, 1.1),
    "veto": corrected(off_policy.veto_outliers, 0.7, 1.3),
}


def of_record(kind: type[PolicyAlgorithm]) -> Loss:
    record = kind(max_tokens=10) if kind.name == "dr_grpo" else kind(off_policy_delta=0.1)

    def loss(logprobs_T: Tensor) -> Tensor:
        return policy_loss(
            record,
            logprobs_T=logprobs_T,
            old_logprobs_T=OLD,
            reference_logprobs_T=OLD - 0.1,
            behaviour_logprobs_T=OLD + 0.05,
            advantages_T=ADVANTAGES,
            loss_mask_T=MASK,
            segment_ids_T=IDS,
            entropy_T=None,
            num_loss_tokens=6,
            num_sequences=3,
            selected_T=SELECTED,
        ).loss

    return loss


LOSSES = FUNCTIONS | {f"record {kind.name}": of_record(kind) for kind in PUBLISHED}


def by_autograd(loss: Loss, at: Tensor) -> tuple[Tensor, Tensor]:
    leaf = at.clone().requires_grad_()
    value = loss(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


@pytest.mark.parametrize("name", LOSSES)
def test_func_grad_and_vmap_give_the_gradient_of_autograd(name: str) -> None:
    loss = LOSSES[name]
    gradient, value = torch.func.grad_and_value(loss)(CURRENT)
    expected_value, expected = by_autograd(loss, CURRENT)
    torch.testing.assert_close(value, expected_value, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    moved = torch.stack([CURRENT, CURRENT + 0.1, CURRENT - 0.3])
    values = torch.func.vmap(loss)(moved)
    gradients = torch.func.vmap(torch.func.grad(loss))(moved)
    for i, one in enumerate(moved):
        expected_value, expected = by_autograd(loss, one)
        torch.testing.assert_close(values[i], expected_value, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradients[i], expected, rtol=1e-12, atol=1e-14)


def check_compiled(name: str, backend: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(LOSSES[name], fullgraph=True, backend=backend)
    value, gradient = by_autograd(compiled, CURRENT)
    expected_value, expected = by_autograd(LOSSES[name], CURRENT)
    torch.testing.assert_close(value, expected_value, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["gspo", "gmpo", "seq-tis", "record grpo"])
def test_some_losses_are_one_graph(name: str) -> None:
    check_compiled(name, "eager")


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_is_one_graph(name: str) -> None:
    check_compiled(name, "aot_eager")


def test_values_may_be_asked_for_outside_of_a_trace() -> None:
    asked: list[bool] = []

    def square(x: Tensor) -> Tensor:
        asked.append(is_traced())
        return x.square().sum()

    square(CURRENT)
    torch.func.grad(square)(CURRENT)
    torch.func.vmap(square)(CURRENT[:, None])
    assert asked == [False, True, True]
