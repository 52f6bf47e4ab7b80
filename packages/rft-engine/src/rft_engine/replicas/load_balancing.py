"""Assignment of samples to replicas: by expected load, as a function of the samples alone.

No clock and no history decide, so that the same call is dealt alike in every run. Where a sample is
drawn changes its log-probabilities by rounding at most, and its tokens not at all: they follow its key.
"""

from __future__ import annotations

from collections.abc import Sequence

from rft_engine.native.partial_requests import SampleRequests

_PREFILL_TOKENS = 16.0  # tokens of a prompt read in the time of about one decoded token


def assign_samples(call: SampleRequests, num_replicas: int) -> list[list[int]]:
    """Return the requests of each replica, in ascending order; samples of a prompt stay together where balanced.

    Longest expected load first, each to the replica that has least so far (Graham, SIAM J. Appl. Math. 17, 1969:
    at most 4/3 of the best). The load of a sample is what it may still draw, plus its prompt read once.
    """
    units = _units(call, num_replicas)
    loads = [_load(call, unit) for unit in units]
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    totals = [0.0] * num_replicas
    # equal loads in the order of their first requests: the same call is dealt alike in every run
    for unit_index in sorted(range(len(units)), key=lambda i: (-loads[i], units[i][0])):
        least = min(range(num_replicas), key=totals.__getitem__)
        shares[least] += units[unit_index]
        totals[least] += loads[unit_index]
    return [sorted(share) for share in shares]


def _units(call: SampleRequests, num_replicas: int) -> list[list[int]]:
    """Requests that go together: with the same tokens and images before them, cut where they are too few to balance."""
    same: dict[tuple[int, ...], list[int]] = {}
    for request, context in enumerate(call.contexts()):
        same.setdefault(context, []).append(request)
    if len(same) >= 2 * num_replicas:
        return list(same.values())
    return [unit[piece::num_replicas] for unit in same.values() for piece in range(min(num_replicas, len(unit)))]


def _load(call: SampleRequests, unit: Sequence[int]) -> float:
    return len(call.prefixes[unit[0]]) / _PREFILL_TOKENS + sum(call.budgets[request] for request in unit)
