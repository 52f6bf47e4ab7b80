from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.input_checks import InputError
from rft_algos.losses.preference import (
    bradley_terry,
    dpo,
    hps,
    implicit_reward,
    ipo,
    ipo_per_token,
    kto,
    kto_reference_point,
    log_exp,
    log_odds,
    mean_logprobs,
    orpo,
    rao_kupper_tie,
    simpo,
)

LOGPROB = st.floats(-200, -0.01)
PAIRS = st.lists(
    st.tuples(LOGPROB, LOGPROB, LOGPROB, LOGPROB, st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8
)
Pair = tuple[float, float, float, float, int, int]
Loss = Callable[..., torch.Tensor]
PAIR_LOSSES: dict[str, Loss] = {
    "dpo": lambda pc, pr, rc, rr, lc, lr: dpo(pc, pr, rc, rr, beta=0.3, label_smoothing=0.2),
    "ipo": lambda pc, pr, rc, rr, lc, lr: ipo(pc, pr, rc, rr, beta=0.3),
    "ipo_per_token": lambda pc, pr, rc, rr, lc, lr: ipo_per_token(pc, pr, rc, rr, lc, lr, beta=0.3),
    "orpo": lambda pc, pr, rc, rr, lc, lr: orpo(pc, pr, lc, lr, coefficient=0.7),
    "simpo": lambda pc, pr, rc, rr, lc, lr: simpo(pc, pr, lc, lr, beta=2.5, gamma=0.4),
    "bradley_terry": lambda pc, pr, rc, rr, lc, lr: bradley_terry(pc, pr, 0.5),
    "hps": lambda pc, pr, rc, rr, lc, lr: hps(pc, pr),
    "log_exp": lambda pc, pr, rc, rr, lc, lr: log_exp(pc, pr),
}


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def columns(pairs: list[Pair], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    cut = list(zip(*pairs, strict=True))
    return [torch.tensor(c, dtype=dtype) for c in cut[:4]] + [torch.tensor(c) for c in cut[4:]]


def plain_log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


def plain_log_odds(log_p: float, eps: float = 2**-52) -> float:
    log_p = min(log_p, -eps)
    return log_p - (math.log(-math.expm1(log_p)) if log_p > -0.5 else math.log1p(-math.exp(log_p)))


def plain_pair_loss(name: str, pair: Pair) -> float:
    pc, pr, rc, rr, lc, lr = pair
    margin = pc - rc - (pr - rr)
    match name:
        case "dpo":
            return -0.8 * plain_log_sigmoid(0.3 * margin) - 0.2 * plain_log_sigmoid(-0.3 * margin)
        case "ipo":
            return (margin - 1 / 0.6) ** 2
        case "ipo_per_token":
            return ((pc - rc) / lc - (pr - rr) / lr - 1 / 0.6) ** 2
        case "orpo":
            return -pc / lc - 0.7 * plain_log_sigmoid(plain_log_odds(pc / lc) - plain_log_odds(pr / lr))
        case "simpo":
            return -plain_log_sigmoid(2.5 * (pc / lc - pr / lr) - 0.4)
        case "bradley_terry":
            return -plain_log_sigmoid(pc - pr - 0.5)
        case _:
            return -plain_log_sigmoid(pc - pr)


# what all losses of pairs have in common


@pytest.mark.parametrize("name", PAIR_LOSSES)
@given(pairs=PAIRS)
def test_equals_a_plain_twin(name: str, pairs: list[Pair]):
    expected = [plain_pair_loss(name, pair) for pair in pairs]
    losses = PAIR_LOSSES[name](*columns(pairs))
    assert losses.dtype == torch.float64
    assert losses.tolist() == pytest.approx(expected, rel=1e-11, abs=1e-13)
    single = PAIR_LOSSES[name](*columns(pairs, torch.float32))
    assert single.dtype == torch.float32
    assert single.tolist() == pytest.approx(expected, rel=2e-4, abs=1e-4)  # sums of 200 nats carry 1e-5 nats


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_float32_agrees_with_the_twin_to_rounding_at_moderate_log_probs(name: str):
    source = random.Random(4)
    pairs: list[Pair] = [
        (*(source.randrange(-80, -1) / 16 for _ in range(4)), source.randint(1, 5), source.randint(1, 5))
        for _ in range(64)
    ]
    expected = [plain_pair_loss(name, pair) for pair in pairs]
    losses = PAIR_LOSSES[name](*columns(pairs, torch.float32))
    assert losses.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_gradients_are_right(name: str):
    *logprobs, lc, lr = columns([(-3.0, -5.0, -2.0, -4.5, 3, 2), (-9.0, -1.0, -8.0, -2.0, 7, 4)])
    inputs = [x.requires_grad_() for x in logprobs[:2]]
    assert torch.autograd.gradcheck(lambda c, r: PAIR_LOSSES[name](c, r, *logprobs[2:], lc, lr), inputs)


@pytest.mark.parametrize("name", PAIR_LOSSES)
@given(pairs=PAIRS)
def test_a_pair_does_not_see_the_others(name: str, pairs: list[Pair]):
    whole = PAIR_LOSSES[name](*columns(pairs))
    assert torch.allclose(PAIR_LOSSES[name](*columns(pairs[::-1])), whole.flip(0), rtol=1e-14, atol=0)
    alone = torch.cat([PAIR_LOSSES[name](*columns([pair])) for pair in pairs])
    assert torch.allclose(alone, whole, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", PAIR_LOSSES)
@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_extreme_gaps_give_finite_losses_and_gradients(name: str, gap: float):
    inputs = [torch.tensor([x]) for x in (-2e4 + gap, -2e4, -1e4, -1e4)]
    inputs[0].requires_grad_()
    loss = PAIR_LOSSES[name](*inputs, integers(2), integers(2))
    loss.sum().backward()
    assert bool(loss.isfinite().all())
    assert inputs[0].grad is not None
    assert bool(inputs[0].grad.isfinite().all())


@pytest.mark.parametrize("name", ["dpo", "ipo", "ipo_per_token"])
def test_no_gradient_flows_to_the_reference(name: str):
    *logprobs, lc, lr = columns([(-3.0, -5.0, -2.0, -4.5, 3, 2)])
    for x in logprobs:
        x.requires_grad_()
    PAIR_LOSSES[name](*logprobs, lc, lr).sum().backward()
    assert [x.grad is None for x in logprobs] == [False, False, True, True]


# scores of a reward model


def test_bradley_terry_by_hand():
    # differences 2, 0, -1: log(1 + e^-2), log 2, log(1 + e)
    losses = bradley_terry(doubles(3.0, 1.0, 0.0), doubles(1.0, 1.0, 1.0))
    assert losses.tolist() == pytest.approx([0.126928011042972, 0.693147180559945, 1.313261687518223], rel=1e-14)


def test_a_margin_is_what_the_chosen_must_be_better_by():
    chosen, rejected = doubles(3.0, 1.0), doubles(1.0, 1.0)
    assert bradley_terry(chosen, rejected, 2.0).tolist() == pytest.approx([math.log(2), math.log1p(math.exp(2))])
    per_pair = bradley_terry(chosen, rejected, doubles(2.0, 0.0))
    assert per_pair.tolist() == pytest.approx([math.log(2)] * 2)
    assert torch.equal(bradley_terry(chosen, rejected), bradley_terry(chosen, rejected, 0.0))


def test_hps_and_log_exp_by_hand():
    # e^s of 3 and 1: 3/4 chosen; of 1 and 3: 1/4
    chosen, rejected = doubles(math.log(3.0), 0.0), doubles(0.0, math.log(3.0))
    assert hps(chosen, rejected).tolist() == pytest.approx([math.log(4 / 3), math.log(4)], rel=1e-14)
    assert log_exp(chosen, rejected).tolist() == pytest.approx([math.log(4 / 3), math.log(4)], rel=1e-14)


@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(-50, 50)), min_size=1, max_size=9))
def test_without_margin_the_three_losses_of_scores_are_one(scores: list[tuple[float, float]]):
    chosen, rejected = doubles(*[c for c, _ in scores]), doubles(*[r for _, r in scores])
    expected = bradley_terry(chosen, rejected)
    torch.testing.assert_close(hps(chosen, rejected), expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(log_exp(chosen, rejected), expected, rtol=1e-12, atol=1e-300)


def test_a_clear_preference_keeps_its_digits():
    for loss in (bradley_terry, log_exp):
        assert loss(doubles(30.0), doubles(0.0)).tolist() == pytest.approx([math.exp(-30)], rel=1e-9)


def test_at_equal_scores_the_gradient_is_half():
    for loss in (bradley_terry, hps, log_exp):
        chosen, rejected = doubles(1.0).requires_grad_(), doubles(1.0).requires_grad_()
        loss(chosen, rejected).sum().backward()
        assert chosen.grad is not None
        assert rejected.grad is not None
        assert (chosen.grad.tolist(), rejected.grad.tolist()) == ([-0.5], [0.5])


# log-probs as rewards


def test_the_implicit_reward_is_the_scaled_log_ratio():
    policy, reference = doubles(-3.0, -5.0).requires_grad_(), doubles(-4.0, -4.5).requires_grad_()
    rewards = implicit_reward(policy, reference, 0.5)
    assert rewards.tolist() == [0.5, -0.25]  # 0.5 * 1, 0.5 * -0.5
    rewards.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [0.5, 0.5]
    assert reference.grad is None


def test_mean_log_probs_divide_by_the_length_and_survive_an_empty_response():
    assert mean_logprobs(doubles(-6.0, -5.0, 0.0), integers(3, 1, 0)).tolist() == [-2.0, -5.0, 0.0]


def test_log_odds_by_hand():
    p = doubles(0.5, 0.9, 0.1, 0.75)
    expected = [0.0, math.log(9.0), -math.log(9.0), math.log(3.0)]
    assert log_odds(p.log()).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("log_p", [-1e-15, -1e-9, -0.3, -0.693, -0.694, -2.0, -40.0, -1e4])
def test_log_odds_keep_their_digits_everywhere(log_p: float):
    assert log_odds(doubles(log_p)).tolist() == pytest.approx([plain_log_odds(log_p)], rel=1e-14)
    x = doubles(log_p).requires_grad_()
    log_odds(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([-1 / math.expm1(log_p)], rel=1e-12)  # 1 / (1 - p)


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 2**-23), (torch.float64, 2**-52)])
def test_certain_tokens_have_large_finite_odds_without_gradient(dtype: torch.dtype, eps: float):
    x = torch.tensor([0.0, -eps / 2, -2 * eps], dtype=dtype, requires_grad=True)
    odds = log_odds(x)
    odds.sum().backward()
    assert odds.tolist() == pytest.approx([-math.log(eps), -math.log(eps), -math.log(2 * eps)], rel=1e-6)
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([0.0, 0.0, 0.5 / eps], rel=1e-5)


# losses of log-probs


def test_dpo_by_hand():
    # log-ratios 1 and -1: margin 2, times 0.5 is 1
    losses = dpo(doubles(-3.0), doubles(-5.0), doubles(-4.0), doubles(-4.0), beta=0.5)
    assert losses.tolist() == pytest.approx([math.log1p(math.exp(-1))], rel=1e-14)
    smoothed = dpo(doubles(-3.0), doubles(-5.0), doubles(-4.0), doubles(-4.0), beta=0.5, label_smoothing=0.25)
    expected = 0.75 * math.log1p(math.exp(-1)) + 0.25 * math.log1p(math.exp(1))
    assert smoothed.tolist() == pytest.approx([expected], rel=1e-14)


def test_dpo_is_bradley_terry_of_implicit_rewards_and_its_defaults_are_the_published_ones():
    pc, pr, rc, rr = doubles(-3.0, -20.0), doubles(-5.0, -2.0), doubles(-4.0, -9.0), doubles(-4.5, -9.0)
    expected = bradley_terry(implicit_reward(pc, rc, 0.1), implicit_reward(pr, rr, 0.1))
    torch.testing.assert_close(dpo(pc, pr, rc, rr), expected, rtol=1e-14, atol=0)


def test_at_the_reference_dpo_is_log_two_with_half_of_beta_as_gradient():
    pc, pr = doubles(-3.0).requires_grad_(), doubles(-5.0).requires_grad_()
    loss = dpo(pc, pr, doubles(-3.0), doubles(-5.0), beta=0.4)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([math.log(2)])
    assert pc.grad is not None
    assert pr.grad is not None
    assert (pc.grad.tolist(), pr.grad.tolist()) == (pytest.approx([-0.2]), pytest.approx([0.2]))


@pytest.mark.parametrize("smoothing", [-0.1, 0.5, 0.9])
def test_a_smoothing_outside_its_range_is_refused(smoothing: float):
    x = doubles(-1.0)
    with pytest.raises(InputError, match="label_smoothing must be"):
        dpo(x, x, x, x, label_smoothing=smoothing)
    assert dpo(x, x, x, x, label_smoothing=0.499).tolist() == pytest.approx([math.log(2)])


def test_ipo_by_hand():
    # margin 1.5 - (-0.5) = 2 against 1 / (2 * 0.25) = 2, and 0 against 2
    losses = ipo(doubles(-2.5, -3.0), doubles(-5.5, -5.0), doubles(-4.0, -3.0), doubles(-5.0, -5.0), beta=0.25)
    assert losses.tolist() == [0.0, 4.0]


def test_ipo_per_token_divides_each_log_ratio_by_its_length():
    pc, pr, rc, rr = doubles(-2.5), doubles(-5.5), doubles(-4.0), doubles(-5.0)
    # 1.5 / 3 - (-0.5) / 2 = 0.75 against 2
    assert ipo_per_token(pc, pr, rc, rr, integers(3), integers(2), beta=0.25).tolist() == [1.5625]
    ones = integers(1)
    assert torch.equal(ipo_per_token(pc, pr, rc, rr, ones, ones, beta=0.1), ipo(pc, pr, rc, rr, beta=0.1))


@pytest.mark.parametrize("beta", [0.0, -0.1])
def test_a_margin_of_ipo_needs_a_positive_beta(beta: float):
    x = doubles(-1.0)
    with pytest.raises(InputError, match="beta must be positive"):
        ipo(x, x, x, x, beta=beta)


def test_orpo_by_hand():
    # p = 1/2 (odds 1) over 2 tokens and p = 1/4 (odds 1/3) over 3: odds ratio 3, sigmoid 3/4
    chosen, rejected = doubles(2 * math.log(0.5)), doubles(3 * math.log(0.25))
    losses = orpo(chosen, rejected, integers(2), integers(3), coefficient=0.5)
    assert losses.tolist() == pytest.approx([math.log(2) + 0.5 * math.log(4 / 3)], rel=1e-14)
    likelihood = orpo(chosen, rejected, integers(2), integers(3), coefficient=0.0)
    assert likelihood.tolist() == pytest.approx([math.log(2)], rel=1e-14)


def test_orpo_of_certain_and_of_empty_responses_is_finite():
    for logprob, length in ((0.0, 5), (0.0, 0)):
        chosen = torch.tensor([logprob], requires_grad=True)
        loss = orpo(chosen, torch.tensor([logprob]), integers(length), integers(length), coefficient=1.0)
        loss.sum().backward()
        assert loss.tolist() == pytest.approx([math.log(2)])
        assert chosen.grad is not None
        assert bool(chosen.grad.isfinite().all())


def test_simpo_by_hand():
    # means -1 and -2, times 2 is a margin of 2, less 0.5
    losses = simpo(doubles(-3.0), doubles(-4.0), integers(3), integers(2), beta=2.0, gamma=0.5)
    assert losses.tolist() == pytest.approx([math.log1p(math.exp(-1.5))], rel=1e-14)


def test_simpo_of_single_tokens_without_margin_is_dpo_with_a_flat_reference():
    pc, pr, zero, one = doubles(-3.0), doubles(-4.0), doubles(0.0), integers(1)
    assert torch.equal(simpo(pc, pr, one, one, beta=0.3, gamma=0.0), dpo(pc, pr, zero, zero, beta=0.3))


# KTO


def plain_kto(policy: float, reference: float, good: bool, point: float, beta: float, w: float, u: float) -> float:
    x = beta * (policy - reference - point)
    return w * math.exp(plain_log_sigmoid(-x)) if good else u * math.exp(plain_log_sigmoid(x))


@given(
    st.lists(st.tuples(LOGPROB, LOGPROB, st.booleans()), min_size=1, max_size=9),
    st.floats(0, 10),
    st.sampled_from([(0.1, 1.0, 1.0), (0.5, 1.33, 0.7)]),
)
def test_kto_equals_a_plain_twin(
    rows: list[tuple[float, float, bool]], point: float, setting: tuple[float, float, float]
):
    beta, w, u = setting
    policy, reference, good = (torch.tensor(c) for c in zip(*rows, strict=True))
    expected = [plain_kto(p, r, g, point, beta, w, u) for p, r, g in rows]
    policy, reference = doubles(*[p for p, _, _ in rows]), doubles(*[r for _, r, _ in rows])
    weights = {"desirable_weight": w, "undesirable_weight": u}
    for given_point in (point, torch.tensor(point, dtype=torch.float64)):
        losses = kto(policy, reference, good, given_point, beta=beta, **weights)
        assert losses.tolist() == pytest.approx(expected, rel=1e-11)
    backwards = kto(policy.flip(0), reference.flip(0), good.flip(0), point, beta=beta, **weights)
    assert backwards.flip(0).tolist() == pytest.approx(expected, rel=1e-11)
    single = kto(policy.float(), reference.float(), good, point, beta=beta, **weights)
    assert single.dtype == torch.float32
    assert single.tolist() == pytest.approx(expected, rel=2e-4)


def test_kto_by_hand_and_its_defaults_are_the_published_ones():
    # log-ratio 12, reference point 2: beta 0.1 gives 1
    policy, reference, good = doubles(-3.0, -3.0), doubles(-15.0, -15.0), torch.tensor([True, False])
    low, high = 1 / (1 + math.e), math.e / (1 + math.e)
    assert kto(policy, reference, good, 2.0).tolist() == pytest.approx([low, high], rel=1e-13)
    weighed = kto(policy, reference, good, 2.0, desirable_weight=3.0, undesirable_weight=5.0)
    assert weighed.tolist() == pytest.approx([3 * low, 5 * high], rel=1e-13)


def test_kto_raises_good_responses_and_lowers_bad_ones_and_moves_nothing_else():
    policy = doubles(-3.0, -3.0).requires_grad_()
    reference, point = doubles(-3.0, -3.0).requires_grad_(), torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    losses = kto(policy, reference, torch.tensor([True, False]), point, beta=0.4)
    losses.sum().backward()
    assert losses.tolist() == [0.5, 0.5]
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-0.1, 0.1], rel=1e-14)  # beta sigmoid' = 0.4 / 4
    assert reference.grad is None
    assert point.grad is None


def test_kto_gradients_are_right_and_finite_at_extremes():
    policy, reference, good = doubles(-3.0, -9.0), doubles(-4.0, -7.0), torch.tensor([True, False])
    assert torch.autograd.gradcheck(lambda p: kto(p, reference, good, 0.3, beta=0.7), (policy.requires_grad_(),))
    far = torch.tensor([-1e5, 1e5], requires_grad=True)
    kto(far, torch.zeros(2), good, 0.0, beta=1.0).sum().backward()
    assert far.grad is not None
    assert far.grad.tolist() == [0.0, 0.0]


def test_a_saturated_kto_loss_keeps_its_digits():
    losses = kto(doubles(0.0), doubles(-400.0), torch.tensor([True]), 0.0)
    assert losses.tolist() == pytest.approx([math.exp(-40)], rel=1e-9)


def test_the_labels_of_kto_must_be_bool():
    with pytest.raises(InputError, match="desirable_B must be bool"):
        kto(doubles(-1.0), doubles(-1.0), torch.tensor([1]), 0.0)


def test_the_reference_point_is_a_clamped_mean_without_gradient():
    total = torch.tensor(6.0, dtype=torch.float64, requires_grad=True)
    point = kto_reference_point(total, 4)
    assert float(point) == 1.5
    assert point.dtype == torch.float64
    assert not point.requires_grad
    assert float(kto_reference_point(torch.tensor(-6.0), torch.tensor(4))) == 0.0
    assert float(kto_reference_point(0.0, 0)) == 0.0
    assert float(kto_reference_point(2.5, 1)) == 2.5


def test_pitfall_8_clamping_micro_batches_one_by_one_would_be_another_number():
    log_ratios = [3.0, 1.0, -2.0, -1.0]
    assert float(kto_reference_point(sum(log_ratios), 4)) == 0.25  # (4 - 3) / 4, not (2 + 0) / 2


@pytest.mark.parametrize("threshold", [0.01, 0.5, 30.0])
@pytest.mark.parametrize("difference", [-3.0, 0.0, 0.7])
def test_wins_losses_and_ties_of_rao_and_kupper_add_up_to_one(threshold: float, difference: float) -> None:
    first, second = doubles(1.0 + difference), doubles(1.0)
    losses = [
        bradley_terry(first, second, threshold),
        bradley_terry(second, first, threshold),
        rao_kupper_tie(first, second, threshold),
    ]
    assert sum(float((-loss).exp()) for loss in losses) == pytest.approx(1.0, rel=1e-12)


def test_a_tie_pulls_the_scores_together() -> None:
    first = doubles(2.0).requires_grad_()
    rao_kupper_tie(first, doubles(0.5), 0.4).sum().backward()
    assert first.grad is not None
    assert float(first.grad) > 0, "the higher score goes down"
    assert float(rao_kupper_tie(doubles(0.5), doubles(2.0), 0.4)) == pytest.approx(
        float(rao_kupper_tie(doubles(2.0), doubles(0.5), 0.4)), rel=1e-14
    )
    with pytest.raises(InputError):
        rao_kupper_tie(doubles(0.5), doubles(2.0), 0.0)
