"""Objectives of preferences: one pair is one unit, and no cut of a step changes its gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rft_algos.algorithms.preference import PreferenceLoss
from rft_algos.losses.preference_variants import length_desensitised
from rft_trainer.batches.packing import count, pack
from rft_trainer.batches.units import MicroBatching
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.testing.bigram import BigramPolicy, OneRank, PlainOptimizer
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.preference_objective import LabelledObjective, PairObjective, pair_logprobs


def pair(number: int, chosen: tuple[int, ...], rejected: tuple[int, ...], weight: float = 1.0) -> list[TrainingSample]:
    rows = (("chosen", chosen), ("rejected", rejected))
    return [
        TrainingSample(
            f"p:{number}/{name}",
            (1, 2, *response),
            2,
            weight,
            reference_logprobs=tuple(-1.0 - 0.1 * (number + t) for t in range(len(response))),
            unit=f"p:{number}",
        )
        for name, response in rows
    ]


SAMPLES = [
    *pair(0, (3, 4), (4, 3, 0)),
    *pair(1, (2,), (5, 5, 5), 1.5),
    *pair(2, (0, 1, 2, 3), (3,), 0.5),
    *pair(3, (4, 4), (1, 1)),
]


def policy() -> BigramPolicy:
    made = BigramPolicy(6, dtype=torch.float64)
    with torch.no_grad():
        made.table.copy_(torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6))
    return made


def step(samples: list[TrainingSample], objective: PairObjective | LabelledObjective, size: int) -> tuple[object, ...]:
    """(the table after a step, metrics)."""
    made, totals, one = policy(), MetricTotals(), OneRank()
    updater = Updater(
        PolicyLoss(made, objective),
        PlainOptimizer([made.table]),
        one,
        micro_batching=MicroBatching(size, 0, False),
        learning_rate=lambda update: 0.5,
    )
    updater(samples, 0, totals)
    return made.table.detach().clone(), totals.merged(one)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_cut_into_micro_batches_changes_a_step_of_pairs(size: int) -> None:
    table, metrics = step(SAMPLES, PairObjective(PreferenceLoss(rpo_alpha=0.3)), 4)
    cut, cut_metrics = step(SAMPLES, PairObjective(PreferenceLoss(rpo_alpha=0.3)), size)
    assert torch.allclose(table, cut, rtol=1e-12, atol=1e-14)  # type: ignore[arg-type]
    assert cut_metrics == pytest.approx(metrics, rel=1e-10)


def test_no_cut_changes_a_step_of_labelled_responses() -> None:
    signs = [1.0, -1.0, 1.0, 1.0, -2.0, 1.0, -1.0, 1.0]
    samples = [replace(one, advantage=sign, unit="") for one, sign in zip(SAMPLES, signs, strict=True)]
    config = PreferenceLoss(loss_type="kto", desirable_weight=1.3)
    table, metrics = step(samples, LabelledObjective(config, 0.2), 8)
    cut, cut_metrics = step(samples, LabelledObjective(config, 0.2), 3)
    assert torch.allclose(table, cut, rtol=1e-12, atol=1e-14)  # type: ignore[arg-type]
    assert cut_metrics == pytest.approx(metrics, rel=1e-10)


def test_the_loss_is_the_weighted_mean_over_the_pairs() -> None:
    losses = []
    for index in range(4):
        one = [replace(sample, advantage=1.0) for sample in SAMPLES[2 * index : 2 * index + 2]]
        losses.append(step(one, PairObjective(PreferenceLoss()), 1)[1]["dpo/loss"])  # type: ignore[index]
    whole = step(SAMPLES, PairObjective(PreferenceLoss()), 2)[1]["dpo/loss"]  # type: ignore[index]
    weights = [sample.advantage for sample in SAMPLES[::2]]
    assert whole == pytest.approx(sum(w * x for w, x in zip(weights, losses, strict=True)) / 4)


def test_rewards_and_margins_are_of_whole_responses() -> None:
    _, metrics = step(SAMPLES, PairObjective(PreferenceLoss(beta=0.2)), 2)
    assert isinstance(metrics, dict)
    assert metrics["dpo/margin"] == pytest.approx(metrics["dpo/chosen_reward"] - metrics["dpo/rejected_reward"])
    logprobs_T, _ = policy().token_logprobs(pack(SAMPLES).tokens)
    of = pair_logprobs(pack(SAMPLES), logprobs_T)
    assert metrics["dpo/chosen_logprob"] == pytest.approx(float(of.pairs.policy_chosen_B.detach().mean()))
    assert metrics["dpo/accuracy"] == pytest.approx(float((of.pairs.margins_B > 0).double().mean()))


def test_at_the_start_all_pairs_are_ties_and_count_half() -> None:
    made = policy()
    logprobs_T, _ = made.token_logprobs(pack(SAMPLES).tokens)
    rows = logprobs_T.detach().split([sample.num_tokens for sample in SAMPLES])
    own = [
        replace(sample, reference_logprobs=tuple(row[2:].float().tolist()))
        for sample, row in zip(SAMPLES, rows, strict=True)
    ]
    batch = pack(own)
    output = PairObjective(PreferenceLoss())(batch, logprobs_T.float(), None, count(own))
    total, number = output.metrics["dpo/accuracy"]
    assert float(total / number) == 0.5


def test_weights_of_tokens_are_those_of_ld_dpo() -> None:
    samples = [replace(SAMPLES[0], token_weights=()), replace(SAMPLES[1], token_weights=(1.0, 1.0, 0.3))]
    batch = pack(samples)
    logprobs_T, _ = policy().token_logprobs(batch.tokens)
    rejected_BL = logprobs_T[4:].detach()[None]
    mask_BL = torch.tensor([[False, False, True, True, True]])
    expected = length_desensitised(rejected_BL, mask_BL, torch.tensor([2]), alpha=0.3)
    assert pair_logprobs(batch, logprobs_T).pairs.policy_rejected_B.tolist() == pytest.approx(expected.tolist())


def test_losses_of_sequences_are_not_asked_token_by_token() -> None:
    objective = PairObjective(PreferenceLoss())
    assert not objective.by_token
    with pytest.raises(AssertionError):
        objective.token_losses(pack(SAMPLES), count(SAMPLES))
