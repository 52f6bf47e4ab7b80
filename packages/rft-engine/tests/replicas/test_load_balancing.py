"""Samples over replicas: exact shares, which follow from budgets and lengths of prompts alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_engine.native.partial_requests import SampleRequests
from rft_engine.replicas.load_balancing import assign_samples


def call_of(requests: Sequence[tuple[int, int, int]]) -> SampleRequests:
    """A call of requests (prompt, its length, budget)."""
    options = SamplingOptions(temperature=1.0, max_new_tokens=max(budget for _, _, budget in requests))
    prefixes = [(prompt,) * length for prompt, length, _ in requests]
    num = len(requests)
    return SampleRequests(prefixes, range(num), [0] * num, [budget for _, _, budget in requests], options)


@pytest.mark.parametrize(
    ("requests", "num", "shares"),
    [
        # 16 tokens of a prompt are read in the time of one token drawn: 1 + 160 / 16 is more than 10 + 8 / 16
        ([(1, 160, 1), (2, 8, 10)], 2, [[0], [1]]),
        ([(2, 8, 10), (1, 160, 1)], 2, [[1], [0]]),
        ([(1, 32, 10), (2, 16, 20)], 2, [[1], [0]]),
        # the longest first, each where there is least; equal ones in their order
        ([(1, 1, 5), (2, 1, 9), (3, 1, 7), (4, 1, 6)], 2, [[0, 1], [2, 3]]),
        ([(1, 1, 5), (2, 1, 5), (3, 1, 5), (4, 1, 5), (5, 1, 5)], 2, [[0, 2, 4], [1, 3]]),
        ([(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 1, 4), (5, 1, 9), (6, 1, 9)], 3, [[0, 4], [5], [1, 2, 3]]),
        # samples of a prompt stay together where there are twice as many prompts as replicas
        ([(1, 1, 4), (2, 1, 3), (1, 1, 4), (3, 1, 3), (2, 1, 3), (4, 1, 3)], 2, [[0, 2, 5], [1, 3, 4]]),
        # and are cut where there are fewer
        ([(1, 1, 4), (1, 1, 3), (1, 1, 2), (2, 1, 9), (3, 1, 1)], 2, [[3, 4], [0, 1, 2]]),
        ([(1, 1, 5)] * 5, 3, [[0, 3], [1, 4], [2]]),
        ([(1, 1, 5)] * 2, 3, [[0], [1], []]),
        ([(1, 1, 5), (2, 1, 6)], 1, [[0, 1]]),
    ],
)
def test_shares_follow_from_the_call(
    requests: Sequence[tuple[int, int, int]], num: int, shares: Sequence[Sequence[int]]
) -> None:
    assert assign_samples(call_of(requests), num) == shares
