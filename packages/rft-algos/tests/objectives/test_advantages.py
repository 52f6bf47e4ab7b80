"""Credit of whole batches: every published record against plain arithmetic, and what happens around it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rft_algos import advantages, surrogates
from rft_algos.algorithms import components
from rft_algos.algorithms.published import PUBLISHED, REWARD_KL_ESTIMATORS, Grpo, PolicyAlgorithm, by_name
from rft_algos.algorithms.registry import clip_indicator_of, equation_of
from rft_algos.input_checks import InputError
from rft_algos.objectives import (
    AdvantageOutput,
    RolloutBatch,
    compute_advantages,
    is_by_token,
    policy_loss,
    register_equation,
    token_losses,
    token_weights,
)
from rft_algos.packed.loss_tokens import Tokens
from rft_algos.rewards.shaping import RunningMoments
from rft_core.errors import OptionsError

D = torch.float64
LENGTHS = torch.tensor([2, 3, 1, 4, 2, 2])
GROUPS = torch.tensor([7, 7, 7, 2, 2, 2])
REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.1, 0.1, 0.1], dtype=D)


def batch(**changes: object) -> RolloutBatch:
    generator = torch.Generator().manual_seed(5)
    num = int(LENGTHS.sum())

    def noise(scale: float) -> Tensor:
        return torch.randn(num, generator=generator, dtype=D) * scale

    old = -torch.rand(num, generator=generator, dtype=D) * 3
    fields: dict[str, object] = {
        "rewards_N": REWARDS,
        "group_ids_N": GROUPS,
        "loss_mask_T": torch.tensor([True] * 4 + [False] + [True] * (num - 5)),
        "segment_ids_T": torch.repeat_interleave(torch.arange(len(LENGTHS)), LENGTHS),
        "old_logprobs_T": old,
        "behaviour_logprobs_T": old + noise(0.3),
        "reference_logprobs_T": old + noise(0.5),
        "entropy_T": torch.rand(num, generator=generator, dtype=D),
        "values_T": noise(1.0),
        "greedy_rewards_N": torch.tensor([0.5, 0.5, 0.5, 0.0, 0.0, 0.0], dtype=D),
        "components_NK": torch.stack([REWARDS, REWARDS.flip(0)], 1),
        "step_rewards_T": noise(1.0),
        "step_mask_T": torch.arange(num) % 2 == 1,
    }
    return RolloutBatch(**(fields | changes))  # type: ignore[arg-type]


def published(name: str) -> PolicyAlgorithm:
    return by_name(name)(max_tokens=100) if name == "dr_grpo" else by_name(name)()


def mask_of(b: RolloutBatch) -> Tensor:
    return b.loss_mask_T


def spread(values_N: Tensor, b: RolloutBatch) -> Tensor:
    return torch.where(b.loss_mask_T, values_N[b.segment_ids_T], 0.0)


def test_lengths_count_loss_tokens():
    assert batch().lengths_N.tolist() == [2.0, 2.0, 1.0, 4.0, 2.0, 2.0]


def batch_for(name: str) -> RolloutBatch:
    """Pass@k is defined for rewards of 0 and 1."""
    return batch(rewards_N=torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], dtype=D)) if name == "pass_at_k" else batch()


def test_pass_at_k_refuses_rewards_that_are_not_0_or_1():
    with pytest.raises(OptionsError, match=r"0\.5") as caught:
        compute_advantages(Grpo(advantage=components.PassAtK(), kl_place="none"), batch())
    assert caught.value.problem.code == "algorithm.rewards_not_binary"


COMPARISONS = {
    "grpo": lambda b: advantages.group_norm(b.rewards_N, b.group_ids_N),
    "dr_grpo": lambda b: advantages.group_centred(b.rewards_N, b.group_ids_N),
    "lite_ppo": lambda b: advantages.batch_std(b.rewards_N, b.group_ids_N),
    "maxrl": lambda b: advantages.max_rl(b.rewards_N, b.group_ids_N),
    "opo": lambda b: advantages.opo(b.rewards_N, b.group_ids_N, b.lengths_N),
    "gpg": lambda b: advantages.gpg(b.rewards_N, b.group_ids_N),
    "best_of_group": lambda b: advantages.best_of_group(b.rewards_N, b.group_ids_N),
    "cpgd": lambda b: advantages.cpgd(b.rewards_N, b.group_ids_N, weighting="clip_filter"),
    "remax": lambda b: advantages.remax(b.rewards_N, b.greedy_rewards_N),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_an_advantage_of_sequences_stands_at_each_of_their_loss_tokens(name: str):
    b = batch()
    found = compute_advantages(replace(published(name), kl_place="none"), b)
    assert torch.equal(found.advantages_T, spread(COMPARISONS[name](b), b))
    assert found.advantages_T.dtype == D
    assert found.returns_T is None
    assert found.weights_T is None
    assert found.selected_T is None


def test_pass_at_k_takes_its_k():
    b = batch(rewards_N=torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], dtype=D))
    for k in (1, 2):
        record = Grpo(advantage=components.PassAtK(k=k), kl_place="none")
        expected = advantages.pass_at_k(b.rewards_N, b.group_ids_N, k=k)
        assert torch.equal(compute_advantages(record, b).advantages_T, spread(expected, b))


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_epsilon_of_the_choice_is_used(epsilon: float):
    b = batch()
    pairs = (
        (components.GroupNorm(epsilon=epsilon), advantages.group_norm(b.rewards_N, b.group_ids_N, epsilon=epsilon)),
        (components.BatchStd(epsilon=epsilon), advantages.batch_std(b.rewards_N, b.group_ids_N, epsilon=epsilon)),
        (
            components.BestOfGroup(epsilon=epsilon),
            advantages.best_of_group(b.rewards_N, b.group_ids_N, epsilon=epsilon),
        ),
        (
            components.Gdpo(epsilon=epsilon, over_batch=False),
            advantages.gdpo(b.components_NK, b.group_ids_N, torch.ones(2, dtype=D), epsilon=epsilon),
        ),
        (
            components.CpgdWeighted(weighting="std", epsilon=epsilon),
            advantages.cpgd(b.rewards_N, b.group_ids_N, weighting="std", epsilon=epsilon),
        ),
    )
    for choice, expected in pairs:
        assert torch.equal(
            compute_advantages(Grpo(advantage=choice, kl_place="none"), b).advantages_T, spread(expected, b)
        )


def test_gdpo_weighs_the_parts_after_each_is_normalised():
    b = batch(component_weights_K=torch.tensor([0.9, 0.1], dtype=D))
    record = Grpo(advantage=components.Gdpo(over_batch=False), kl_place="none")
    parts = [advantages.group_norm(b.components_NK[:, k], GROUPS) for k in (0, 1)]  # type: ignore[index]
    torch.testing.assert_close(compute_advantages(record, b).advantages_T, spread(0.9 * parts[0] + 0.1 * parts[1], b))


def test_gdpo_normalises_the_sum_over_sequences_however_long_they_are():
    b = batch()
    assert len(set(b.lengths_N.tolist())) > 1
    sums_N = advantages.gdpo(b.components_NK, b.group_ids_N, torch.ones(2, dtype=D))  # type: ignore[arg-type]
    expected_N = (sums_N - sums_N.mean()) / (sums_N.std() + 1e-6)
    torch.testing.assert_close(compute_advantages(published("gdpo"), b).advantages_T, spread(expected_N, b))


def test_cpgd_takes_its_largest_weight():
    rewards = torch.tensor([1.0, 0.0, 0.5] + [0.1] * 3, dtype=D)
    record = Grpo(advantage=components.CpgdWeighted(max_weight=1.5), kl_place="none")
    b = batch(rewards_N=rewards)
    expected = advantages.cpgd(rewards, GROUPS, weighting="clip_filter", max_weight=1.5)
    assert torch.equal(compute_advantages(record, b).advantages_T, spread(expected, b))
    assert not torch.equal(expected, advantages.cpgd(rewards, GROUPS, weighting="clip_filter", max_weight=3.0))


# the KL penalty in the reward


@pytest.mark.parametrize("estimator", REWARD_KL_ESTIMATORS)
def test_the_penalty_comes_before_the_comparison_of_groups(estimator: str):
    b = batch()
    x = b.old_logprobs_T - b.reference_logprobs_T
    kl = {"k1": x, "k2": x.square() / 2, "k3": torch.expm1(-x) + x, "abs": x.abs()}[estimator]
    spent = torch.zeros(6, dtype=D).index_add_(0, b.segment_ids_T, torch.where(b.loss_mask_T, kl, 0.0))
    expected = advantages.leave_one_out(REWARDS - 0.3 * spent, GROUPS)
    record = replace(published("rloo"), kl_coef=0.3, kl_estimator=estimator)
    torch.testing.assert_close(compute_advantages(record, b).advantages_T, spread(expected, b), rtol=1e-12, atol=1e-14)


def test_a_controlled_coefficient_replaces_the_record_s():
    b = batch()
    record = published("rloo")
    given = compute_advantages(record, b, kl_coef=0.3).advantages_T
    assert torch.equal(given, compute_advantages(replace(record, kl_coef=0.3), b).advantages_T)
    assert not torch.equal(given, compute_advantages(record, b).advantages_T)
    assert torch.equal(
        compute_advantages(record, b, kl_coef=0.0).advantages_T, spread(advantages.leave_one_out(REWARDS, GROUPS), b)
    )


@pytest.mark.parametrize("place", ["loss", "none"])
def test_no_penalty_where_the_record_places_it_elsewhere(place: str):
    b = batch(reference_logprobs_T=None)
    record = Grpo(kl_place=place, kl_coef=0.5)  # type: ignore[arg-type]
    assert torch.equal(compute_advantages(record, b).advantages_T, spread(advantages.group_norm(REWARDS, GROUPS), b))


def test_the_penalty_needs_the_reference():
    with pytest.raises(InputError, match="reference"):
        compute_advantages(published("rloo"), batch(reference_logprobs_T=None))


# credit over time


def test_returns_sum_penalties_and_the_reward_at_the_end():
    b = batch()
    record = replace(published("reinforce++"), advantage=components.Returns(gamma=0.9), normalise_advantages=False)
    found = compute_advantages(replace(record, kl_coef=0.2), b).advantages_T
    x = (b.old_logprobs_T - b.reference_logprobs_T).tolist()
    # the second sequence: tokens 2, 3 and a masked 4, reward 0
    assert found[3].item() == pytest.approx(-0.2 * x[3])
    assert found[2].item() == pytest.approx(-0.2 * x[2] + 0.9 * -0.2 * x[3])
    assert found[4].item() == 0.0
    # the third: one token, reward 0.5
    assert found[5].item() == pytest.approx(0.5 - 0.2 * x[5])
    assert compute_advantages(record, b).returns_T is None


def test_gae_takes_values_gamma_and_lambda_and_gives_returns():
    b = batch()
    record = replace(published("gae"), advantage=components.Gae(gamma=0.9, lambd=0.8), kl_place="none")
    record = replace(record, normalise_advantages=False)
    rewards = torch.zeros_like(b.old_logprobs_T)
    for index, place in enumerate((1, 3, 5, 9, 11, 13)):
        rewards[place] = REWARDS[index]
    expected, returns = advantages.gae(rewards, b.values_T, b.loss_mask_T, b.segment_ids_T, gamma=0.9, lambd=0.8)
    found = compute_advantages(record, b)
    assert torch.equal(found.advantages_T, torch.where(b.loss_mask_T, expected, 0.0))
    assert found.returns_T is not None
    assert torch.equal(found.returns_T, returns)
    with pytest.raises(InputError, match="values"):
        compute_advantages(record, batch(values_T=None))


def test_rewards_of_steps_take_the_place_of_the_outcome():
    b = batch()
    record = Grpo(advantage=components.ProcessGroupNorm(epsilon=0.1), kl_place="none")
    expected = advantages.process_group_norm(
        b.step_rewards_T, b.step_mask_T, b.loss_mask_T, b.segment_ids_T, b.group_ids_N, epsilon=0.1
    )
    assert torch.equal(compute_advantages(record, b).advantages_T, torch.where(b.loss_mask_T, expected, 0.0))
    for missing in ("step_rewards_T", "step_mask_T"):
        with pytest.raises(InputError, match="process rewards"):
            compute_advantages(record, batch(**{missing: None}))


@pytest.mark.parametrize(("name", "field"), [("gdpo", "components_NK"), ("remax", "greedy_rewards_N")])
def test_what_an_estimator_needs_must_be_there(name: str, field: str):
    with pytest.raises(InputError, match="needs"):
        compute_advantages(published(name), batch(**{field: None}))


# scores, normalisation, clips


def test_running_scale_then_clip_then_metrics():
    b = batch()
    record = Grpo(kl_place="none")
    before = RunningMoments().update(torch.tensor([0.0, 4.0], dtype=D))
    scores = advantages.group_norm(REWARDS, GROUPS)
    after = before.update(scores)
    for minus_mean in (False, True):
        scaled = after.normalise(scores, minus_mean=minus_mean)
        found = compute_advantages(record, b, running=before, minus_mean=minus_mean, score_clip=0.3)
        assert found.running == after
        torch.testing.assert_close(found.advantages_T, spread(scaled.clamp(-0.3, 0.3), b))
        total, count = found.metrics["reward/score_clipped"]
        assert (float(total), float(count)) == (float((scaled.abs() > 0.3).sum()), 6.0)
    plain = compute_advantages(record, b)
    assert plain.running is None
    assert plain.metrics == {}


def test_advantages_are_normalised_over_all_loss_tokens_and_clipped_after():
    b = batch()
    record = Grpo(kl_place="none", normalise_advantages=True)
    found = compute_advantages(record, b).advantages_T
    chosen = found[b.loss_mask_T]
    assert float(chosen.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(chosen.std()) == pytest.approx(1.0, rel=1e-6)
    assert float(found[4]) == 0.0
    clipped = compute_advantages(replace(record, advantage_clip=0.7), b)
    assert torch.equal(clipped.advantages_T, found.clamp(-0.7, 0.7))
    total, count = clipped.metrics["policy/advantage_clipped"]
    assert (float(total), float(count)) == (float((chosen.abs() > 0.7).sum()), 13.0)


# weights and selections


def test_corrections_use_the_trainer_s_log_probs_over_the_engine_s():
    b = batch()
    record = Grpo(kl_place="none", correction=components.TokenTis(cap=1.1))
    found = compute_advantages(record, b)
    rho = torch.exp(b.old_logprobs_T - b.behaviour_logprobs_T).clamp(max=1.1)
    assert found.weights_T is not None
    torch.testing.assert_close(found.weights_T[b.loss_mask_T], rho[b.loss_mask_T], rtol=1e-12, atol=0)
    total, count = found.metrics["mismatch/correction"]
    assert float(total) == pytest.approx(float(rho[b.loss_mask_T].sum()))
    assert float(count) == 13.0
    assert float(found.metrics["mismatch/masked"][0]) == 0.0
    assert {name.split("/")[0] for name in found.metrics} == {"mismatch"}


@pytest.mark.parametrize(
    "correction",
    [
        components.SequenceTis(cap=1.05),
        components.TokenMis(low=0.9, high=1.2),
        components.SequenceMis(low=0.9, high=1.2),
        components.GeometricMis(low=0.95, high=1.05),
    ],
)
def test_corrections_take_their_bounds(correction: components.Correction):
    b = batch()
    wide = replace(correction, **({"cap": 100.0} if hasattr(correction, "cap") else {"low": 0.0, "high": 100.0}))
    narrow, open_ = (compute_advantages(Grpo(kl_place="none", correction=c), b).weights_T for c in (correction, wide))
    assert narrow is not None
    assert open_ is not None
    assert not torch.equal(narrow, open_)
    changed = narrow != open_
    bound = correction.cap if hasattr(correction, "cap") else 0.0  # type: ignore[attr-defined]
    assert bool((narrow[changed & b.loss_mask_T] == bound).all())


def test_tokens_of_high_entropy_are_chosen_over_the_whole_batch():
    b = batch()
    found = compute_advantages(Grpo(kl_place="none", high_entropy_fraction=0.25), b)
    assert found.weights_T is not None
    kept = found.weights_T[b.loss_mask_T] > 0
    entropy = b.entropy_T[b.loss_mask_T]
    assert float(entropy[kept].min()) >= float(entropy[~kept].max())
    assert float(found.metrics["policy/high_entropy"][0]) == float(kept.sum())
    both = compute_advantages(
        Grpo(kl_place="none", high_entropy_fraction=0.25, correction=components.TokenTis(cap=1.1)), b
    ).weights_T
    rho = torch.exp(b.old_logprobs_T - b.behaviour_logprobs_T).clamp(max=1.1)
    assert both is not None
    torch.testing.assert_close(both[b.loss_mask_T], (rho * (found.weights_T > 0))[b.loss_mask_T])
    with pytest.raises(InputError, match="entropy"):
        compute_advantages(Grpo(kl_place="none", high_entropy_fraction=0.25), batch(entropy_T=None))


def test_selective_surrogates_select_over_the_whole_batch_and_by_key():
    b = batch()
    record = Grpo(kl_place="none", surrogate=components.KlCov(fraction=0.2))
    found = compute_advantages(record, b)
    assert found.selected_T is not None
    assert int(found.selected_T.sum()) == float(found.metrics["policy/covariance_selected"][0]) >= 1
    covs = components.ClipCov(covariance_low=-100.0, covariance_high=100.0, fraction=0.4)
    picks = [
        compute_advantages(Grpo(kl_place="none", surrogate=covs), b, key=key).selected_T for key in (1, 1, 2, 3, 4)
    ]
    assert torch.equal(picks[0], picks[1])  # type: ignore[arg-type]
    assert any(not torch.equal(picks[0], other) for other in picks[2:])  # type: ignore[arg-type]
    narrow = replace(covs, covariance_low=99.0)
    assert not bool(compute_advantages(Grpo(kl_place="none", surrogate=narrow), b).selected_T.any())  # type: ignore[union-attr]


# a person's own advantages


@pytest.mark.parametrize("per_token", [False, True])
def test_own_advantages_of_sequences_or_tokens(per_token: bool):
    b = batch()
    given = torch.arange(float(len(b.loss_mask_T) if per_token else 6))
    found = compute_advantages(Grpo(kl_place="none"), b, score=lambda seen: given if seen is b else given * 0)
    expected = given if per_token else given[b.segment_ids_T]
    assert torch.equal(found.advantages_T, torch.where(b.loss_mask_T, expected.double(), 0.0))


@pytest.mark.parametrize("given", [torch.zeros(5), torch.full((6,), math.nan)])
def test_own_advantages_that_cannot_be_used_are_refused(given: Tensor):
    with pytest.raises(OptionsError) as caught:
        compute_advantages(Grpo(kl_place="none"), batch(), score=lambda _: given)
    assert "6 sequences" in caught.value.problem.why


# properties of all


def loss_of(
    record: PolicyAlgorithm, b: RolloutBatch, found: AdvantageOutput, logprobs_T: Tensor, keep: Tensor
) -> Tensor:
    numbers = torch.unique(b.segment_ids_T[keep], return_inverse=True)[1]
    return policy_loss(
        record,
        logprobs_T=logprobs_T,
        old_logprobs_T=b.old_logprobs_T[keep],
        reference_logprobs_T=b.reference_logprobs_T[keep],  # type: ignore[index]
        advantages_T=found.advantages_T[keep],
        loss_mask_T=b.loss_mask_T[keep],
        segment_ids_T=numbers,
        entropy_T=None,
        num_loss_tokens=int(b.loss_mask_T.sum()),
        num_sequences=6,
        behaviour_logprobs_T=b.behaviour_logprobs_T[keep],
        token_weights_T=None if found.weights_T is None else found.weights_T[keep],
        selected_T=None if found.selected_T is None else found.selected_T[keep],
    ).loss


@pytest.mark.parametrize("name", [record.name for record in PUBLISHED if is_by_token(published(record.name))])
def test_losses_of_tokens_in_any_order_add_up_to_the_loss_with_its_gradient(name: str):
    record = replace(published(name), entropy_coef=0.1, drift_coef=0.2)
    b = batch_for(name)
    found = compute_advantages(record, b, key=3)
    now_T = (
        b.old_logprobs_T + 0.4 * torch.randn(b.old_logprobs_T.shape, generator=seeded(2), dtype=D)
    ).requires_grad_()
    entropy_T = torch.rand(now_T.shape, generator=seeded(4), dtype=D).requires_grad_()
    given = {
        "old_logprobs_T": b.old_logprobs_T,
        "reference_logprobs_T": b.reference_logprobs_T,
        "advantages_T": found.advantages_T,
        "token_weights_T": found.weights_T,
        "selected_T": found.selected_T,
    }
    sizes = {"num_loss_tokens": int(b.loss_mask_T.sum()), "num_sequences": 6}
    layout = {"loss_mask_T": b.loss_mask_T, "segment_ids_T": b.segment_ids_T}
    whole = policy_loss(record, logprobs_T=now_T, entropy_T=entropy_T, **given, **layout, **sizes).loss  # type: ignore[arg-type]
    weights_T = token_weights(record, **layout, **sizes, dtype=D)  # type: ignore[arg-type]
    rows = b.loss_mask_T.nonzero()[:, 0].flip(0)
    parts = [
        token_losses(
            record,
            logprobs_T=now_T[part],
            entropy_T=entropy_T[part],
            weights_T=weights_T[part],
            **{key: None if value is None else value[part] for key, value in given.items()},  # type: ignore[arg-type]
        )
        for part in rows.split(3)
    ]
    total = torch.cat(parts).sum()
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-14)
    for one, other in zip(
        torch.autograd.grad(total, (now_T, entropy_T)), torch.autograd.grad(whole, (now_T, entropy_T)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_losses_of_sequences_are_none_of_tokens():
    for record in (published("gspo"), published("gmpo"), Grpo(off_policy_delta=0.1)):
        assert not is_by_token(record)
        with pytest.raises(InputError, match="is not one of tokens"):
            token_losses(
                record,
                logprobs_T=torch.zeros(1),
                old_logprobs_T=torch.zeros(1),
                reference_logprobs_T=None,
                advantages_T=torch.ones(1),
                weights_T=torch.ones(1),
                entropy_T=None,
            )


def test_a_token_without_weight_may_hold_anything():
    now_T = torch.tensor([-1.0, math.nan], dtype=D, requires_grad=True)
    losses_T = token_losses(
        Grpo(kl_place="none"),
        logprobs_T=now_T,
        old_logprobs_T=torch.tensor([-1.0, -1.0], dtype=D),
        reference_logprobs_T=None,
        advantages_T=torch.tensor([2.0, 1.0], dtype=D),
        weights_T=torch.tensor([0.5, 0.0], dtype=D),
        entropy_T=None,
    )
    assert losses_T.tolist() == [-1.0, 0.0]


@pytest.mark.parametrize("name", [record.name for record in PUBLISHED])
def test_no_algorithm_depends_on_the_cut_or_on_what_stands_at_masked_tokens(name: str):
    record = replace(published(name), off_policy_delta=0.05)
    clean = batch_for(name)
    hidden = ~clean.loss_mask_T
    dirty = replace(
        clean,
        **{
            field: getattr(clean, field).masked_fill(hidden, math.nan)
            for field in ("old_logprobs_T", "behaviour_logprobs_T", "reference_logprobs_T", "entropy_T", "values_T")
        },
    )
    everything = torch.ones_like(hidden)
    current = clean.old_logprobs_T + torch.linspace(-0.3, 0.3, len(hidden), dtype=D)
    leaf = current.clone().requires_grad_()
    found = compute_advantages(record, clean, key=3)
    whole = loss_of(record, clean, found, leaf, everything)
    (gradient,) = torch.autograd.grad(whole, leaf)
    assert bool((gradient[~hidden] != 0).any())

    of_dirty = compute_advantages(record, dirty, key=3)
    assert torch.equal(of_dirty.advantages_T, found.advantages_T)
    total = 0.0
    for part in ([0, 4], [1], [2, 3, 5]):
        keep = torch.isin(clean.segment_ids_T, torch.tensor(part))
        part_leaf = current.masked_fill(hidden, math.nan)[keep].requires_grad_()
        loss = loss_of(record, dirty, of_dirty, part_leaf, keep)
        (part_gradient,) = torch.autograd.grad(loss, part_leaf)
        torch.testing.assert_close(part_gradient, gradient[keep], rtol=1e-10, atol=1e-14)
        total += float(loss.detach())
    assert total == pytest.approx(float(whole.detach()), rel=1e-10, abs=1e-13)


ON_POLICY = [r.name for r in PUBLISHED if r.name not in ("kimi", "decoupled_ppo")]


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_every_surrogate_has_the_policy_gradient(name: str):
    record = replace(published(name), kl_place="none", correction=components.NoCorrection(), drift_coef=0.0)
    b = batch_for(name)
    found = compute_advantages(record, b, key=3)
    leaf = b.old_logprobs_T.clone().requires_grad_()
    everything = torch.ones_like(b.loss_mask_T)
    (gradient,) = torch.autograd.grad(loss_of(record, b, found, leaf, everything), leaf)
    plain = replace(record, surrogate=components.Reinforce())
    (expected,) = torch.autograd.grad(loss_of(plain, b, replace(found, selected_T=None), leaf, everything), leaf)
    if found.selected_T is not None and isinstance(record.surrogate, components.ClipCov):
        expected = torch.where(found.selected_T, 0.0, expected)
    if found.selected_T is not None and isinstance(record.surrogate, components.KlCov):
        gradient, expected = gradient[~found.selected_T], expected[~found.selected_T]
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", [record.name for record in PUBLISHED])
def test_sequences_in_another_order_get_the_same_credit(name: str):
    record = published(name)
    b = batch_for(name)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    places = torch.cat([(b.segment_ids_T == index).nonzero()[:, 0] for index in order.tolist()])
    moved = RolloutBatch(
        rewards_N=b.rewards_N[order],
        group_ids_N=b.group_ids_N[order],
        segment_ids_T=torch.repeat_interleave(torch.arange(6), LENGTHS[order]),
        greedy_rewards_N=b.greedy_rewards_N[order],  # type: ignore[index]
        components_NK=b.components_NK[order],  # type: ignore[index]
        **{
            field: getattr(b, field)[places]
            for field in (
                "loss_mask_T",
                "old_logprobs_T",
                "behaviour_logprobs_T",
                "reference_logprobs_T",
                "entropy_T",
                "values_T",
                "step_rewards_T",
                "step_mask_T",
            )
        },
    )
    torch.testing.assert_close(
        compute_advantages(record, moved).advantages_T,
        compute_advantages(record, b).advantages_T[places],
        rtol=1e-10,
        atol=1e-13,
    )


def test_the_off_policy_mask_keeps_the_denominator():
    b = batch()
    record = Grpo(kl_place="none", off_policy_delta=0.1)
    found = compute_advantages(record, b)
    everything = torch.ones_like(b.loss_mask_T)
    away = (b.behaviour_logprobs_T - 0.5).requires_grad_()  # fell by half a nat everywhere
    (gradient,) = torch.autograd.grad(loss_of(record, b, found, away, everything), away)
    (free,) = torch.autograd.grad(loss_of(replace(record, off_policy_delta=None), b, found, away, everything), away)
    negative = found.advantages_T < 0
    assert bool((gradient[negative] == 0).all())
    assert torch.equal(gradient[~negative], free[~negative])
    output = policy_loss(
        record,
        logprobs_T=away.detach(),
        old_logprobs_T=b.old_logprobs_T,
        reference_logprobs_T=None,
        advantages_T=found.advantages_T,
        loss_mask_T=b.loss_mask_T,
        segment_ids_T=b.segment_ids_T,
        entropy_T=None,
        num_loss_tokens=13,
        num_sequences=6,
        behaviour_logprobs_T=b.behaviour_logprobs_T,
    )
    kept, count = output.metrics["policy/off_policy_kept"]
    assert (float(kept), float(count)) == (13.0 - float((negative & b.loss_mask_T).sum()), 13.0)


def test_a_choice_of_one_s_own_joins_with_its_equation():
    class Halved(components.Surrogate):
        pass

    with pytest.raises(InputError, match="no equation"):
        equation_of(Halved())

    @register_equation(Halved)
    def halved(choice: Halved, tokens: object) -> Tensor:
        return -0.5 * tokens.advantages * tokens.logprobs  # type: ignore[attr-defined]

    assert equation_of(Halved()) is halved
    assert clip_indicator_of(Halved()) is None
    b = batch()
    record = Grpo(kl_place="none", surrogate=Halved())
    found = compute_advantages(record, b)
    leaf = b.old_logprobs_T.clone().requires_grad_()
    everything = torch.ones_like(b.loss_mask_T)
    (gradient,) = torch.autograd.grad(loss_of(record, b, found, leaf, everything), leaf)
    full = replace(record, surrogate=components.Reinforce())
    (expected,) = torch.autograd.grad(loss_of(full, b, found, leaf, everything), leaf)
    torch.testing.assert_close(gradient, expected / 2)


def test_corrections_say_how_far_the_two_policies_are_apart():
    b = batch()
    found = compute_advantages(Grpo(kl_place="none", correction=components.TokenMis(low=0.9, high=1.2)), b)
    log_rho = (b.old_logprobs_T - b.behaviour_logprobs_T)[b.loss_mask_T]
    rho = log_rho.exp()
    kept = (rho >= 0.9) & (rho <= 1.2)
    expected = {
        "mismatch/kl_k1": (-log_rho.sum(), 13.0),
        "mismatch/kl_k3": ((rho - 1 - log_rho).sum(), 13.0),
        "mismatch/weight": (rho.sum(), 13.0),
        "mismatch/ratio_max": (rho.max(), 1.0),
        "mismatch/inverse_ratio_max": ((1 / rho).max(), 1.0),
        "mismatch/correction": (rho[kept].sum(), 13.0),
        "mismatch/masked": ((~kept).sum(), 13.0),
    }
    for name, (total, count) in expected.items():
        assert float(found.metrics[name][0]) == pytest.approx(float(total), rel=1e-12), name
        assert float(found.metrics[name][1]) == count, name
    assert 0 < int((~kept).sum()) < 13


def test_pitfall_6_masked_log_probs_reach_no_weight():
    b = batch()
    spoiled = torch.where(b.loss_mask_T, b.behaviour_logprobs_T, math.nan)
    found = compute_advantages(
        Grpo(kl_place="none", correction=components.TokenTis(cap=2.0)), batch(behaviour_logprobs_T=spoiled)
    )
    assert found.weights_T is not None
    assert found.weights_T[~b.loss_mask_T].tolist() == [1.0]  # exp(0)


def test_without_a_key_selections_draw_by_key_zero():
    record = by_name("clip_cov")()
    chosen = replace(record.surrogate, covariance_low=-9.0, covariance_high=9.0, fraction=0.4)
    record = replace(record, surrogate=chosen)
    plain, zero, one = (
        compute_advantages(record, batch()),
        compute_advantages(record, batch(), key=0),
        compute_advantages(record, batch(), key=1),
    )
    assert plain.selected_T is not None
    assert torch.equal(plain.selected_T, zero.selected_T)  # type: ignore[arg-type]
    assert not torch.equal(plain.selected_T, one.selected_T)  # type: ignore[arg-type]


def test_a_last_sequence_without_tokens_has_length_zero():
    changed = {name: getattr(batch(), name)[:2] for name in ("loss_mask_T", "segment_ids_T")}
    assert replace(batch(), **changed).lengths_N.tolist() == [2.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("divergence", "equation"), [("tv", surrogates.dppo_tv), ("kl", surrogates.dppo_kl)])
def test_dppo_takes_the_divergence_of_the_choice(divergence: str, equation: Callable[..., Tensor]):
    # down by 0.3, 0.22 nats: further than 0.25 by the one measure, not by the other
    logprobs_T, old_T = torch.tensor([0.2, 0.4], dtype=D).log(), torch.tensor([0.5, 0.4], dtype=D).log()
    tokens = tokens_of(logprobs_T, old_T, torch.tensor([-2.0, 1.0], dtype=D))
    choice = components.Dppo(divergence=divergence, low=0.25, high=0.25)  # type: ignore[arg-type]
    expected_T = equation(logprobs_T, old_T, tokens.advantages, 0.25, 0.25)
    assert equation_of(choice)(choice, tokens).tolist() == expected_T.tolist()
    assert (expected_T[0] == 0.0) == (divergence == "tv")


def test_clip_cov_takes_the_gradient_of_clipped_and_of_selected_tokens():
    # a ratio of 2 is clipped at positive advantages; the second token is selected, the third neither
    old_T = torch.tensor([-1.0, -1.0, -1.0], dtype=D)
    tokens = tokens_of(old_T + torch.tensor([2.0, 1.0, 1.0], dtype=D).log(), old_T, torch.ones(3, dtype=D))
    choice = components.ClipCov()
    indicator = clip_indicator_of(choice)
    assert indicator is not None
    selected = replace(tokens, selected=torch.tensor([False, True, False]))
    assert indicator(choice, selected).tolist() == [True, True, False]


def tokens_of(logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor) -> Tokens:
    num = logprobs_T.shape[0]
    return Tokens.masked(
        logprobs_T=logprobs_T,
        old_logprobs_T=old_T,
        advantages_T=advantages_T,
        loss_mask_T=torch.ones(num, dtype=torch.bool),
        segment_ids_T=torch.zeros(num, dtype=torch.int64),
        dtype=D,
    )


def test_pitfall_6_tokens_are_zero_where_masked_whatever_stands_there():
    def spoiled() -> Tensor:
        return torch.tensor([1.5, math.nan], dtype=D)

    tokens = Tokens.masked(
        logprobs_T=spoiled(),
        old_logprobs_T=spoiled(),
        advantages_T=spoiled(),
        loss_mask_T=torch.tensor([True, False]),
        segment_ids_T=torch.tensor([0, 0]),
        dtype=D,
        reference_logprobs_T=spoiled(),
        behaviour_logprobs_T=spoiled(),
        entropy_T=spoiled(),
        token_weights_T=spoiled(),
        selected_T=torch.tensor([True, True]),
    )
    for name in ("logprobs", "old_logprobs", "advantages", "behaviour_logprobs", "entropy", "weights"):
        assert getattr(tokens, name).tolist() == [1.5, 0.0], name
    assert tokens.log_ratio.tolist() == [0.0, 0.0]
    assert tokens.reference_log_ratio is not None
    assert tokens.reference_log_ratio.tolist() == [0.0, 0.0]
    assert tokens.selected is not None
    assert tokens.selected.tolist() == [True, False]
