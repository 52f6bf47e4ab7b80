"""What is done off the CPU gives the same: tensors that say they are elsewhere take those paths on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rft_algos.algorithms.published import PUBLISHED, PolicyAlgorithm
from rft_algos.losses.aggregation import sequence_mean_token_mean, token_mean, weighted_sum
from rft_algos.objectives import RolloutBatch, compute_advantages, policy_loss
from rft_algos.packed.segments import segment_index, segment_lengths, segment_means, segment_sums

D = torch.float64
NAN = math.nan
MASKS = {
    "some masked": [True, False, True, True, True, False, False],
    "none masked": [True] * 7,
    "all masked": [False] * 7,
}
IDS = {"packed": [2, 2, 2, 0, 0, 1, 1], "padded": [2, 2, 2, 0, 0, -1, -1]}
batches = [pytest.param(m, i, id=f"{name}, {kind}") for name, m in MASKS.items() for kind, i in IDS.items()]


class Elsewhere(Tensor):
    """Says that it is not on the CPU, and so do results of operations on it."""

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False


def elsewhere(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Elsewhere)


def test_such_tensors_pass_it_on() -> None:
    assert not (elsewhere(torch.ones(2)) + torch.ones(2)).is_cpu
    assert torch.ones(2).is_cpu


@pytest.mark.parametrize(("mask", "ids"), batches)
def test_sequences_are_summed_alike(mask: list[bool], ids: list[int]) -> None:
    mask_T, ids_T = torch.tensor(mask), torch.tensor(ids)
    values_T = torch.where(mask_T, torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], dtype=D), NAN)
    for function in (segment_sums, segment_means):
        found_S = function(elsewhere(values_T), segment_index(elsewhere(mask_T), elsewhere(ids_T)))
        assert found_S[ids_T].tolist() == function(values_T, segment_index(mask_T, ids_T))[ids_T].tolist()
    found_T = segment_lengths(elsewhere(mask_T), elsewhere(ids_T))
    assert found_T.tolist() == segment_lengths(mask_T, ids_T).tolist()
    places = segment_index(elsewhere(mask_T), elsewhere(ids_T))
    assert (places.runs, places.spare) == (None, 7)
    assert places.index_T.tolist() == [i if kept and i >= 0 else 7 for kept, i in zip(mask, ids, strict=True)]


@pytest.mark.parametrize(("mask", "ids"), batches)
def test_reductions_are_alike(mask: list[bool], ids: list[int]) -> None:
    mask_T, ids_T = torch.tensor(mask), torch.tensor(ids)
    values_T = torch.where(mask_T, torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], dtype=D), NAN)
    for there, here in (
        (token_mean(elsewhere(mask_T), 5), token_mean(mask_T, 5)),
        (sequence_mean_token_mean(elsewhere(mask_T), elsewhere(ids_T), 3), sequence_mean_token_mean(mask_T, ids_T, 3)),
    ):
        assert there.tolist() == here.tolist()
        assert weighted_sum(there, elsewhere(values_T)).item() == weighted_sum(here, values_T).item()


def test_a_value_that_is_not_finite_is_not_hidden() -> None:
    mask_T, values_T = torch.tensor([True, True]), torch.tensor([1.0, math.inf])
    assert weighted_sum(token_mean(elsewhere(mask_T), 2), elsewhere(values_T)).item() == math.inf


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", PUBLISHED, ids=lambda kind: kind.name)
def test_every_algorithm_has_the_same_loss_metrics_and_gradient(kind: type[PolicyAlgorithm], mask: str) -> None:
    record = kind(max_tokens=100) if kind.name == "dr_grpo" else kind()
    generator = torch.Generator().manual_seed(3)

    def noise(scale: float, num: int = 7) -> Tensor:
        return torch.randn(num, generator=generator, dtype=D) * scale

    mask_T, ids_T = torch.tensor(MASKS[mask]), torch.tensor([0, 0, 0, 1, 1, 2, 2])
    old_T = noise(1.0) - 3
    batch = RolloutBatch(
        rewards_N=torch.tensor([1.0, 0.0, 1.0], dtype=D),
        group_ids_N=torch.tensor([4, 4, 4]),
        loss_mask_T=mask_T,
        segment_ids_T=ids_T,
        old_logprobs_T=old_T,
        behaviour_logprobs_T=old_T + noise(0.2),
        reference_logprobs_T=old_T + noise(0.2),
        entropy_T=noise(1.0).abs(),
        values_T=noise(1.0),
        greedy_rewards_N=torch.tensor([0.5, 0.5, 0.0], dtype=D),
        components_NK=noise(1.0, 6).reshape(3, 2),
        step_rewards_T=noise(1.0),
        step_mask_T=mask_T & torch.tensor([False, False, True, False, True, False, True]),
    )
    worth = compute_advantages(record, batch)
    current_T = old_T + noise(0.3)
    outputs = []
    for place in (elsewhere, lambda tensor: tensor):
        leaf_T = current_T.clone().requires_grad_()
        output = policy_loss(
            record,
            logprobs_T=place(leaf_T),
            old_logprobs_T=place(old_T),
            reference_logprobs_T=place(batch.reference_logprobs_T),  # type: ignore[arg-type]
            behaviour_logprobs_T=place(batch.behaviour_logprobs_T),
            entropy_T=place(batch.entropy_T),  # type: ignore[arg-type]
            advantages_T=place(worth.advantages_T),
            loss_mask_T=place(mask_T),
            segment_ids_T=place(ids_T),
            num_loss_tokens=7,
            num_sequences=3,
            token_weights_T=None if worth.weights_T is None else place(worth.weights_T),
            selected_T=None if worth.selected_T is None else place(worth.selected_T),
        )
        output.loss.backward()
        numbers = {name: (total.item(), count.item()) for name, (total, count) in output.metrics.items()}
        outputs.append((output.loss.item(), numbers, leaf_T.grad))
    (there, metrics_there, gradient_there), (here, metrics_here, gradient_here) = outputs
    assert there == pytest.approx(here, rel=1e-13, abs=1e-15)
    assert metrics_there.keys() == metrics_here.keys()
    for metric, pair in metrics_here.items():
        assert metrics_there[metric] == pytest.approx(pair, rel=1e-13, abs=1e-15), metric
    torch.testing.assert_close(gradient_there, gradient_here, rtol=1e-12, atol=1e-15)
