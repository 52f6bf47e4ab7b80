"""Padded rows give the loss, the metrics and the gradient of the packed row without padding."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_algos.algorithms.components import SequenceTis
from rft_algos.algorithms.published import PUBLISHED, Grpo, PolicyAlgorithm
from rft_algos.input_checks import InputError
from rft_algos.objectives import PaddedBatch, RolloutBatch, compute_advantages, padded_loss, policy_loss

D = torch.float64
MASK = torch.arange(6) < torch.tensor([[6], [3], [0], [4]])
MASK[0, 0] = MASK[3, 1] = False


def noise(seed: int, scale: float) -> Tensor:
    return torch.randn(4, 6, dtype=D, generator=torch.Generator().manual_seed(seed)) * scale


OLD = noise(1, 0.5) - 2
BATCH = PaddedBatch(
    rewards_B=torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=D),
    group_ids_B=torch.tensor([5, 5, 5, 5]),
    loss_mask_BL=MASK,
    old_logprobs_BL=torch.where(MASK, OLD, torch.nan),
    behaviour_logprobs_BL=torch.where(MASK, OLD + noise(2, 0.2), torch.nan),
    reference_logprobs_BL=torch.where(MASK, OLD + noise(3, 0.2), torch.nan),
    entropy_BL=torch.where(MASK, noise(4, 1.0).abs(), torch.nan),
    values_BL=torch.where(MASK, noise(5, 1.0), torch.nan),
    greedy_rewards_B=torch.tensor([0.5] * 4, dtype=D),
    components_BK=torch.tensor([[1.0, 0.0], [0.0, 0.5], [0.5, 0.5], [0.0, 1.0]], dtype=D),
)
CURRENT = torch.where(MASK, OLD + noise(6, 0.3), torch.nan)


def kept(values_BL: Tensor | None) -> Tensor:
    assert values_BL is not None
    return values_BL[MASK]


def packed_output(record: PolicyAlgorithm, leaf: Tensor, weights: Tensor | None = None):  # type: ignore[no-untyped-def]
    """By hand: the loss tokens alone, sequences numbered by rows."""
    ids = torch.arange(4)[:, None].expand(4, 6)[MASK]
    ones = torch.ones_like(ids, dtype=torch.bool)
    batch = RolloutBatch(
        rewards_N=BATCH.rewards_B,
        group_ids_N=BATCH.group_ids_B,
        loss_mask_T=ones,
        segment_ids_T=ids,
        old_logprobs_T=kept(BATCH.old_logprobs_BL),
        behaviour_logprobs_T=kept(BATCH.behaviour_logprobs_BL),
        reference_logprobs_T=kept(BATCH.reference_logprobs_BL),
        entropy_T=kept(BATCH.entropy_BL),
        values_T=kept(BATCH.values_BL),
        greedy_rewards_N=BATCH.greedy_rewards_B,
        components_NK=BATCH.components_BK,
    )
    worth = compute_advantages(record, batch)
    return policy_loss(
        record,
        logprobs_T=leaf[MASK],
        old_logprobs_T=batch.old_logprobs_T,
        reference_logprobs_T=batch.reference_logprobs_T,
        behaviour_logprobs_T=batch.behaviour_logprobs_T,
        entropy_T=batch.entropy_T,
        advantages_T=worth.advantages_T,
        token_weights_T=worth.weights_T,
        selected_T=worth.selected_T,
        loss_mask_T=ones,
        segment_ids_T=ids,
        num_loss_tokens=len(ids),
        num_sequences=3,
    )


RECORDS = [
    kind(max_tokens=7) if kind.name == "dr_grpo" else kind()
    for kind in PUBLISHED
    # steps have no padded form; a draw goes by positions, which padding moves
    if kind.name not in ("process_grpo", "clip_cov")
]
RECORDS.append(Grpo(correction=SequenceTis(), high_entropy_fraction=0.5, entropy_coef=0.1, off_policy_delta=0.2))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_it_is_the_packed_loss(record: PolicyAlgorithm) -> None:
    leaves = [CURRENT.clone().requires_grad_() for _ in range(2)]
    found = padded_loss(record, BATCH, leaves[0], entropy_BL=BATCH.entropy_BL)
    expected = packed_output(record, leaves[1])
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=1e-14)
    assert found.metrics.keys() == expected.metrics.keys()
    for name, pair in expected.metrics.items():
        torch.testing.assert_close(found.metrics[name], pair, rtol=1e-12, atol=1e-14)
    for output in (found, expected):
        output.loss.backward()
    assert leaves[0].grad is not None
    assert not bool(leaves[0].grad.isnan().any())
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-12, atol=1e-14)
    assert bool((leaves[0].grad[~MASK] == 0).all())


def test_micro_batches_add_up_to_the_batch_without_a_number_given() -> None:
    record = RECORDS[-1]
    worth = compute_advantages(record, BATCH.flat())
    leaf = CURRENT.clone().requires_grad_()
    parts = [slice(0, 1), slice(1, 4)]
    losses = [
        padded_loss(record, BATCH, leaf[rows], entropy_BL=kept_rows(rows), advantages=worth, rows=rows).loss
        for rows in parts
    ]
    whole = padded_loss(record, BATCH, leaf, entropy_BL=BATCH.entropy_BL)
    torch.testing.assert_close(sum(losses), whole.loss, rtol=1e-12, atol=0)
    # two ranks with this batch each: counts of both, and half of the loss on each
    doubled = padded_loss(record, BATCH, leaf, entropy_BL=BATCH.entropy_BL, num_loss_tokens=22, num_sequences=6)
    torch.testing.assert_close(doubled.loss, whole.loss / 2, rtol=1e-12, atol=0)


def kept_rows(rows: slice) -> Tensor:
    assert BATCH.entropy_BL is not None
    return BATCH.entropy_BL[rows]


def test_advantages_of_your_own_are_one_a_row_or_one_a_token() -> None:
    own = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=D)
    by_row = padded_loss(Grpo(kl_place="none"), BATCH, CURRENT, advantages=own).loss
    by_token = padded_loss(Grpo(kl_place="none"), BATCH, CURRENT, advantages=own[:, None].expand(4, 6)).loss
    assert by_row == by_token
    other = padded_loss(Grpo(kl_place="none"), BATCH, CURRENT, advantages=own * 2).loss
    assert float(other) != float(by_row)


def test_hand_computed_numbers() -> None:
    batch = PaddedBatch(
        rewards_B=torch.tensor([1.0, 0.0]),
        group_ids_B=torch.tensor([0, 0]),
        loss_mask_BL=torch.tensor([[True, True], [True, False]]),
        old_logprobs_BL=torch.zeros(2, 2),
    )
    logprobs = torch.zeros(2, 2, requires_grad=True)
    output = padded_loss(Grpo(kl_place="none"), batch, logprobs)
    output.loss.backward()
    assert logprobs.grad is not None
    a = 0.5**0.5
    assert logprobs.grad.flatten().tolist() == pytest.approx([-a / 4, -a / 4, a / 2, 0.0], abs=1e-5)


def test_nothing_to_learn_from_is_a_loss_of_0() -> None:
    batch = replace(BATCH, loss_mask_BL=torch.zeros(4, 6, dtype=torch.bool))
    assert padded_loss(Grpo(kl_place="none"), batch, CURRENT).loss == 0


def test_a_correction_asks_for_the_engine_and_other_records_do_not() -> None:
    batch = replace(BATCH, behaviour_logprobs_BL=None)
    assert bool(padded_loss(Grpo(), batch, CURRENT).loss.isfinite())
    with pytest.raises(InputError, match="behaviour_logprobs_T"):
        padded_loss(Grpo(correction=SequenceTis()), batch, CURRENT)
    with pytest.raises(InputError, match="one a row"):
        replace(BATCH, rewards_B=torch.ones(3)).flat()


PADDED = {
    "rewards_B": torch.tensor([1.0, 0.0]),
    "group_ids_B": torch.tensor([0, 0]),
    "loss_mask_BL": torch.tensor([[True, True, True], [True, False, False]]),
    "old_logprobs_BL": torch.full((2, 3), -1.0),
}


@pytest.mark.parametrize(
    ("changes", "match", "do"),
    [
        ({"rewards_B": [1.0, 0.0]}, "rewards_B must be a tensor, it is a list", "torch.as_tensor(rewards_B)"),
        ({"rewards_B": torch.zeros(2, 1)}, "rewards_B must be one a row", ""),
        ({"group_ids_B": ["a", "a"]}, "group_ids_B must be a tensor of integers", None),
        ({"group_ids_B": torch.tensor([0])}, "group_ids_B must be one a row", ""),
        ({"loss_mask_BL": torch.ones(2, 3)}, "loss_mask_BL must be bool", "loss_mask_BL.bool()"),
        ({"loss_mask_BL": None}, "loss_mask_BL must be a tensor, it is None", ""),
        ({"old_logprobs_BL": None}, "old_logprobs_BL must be a tensor, it is None", ""),
        ({"old_logprobs_BL": torch.zeros(2, 2)}, "old_logprobs_BL of shape", ""),
        ({"record": Grpo}, "it is Grpo", "Grpo()"),
        ({"record": "grpo"}, "it is 'grpo'", "by_name('grpo')()"),
        ({"logprobs_BL": torch.zeros(2, 3, 7)}, "logprobs_from_logits", ""),
        ({"logprobs_BL": torch.zeros(2, 3).long()}, "logprobs_BL must be floating", ""),
        ({"advantages": [1.0, 2.0]}, "advantages must be a tensor", "torch.as_tensor(advantages)"),
        ({"advantages": torch.zeros(3)}, "advantages of shape", ""),
        ({"num_sequences": 0}, "num_sequences must be positive", ""),
        ({"num_loss_tokens": -3}, "num_loss_tokens must be positive", ""),
    ],
)
def test_a_mistake_is_named(changes: dict[str, Any], match: str, do: str | None) -> None:
    given = {"record": Grpo(kl_place="none"), "logprobs_BL": torch.full((2, 3), -1.0)} | changes
    batch = PaddedBatch(**{name: given.pop(name, value) for name, value in PADDED.items()})
    record, logprobs_BL = given.pop("record"), given.pop("logprobs_BL")
    with pytest.raises(InputError, match=re.escape(match)) as caught:
        padded_loss(record, batch, logprobs_BL, **given)
    if do is not None:
        assert caught.value.problem.do == do


def test_a_dict_is_no_batch() -> None:
    with pytest.raises(InputError, match="it is a dict") as caught:
        padded_loss(Grpo(), PADDED, torch.zeros(2, 3))  # type: ignore[arg-type]
    assert caught.value.problem.do == "PaddedBatch(**batch)"
