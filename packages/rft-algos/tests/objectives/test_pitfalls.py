"""Mistakes that implementations of these equations have made, by the number of the list they are kept in.

1, 3, 4, 5, 6, 8, 10, 14, 15 and 19 stand beside the functions they concern.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rft_algos import advantages
from rft_algos.algorithms.published import Dapo, DrGrpo, Grpo
from rft_algos.losses import aggregation
from rft_algos.objectives import LossOutput, policy_loss

D = torch.float64


def loss_of(record: Grpo | Dapo | DrGrpo, width: int = 4, num_loss_tokens: int = 6, **changes: object) -> LossOutput:
    """Two sequences of 4 and 2 loss tokens, with `width` - 4 tokens of padding behind them."""
    num, pad = 6, width - 4
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(num, generator=generator, dtype=D) * 2
    new = old + 0.05 * torch.randn(num, generator=generator, dtype=D)
    old, new = (torch.cat([row, torch.full((pad,), -3.0, dtype=D)]) for row in (old, new))
    fields: dict[str, object] = {
        "logprobs_T": new.requires_grad_(),
        "old_logprobs_T": old,
        "reference_logprobs_T": old - 0.3,
        "advantages_T": torch.tensor([1.0] * 4 + [-1.0] * 2 + [9.0] * pad, dtype=D),
        "loss_mask_T": torch.tensor([True] * num + [False] * pad),
        "segment_ids_T": torch.tensor([0] * 4 + [1] * 2 + [-1] * pad),
        "entropy_T": torch.ones(num + pad, dtype=D),
        "num_loss_tokens": num_loss_tokens,
        "num_sequences": 2,
    }
    return policy_loss(record, **(fields | changes))  # type: ignore[arg-type]


def test_pitfall_2_the_rare_success_is_normalised_like_the_others_and_the_batch_has_mean_zero():
    rewards = torch.tensor([1.0] + [0.0] * 7)
    found = advantages.group_norm(rewards, torch.zeros(8, dtype=torch.int64))
    # mean 1/8, variance (49/64 + 7/64) / 7 = 1/8: not 1 and -0.378, as a deviation without the sample itself gives
    assert found.tolist() == pytest.approx([7 / 8 / 8**-0.5] + [-1 / 8 / 8**-0.5] * 7, rel=1e-5)
    assert float(found.sum()) == pytest.approx(0.0, abs=1e-12)


def test_pitfall_7_the_mean_over_tokens_leaves_out_what_is_masked_though_it_is_not_zero():
    mask = torch.tensor([True, True, True, True, False, False])
    weights = aggregation.token_mean(mask, 4, dtype=D)
    assert float(aggregation.weighted_sum(weights, torch.ones(6, dtype=D))) == 1.0


def test_pitfall_9_the_denominator_is_that_of_the_optimizer_step_alone():
    # a rollout cut into two optimizer steps of equal content: each has the loss of its own tokens, not half of it
    output = loss_of(Dapo())
    twice_the_rollout = loss_of(Dapo(), num_loss_tokens=12)
    assert float(twice_the_rollout.loss) == pytest.approx(float(output.loss) / 2)
    assert float(output.metrics["policy/loss"][1]) == 1.0


def test_pitfall_11_tokens_whose_gradient_a_clamp_takes_away_are_counted():
    old = torch.tensor([-1.0, -1.0, -40.0, -1.0, -1.0, -1.0], dtype=D)
    new = torch.tensor([-40.0, -1.0, -1.0, -1.0, -1.0, -1.0], dtype=D).requires_grad_()
    output = loss_of(Grpo(), logprobs_T=new, old_logprobs_T=old, reference_logprobs_T=torch.full((6,), -1.0, dtype=D))
    output.loss.backward()
    assert float(output.metrics["policy/ratio_clamped"][0]) == 2.0
    assert float(output.metrics["kl/reference_clamped"][0]) == 1.0
    assert new.grad is not None
    assert float(new.grad[0]) == 0.0


def test_pitfall_12_the_constant_length_of_dr_grpo_is_no_width_of_a_tensor():
    record = DrGrpo(max_tokens=10)
    assert torch.equal(loss_of(record, width=4).loss, loss_of(record, width=9).loss)
    assert float(loss_of(replace(record, max_tokens=20)).loss) == pytest.approx(float(loss_of(record).loss) / 2)


def test_pitfall_12_a_long_wrong_answer_weighs_less_a_token_only_under_the_mean_of_means():
    mask, ids = torch.tensor([True] * 10), torch.tensor([0] * 8 + [1] * 2)
    by_sequence = aggregation.sequence_mean_token_mean(mask, ids, 2, dtype=D)
    assert by_sequence[0] == by_sequence[-1] / 4
    by_token = aggregation.token_mean(mask, 10, dtype=D)
    assert by_token[0] == by_token[-1]


def test_pitfall_13_division_by_the_deviation_makes_easy_and_hard_questions_weigh_more():
    hard, even = [1.0] + [0.0] * 7, [1.0] * 4 + [0.0] * 4
    rewards, groups = torch.tensor(hard + even), torch.tensor([0] * 8 + [1] * 8)
    divided, centred = advantages.group_norm(rewards, groups), advantages.group_centred(rewards, groups)
    assert float(divided[0]) > 2.4 > 1.0 > float(divided[8]), "a success where most fail against one where half do"
    assert (float(centred[0]), float(centred[8])) == (0.875, 0.5)
    scaled = advantages.group_centred(10 * rewards, groups)
    assert torch.allclose(scaled, 10 * centred), "without the division the scale of the reward is that of the step"
    assert torch.allclose(advantages.group_norm(10 * rewards, groups), divided, rtol=1e-4)


def test_pitfall_17_every_term_has_the_denominator_of_the_surrogate():
    record = Grpo(kl_coef=0.5, entropy_coef=0.1)
    whole = loss_of(record)
    for name in ("policy/surrogate", "kl/loss", "policy/entropy_loss"):
        smaller = loss_of(record, num_sequences=4)
        assert float(smaller.metrics[name][0]) == pytest.approx(float(whole.metrics[name][0]) / 2), name


def test_pitfall_18_gae_and_remax_take_batches_of_any_size():
    lengths = torch.tensor([3, 1, 5, 2])
    num = int(lengths.sum())
    mask, ids = torch.ones(num, dtype=torch.bool), torch.repeat_interleave(torch.arange(4), lengths)
    values = torch.linspace(-1, 1, num, dtype=D)
    rewards = torch.linspace(0, 1, num, dtype=D)
    whole, _ = advantages.gae(rewards, values, mask, ids, gamma=0.9, lambd=0.8)
    parts = [
        advantages.gae(rewards[s], values[s], mask[s], torch.zeros(int(n), dtype=torch.int64), gamma=0.9, lambd=0.8)[0]
        for s, n in ((slice(0, 3), 3), (slice(3, 4), 1), (slice(4, 9), 5), (slice(9, 11), 2))
    ]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-12, atol=1e-14)
    for size in (1, 3, 7):
        given, greedy = torch.rand(size, dtype=D), torch.rand(size, dtype=D)
        assert torch.equal(advantages.remax(given, greedy), given - greedy)
