"""Layout of a run: its ranks, and the part of weights, gradients and optimizer state that each of them holds.

The chosen strategy's row gives it (`rft_dist.strategies.registry.run_layout`); memory estimates and the plan of a run
read it. No torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rft_dist.planning.parallel_dims import ParallelDims


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The parts of a model's training state that are divided among the ranks; of the others each rank has a copy."""

    weights: bool = False
    """A layer is gathered while it computes."""
    gradients: bool = False
    optimizer: bool = False
    """Moments, master copies, moving averages."""
    float32_weights: bool = False
    """Whether weights are kept in float32 where the forward computes in a narrower type, in place of master copies."""
    sums_in_buckets: bool = False
    """Whether gradients are summed over the ranks once a step, in flat float32 buckets beside them."""
    expert_ranks: int = 1
    """Ranks that the experts of every layer are divided among, with their gradients and moments."""


ONE_RANK = ParallelDims(1, 1)
REPLICATED = Sharding(sums_in_buckets=True)
"""Every rank has a copy of everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLayout:
    """The ranks of a run, and how the state of its models is divided among them."""

    dims: ParallelDims = ONE_RANK
    shard_size: int | None = None
    """Ranks that divide one copy, where there are several copies (HSDP); None = all of them."""
    policy: Sharding = REPLICATED
    reference: Sharding = REPLICATED
    critic: Sharding = REPLICATED

    @property
    def shard_ranks(self) -> int:
        """Ranks that a sharded part is divided among, of those that hold the same part of each matrix."""
        return self.shard_size or self.dims.dp_size * self.dims.sp_size

    def ranks_of(self, *, sharded: bool) -> int:
        """Ranks that hold one copy of a part of the training state together: a rank holds that fraction of it."""
        return self.dims.tp_size * (self.shard_ranks if sharded else 1)

    def of_critic(self) -> RunLayout:
        """Return the layout of a critic, of whose matrices and samples no rank holds a part."""
        dims = ParallelDims(self.dims.num_nodes, self.dims.ranks_per_node)
        return replace(self, dims=dims, policy=self.critic)
