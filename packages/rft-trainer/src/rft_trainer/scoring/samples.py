"""Conversion of scored groups to training samples: filters, flat order, and the samples of each optimizer step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rft_core.keyed_random import derive_key, permutation
from rft_trainer.records.rollouts import Rollout, RolloutGroup, TrainingSample


@dataclass(frozen=True, slots=True)
class FilterResult:
    """Groups that a filter kept, and the number of rollouts left out by reason."""

    groups: tuple[RolloutGroup, ...]
    reasons: dict[str, int]


def keep_scored(
    groups: Sequence[RolloutGroup], *, smallest_group: int = 2, needs_baseline: bool = False
) -> FilterResult:
    """Leave out rollouts without a score, then groups with too few left to compare, or without their baseline."""
    reasons: Counter[str] = Counter()
    kept: list[RolloutGroup] = []
    for group in groups:
        scored = tuple(rollout for rollout in group.rollouts if rollout.reward is not None)
        reasons["unscored"] += len(group.rollouts) - len(scored)
        # counted after the unscored ones are out: those that are left could not be compared
        if len(scored) < smallest_group:
            reasons["alone_in_group"] += len(scored)
        elif needs_baseline and group.baseline_reward is None:
            reasons["no_baseline"] += len(scored)
        else:
            kept.append(replace(group, rollouts=scored))
    return FilterResult(tuple(kept), {name: count for name, count in reasons.items() if count})


def drop_zero_variance_groups(kept: FilterResult) -> FilterResult:
    """Leave out groups in which every rollout has the same reward, in the denominators too (DAPO, 2503.14476)."""
    groups = tuple(g for g in kept.groups if has_signal(g))
    dropped = sum(len(g.rollouts) for g in kept.groups) - sum(len(g.rollouts) for g in groups)
    return FilterResult(groups, kept.reasons | ({"no_signal": dropped} if dropped else {}))


def has_signal(group: RolloutGroup) -> bool:
    """Return whether the rewards of a group differ, before any shaping for length."""
    return len({rollout.reward for rollout in group.rollouts if rollout.reward is not None}) > 1


def shuffle_rewards(groups: Sequence[RolloutGroup], seed: int) -> list[RolloutGroup]:
    """Shuffle the rewards within each group, as a control experiment in which they carry no information."""
    shuffled: list[RolloutGroup] = []
    for group in groups:
        # by the group's place in the epoch, so that a resume shuffles alike
        key = derive_key(seed, "shuffle-rewards", group.epoch, group.position)
        order = permutation(key, len(group.rollouts)).tolist()
        shuffled.append(
            replace(
                group,
                rollouts=tuple(
                    replace(rollout, reward=group.rollouts[j].reward, status=group.rollouts[j].status)
                    for rollout, j in zip(group.rollouts, order, strict=True)
                ),
            )
        )
    return shuffled


def flat_rollouts(groups: Sequence[RolloutGroup]) -> list[tuple[RolloutGroup, Rollout]]:
    """Return every rollout with its group, in group order: the order of all flat lists of this package."""
    return [(group, rollout) for group in groups for rollout in group.rollouts]


def flat_rewards(groups: Sequence[RolloutGroup]) -> tuple[Tensor, Tensor]:
    """Return (rewards_N float64, group_ids_N int64) over `flat_rollouts`; every rollout must have a reward."""
    rewards = [rollout.reward for _, rollout in flat_rollouts(groups)]
    assert all(reward is not None for reward in rewards), "unscored rollouts must be left out before advantages"
    sizes = torch.tensor([len(group.rollouts) for group in groups], dtype=torch.int64)
    return torch.tensor(rewards, dtype=torch.float64), torch.repeat_interleave(torch.arange(len(groups)), sizes)


def sample_name(group: RolloutGroup, rollout: Rollout) -> str:
    """Return the name of a rollout as a training sample, unique in its step."""
    return f"{group.epoch}/{group.position}/{rollout.prompt_id}#{rollout.sample_index}"


def build_samples(
    groups: Sequence[RolloutGroup],
    advantages: Sequence[float],
    old_logprobs: Sequence[tuple[float, ...]],
    reference_logprobs: Sequence[tuple[float, ...]],
    **token_fields: Sequence[tuple[Any, ...]],
) -> list[TrainingSample]:
    """Build one sample a rollout in `flat_rollouts` order; `reference_logprobs` and other token fields may be empty."""
    flat = flat_rollouts(groups)
    fields = {"reference_logprobs": reference_logprobs, **token_fields}
    masks = [rollout.loss_mask for _, rollout in flat]
    fields |= {"loss_mask": masks} if any(masks) else {}
    present: dict[str, Sequence[Any]] = {name: rows for name, rows in fields.items() if rows}
    return [
        TrainingSample(
            sample_id=sample_name(group, rollout),
            token_ids=group.prompt.token_ids + rollout.completion_ids,
            prompt_length=len(group.prompt.token_ids),
            advantage=advantages[i],
            behaviour_logprobs=rollout.behaviour_logprobs,
            old_logprobs=old_logprobs[i],
            media=group.prompt.media,
            **{name: rows[i] for name, rows in present.items()},
        )
        for i, (group, rollout) in enumerate(flat)
    ]
