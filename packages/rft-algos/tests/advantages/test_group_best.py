from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.advantages import best_of_group, pass_at_k
from rft_algos.input_checks import InputError

BINARY = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 1.0])), max_size=14)


def plain_pass_at_k(rewards: list[float], k: int) -> list[float]:
    """From the definition: reward every draw of k, normalise, average over the draws that hold a sequence."""
    if len(rewards) < k:
        return [0.0] * len(rewards)
    draws = list(itertools.combinations(range(len(rewards)), k))
    scores = [max(rewards[i] for i in draw) for draw in draws]
    mean = math.fsum(scores) / len(scores)
    spread = statistics.pstdev(scores)
    if spread == 0:
        return [0.0] * len(rewards)
    normalised = [(score - mean) / spread for score in scores]
    return [
        statistics.fmean(a for a, draw in zip(normalised, draws, strict=True) if index in draw)
        for index in range(len(rewards))
    ]


def test_pass_at_k_by_hand():
    # C(3, 2) / C(4, 2) = 1/2, sigma 1/2; wrong: 1/2 - C(2, 1) / C(3, 1) = -1/6
    result = pass_at_k(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64), k=2)
    assert result.tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3], rel=1e-12)


@given(BINARY, st.integers(1, 5))
def test_pass_at_k_equals_the_average_over_all_draws(rows: list[tuple[int, float]], k: int):
    expected = [0.0] * len(rows)
    for group in {g for g, _ in rows}:
        members = [i for i, (g, _) in enumerate(rows) if g == group]
        for index, advantage in zip(members, plain_pass_at_k([rows[i][1] for i in members], k), strict=True):
            expected[index] = advantage
    result = pass_at_k(torch.tensor([r for _, r in rows]), torch.tensor([g for g, _ in rows], dtype=torch.int64), k=k)
    assert result.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("num_correct", range(17))
def test_pass_at_k_equals_the_published_binomials(k: int, num_correct: int):
    size, wrong = 16, 16 - num_correct
    all_wrong = math.comb(wrong, k) / math.comb(size, k)
    sigma = math.sqrt(all_wrong * (1 - all_wrong))
    correct = all_wrong / sigma if sigma else 0.0
    others = math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1) if wrong else 0.0
    wrong_one = (all_wrong - others) / sigma if sigma else 0.0
    rewards = torch.tensor([1.0] * num_correct + [0.0] * wrong)
    result = pass_at_k(rewards, torch.zeros(size, dtype=torch.int64), k=k)
    assert result.tolist() == pytest.approx([correct] * num_correct + [wrong_one] * wrong, rel=1e-9, abs=1e-12)


def test_pass_at_one_is_group_norm_without_bessels_correction():
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    result = pass_at_k(rewards, torch.zeros(5, dtype=torch.int64), k=1)
    spread = math.sqrt(0.4 * 0.6)
    assert result.tolist() == pytest.approx([0.6 / spread] * 2 + [-0.4 / spread] * 3, rel=1e-12)


def test_pass_at_k_of_large_groups_stays_finite_and_adds_up_to_zero():
    draw = random.Random(1)
    rewards = torch.tensor([float(draw.random() < 0.02) for _ in range(2000)])
    result = pass_at_k(rewards, torch.arange(2000) % 3, k=64)
    assert result.isfinite().all()
    assert float(result.sum()) == pytest.approx(0.0, abs=1e-9)
    assert float(result[rewards == 1].min()) > 0


@pytest.mark.parametrize("rewards", [[0.0] * 4, [1.0] * 4, [1.0], [0.0]])
def test_pass_at_k_pitfalls_1_and_3_equal_rewards_give_exactly_zero(rewards: list[float]):
    for k in (1, 2, 3):
        result = pass_at_k(torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64), k=k)
        assert result.tolist() == [0.0] * len(rewards)


def test_pass_at_k_of_a_group_smaller_than_k_is_zero_and_of_size_k_too():
    # one draw in all, so no spread; of three there are three draws of two
    for size in (2, 3):
        result = pass_at_k(torch.tensor([1.0, 0.0, 0.0][:size]), torch.zeros(size, dtype=torch.int64), k=3)
        assert result.tolist() == [0.0] * size
    assert float(pass_at_k(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.int64), k=2)[0]) > 0


def test_pass_at_k_refuses_what_does_not_fit():
    with pytest.raises(InputError, match="rewards of 0 and 1"):
        pass_at_k(torch.tensor([0.5, 1.0]), torch.tensor([0, 0]), k=1)
    with pytest.raises(InputError, match="at least 1: 0"):
        pass_at_k(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), k=0)


def test_best_of_group_by_hand():
    # mean 1, squares 4 + 0 + 0 + 4 = 8, std sqrt(8 / 3); lead 3 - 1 = 2; 0.5 is added
    result = best_of_group(torch.tensor([1.0, 3.0, 1.0, -1.0]), torch.zeros(4, dtype=torch.int64), epsilon=0.5)
    assert result.tolist() == pytest.approx([0.0, 2 / (math.sqrt(8 / 3) + 0.5), 0.0, 0.0], rel=1e-12)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([-2.0, -1.0, 0.0, 0.1, 0.5, 3.0])), max_size=14))
def test_best_of_group_equals_its_plain_twin(rows: list[tuple[int, float]]):
    expected = []
    for group, reward in rows:
        ranked = sorted((r for g, r in rows if g == group), reverse=True)
        is_only_best = len(ranked) > 1 and reward == ranked[0] > ranked[1]
        expected.append((ranked[0] - ranked[1]) / (statistics.stdev(ranked) + 0.01) if is_only_best else 0.0)
    rewards = torch.tensor([r for _, r in rows], dtype=torch.float64)
    result = best_of_group(rewards, torch.tensor([g for g, _ in rows], dtype=torch.int64), epsilon=0.01)
    assert result.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_best_of_group_epsilon_defaults_to_a_millionth():
    rewards = torch.tensor([0.0, 1e-6]).double()
    expected = 1e-6 / (1e-6 * math.sqrt(0.5) + 1e-6)
    assert float(best_of_group(rewards, torch.tensor([0, 0]))[1]) == pytest.approx(expected, rel=1e-7)


def test_two_best_ones_replace_each_other():
    assert best_of_group(torch.tensor([2.0, 2.0, 0.0]), torch.zeros(3, dtype=torch.int64)).tolist() == [0.0] * 3


@pytest.mark.parametrize("reward", [0.1, -0.3])
def test_best_of_group_pitfalls_1_and_3_equal_rewards_give_exactly_zero(reward: float):
    for size in (1, 2, 8):
        for epsilon in (1e-6, 0.0):
            result = best_of_group(torch.full((size,), reward), torch.zeros(size, dtype=torch.int64), epsilon=epsilon)
            assert result.tolist() == [0.0] * size


def test_results_are_float64_without_gradient_and_may_be_empty():
    rewards = torch.tensor([1.0, 0.0, 0.0], requires_grad=True)
    groups = torch.zeros(3, dtype=torch.int64)
    for result in (pass_at_k(rewards, groups, k=2), best_of_group(rewards, groups)):
        assert result.dtype == torch.float64
        assert not result.requires_grad
    empty = torch.empty(0), torch.empty(0, dtype=torch.int64)
    assert pass_at_k(*empty, k=2).shape == best_of_group(*empty).shape == (0,)


def test_order_of_sequences_does_not_matter():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    groups = torch.tensor([0, 1, 0, 1, 0, 1, 1])
    order = torch.tensor([6, 2, 4, 0, 1, 5, 3])
    assert torch.equal(pass_at_k(rewards[order], groups[order], k=2), pass_at_k(rewards, groups, k=2)[order])
    assert torch.equal(best_of_group(rewards[order], groups[order]), best_of_group(rewards, groups)[order])
