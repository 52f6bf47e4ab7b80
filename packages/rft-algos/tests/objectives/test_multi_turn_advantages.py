"""Turns of a conversation: observations are skipped, time may count in turns, rewards lie at the turns' ends."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.advantages import gae
from rft_algos.algorithms import components
from rft_algos.algorithms.published import Grpo, Ppo, ReinforceAlgorithm
from rft_algos.objectives import RolloutBatch, compute_advantages
from rft_core.errors import OptionsError

Token = tuple[bool, float, float]
TOKENS = st.lists(st.tuples(st.booleans(), st.floats(-2, 2), st.floats(-2, 2)), max_size=8)
UNIT = st.floats(0, 1)


def plain_turn_gae(tokens: list[Token], gamma: float, turn_gamma: float, lambd: float) -> list[tuple[float, float]]:
    """One sequence, from its last token to its first; a step over an observation is discounted by `turn_gamma`."""
    result = [(0.0, 0.0)] * len(tokens)
    next_value = next_advantage = 0.0
    next_place: int | None = None
    for place in reversed(range(len(tokens))):
        sampled, reward, value = tokens[place]
        if not sampled:
            continue
        discount = 0.0 if next_place is None else gamma if next_place == place + 1 else turn_gamma
        advantage = reward + discount * next_value - value + discount * lambd * next_advantage
        result[place] = advantage, advantage + value
        next_value, next_advantage, next_place = value, advantage, place
    return result


@given(st.lists(TOKENS, max_size=4), UNIT, UNIT, UNIT)
def test_gae_over_turns_is_the_plain_recurrence(
    sequences: list[list[Token]], gamma: float, turn_gamma: float, lambd: float
) -> None:
    tokens = [token for sequence in sequences for token in sequence]
    ids = torch.tensor([i for i, sequence in enumerate(sequences) for _ in sequence], dtype=torch.int64)
    rewards = torch.tensor([r if kept else math.nan for kept, r, _ in tokens], dtype=torch.float64)
    values = torch.tensor([v if kept else math.inf for kept, _, v in tokens], dtype=torch.float64)
    mask = torch.tensor([kept for kept, _, _ in tokens], dtype=torch.bool)
    advantages, returns = gae(rewards, values, mask, ids, gamma=gamma, lambd=lambd, turn_gamma=turn_gamma)
    wanted = [pair for sequence in sequences for pair in plain_turn_gae(sequence, gamma, turn_gamma, lambd)]
    assert advantages.tolist() == pytest.approx([a for a, _ in wanted], abs=1e-12)
    assert returns.tolist() == pytest.approx([g for _, g in wanted], abs=1e-12)


def test_the_value_after_a_turn_is_that_of_the_next_turns_first_token() -> None:
    rewards, values = torch.tensor([0.0, 9.0, 1.0]), torch.tensor([0.5, 7.0, 0.8])
    mask, ids = torch.tensor([True, False, True]), torch.zeros(3, dtype=torch.int64)
    advantages, returns = gae(rewards.double(), values.double(), mask, ids, gamma=1.0, lambd=1.0, turn_gamma=0.5)
    assert returns.tolist() == pytest.approx([0.5, 0.0, 1.0])
    assert advantages.tolist() == pytest.approx([0.0, 0.0, 0.2])
    _, carried = gae(rewards.double(), values.double(), mask, ids, gamma=0.5, lambd=0.0)
    assert carried.tolist() == pytest.approx([0.5 * 0.8, 0.0, 1.0])  # not 0.25 * 0.8: the observation is no step


def batch(turn_rewards: list[float] | None, total: float, **more: torch.Tensor) -> RolloutBatch:
    """One conversation: two tokens, an observation, one token."""
    zeros = torch.zeros(4, dtype=torch.float64)
    return RolloutBatch(
        rewards_N=torch.tensor([total], dtype=torch.float64),
        group_ids_N=torch.zeros(1, dtype=torch.int64),
        loss_mask_T=torch.tensor([True, True, False, True]),
        segment_ids_T=torch.zeros(4, dtype=torch.int64),
        old_logprobs_T=zeros,
        behaviour_logprobs_T=zeros,
        turn_rewards_T=None if turn_rewards is None else torch.tensor(turn_rewards, dtype=torch.float64),
        **more,
    )


def test_a_turn_is_credited_for_what_comes_after_it() -> None:
    record = ReinforceAlgorithm(advantage=components.Returns(gamma=0.5), normalise_advantages=False)
    found = compute_advantages(record, batch([0.0, 0.25, 0.0, 1.0], 1.25)).advantages_T
    assert found.tolist() == pytest.approx([0.5 * (0.25 + 0.5 * 1.0), 0.25 + 0.5 * 1.0, 0.0, 1.0])
    at_the_end = compute_advantages(record, batch(None, 1.25)).advantages_T
    assert at_the_end.tolist() == pytest.approx([0.3125, 0.625, 0.0, 1.25])


def test_what_the_reward_holds_besides_its_turns_stands_at_the_end() -> None:
    record = ReinforceAlgorithm(advantage=components.Returns(gamma=0.5), normalise_advantages=False)
    found = compute_advantages(record, batch([0.0, 0.25, 0.0, 1.0], 1.05)).advantages_T  # 0.2 taken away for length
    assert found.tolist() == pytest.approx([0.5 * (0.25 + 0.5 * 0.8), 0.25 + 0.5 * 0.8, 0.0, 0.8])


def test_the_record_says_how_turns_are_discounted() -> None:
    values = torch.tensor([0.1, 0.2, 9.0, 0.3], dtype=torch.float64)
    record = Ppo(
        advantage=components.Gae(gamma=1.0, lambd=1.0, turn_gamma=0.5), normalise_advantages=False, kl_coef=0.0
    )
    found = compute_advantages(record, batch([0.0, 0.0, 0.0, 1.0], 1.0, values_T=values))
    assert found.returns_T is not None
    assert found.returns_T.tolist() == pytest.approx([0.5, 0.5, 0.0, 1.0])
    with pytest.raises(OptionsError):
        components.Gae(turn_gamma=1.5)


@pytest.mark.parametrize("turn_gamma", [None, 0.5])
def test_a_critic_may_learn_returns_of_another_lambda(turn_gamma: float | None) -> None:
    whole = batch([0.0, 0.25, 0.0, 1.0], 1.25, values_T=torch.tensor([0.1, 0.2, 9.0, 0.3], dtype=torch.float64))

    def found(**numbers: float) -> tuple[list[float], list[float]]:
        choice = components.Gae(gamma=0.9, turn_gamma=turn_gamma, **numbers)
        output = compute_advantages(Ppo(advantage=choice, normalise_advantages=False, kl_coef=0.0), whole)
        assert output.returns_T is not None
        return output.advantages_T.tolist(), output.returns_T.tolist()

    low, high = found(lambd=0.5), found(lambd=1.0)
    assert found(lambd=0.5, lambd_value=1.0) == (low[0], high[1])
    assert found(lambd=1.0, lambd_value=0.5) == (high[0], low[1])
    # three loss tokens: 1 - 1 / (alpha 3) is 0.5
    by_length = found(lambd=1.0, length_alpha=2 / 3)
    assert by_length[0] == pytest.approx(low[0])
    assert by_length[1] == high[1]
    assert found(lambd_value=0.5, length_alpha=2 / 3)[1] == low[1]


def test_groups_are_compared_by_the_whole() -> None:
    two = RolloutBatch(
        rewards_N=torch.tensor([1.25, 0.25], dtype=torch.float64),
        group_ids_N=torch.zeros(2, dtype=torch.int64),
        loss_mask_T=torch.tensor([True, False, True, True]),
        segment_ids_T=torch.tensor([0, 0, 0, 1]),
        old_logprobs_T=torch.zeros(4, dtype=torch.float64),
        behaviour_logprobs_T=torch.zeros(4, dtype=torch.float64),
        turn_rewards_T=torch.tensor([0.25, 0.0, 1.0, 0.25], dtype=torch.float64),
    )
    found = compute_advantages(Grpo(), two).advantages_T.tolist()
    assert found[0] == found[2] > 0
    assert found[3] == pytest.approx(-found[0])
    assert found[1] == 0.0
