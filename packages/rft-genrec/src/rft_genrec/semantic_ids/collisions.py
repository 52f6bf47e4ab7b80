"""IDs of their own for items with the same codes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rft_algos.quantisation.kmeans import squared_distances
from rft_algos.quantisation.sinkhorn import sinkhorn_codes
from rft_genrec.settings.sid import Collisions

_ROUNDS = 20
"""Of Sinkhorn, as in MiniOneRec."""

Codes = tuple[int, ...]


def resolve(
    codes_NL: Tensor, left_ND: Tensor, last_KD: Tensor, how: Collisions, *, epsilon: float, taken: Sequence[Codes] = ()
) -> list[Codes]:
    """Return the codes of every item after collisions were resolved in one of the ways of `collisions`.

    Args:
        codes_NL: [N, L] int64.
        left_ND: [N, D]: what all levels but the last left of the vectors, which the last level quantises.
        last_KD: [K, D]: the codebook of the last level.
        epsilon: of Sinkhorn.
        taken: codes of items that exist and keep theirs.
    """
    codes: list[Codes] = [tuple(row) for row in codes_NL.tolist()]
    if how == "free":
        return _to_free(codes, squared_distances(left_ND, last_KD).cpu(), taken)
    if how == "sinkhorn":
        return _by_sinkhorn(codes, squared_distances(left_ND, last_KD).cpu(), epsilon)
    if how == "extra":
        return _with_extra(codes, taken)
    return codes


def groups_of(codes: Sequence[Codes]) -> Mapping[Codes, list[int]]:
    """Return the items of each distinct code, in their order."""
    groups: dict[Codes, list[int]] = defaultdict(list)
    for item, one in enumerate(codes):
        groups[one].append(item)
    return groups


def _to_free(codes: list[Codes], distances_NK: Tensor, taken: Sequence[Codes]) -> list[Codes]:
    """Of each group the item that is nearest to its code keeps it; the others take free ones, the nearest first."""
    used: dict[Codes, set[int]] = defaultdict(set)
    last = len(codes[0]) - 1 if codes else 0
    for one in taken:  # may have a code more, for a rank
        used[one[:last]].add(one[last])
    crowded: dict[Codes, list[int]] = defaultdict(list)
    for one, members in groups_of(codes).items():
        members = sorted(members, key=lambda item: (float(distances_NK[item, one[-1]]), item))
        if one[-1] not in used[one[:-1]]:
            used[one[:-1]].add(one[-1])
            members = members[1:]
        crowded[one[:-1]] += members
    found, num_codes = list(codes), distances_NK.shape[1]
    for prefix, members in crowded.items():
        free = sorted(set(range(num_codes)) - used[prefix])
        waiting = set(members)
        if not (free and waiting):
            continue
        wanted = sorted(waiting)
        ordered_P = distances_NK[wanted][:, free].flatten().argsort(stable=True).tolist()
        open_codes = set(free)
        for place in ordered_P:
            item, code = wanted[place // len(free)], free[place % len(free)]
            if item in waiting and code in open_codes:
                found[item] = (*prefix, code)
                waiting.discard(item)
                open_codes.discard(code)
                if not (waiting and open_codes):
                    break
    return found


def _by_sinkhorn(codes: list[Codes], distances_NK: Tensor, epsilon: float) -> list[Codes]:
    found = list(codes)
    for _ in range(_ROUNDS):
        crowded = [members for members in groups_of(found).values() if len(members) > 1]
        if not crowded:
            break
        for members in crowded:
            last = sinkhorn_codes(distances_NK[members], epsilon=epsilon).tolist()
            for item, code in zip(members, last, strict=True):
                found[item] = (*found[item][:-1], code)
    return found


def _with_extra(codes: list[Codes], taken: Sequence[Codes]) -> list[Codes]:
    """Every item of a group takes its rank as one code more; the others keep their length."""
    num_levels = len(codes[0]) if codes else 0
    highest: dict[Codes, int] = {}
    for one in taken:
        rank = one[num_levels] if len(one) > num_levels else 0
        highest[one[:num_levels]] = max(rank, highest.get(one[:num_levels], -1))
    found = list(codes)
    for one, members in groups_of(codes).items():
        if len(members) > 1 or one in highest:
            first = highest.get(one, -1) + 1
            for rank, item in enumerate(members, start=first):
                found[item] = (*one, rank)
    return found


def last_residuals(points_ND: Tensor, codes_NL: Tensor, codebooks: Sequence[Tensor]) -> Tensor:
    """Return [N, D]: what all levels but the last leave of the vectors."""
    left_ND = points_ND
    for codebook_KD, codes_N in zip(codebooks[:-1], codes_NL.unbind(1), strict=False):
        left_ND = left_ND - codebook_KD[codes_N]
    return left_ND


def collision_rate(codes: Sequence[Codes]) -> float:
    """Return (items - distinct codes) / items."""
    return (len(codes) - len(set(codes))) / len(codes)


def as_tensor(codes: Sequence[Codes], num_levels: int) -> Tensor:
    """Return [N, L] int64: the codes of the first levels."""
    return torch.tensor([one[:num_levels] for one in codes], dtype=torch.int64)
