from __future__ import annotations

import math
import random

import pytest
import torch

from rft_algos.advantages import optimal_token_baseline
from rft_algos.input_checks import InputError

D = torch.float64


def plain(rewards, logprobs, squares, mask, ids, groups, gamma):  # type: ignore[no-untyped-def]
    """Loops over groups and positions, by the equation."""
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
        for position in range(max(map(len, members), default=0)):
            here = [own[position] for own in members if len(own) > position]
            total = sum(weights[t] for t in here)
            baseline = sum(weights[t] * returns[t] for t in here) / total
            for t in here:
                found[t] = returns[t] - baseline if len(here) > 1 else 0.0
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_equals_loops_over_groups_and_positions(seed: int, gamma: float) -> None:
    numbers = random.Random(seed)
    lengths = [numbers.randint(1, 6) for _ in range(6)]
    groups = [7, 7, 2, 7, 2, 9]
    ids = [i for i, length in enumerate(lengths) for _ in range(length)]
    mask = [numbers.random() < 0.7 for _ in ids] if seed else [True] * len(ids)
    rewards = [numbers.gauss(0, 1) if kept else math.nan for kept in mask]
    logprobs = [-numbers.expovariate(1.0) for _ in ids]
    squares = [math.exp(x) ** 2 + numbers.random() * 0.1 for x in logprobs]
    found = optimal_token_baseline(
        torch.tensor(rewards, dtype=D),
        torch.tensor(logprobs, dtype=D),
        torch.tensor(squares, dtype=D),
        torch.tensor(mask),
        torch.tensor(ids),
        torch.tensor(groups),
        gamma=gamma,
    )
    assert found.tolist() == pytest.approx(plain(rewards, logprobs, squares, mask, ids, groups, gamma), abs=1e-12)


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


def test_shapes_are_checked() -> None:
    three, mask, ids = torch.zeros(3), torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(InputError, match="one shape"):
        optimal_token_baseline(three, three[:2], three, mask, ids, torch.tensor([0]))
    with pytest.raises(InputError, match="must be integers"):
        optimal_token_baseline(three, three, three, mask, ids, torch.tensor([0.0]))
