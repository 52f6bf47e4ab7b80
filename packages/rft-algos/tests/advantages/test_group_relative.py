from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rft_algos import advantages
from rft_algos.advantages import (
    batch_std,
    cpgd,
    gdpo,
    gpg,
    group_centred,
    group_norm,
    leave_one_out,
    max_rl,
    opo,
    remax,
)
from rft_algos.input_checks import InputError

Rows = list[tuple[int, float]]
ROWS = st.lists(
    st.tuples(st.integers(-2, 3), st.one_of(st.sampled_from([0.0, 0.1, 0.3, 1.0]), st.floats(-10, 10))), max_size=20
)
ALL_RELATIVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group_norm": group_norm,
    "group_centred": group_centred,
    "batch_std": batch_std,
    "leave_one_out": leave_one_out,
    "max_rl": max_rl,
    "opo": lambda r, g: opo(r, g, torch.arange(1, r.numel() + 1)),
    "gpg": gpg,
    "cpgd_equal": lambda r, g: cpgd(r, g, weighting="equal"),
    "cpgd_std": lambda r, g: cpgd(r, g, weighting="std"),
    "cpgd_clip_filter": lambda r, g: cpgd(r, g, weighting="clip_filter"),
    "gdpo": lambda r, g: gdpo(torch.stack([r, r.square()], 1), g, torch.tensor([1.0, 0.5])),
}
by_estimator = pytest.mark.parametrize("estimate", ALL_RELATIVE.values(), ids=ALL_RELATIVE.keys())


def tensors(rows: Rows) -> tuple[Tensor, Tensor]:
    return (
        torch.tensor([r for _, r in rows], dtype=torch.float64),
        torch.tensor([g for g, _ in rows], dtype=torch.int64),
    )


def mates(rows: Rows, group: int) -> list[float]:
    return [r for g, r in rows if g == group]


def mean(values: list[float]) -> float:
    return values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)


def plain_centred(rows: Rows) -> list[float]:
    return [r - mean(mates(rows, g)) for g, r in rows]


def has_signal(rows: Rows, group: int) -> bool:
    return len(set(mates(rows, group))) > 1


def test_group_centred_by_hand():
    # group 5: mean 1/4; group 2: mean 1.5
    centred = group_centred(torch.tensor([1.0, 2.0, 0.0, 0.0, 1.0, 0.0]), torch.tensor([5, 2, 5, 5, 2, 5]))
    assert centred.tolist() == [0.75, 0.5, -0.25, -0.25, -0.5, -0.25]


@given(ROWS)
def test_group_centred_equals_its_plain_twin(rows: Rows):
    assert group_centred(*tensors(rows)).tolist() == pytest.approx(plain_centred(rows), rel=1e-12, abs=1e-12)


def test_batch_std_by_hand():
    # all rewards 0, 1, 2, 3: mean 1.5, squares 2.25 + 0.25 + 0.25 + 2.25 = 5, std sqrt(5 / 3); 0.5 is added
    scale = math.sqrt(5 / 3) + 0.5
    result = batch_std(torch.tensor([0.0, 2.0, 1.0, 3.0]), torch.tensor([0, 1, 0, 1]), epsilon=0.5)
    assert result.tolist() == pytest.approx([-0.5 / scale, -0.5 / scale, 0.5 / scale, 0.5 / scale], rel=1e-12)


@given(ROWS, st.sampled_from([1e-3, 1.0]))
def test_batch_std_equals_its_plain_twin(rows: Rows, epsilon: float):
    rewards = [r for _, r in rows]
    spread = statistics.stdev(rewards) if len(set(rewards)) > 1 else 0.0
    expected = [c / (spread + epsilon) for c in plain_centred(rows)]
    assert batch_std(*tensors(rows), epsilon=epsilon).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-11)


def test_epsilons_default_to_a_millionth():
    # std of 0 and 1e-6 is 1e-6 / sqrt 2
    rewards, groups = torch.tensor([0.0, 1e-6]).double(), torch.tensor([0, 0])
    expected = 0.5e-6 / (float(rewards[1]) * math.sqrt(0.5) + 1e-6)
    for estimate in (group_norm, batch_std, lambda r, g: cpgd(r, g, weighting="std")):
        assert float(estimate(rewards, groups)[1]) == pytest.approx(expected, rel=1e-7)
    assert float(gdpo(rewards[:, None], groups, torch.ones(1))[1]) == pytest.approx(expected, rel=1e-7)


def test_leave_one_out_by_hand():
    # 1 - 0, 0 - (1 + 0 + 0) / 3; and 4 - 2, 2 - 4
    result = leave_one_out(torch.tensor([1.0, 0.0, 0.0, 0.0, 4.0, 2.0]), torch.tensor([0, 0, 0, 0, 1, 1]))
    assert result.tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3, 2.0, -2.0], rel=1e-12)


@given(ROWS)
def test_leave_one_out_equals_its_plain_twin(rows: Rows):
    expected = []
    for index, (group, reward) in enumerate(rows):
        others = [r for i, (g, r) in enumerate(rows) if g == group and i != index]
        expected.append(reward - math.fsum(others) / len(others) if has_signal(rows, group) else 0.0)
    assert leave_one_out(*tensors(rows)).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_max_rl_by_hand():
    # means 1/4, 0 and -1
    result = max_rl(torch.tensor([1.0, 0.0, 0.0, 0.0, -1.0, 1.0, -2.0, 0.0]), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2]))
    assert result.tolist() == [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.25, 1.0, -3.0])), max_size=20))
def test_max_rl_equals_its_plain_twin(rows: Rows):
    means = [mean(mates(rows, g)) for g, _ in rows]
    expected = [c / m if m > 0 else 0.0 for c, m in zip(plain_centred(rows), means, strict=True)]
    assert max_rl(*tensors(rows)).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_max_rl_of_binary_rewards_gives_the_failures_minus_one():
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    result = max_rl(rewards, torch.zeros(5, dtype=torch.int64))
    assert result.tolist() == pytest.approx([1.5, 1.5, -1, -1, -1], rel=1e-12)


def test_opo_by_hand():
    # baseline (3 * 1 + 1 * 0) / 4 = 3/4
    result = opo(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([3, 1]))
    assert result.tolist() == [0.25, -0.75]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10), st.integers(0, 50)), max_size=16))
def test_opo_equals_its_plain_twin(rows: list[tuple[int, float, int]]):
    expected = []
    for group, reward, _ in rows:
        rewards = [r for g, r, _ in rows if g == group]
        lengths = [length for g, _, length in rows if g == group] if any(m for g, _, m in rows if g == group) else None
        lengths = lengths or [1] * len(rewards)
        baseline = math.fsum(r * m for r, m in zip(rewards, lengths, strict=True)) / sum(lengths)
        expected.append(0.0 if len(set(rewards)) == 1 else reward - baseline)
    rewards_N, groups_N = tensors([(g, r) for g, r, _ in rows])
    lengths_N = torch.tensor([length for *_, length in rows], dtype=torch.int64)
    assert opo(rewards_N, groups_N, lengths_N).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_opo_of_the_shortest_and_of_very_long_lengths():
    # one token in all: the baseline is its reward. 2^24 + 1 is no float32: baseline (2^24 + 1) / (2^24 + 2)
    groups = torch.tensor([0, 0])
    assert opo(torch.tensor([1.0, 0.0]), groups, torch.tensor([0, 1])).tolist() == [1.0, 0.0]
    lengths = torch.tensor([2.0**24 + 1, 1.0], dtype=torch.float64, requires_grad=True)
    result = opo(torch.tensor([1.0, 0.0]), groups, lengths)
    assert float(result[0]) == pytest.approx(1 / (2**24 + 2), rel=1e-7)
    assert not result.requires_grad


def test_opo_of_equal_lengths_is_centring():
    rewards, groups = torch.tensor([1.0, 0.5, 0.0, 3.0]), torch.tensor([0, 0, 0, 1])
    assert torch.allclose(opo(rewards, groups, torch.full((4,), 7)), group_centred(rewards, groups), atol=1e-15)


def test_opo_wants_one_length_for_each_reward():
    with pytest.raises(InputError, match="lengths"):
        opo(torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.ones(3))


def test_gpg_by_hand():
    # 5 sequences, 2 of them in the group with signal: alpha = 5 / 2
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1, 1])
    assert gpg(rewards, groups).tolist() == [1.25, -1.25, 0.0, 0.0, 0.0]


@given(ROWS)
def test_gpg_equals_its_plain_twin(rows: Rows):
    num_with_signal = sum(has_signal(rows, g) for g, _ in rows)
    expected = [c * len(rows) / num_with_signal if c else 0.0 for c in plain_centred(rows)]
    assert gpg(*tensors(rows)).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_gpg_does_not_change_when_groups_without_signal_are_filtered_out():
    rewards, groups = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    mean_gradient = gpg(rewards, groups).sum() / 6, gpg(rewards[:3], groups[:3]).sum() / 3
    assert torch.allclose(gpg(rewards, groups)[:3] / 6, gpg(rewards[:3], groups[:3]) / 3)
    assert mean_gradient[0] == pytest.approx(mean_gradient[1], abs=1e-12)


def test_cpgd_by_hand():
    # group 0 has signal and std sqrt(1/2); groups 1 and 2 have none: 3 groups / 1 with signal, 3 at most
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1, 2])
    assert cpgd(rewards, groups, weighting="equal").tolist() == [0.5, -0.5, 0.0, 0.0, 0.0]
    std = cpgd(rewards, groups, weighting="std", epsilon=1.0)
    assert std.tolist() == pytest.approx([0.5 / (math.sqrt(0.5) + 1), -0.5 / (math.sqrt(0.5) + 1), 0, 0, 0])
    assert cpgd(rewards, groups, weighting="clip_filter").tolist() == [1.5, -1.5, 0.0, 0.0, 0.0]
    assert cpgd(rewards, groups, weighting="clip_filter", max_weight=2.0).tolist() == [1.0, -1.0, 0.0, 0.0, 0.0]


def test_cpgd_without_a_limit_and_without_signal_is_zero():
    result = cpgd(torch.ones(3), torch.tensor([0, 0, 1]), weighting="clip_filter", max_weight=math.inf)
    assert result.tolist() == [0.0, 0.0, 0.0]


def test_cpgd_limits_its_weight_to_three():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    result = cpgd(rewards, torch.tensor([0, 0, 1, 2, 3]), weighting="clip_filter")
    assert result.tolist() == [1.5, -1.5, 0.0, 0.0, 0.0]


@given(ROWS, st.floats(0.5, 4))
def test_cpgd_clip_filter_equals_its_plain_twin(rows: Rows, max_weight: float):
    groups = {g for g, _ in rows}
    weight = min(len(groups) / max(1, sum(has_signal(rows, g) for g in groups)), max_weight)
    result = cpgd(*tensors(rows), weighting="clip_filter", max_weight=max_weight)
    assert result.tolist() == pytest.approx([weight * c for c in plain_centred(rows)], rel=1e-12, abs=1e-12)


@given(ROWS)
def test_cpgd_of_equal_weight_is_centring_and_of_std_is_group_norm(rows: Rows):
    rewards, groups = tensors(rows)
    assert torch.equal(cpgd(rewards, groups, weighting="equal"), group_centred(rewards, groups))
    assert torch.equal(cpgd(rewards, groups, weighting="std", epsilon=0.1), group_norm(rewards, groups, epsilon=0.1))


def test_cpgd_knows_three_weightings():
    with pytest.raises(InputError, match="no weighting of CPGD: other"):
        cpgd(torch.ones(1), torch.zeros(1, dtype=torch.int64), weighting="other")  # pyright: ignore[reportArgumentType]


def test_gdpo_by_hand():
    # component 0: 1, 0 -> +-sqrt(1/2); component 1: 0, 4 -> -+sqrt(1/2); weights 1 and 1/4
    components = torch.tensor([[1.0, 0.0], [0.0, 4.0]])
    result = gdpo(components, torch.tensor([0, 0]), torch.tensor([1.0, 0.25]), epsilon=1e-12)
    assert result.tolist() == pytest.approx([0.75 * math.sqrt(0.5), -0.75 * math.sqrt(0.5)], rel=1e-10)


def test_gdpo_tells_combinations_apart_that_normalising_the_sum_does_not():
    groups = torch.tensor([0, 0])
    one_of_two, two_of_two = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    ones = torch.ones(2)
    assert torch.allclose(group_norm(one_of_two.sum(1), groups), group_norm(two_of_two.sum(1), groups), atol=1e-5)
    assert float(gdpo(two_of_two, groups, ones)[0]) == pytest.approx(2 * float(gdpo(one_of_two, groups, ones)[0]))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(-5, 5), st.floats(-5, 5)), max_size=12),
    st.tuples(st.floats(-2, 2), st.floats(-2, 2)),
)
def test_gdpo_equals_its_plain_twin(rows: list[tuple[int, float, float]], weights: tuple[float, float]):
    expected = [0.0] * len(rows)
    for k in (0, 1):
        for index, row in enumerate(rows):
            component = [r[1 + k] for r in rows if r[0] == row[0]]
            if len(set(component)) > 1:
                expected[index] += weights[k] * (row[1 + k] - mean(component)) / (statistics.stdev(component) + 0.01)
    components = torch.tensor([row[1:] for row in rows], dtype=torch.float64).reshape(-1, 2)
    groups = torch.tensor([row[0] for row in rows], dtype=torch.int64)
    result = gdpo(components, groups, torch.tensor(weights, dtype=torch.float64), epsilon=0.01)
    assert result.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-10)


def test_gdpo_weights_pass_no_gradient():
    weights = torch.ones(1, requires_grad=True)
    assert not gdpo(torch.tensor([[1.0], [0.0]]), torch.tensor([0, 0]), weights).requires_grad


def test_gdpo_refuses_what_does_not_fit():
    groups = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InputError, match="must be a matrix"):
        gdpo(torch.ones(2), groups, torch.ones(1))
    with pytest.raises(InputError, match="weights"):
        gdpo(torch.ones(2, 3), groups, torch.ones(2))


def test_remax_by_hand():
    result = remax(torch.tensor([1.0, 0.0, 0.5], requires_grad=True), torch.tensor([0.0, 1.0, 0.25]))
    assert result.tolist() == [1.0, -1.0, 0.25]
    assert result.dtype == torch.float64
    assert not result.requires_grad


def test_remax_subtracts_in_float64_and_takes_integers():
    assert float(remax(torch.tensor([2**25 + 1]), torch.tensor([0.5]))[0]) == 2.0**25 + 0.5
    greedy = torch.tensor([0.1], dtype=torch.float64, requires_grad=True)
    assert float(remax(torch.tensor([1]), greedy)[0]) == 0.9
    assert not remax(torch.tensor([1]), greedy).requires_grad


def test_remax_refuses_what_does_not_fit():
    with pytest.raises(InputError, match="against"):
        remax(torch.ones(2), torch.ones(3))
    with pytest.raises(InputError, match="dropped before advantages"):
        remax(torch.tensor([math.nan]), torch.ones(1))


@by_estimator
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1 / 3, -5.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pitfall_1_equal_rewards_give_exactly_zero(
    estimate: Callable[[Tensor, Tensor], Tensor], reward: float, dtype: torch.dtype
):
    for size in (1, 2, 3, 7, 8, 64):
        rewards = torch.full((size + 2,), reward, dtype=dtype)
        rewards[-1] = 2.0  # another group has signal
        groups = torch.tensor([4] * size + [9, 9])
        assert estimate(rewards, groups)[:size].tolist() == [0.0] * size
        assert estimate(rewards[:size], groups[:size]).tolist() == [0.0] * size


@by_estimator
def test_pitfall_3_a_group_of_one_gets_zero(estimate: Callable[[Tensor, Tensor], Tensor]):
    result = estimate(torch.tensor([5.0, 1.0, 0.0]), torch.tensor([7, 3, 3]))
    assert float(result[0]) == 0.0
    assert float(result[1]) > 0 > float(result[2])


@by_estimator
def test_pitfall_4_ragged_groups_in_any_order_are_each_their_own(estimate: Callable[[Tensor, Tensor], Tensor]):
    draw = random.Random(3)
    rows = [(g, draw.uniform(0, 1)) for g, size in ((8, 2), (-1, 5), (3, 3)) for _ in range(size)]
    rewards, groups = tensors(rows)
    order = torch.tensor(draw.sample(range(10), 10))
    if estimate is ALL_RELATIVE["opo"]:  # its lengths are not permuted with the rewards
        lengths = torch.arange(10)
        assert torch.allclose(
            opo(rewards[order], groups[order], lengths[order]), opo(rewards, groups, lengths)[order], atol=1e-14
        )
        return
    assert torch.allclose(estimate(rewards[order], groups[order]), estimate(rewards, groups)[order], atol=1e-14)
    renamed = torch.tensor([{8: 100, -1: 2**50, 3: -9}[g] for g in groups.tolist()])
    assert torch.allclose(estimate(rewards, renamed), estimate(rewards, groups), atol=1e-14)


@by_estimator
def test_results_are_float64_without_gradient_and_may_be_empty(estimate: Callable[[Tensor, Tensor], Tensor]):
    rewards = torch.tensor([1.0, 0.0], requires_grad=True)
    result = estimate(rewards, torch.tensor([0, 0]))
    assert result.dtype == torch.float64
    assert not result.requires_grad
    assert estimate(torch.empty(0), torch.empty(0, dtype=torch.int64)).shape == (0,)
    assert estimate(torch.empty(0), torch.empty(0, dtype=torch.int64)).dtype == torch.float64


@by_estimator
def test_float32_rewards_are_computed_in_float64(estimate: Callable[[Tensor, Tensor], Tensor]):
    draw = random.Random(5)
    rewards = torch.tensor([draw.uniform(0.5, 1.5) for _ in range(12)])
    groups = torch.tensor([i % 3 for i in range(12)])
    assert torch.allclose(estimate(rewards, groups), estimate(rewards.double(), groups), rtol=1e-5, atol=1e-6)


@by_estimator
def test_a_missing_reward_is_refused(estimate: Callable[[Tensor, Tensor], Tensor]):
    with pytest.raises(InputError, match="dropped before advantages"):
        estimate(torch.tensor([1.0, math.nan]), torch.tensor([0, 0]))


@pytest.mark.parametrize("estimate", [group_norm, batch_std])
def test_an_epsilon_of_zero_makes_no_nan(estimate: Callable[..., Tensor]):
    result = estimate(torch.tensor([1.0, 0.0, 0.5, 0.5, 9.0]), torch.tensor([0, 0, 1, 1, 2]), epsilon=0.0)
    assert result.isfinite().all()
    assert result[2:].tolist() == [0.0, 0.0, 0.0]


def test_the_package_exports_every_estimator():
    assert sorted(advantages.__all__) == advantages.__all__
    assert all(hasattr(advantages, name) for name in advantages.__all__)
