"""The policy loss of a packed micro-batch: each field of the batch reaches its term, of whole batches and of tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rft_algos.algorithms.components import ClipCov, Gspo, PpoClip
from rft_algos.algorithms.published import ClipCovAlgorithm, Grpo, KlCovAlgorithm, PolicyAlgorithm
from rft_algos.objectives import Coefficients
from rft_core.errors import OptionsError
from rft_trainer.batches.packing import count, pack
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample
from rft_trainer.update.policy_objective import PolicyObjective

PLAIN = Grpo(kl_place="none", kl_coef=0.0, aggregation="token_mean")
SAMPLES = [
    TrainingSample("a", (1, 2, 3, 4), 2, 2.0, behaviour_logprobs=(-1.0, -1.0), old_logprobs=(-1.0, -1.5)),
    TrainingSample("b", (1, 5, 6), 2, -1.0, behaviour_logprobs=(-0.5,), old_logprobs=(-0.5,)),
]
COUNTS = Counts(num_loss_tokens=6, num_sequences=4)
"""Of a step that has more than this micro-batch."""


def on_policy(batch: TokenBatch) -> Tensor:
    """Log-probs with a ratio of 1 at every loss token."""
    assert batch.old_logprobs_T is not None
    return batch.old_logprobs_T.clone().requires_grad_()


def both_ways(
    objective: PolicyObjective, batch: TokenBatch, logprobs_T: Tensor, entropy_T: Tensor
) -> tuple[float, ...]:
    """Return the loss of the micro-batch at once, and as a sum over single tokens, the last one first."""
    whole = objective(batch, logprobs_T, entropy_T, COUNTS).loss
    places_N = batch.loss_mask_T.nonzero()[:, 0].flip(0)
    losses_N = objective.token_losses(batch, COUNTS)(logprobs_T[places_N], entropy_T[places_N], places_N)
    return whole.item(), losses_N.sum().item()


def zeros(batch: TokenBatch) -> Tensor:
    return torch.zeros(len(batch.token_ids_T))


def test_the_denominators_are_those_of_the_step() -> None:
    batch = pack(SAMPLES)
    # advantages 2, 2 and -1 of six tokens
    assert both_ways(PolicyObjective(PLAIN), batch, on_policy(batch), zeros(batch)) == pytest.approx((-3 / 6,) * 2)
    by_sequence = PolicyObjective(replace(PLAIN, aggregation="sequence_mean_token_mean"))
    # means 2 and -1 of four sequences
    assert both_ways(by_sequence, batch, on_policy(batch), zeros(batch)) == pytest.approx((-1 / 4,) * 2)


@pytest.mark.parametrize(
    "record",
    [PLAIN, Grpo(), KlCovAlgorithm(), ClipCovAlgorithm(), replace(PLAIN, off_policy_delta=0.1), Grpo(entropy_coef=0.1)],
)
def test_a_micro_batch_whose_responses_are_all_empty_adds_nothing(record: PolicyAlgorithm) -> None:
    batch = pack([TrainingSample("a", (1, 2), 2, 1.0), TrainingSample("b", (1, 2, 3), 3, -1.0)])
    logprobs_T = torch.zeros(5, requires_grad=True)
    loss = PolicyObjective(record)(batch, logprobs_T, zeros(batch), COUNTS).loss
    loss.backward()
    assert float(loss) == 0.0
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.tolist() == [0.0] * 5


def test_weights_of_tokens_weigh_the_surrogate() -> None:
    batch = pack([replace(SAMPLES[0], token_weights=(0.5, 0.0)), replace(SAMPLES[1], token_weights=(3.0,))])
    losses = both_ways(PolicyObjective(PLAIN), batch, on_policy(batch), zeros(batch))
    assert losses == pytest.approx((-(0.5 * 2.0 + 0.0 - 3.0) / 6,) * 2)


def test_selected_tokens_are_left_out_by_a_selective_surrogate() -> None:
    batch = pack([replace(SAMPLES[0], selected=(False, True)), replace(SAMPLES[1], selected=(False,))])
    objective = PolicyObjective(replace(PLAIN, surrogate=ClipCov()))
    assert both_ways(objective, batch, on_policy(batch), zeros(batch)) == pytest.approx((-(2.0 - 1.0) / 6,) * 2)


def test_every_token_has_the_ratio_to_its_own_old_log_prob() -> None:
    batch = pack(SAMPLES)
    shifts_T = torch.tensor([0.0, 0.0, 0.1, -0.05, 0.0, 0.0, 0.02])
    losses = both_ways(PolicyObjective(PLAIN), batch, on_policy(batch).detach() + shifts_T, zeros(batch))
    expected = -(2 * math.exp(0.1) + 2 * math.exp(-0.05) - math.exp(0.02)) / 6
    assert losses == pytest.approx((expected,) * 2)


def test_the_reference_enters_a_divergence_in_the_loss() -> None:
    samples = [
        replace(SAMPLES[0], reference_logprobs=(-1.5, -1.5), advantage=0.0),
        replace(SAMPLES[1], reference_logprobs=(-0.75,), advantage=0.0),
    ]
    batch = pack(samples)
    record = replace(PLAIN, kl_place="loss", kl_coef=0.5, kl_estimator="k2")
    # k2 is half of the squared log-ratio: 0.5, 0 and 0.25
    expected = 0.5 * (0.5**2 + 0.25**2) / 2 / 6
    losses = both_ways(PolicyObjective(record), batch, on_policy(batch), zeros(batch))
    assert losses == pytest.approx((expected,) * 2)


def test_the_entropy_is_a_bonus_of_an_algorithm_that_has_one_and_of_no_other() -> None:
    batch = pack(SAMPLES)
    entropy_T = torch.tensor([9.0, 9.0, 1.0, 0.5, 9.0, 9.0, 0.25])
    with_bonus = replace(PLAIN, entropy_coef=0.2)
    assert PolicyObjective(with_bonus).needs_entropy
    assert not PolicyObjective(PLAIN).needs_entropy
    assert PolicyObjective(PLAIN).logs_entropy
    losses = both_ways(PolicyObjective(with_bonus), batch, on_policy(batch), entropy_T)
    assert losses == pytest.approx((-3 / 6 - 0.2 * 1.75 / 6,) * 2)
    assert both_ways(PolicyObjective(PLAIN), batch, on_policy(batch), entropy_T) == pytest.approx((-3 / 6,) * 2)
    total, number = PolicyObjective(PLAIN)(batch, on_policy(batch), entropy_T, COUNTS).metrics["policy/entropy"]
    assert (float(total), float(number)) == (1.75, 3.0)


def test_coefficients_are_read_at_every_micro_batch() -> None:
    batch = pack(SAMPLES)
    current = [0.2]
    record = replace(PLAIN, entropy_coef=0.7)
    objective = PolicyObjective(record, lambda: Coefficients(kl=0.0, drift=0.0, entropy=current[0]))
    entropy_T = zeros(batch) + 1.0
    for coefficient in (0.2, 0.4):
        current[0] = coefficient
        losses = both_ways(objective, batch, on_policy(batch), entropy_T)
        assert losses == pytest.approx((-3 / 6 - coefficient * 3 / 6,) * 2)
    assert both_ways(PolicyObjective(record), batch, on_policy(batch), entropy_T) == pytest.approx(
        (-3 / 6 - 0.7 * 3 / 6,) * 2
    )


def test_a_sequence_that_fell_away_from_the_engine_is_left_out_where_the_algorithm_masks_it() -> None:
    # only sequences of negative advantage are masked
    batch = pack([replace(one, advantage=-1.0) for one in SAMPLES])
    objective = PolicyObjective(replace(PLAIN, off_policy_delta=0.1))
    output = objective(batch, on_policy(batch), zeros(batch), COUNTS)
    # the trainer's log-probs of "a" are 0 and 0.5 below the engine's, 0.25 in the mean; those of "b" are equal
    assert output.loss.item() == pytest.approx(1 / 6)
    kept, number = output.metrics["policy/off_policy_kept"]
    assert (float(kept), float(number)) == (1.0, 3.0)
    closer = PolicyObjective(replace(PLAIN, off_policy_delta=0.3))(batch, on_policy(batch), zeros(batch), COUNTS)
    assert closer.loss.item() == pytest.approx(3 / 6)


@pytest.mark.parametrize(
    ("record", "by_token"),
    [
        (PLAIN, True),
        (replace(PLAIN, surrogate=PpoClip()), True),
        (replace(PLAIN, surrogate=Gspo()), False),
        (replace(PLAIN, off_policy_delta=0.1), False),
    ],
)
def test_what_looks_at_whole_sequences_is_not_computed_token_by_token(record: PolicyAlgorithm, by_token: bool) -> None:
    assert PolicyObjective(record).by_token == by_token


def test_a_micro_batch_of_prompts_alone_adds_nothing_and_has_a_gradient_of_zero() -> None:
    batch = pack([TrainingSample("p", (1, 2, 3), 3, 1.0)])
    assert batch.old_logprobs_T is None
    assert count([TrainingSample("p", (1, 2, 3), 3, 1.0)]) == Counts(0, 0, 1)
    logprobs_T = torch.full((3,), -1.0, requires_grad=True)
    output = PolicyObjective(PLAIN)(batch, logprobs_T, zeros(batch), COUNTS)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.tolist() == [0.0, 0.0, 0.0]
    assert [float(part) for part in output.metrics["policy/loss"]] == [0.0, 0.0]


def test_samples_without_the_log_probs_of_the_loss_are_refused_with_the_call_that_adds_them() -> None:
    empty = TrainingSample("c", (1, 2), 2, 0.0)
    objective = PolicyObjective(Grpo(kl_place="loss", kl_coef=0.1))
    with_reference = [replace(sample, reference_logprobs=sample.old_logprobs) for sample in SAMPLES]
    objective.check([*with_reference, empty])
    PolicyObjective(PLAIN).check([*SAMPLES, empty])
    for samples, argument in (
        ([with_reference[0], SAMPLES[1]], "reference=policy.reference_logprobs(batch)"),
        ([replace(SAMPLES[0], old_logprobs=())], "old=policy.logprobs(batch)"),
    ):
        with pytest.raises(OptionsError) as caught:
            objective.check(samples)
        assert caught.value.problem.do == f"batch = batch.with_logprobs({argument})"
