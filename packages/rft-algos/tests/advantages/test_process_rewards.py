from __future__ import annotations

import math
import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rft_algos.advantages import discounted_returns, group_norm, process_group_norm, turn_level
from rft_algos.input_checks import InputError

Step = tuple[bool, bool, float]
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from([0.1, 0.5, -1.0, 2.0])), max_size=5),
    ),
    max_size=5,
)


def normalised(value: float, values: list[float], epsilon: float) -> float:
    if len(set(values)) <= 1:
        return 0.0
    return (value - math.fsum(values) / len(values)) / (statistics.stdev(values) + epsilon)


def packed_steps(sequences: list[tuple[int, list[Step]]]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens are (sampled, ends a step, reward of the step); NaN where no step ends."""
    tokens = [(i, kept, kept and ends, r) for i, (_, steps) in enumerate(sequences) for kept, ends, r in steps]
    return (
        torch.tensor([r if ends else math.nan for *_, ends, r in tokens], dtype=torch.float64),
        torch.tensor([ends for _, _, ends, _ in tokens], dtype=torch.bool),
        torch.tensor([kept for _, kept, *_ in tokens], dtype=torch.bool),
        torch.tensor([i for i, *_ in tokens], dtype=torch.int64),
        torch.tensor([group for group, _ in sequences], dtype=torch.int64),
    )


def plain_process(sequences: list[tuple[int, list[Step]]], epsilon: float) -> list[float]:
    result: list[float] = []
    for group, steps in sequences:
        of_group = [r for g, mates in sequences if g == group for kept, ends, r in mates if kept and ends]
        for start, (kept, _, _) in enumerate(steps):
            later = [normalised(r, of_group, epsilon) for is_loss, ends, r in steps[start:] if is_loss and ends]
            result.append(math.fsum(later) if kept else 0.0)
    return result


def test_process_by_hand():
    # rewards of the group's steps 1, 3, 2: mean 2, std 1; sequence 0 has 1 then 3, sequence 1 has 2
    # sequence 0: -1 + 1 = 0 up to the first end, then 1; its last token comes after all ends
    advantages = process_group_norm(
        torch.tensor([math.nan, 1.0, math.nan, 3.0, math.nan, 2.0]),
        torch.tensor([False, True, False, True, False, True]),
        torch.tensor([True, True, True, True, True, True]),
        torch.tensor([0, 0, 0, 0, 0, 1]),
        torch.tensor([7, 7]),
        epsilon=1e-15,
    )
    assert advantages.tolist() == pytest.approx([0.0, 0.0, 1.0, 1.0, 0.0, 0.0], abs=1e-12)


@given(STEPS, st.sampled_from([1e-6, 0.5]))
def test_pitfall_6_process_equals_a_plain_twin_with_nan_where_no_step_ends(
    sequences: list[tuple[int, list[Step]]], epsilon: float
):
    advantages = process_group_norm(*packed_steps(sequences), epsilon=epsilon)
    assert advantages.tolist() == pytest.approx(plain_process(sequences, epsilon), rel=1e-12, abs=1e-12)


def test_process_with_one_step_each_is_group_norm():
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 2.0]), torch.tensor([3, 3, 3, 9])
    mask = torch.ones(4, dtype=torch.bool)
    result = process_group_norm(rewards, mask, mask, torch.arange(4), groups)
    assert torch.equal(result, group_norm(rewards, groups))


def test_process_epsilon_defaults_to_a_millionth():
    rewards, mask = torch.tensor([0.0, 1e-6]).double(), torch.ones(2, dtype=torch.bool)
    result = process_group_norm(rewards, mask, mask, torch.arange(2), torch.tensor([0, 0]))
    assert float(result[1]) == pytest.approx(0.5e-6 / (1e-6 * math.sqrt(0.5) + 1e-6), rel=1e-7)


def test_process_pitfall_1_equal_rewards_give_exactly_zero():
    mask = torch.ones(24, dtype=torch.bool)
    ids = torch.arange(24) // 3
    result = process_group_norm(torch.full((24,), 0.1), mask, mask, ids, torch.zeros(8, dtype=torch.int64))
    assert result.tolist() == [0.0] * 24


def test_process_does_not_depend_on_the_packing_order():
    draw = random.Random(2)
    lengths = [draw.randrange(6) for _ in range(6)]
    sequences = [
        (draw.randrange(2), [(draw.random() < 0.8, draw.random() < 0.5, draw.random()) for _ in range(length)])
        for length in lengths
    ]
    rewards, ends, mask, ids, groups = packed_steps(sequences)
    whole = process_group_norm(rewards, ends, mask, ids, groups)
    order = torch.cat([(ids == index).nonzero().squeeze(1) for index in (3, 1, 5, 0, 4, 2)])
    reordered = process_group_norm(rewards[order], ends[order], mask[order], ids[order], groups)
    assert torch.allclose(reordered, whole[order], rtol=1e-12, atol=1e-12)


def test_process_result_is_float64_without_gradient():
    rewards = torch.tensor([1.0, 0.0], requires_grad=True)
    mask = torch.ones(2, dtype=torch.bool)
    result = process_group_norm(rewards, mask, mask, torch.arange(2), torch.zeros(2, dtype=torch.int64))
    assert result.dtype == torch.float64
    assert not result.requires_grad


def test_process_refuses_what_does_not_fit():
    two, mask = torch.ones(2), torch.ones(2, dtype=torch.bool)
    ids = groups = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InputError, match="a token that the policy sampled"):
        process_group_norm(two, mask, torch.tensor([True, False]), ids, groups)
    with pytest.raises(InputError, match="reward_mask_T must be bool"):
        process_group_norm(two, mask.long(), mask, ids, groups)
    with pytest.raises(InputError, match="rewards"):
        process_group_norm(torch.ones(3), mask, mask, ids, groups)
    with pytest.raises(InputError, match="dropped before advantages"):
        process_group_norm(torch.tensor([math.nan, 1.0]), mask, mask, ids, groups)


# tokens of a conversation: turn 0, turn 0, observation, turn 1
TURNS = torch.tensor([0, 0, -1, 1] * 2)
IDS = torch.tensor([0] * 4 + [1] * 4)


def test_turns_by_hand():
    # turn 0: rewards 1, 0 -> +-a; turn 1: rewards 0, 2 -> -+a, with a = sqrt(1/2); outcomes 3 and -3, gamma 1/2
    # sequence 0, turn 1: -a + 3, turn 0: a + (3 - a) / 2; sequence 1 is its negative
    a = math.sqrt(0.5)
    result = turn_level(
        torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
        torch.tensor([3.0, -3.0]),
        TURNS,
        IDS,
        torch.tensor([4, 4]),
        gamma=0.5,
        epsilon=1e-15,
    )
    first, last = a + (3 - a) / 2, 3 - a
    assert result.tolist() == pytest.approx([first, first, 0, last, -first, -first, 0, -last], rel=1e-12)


def test_a_weight_for_turns_and_no_discount_by_default():
    a = math.sqrt(0.5)
    result = turn_level(
        torch.tensor([[1.0, 0.0], [0.0, 0.0]]),
        torch.tensor([3.0, -3.0]),
        TURNS,
        IDS,
        torch.tensor([4, 4]),
        turn_coefficient=2.0,
        epsilon=1e-15,
    )
    assert result.tolist() == pytest.approx([3 + 2 * a] * 2 + [0, 3] + [-3 - 2 * a] * 2 + [0, -3], rel=1e-12)


Conversation = tuple[int, float, list[list[tuple[int, float]]]]
CONVERSATIONS = st.lists(
    st.tuples(
        st.integers(0, 1),  # group
        st.sampled_from([-1.0, 0.5, 2.0]),  # advantage of the outcome
        st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.1, 0.5, 1.0, -2.0])), max_size=3),  # tokens, reward
    ),
    max_size=6,
)


@given(CONVERSATIONS, st.floats(0, 1), st.sampled_from([1.0, 0.3]))
def test_turns_equal_a_plain_twin(
    conversations: list[tuple[int, float, list[tuple[int, float]]]], gamma: float, coefficient: float
):
    """A turn of 0 tokens does not exist; NaN stands at its reward."""
    rewards = torch.full((len(conversations), 3), math.nan, dtype=torch.float64)
    turn_ids: list[int] = []
    ids: list[int] = []
    expected: list[float] = []
    for index, (group, outcome, turns) in enumerate(conversations):
        credits = [0.0] * 3
        present = [j for j, (num_tokens, _) in enumerate(turns) if num_tokens]
        for j in present:
            rewards[index, j] = turns[j][1]
            mates = [t[j][1] for g, _, t in conversations if g == group and len(t) > j and t[j][0]]
            credits[j] = coefficient * normalised(turns[j][1], mates, 0.1) + (outcome if j == present[-1] else 0.0)
        for j, (num_tokens, _) in enumerate(turns):
            total = math.fsum(gamma ** (later - j) * credits[later] for later in range(j, 3))
            turn_ids += [j] * num_tokens + [-1]
            ids += [index] * num_tokens + [index if j % 2 else -1]
            expected += [total] * num_tokens + [0.0]
    result = turn_level(
        rewards,
        torch.tensor([outcome for _, outcome, _ in conversations], dtype=torch.float64),
        torch.tensor(turn_ids, dtype=torch.int64),
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor([group for group, *_ in conversations], dtype=torch.int64),
        gamma=gamma,
        turn_coefficient=coefficient,
        epsilon=0.1,
    )
    assert result.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_one_turn_without_rewards_is_the_outcome_at_every_sampled_token():
    outcomes = group_norm(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 0]))
    result = turn_level(
        torch.zeros(3, 1), outcomes, torch.tensor([0, -1, 0, 0]), torch.tensor([0, 0, 1, 2]), torch.zeros(3).long()
    )
    assert result.tolist() == [float(outcomes[0]), 0.0, float(outcomes[1]), float(outcomes[2])]


def test_turns_without_an_outcome_are_returns_over_turns():
    # one token per turn: the credit of a token is the return of the turns' advantages
    rewards = torch.tensor([[1.0, 0.5, 0.0], [0.0, 2.0, 1.0]])
    turn_ids, ids = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([0, 0, 0, 1, 1, 1])
    result = turn_level(rewards, torch.zeros(2), turn_ids, ids, torch.zeros(2).long(), gamma=0.7)
    per_turn = group_norm(rewards.flatten(), turn_ids)
    expected = discounted_returns(per_turn, torch.ones(6, dtype=torch.bool), ids, gamma=0.7)
    assert torch.allclose(result, expected, rtol=1e-12, atol=1e-12)


def test_turns_epsilon_defaults_to_a_millionth():
    none = torch.zeros(2, dtype=torch.int64)
    result = turn_level(torch.tensor([[0.0], [1e-6]]).double(), torch.zeros(2), none, torch.arange(2), none)
    assert float(result[1]) == pytest.approx(0.5e-6 / (1e-6 * math.sqrt(0.5) + 1e-6), rel=1e-7)


def test_turns_pitfalls_1_and_3_equal_and_single_rewards_give_exactly_zero():
    rewards = torch.tensor([[0.1, 5.0], [0.1, math.nan], [0.1, 7.0]])
    turn_ids, ids = torch.tensor([0, 1, 0, 0, 1]), torch.tensor([0, 0, 1, 2, 2])
    result = turn_level(rewards, torch.zeros(3), turn_ids, ids, torch.tensor([0, 0, 1]))
    assert result.tolist() == [0.0] * 5


def test_turns_take_a_transposed_matrix_and_give_float64_without_gradient():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 2.0]], requires_grad=True)
    outcomes = torch.tensor([1.0, 2.0], requires_grad=True)
    plain = turn_level(rewards.detach().clone(), outcomes, TURNS, IDS, torch.tensor([4, 4]))
    result = turn_level(rewards.t().contiguous().t(), outcomes, TURNS, IDS, torch.tensor([4, 4]))
    assert torch.equal(result, plain)
    assert result.dtype == torch.float64
    assert not result.requires_grad


def test_turns_leave_their_inputs_alone():
    turn_ids, ids = torch.tensor([0, 1]), torch.tensor([0, 0])
    turn_level(torch.ones(1, 2), torch.ones(1), turn_ids, ids, torch.zeros(1).long())
    assert turn_ids.tolist() == [0, 1]
    assert ids.tolist() == [0, 0]


def test_turns_of_an_empty_batch():
    none = torch.empty(0, dtype=torch.int64)
    assert turn_level(torch.empty(0, 2), torch.empty(0), none, none, none).shape == (0,)


def test_turns_refuse_what_does_not_fit():
    rewards, outcomes, groups = torch.ones(2, 2), torch.ones(2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InputError, match="outside of the 2 turns"):
        turn_level(rewards, outcomes, torch.tensor([2]), torch.tensor([0]), groups)
    with pytest.raises(InputError, match="group ids, 2 sequences"):
        turn_level(rewards, outcomes, TURNS, IDS, groups[:1])
    with pytest.raises(InputError, match="segment ids"):
        turn_level(rewards, outcomes, TURNS, IDS[:3], groups)
