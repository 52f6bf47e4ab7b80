"""What each rank holds of the policy, the reference and the critic, for every strategy."""

from __future__ import annotations

from typing import Any

import pytest

from rft_dist.planning.parallel_dims import ParallelDims
from rft_dist.planning.run_layout import RunLayout
from rft_dist.settings import StrategySettings
from rft_dist.strategies.registry import SHARDINGS, run_dims, run_layout

PARTS = ("weights", "gradients", "optimizer")


def layout_of(settings: StrategySettings, world_size: int = 8) -> RunLayout:
    return run_layout(settings, run_dims(settings, world_size))


def fractions(layout: RunLayout) -> tuple[int, ...]:
    """Of weights, gradients and optimizer state of the policy: the ranks that hold one copy together."""
    return tuple(layout.ranks_of(sharded=getattr(layout.policy, part)) for part in PARTS)


@pytest.mark.parametrize(
    ("settings", "dp_size", "policy", "reference", "critic"),
    [
        ({}, 8, (1, 1, 1), 1, (1, 1, 1)),
        ({"sp_size": 2}, 4, (1, 1, 1), 1, (1, 1, 1)),
        ({"fsdp": True}, 8, (8, 8, 8), 8, (8, 8, 8)),
        ({"fsdp": True, "sp_size": 2}, 4, (8, 8, 8), 8, (8, 8, 8)),
        ({"fsdp": True, "shard_size": 4}, 8, (4, 4, 4), 4, (4, 4, 4)),
        ({"fsdp": True, "tp_size": 2}, 4, (8, 8, 8), 8, (8, 8, 8)),
        ({"tp_size": 2}, 4, (2, 2, 2), 2, (1, 1, 1)),
        ({"zero_stage": 1}, 8, (1, 1, 8), 1, (1, 1, 1)),
        ({"zero_stage": 2}, 8, (1, 8, 8), 1, (1, 1, 1)),
        ({"zero_stage": 3, "sp_size": 2}, 4, (8, 8, 8), 8, (1, 1, 1)),
    ],
)
def test_ranks_that_hold_one_copy_together(
    settings: dict[str, Any], dp_size: int, policy: tuple[int, ...], reference: int, critic: tuple[int, ...]
) -> None:
    layout = layout_of(StrategySettings(**settings))
    assert layout.dims.dp_size == dp_size
    assert layout.dims.world_size == 8
    assert fractions(layout) == policy
    assert layout.ranks_of(sharded=layout.reference.weights) == reference
    assert fractions(layout.of_critic()) == critic
    assert layout.of_critic().dims.dp_size == 8, "every rank computes its own samples of a critic"


@pytest.mark.parametrize("word", SHARDINGS)
def test_a_sharding_that_is_planned_keeps_the_ranks_of_the_settings(word: str) -> None:
    settings = StrategySettings(tp_size=2)
    planned = run_layout(settings, ParallelDims(2, 4, tp_size=2), SHARDINGS[word])
    assert planned.dims.tp_size == 2
    assert planned.policy == layout_of(SHARDINGS[word]).policy
    assert planned.policy.sums_in_buckets == (word == "replicated")
    assert planned.policy.float32_weights == (word == "fsdp")
