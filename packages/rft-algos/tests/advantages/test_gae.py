from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rft_algos.advantages import bootstrap_truncated, decoupled_gae, discounted_returns, gae, length_adaptive_lambda
from rft_algos.input_checks import InputError
from rft_algos.packed.segments import segment_lengths

Token = tuple[bool, float, float]
Sequences = list[list[Token]]
UNIT = st.floats(0, 1)
SEQUENCES = st.lists(st.lists(st.tuples(st.booleans(), st.floats(-2, 2), st.floats(-2, 2)), max_size=6), max_size=5)


def packed(sequences: Sequences) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, values, mask and ids; NaN where masked, padding after every sequence of odd number."""
    tokens: list[tuple[float, float, bool, int]] = []
    for index, sequence in enumerate(sequences):
        for kept, reward, value in sequence:
            tokens.append((reward, value, True, index) if kept else (math.nan, math.inf, False, index))
        tokens += [(math.nan, math.nan, False, -1)] * (index % 2)
    return (
        torch.tensor([t[0] for t in tokens], dtype=torch.float64),
        torch.tensor([t[1] for t in tokens], dtype=torch.float64),
        torch.tensor([t[2] for t in tokens], dtype=torch.bool),
        torch.tensor([t[3] for t in tokens], dtype=torch.int64),
    )


def plain_gae(sequences: Sequences, gamma: float, lambd: float) -> list[tuple[float, float]]:
    """Advantage and return of every token, from the sum over temporal differences."""
    result: list[tuple[float, float]] = []
    for index, sequence in enumerate(sequences):
        for start, (kept, _, value) in enumerate(sequence):
            steps = [(r, v) for is_loss, r, v in sequence[start:] if is_loss]
            following = [v for _, v in steps[1:]] + [0.0]
            deltas = [r + gamma * later - v for (r, v), later in zip(steps, following, strict=True)] if steps else []
            advantage = math.fsum((gamma * lambd) ** n * delta for n, delta in enumerate(deltas))
            result.append((advantage, advantage + value) if kept else (0.0, 0.0))
        result += [(0.0, 0.0)] * (index % 2)
    return result


def assert_equal(result: tuple[Tensor, Tensor], expected: list[tuple[float, float]], tolerance: float = 1e-12):
    advantages, returns = result
    assert advantages.tolist() == pytest.approx([a for a, _ in expected], rel=tolerance, abs=tolerance)
    assert returns.tolist() == pytest.approx([g for _, g in expected], rel=tolerance, abs=tolerance)


def test_hand_computed_values_across_an_observation():
    # loss tokens: V 1, 2 | observation | V 4, reward 8; gamma 1/2, lambda 1/2
    # deltas: 0 + 2/2 - 1 = 0; 0 + 4/2 - 2 = 0; 8 - 4 = 4; A: 4; 0 + 4/4 = 1; 0 + 1/4 = 0.25
    advantages, returns = gae(
        torch.tensor([0.0, 0.0, math.nan, 8.0]),
        torch.tensor([1.0, 2.0, math.nan, 4.0]),
        torch.tensor([True, True, False, True]),
        torch.zeros(4, dtype=torch.int64),
        gamma=0.5,
        lambd=0.5,
    )
    assert advantages.tolist() == [0.25, 1.0, 0.0, 4.0]
    assert returns.tolist() == [1.25, 3.0, 0.0, 8.0]


@given(SEQUENCES, UNIT, UNIT)
def test_pitfall_6_equals_a_plain_twin_with_nan_at_masked_positions(sequences: Sequences, gamma: float, lambd: float):
    assert_equal(gae(*packed(sequences), gamma=gamma, lambd=lambd), plain_gae(sequences, gamma, lambd))


@given(SEQUENCES, UNIT, UNIT, UNIT)
def test_decoupled_takes_the_advantage_of_one_lambda_and_the_return_of_the_other(
    sequences: Sequences, gamma: float, policy: float, value: float
):
    result = decoupled_gae(*packed(sequences), gamma=gamma, lambd_policy=policy, lambd_value=value)
    ours, theirs = plain_gae(sequences, gamma, policy), plain_gae(sequences, gamma, value)
    assert_equal(result, [(a, g) for (a, _), (_, g) in zip(ours, theirs, strict=True)])


@given(SEQUENCES, st.lists(UNIT, min_size=5, max_size=5))
def test_decoupled_takes_a_lambda_for_each_sequence(sequences: Sequences, lambdas: list[float]):
    rewards, values, mask, ids = packed(sequences)
    lambd_policy = torch.tensor([*lambdas, math.nan], dtype=torch.float64)[ids]  # padding has id -1
    advantages, _ = decoupled_gae(rewards, values, mask, ids, gamma=0.9, lambd_policy=lambd_policy)
    expected: list[float] = []
    for index, sequence in enumerate(sequences):
        expected += [advantage for advantage, _ in plain_gae([sequence], 0.9, lambdas[index])] + [0.0] * (index % 2)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def random_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lengths, generator = [1, 700, 3, 1500, 64, 128], torch.Generator().manual_seed(1)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rewards, values = torch.randn(2, len(ids), generator=generator, dtype=torch.float64)
    return rewards, values, torch.rand(len(ids), generator=generator) < 0.8, ids


def test_long_sequences_equal_the_plain_loop():
    rewards, values, mask, ids = random_batch()
    expected, later, later_value = [(0.0, 0.0)] * len(ids), 0.0, 0.0
    for t in reversed(range(len(ids))):
        if t + 1 < len(ids) and ids[t] != ids[t + 1]:
            later = later_value = 0.0
        if mask[t]:
            value = float(values[t])
            later = float(rewards[t]) + 0.99 * later_value - value + 0.99 * 0.95 * later
            later_value = value
            expected[t] = (later, later + value)
    assert_equal(gae(rewards, values, mask, ids, gamma=0.99, lambd=0.95), expected)
    assert_equal(gae(rewards.float(), values.float(), mask, ids, gamma=0.99, lambd=0.95), expected, 2e-5)


def test_lambda_one_is_the_monte_carlo_return_minus_the_value():
    rewards, values, mask, ids = random_batch()
    advantages, returns = gae(rewards, values, mask, ids, gamma=0.99, lambd=1.0)
    monte_carlo = discounted_returns(rewards, mask, ids, gamma=0.99)
    assert torch.allclose(returns, monte_carlo, rtol=1e-10, atol=1e-10)
    assert torch.allclose(advantages, (monte_carlo - values) * mask, rtol=1e-10, atol=1e-10)


def test_lambda_zero_is_the_temporal_difference():
    rewards, values = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 0.25, 0.125])
    mask, ids = torch.ones(3, dtype=torch.bool), torch.tensor([0, 0, 1])
    advantages, _ = gae(rewards, values, mask, ids, gamma=0.5, lambd=0.0)
    assert advantages.tolist() == [1 + 0.125 - 0.5, 2 - 0.25, 3 - 0.125]


def test_decoupled_with_equal_lambdas_is_gae():
    batch = random_batch()
    for ours, theirs in zip(
        decoupled_gae(*batch, gamma=0.9, lambd_policy=0.8, lambd_value=0.8),
        gae(*batch, gamma=0.9, lambd=0.8),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_published_defaults():
    batch = random_batch()
    for ours, theirs in zip(gae(*batch), gae(*batch, gamma=1.0, lambd=0.95), strict=True):
        assert torch.equal(ours, theirs)
    decoupled = decoupled_gae(*batch)
    assert torch.equal(decoupled[0], gae(*batch, gamma=1.0, lambd=0.95)[0])
    assert torch.allclose(decoupled[1], discounted_returns(batch[0], batch[2], batch[3]), rtol=1e-9, atol=1e-9)


def test_returns_of_lambda_one_do_not_depend_on_the_critic():
    rewards, values, mask, ids = random_batch()
    one = decoupled_gae(rewards, values, mask, ids, lambd_policy=0.5)[1]
    other = decoupled_gae(rewards, torch.zeros_like(values), mask, ids, lambd_policy=0.5)[1]
    assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("estimate", [gae, decoupled_gae])
def test_cut_into_micro_batches_and_order_of_sequences(estimate: Callable[..., tuple[Tensor, Tensor]]):
    batch = random_batch()
    whole = estimate(*batch)
    parts = [estimate(*(part[batch[3] == index] for part in batch)) for index in range(6)]
    for k in (0, 1):
        assert torch.allclose(torch.cat([p[k] for p in parts]), whole[k], rtol=1e-12, atol=1e-12)
    order = torch.cat([(batch[3] == index).nonzero().squeeze(1) for index in (4, 0, 5, 3, 2, 1)])
    for k in (0, 1):
        reordered = estimate(*(part[order] for part in batch))[k]
        assert torch.allclose(reordered, whole[k][order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimate", [gae, decoupled_gae])
@pytest.mark.parametrize("mask", [[True, True], [True, False]])
def test_results_are_float64_without_gradient_and_leave_their_inputs(
    estimate: Callable[..., tuple[Tensor, Tensor]], mask: list[bool]
):
    rewards = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    values = torch.tensor([3.0, 4.0], dtype=torch.float64, requires_grad=True)
    for result in estimate(rewards, values, torch.tensor(mask), torch.zeros(2, dtype=torch.int64)):
        assert result.dtype == torch.float64
        assert not result.requires_grad
    assert rewards.tolist() == [1.0, 2.0]
    assert values.tolist() == [3.0, 4.0]


def test_a_lambda_tensor_is_left_alone_and_passes_no_gradient():
    lambdas = torch.tensor([0.5, 0.5], dtype=torch.float64, requires_grad=True)
    mask, ids = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    advantages, returns = decoupled_gae(torch.ones(2), torch.ones(2), mask, ids, lambd_policy=lambdas)
    assert not advantages.requires_grad
    assert not returns.requires_grad
    assert lambdas.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("estimate", [gae, decoupled_gae])
def test_pitfall_19_fully_masked_rows_and_empty_batches_give_zeros(estimate: Callable[..., tuple[Tensor, Tensor]]):
    missing, ids = torch.full((3,), math.nan), torch.tensor([0, 0, 1])
    for result in estimate(missing, missing, torch.zeros(3, dtype=torch.bool), ids):
        assert result.tolist() == [0.0, 0.0, 0.0]
    empty = torch.empty(0)
    for result in estimate(empty, empty, torch.empty(0, dtype=torch.bool), torch.empty(0, dtype=torch.int64)):
        assert result.shape == (0,)


@pytest.mark.parametrize("estimate", [gae, decoupled_gae])
def test_what_does_not_fit_is_refused(estimate: Callable[..., tuple[Tensor, Tensor]]):
    two, mask, ids = torch.ones(2), torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InputError, match="rewards"):
        estimate(torch.ones(3), two, mask, ids)
    with pytest.raises(InputError, match="values"):
        estimate(two, torch.ones(3), mask, ids)
    with pytest.raises(InputError, match="segment ids"):
        estimate(two, two, mask, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InputError, match="lambdas"):
        decoupled_gae(two, two, mask, ids, lambd_policy=torch.ones(3))


def test_length_adaptive_lambda_by_hand():
    # alpha l = 1 at 20 tokens and 2 at 40
    lambdas = length_adaptive_lambda(torch.tensor([0, 1, 20, 40, 2000]))
    assert lambdas.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.5, 0.99], abs=1e-12)
    assert lambdas.dtype == torch.float64
    assert length_adaptive_lambda(torch.tensor([4.0]), alpha=0.5).tolist() == [0.5]
    assert not length_adaptive_lambda(torch.tensor([4.0], requires_grad=True)).requires_grad


def test_weights_of_the_length_adaptive_lambda_add_up_to_a_share_of_the_length():
    for length in (21, 100, 5000):
        lambd = float(length_adaptive_lambda(torch.tensor([length]), alpha=0.05)[0])
        assert 1 / (1 - lambd) == pytest.approx(0.05 * length, rel=1e-9)


def test_length_adaptive_lambda_goes_with_the_lengths_of_sequences():
    rewards, values, mask, ids = random_batch()
    lambdas = length_adaptive_lambda(segment_lengths(mask, ids, dtype=torch.float64))
    advantages, _ = decoupled_gae(rewards, values, mask, ids, lambd_policy=lambdas)
    of_longest = ids == 3
    of_one = [part[of_longest] for part in (rewards, values, mask, ids)]
    alone = gae(*of_one, lambd=1 - 20 / int(mask[of_longest].sum()))
    assert torch.allclose(advantages[of_longest], alone[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 0.95), (0.9, 0.5), (1.0, 0.0)])
def test_a_bootstrap_is_a_temporal_difference_to_the_next_value(gamma: float, lambd: float) -> None:
    double = torch.float64
    mask, ids = torch.tensor([True, True, False, True, True]), torch.tensor([0, 0, 0, 1, 1])
    rewards = torch.tensor([0.1, 0.2, math.nan, 0.3, 0.4], dtype=double)
    values = torch.tensor([0.5, -0.5, math.nan, 0.25, 0.75], dtype=double)
    truncated, following = torch.tensor([True, False]), torch.tensor([2.0, math.nan], dtype=double)
    rewards_T = bootstrap_truncated(rewards, following, truncated, mask, ids, gamma=gamma)
    assert rewards_T[[0, 3, 4]].tolist() == [0.1, 0.3, 0.4]
    assert rewards_T[1].item() == pytest.approx(0.2 + gamma * 2.0)
    found, _ = gae(rewards_T, values, mask, ids, gamma=gamma, lambd=lambd)
    last = 0.2 + gamma * 2.0 + 0.5
    first = 0.1 + gamma * -0.5 - 0.5 + gamma * lambd * last
    assert found[:2].tolist() == pytest.approx([first, last])
    # nothing is truncated: the rewards as they are
    unchanged = bootstrap_truncated(rewards, following, torch.tensor([False, False]), mask, ids)
    assert unchanged[mask].tolist() == rewards[mask].tolist()


def test_a_bootstrap_passes_no_gradient_to_rewards_or_values() -> None:
    mask, ids = torch.tensor([True, True]), torch.tensor([0, 0])
    rewards, following = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    for numbers in ((rewards, following.detach()), (rewards.detach(), following)):
        assert not bootstrap_truncated(*numbers, torch.tensor([True]), mask, ids).requires_grad
