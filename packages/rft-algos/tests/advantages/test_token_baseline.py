from __future__ import annotations

import math
import random

import pytest
import torch

from rft_algos.advantages import optimal_token_baseline
from rft_algos.input_checks import InputError

D = torch.float64


def plain(rewards, logprobs, squares, mask, ids, groups, gamma, turns=None):  # type: ignore[no-untyped-def]
    """Loops over groups and positions, by the equation; a position is a turn and a token of it."""
    sequences: dict[int, list[int]] = {}
    for t, (i, kept) in enumerate(zip(ids, mask, strict=True)):
        if kept:
            sequences.setdefault(i, []).append(t)
    returns = {t: sum(gamma ** (n - m) * rewards[s] for n, s in enumerate(own) if n >= m)
               for own in sequences.values() for m, t in enumerate(own)}  # fmt: skip
    weights = {t: sum(1 - 2 * math.exp(logprobs[s]) + squares[s] for s in own[: m + 1])
               for own in sequences.values() for m, t in enumerate(own)}  # fmt: skip
    found = [0.0] * len(ids)
    for group in set(groups):
        members = [own for i, own in sequences.items() if groups[i] == group]
        placed = {}
        for own in members:
            for m, t in enumerate(own):
                turn = 0 if turns is None else turns[t]
                before = 0 if turns is None else sum(turns[s] < turn for s in own)
                placed.setdefault((turn, m - before), []).append(t)
        for here in placed.values():
            total = sum(weights[t] for t in here)
            baseline = sum(weights[t] * returns[t] for t in here) / total
            for t in here:
                found[t] = returns[t] - baseline if len(here) > 1 else 0.0
    return found


@pytest.mark.parametrize("by_turn", [False, True])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_equals_loops_over_groups_and_positions(seed: int, gamma: float, by_turn: bool) -> None:
    numbers = random.Random(seed)
    lengths = [numbers.randint(1, 6) for _ in range(6)]
    groups = [7, 7, 2, 7, 2, 9]
    ids = [i for i, length in enumerate(lengths) for _ in range(length)]
    mask = [numbers.random() < 0.7 for _ in ids] if seed else [True] * len(ids)
    rewards = [numbers.gauss(0, 1) if kept else math.nan for kept in mask]
    logprobs = [-numbers.expovariate(1.0) for _ in ids]
    squares = [math.exp(x) ** 2 + numbers.random() * 0.1 for x in logprobs]
    # turns end at observations, whose own tokens may have any number
    turns = [sum(not kept for kept, j in zip(mask[:t], ids, strict=False) if j == i) for t, i in enumerate(ids)]
    turns = [turn if kept else -5 for turn, kept in zip(turns, mask, strict=True)] if by_turn else None
    found = optimal_token_baseline(
        torch.tensor(rewards, dtype=D),
        torch.tensor(logprobs, dtype=D),
        torch.tensor(squares, dtype=D),
        torch.tensor(mask),
        torch.tensor(ids),
        torch.tensor(groups),
        gamma=gamma,
        turn_ids_T=None if turns is None else torch.tensor(turns),
    )
    expected = plain(rewards, logprobs, squares, mask, ids, groups, gamma, turns)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


def test_tokens_after_an_observation_are_compared_however_long_the_turn_before() -> None:
    # first turns of one and of two tokens, then an observation, then a turn of one token that earns the reward
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    mask = torch.tensor([True, False, True, True, True, False, True])
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], dtype=D)
    turns = torch.tensor([0, 0, 1, 0, 0, 0, 1])
    evenly = torch.full((7,), math.log(0.5), dtype=D)  # of two words: each token adds 1/2 to W
    squares, group = torch.full((7,), 0.5, dtype=D), torch.tensor([3, 3])
    found = optimal_token_baseline(rewards, evenly, squares, mask, ids, group, turn_ids_T=turns)
    # W is 1 and 3/2 at the second turns, so that the baseline is 1 / (1 + 3/2)
    assert found.tolist() == pytest.approx([0.5, 0.0, 0.6, -0.5, 0.0, 0.0, -0.4])
    # by the place in the sequence the second token of the first turn stands beside the second turn
    found = optimal_token_baseline(rewards, evenly, squares, mask, ids, group)
    assert found.tolist() == pytest.approx([0.5, 0.0, 0.5, -0.5, -0.5, 0.0, 0.0])
    # one turn is no turns
    one = optimal_token_baseline(rewards, evenly, squares, mask, ids, group, turn_ids_T=torch.zeros(7).long())
    assert torch.equal(one, found)


@pytest.mark.parametrize("turns", [[0, 1, 0], [-1, 0, 0]])
def test_turns_that_fall_or_are_negative_are_refused(turns: list[int]) -> None:
    three, mask, ids = torch.zeros(3), torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(InputError, match="never fall"):
        optimal_token_baseline(three, three, three, mask, ids, torch.tensor([0]), turn_ids_T=torch.tensor(turns))
    # from one sequence to the next they may
    ids = torch.tensor([0, 0, 1])
    optimal_token_baseline(three, three, three, mask, ids, torch.tensor([0, 0]), turn_ids_T=torch.tensor([0, 1, 0]))


def test_hand_computed_and_certain_tokens() -> None:
    # two sequences of one token: p = 1/2 each of two tokens gives 1 - 1 + 1/2; p = 1 gives 0
    rewards, mask, ids = torch.tensor([1.0, 0.0], dtype=D), torch.tensor([True, True]), torch.tensor([0, 1])
    half, one = math.log(0.5), 0.0
    found = optimal_token_baseline(
        rewards, torch.tensor([half, one]), torch.tensor([0.5, 1.0]), mask, ids, torch.tensor([0, 0])
    )
    assert found.tolist() == pytest.approx([0.0, -1.0])
    # where nothing varies, the plain mean
    found = optimal_token_baseline(rewards, torch.zeros(2), torch.ones(2), mask, ids, torch.tensor([0, 0]))
    assert found.tolist() == pytest.approx([0.5, -0.5])


def test_a_weight_below_zero_by_rounding_counts_as_zero() -> None:
    rewards, mask, ids = torch.tensor([1.0, 0.0], dtype=D), torch.tensor([True, True]), torch.tensor([0, 1])
    squares = torch.tensor([1.0 - 1e-3, 1.0 + 1e-2], dtype=D)  # W would be -1e-3 and 1e-2
    found = optimal_token_baseline(rewards, torch.zeros(2, dtype=D), squares, mask, ids, torch.tensor([0, 0]))
    assert found.tolist() == pytest.approx([1.0, 0.0])


def test_shapes_are_checked() -> None:
    three, mask, ids = torch.zeros(3), torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(InputError, match="one shape"):
        optimal_token_baseline(three, three[:2], three, mask, ids, torch.tensor([0]))
    with pytest.raises(InputError, match="must be integers"):
        optimal_token_baseline(three, three, three, mask, ids, torch.tensor([0.0]))
