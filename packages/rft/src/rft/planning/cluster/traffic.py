"""Bytes that the ranks of each strategy exchange in a step, and the seconds that this takes.

What is exchanged, and when, is that of `rft_dist.strategies`: replicas sum float32 gradients once an update, after the
last backward; FSDP2 and ZeRO 3 gather the weights for each forward and each backward and sum gradients into parts after
each backward; a tensor group sums the hidden states twice a layer, each way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rft.planning.cluster.equations import RankGroup, gather_seconds, gathered_bytes, sum_seconds
from rft.planning.cluster.workload import StepShape
from rft_dist.planning.memory_estimate import BUCKET_BYTES, DecoderSizes

StrategyKind = Literal["replicas", "zero2", "zero3", "sharded", "hybrid", "tensor", "tensor_sharded"]
ZERO_BUCKET = 16 * 2**20
"""Elements that DeepSpeed gathers or sums at a time (`rft_dist.strategies.zero`)."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """All exchanges of one kind of one rank, over a whole step."""

    num_bytes: float
    """That it receives."""
    seconds: float
    hides: bool
    """Whether it goes on while layers compute."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy on some ranks, and the settings that choose it."""

    name: str
    kind: StrategyKind
    machines: int
    ranks_of_machine: int
    tp_size: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings, all of a strategy."""

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.machines * self.ranks_of_machine

    @property
    def dp_size(self) -> int:
        """Return the ranks that take different samples."""
        return self.num_ranks // self.tp_size

    @property
    def everyone(self) -> RankGroup:
        """Return the group of all ranks."""
        return RankGroup(self.num_ranks, self.ranks_of_machine)

    @property
    def tensor(self) -> RankGroup:
        """Return a group whose ranks hold the parts of each matrix."""
        return RankGroup(self.tp_size, self.tp_size)

    @property
    def shards(self) -> RankGroup:
        """Return a group whose ranks divide the state of a model, or of a part of it, among them."""
        if self.kind == "hybrid":
            return RankGroup(self.changes["shard_size"], self.ranks_of_machine)
        return RankGroup(self.dp_size, self.ranks_of_machine // self.tp_size)

    @property
    def copies(self) -> RankGroup:
        """Return a group whose ranks hold the same shard of a hybrid, at most one on each machine."""
        return RankGroup(self.num_ranks // self.shards.size, 1)

    @property
    def gathers_weights(self) -> bool:
        """Return whether a rank keeps a part of the weights between two forwards, and gathers a layer to compute."""
        return self.kind in ("zero3", "sharded", "hybrid", "tensor_sharded")

    @property
    def loads_whole(self) -> bool:
        """Return whether each rank loads the whole model before it keeps a part of it; `--meta_init` does not."""
        return self.kind in ("zero3", "tensor", "tensor_sharded")


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of what is exchanged."""

    weight: int
    """Of an element as it is computed with."""
    gradient: int
    """Of an element of gradients that are summed into shards."""


def logprob_exchanges(candidate: Candidate, sizes: DecoderSizes, shape: StepShape, widths: Widths) -> list[Exchange]:
    """Return what the passes for log-probabilities exchange."""
    samples = -(-shape.num_samples // candidate.dp_size)
    passes = shape.forwards * shape.micro_batches(samples)
    found: list[Exchange] = []
    if candidate.gathers_weights:
        found.append(_gather(candidate, sizes, widths.weight, passes))
    if candidate.tp_size > 1:
        tokens = shape.forwards * samples * shape.sample_tokens
        found.append(_hidden_sums(candidate, sizes, tokens * widths.weight, passes, layer_sums=2))
    return found


def update_exchanges(candidate: Candidate, sizes: DecoderSizes, shape: StepShape, widths: Widths) -> list[Exchange]:
    """Return what the updates of one rollout exchange."""
    samples = -(-shape.num_samples * shape.epochs // (shape.updates * candidate.dp_size))
    passes = shape.updates * shape.micro_batches(samples)
    found: list[Exchange] = []
    if candidate.tp_size > 1:
        tokens = shape.updates * samples * shape.sample_tokens
        layer_sums = 6 if shape.recomputes else 4
        found.append(_hidden_sums(candidate, sizes, tokens * widths.weight, passes, layer_sums=layer_sums))
    if candidate.gathers_weights:
        found.append(_gather(candidate, sizes, widths.weight, 2 * passes))
        width = 4 if candidate.kind == "zero3" else widths.gradient
        found.append(_gather(candidate, sizes, width, passes))
        if candidate.kind == "hybrid":
            total = width * sizes.parameters / candidate.shards.size
            found.append(_sum(total, candidate.copies, sizes.layers + 1, passes, hides=True))
    elif candidate.kind == "zero2":
        pieces = -(-sizes.parameters // ZERO_BUCKET)
        found.append(_repeated(4.0 * sizes.parameters, candidate.everyone, pieces, passes, hides=True))
        weights = float(widths.weight * sizes.parameters)
        found.append(_repeated(weights, candidate.everyone, pieces, shape.updates, hides=False))
    else:
        total = 4 * sizes.parameters / candidate.tp_size
        pieces = -(-int(total) // BUCKET_BYTES)
        found.append(_sum(total, candidate.shards, pieces, shape.updates, hides=False))
    return found


def weight_exchange(candidate: Candidate, sizes: DecoderSizes, widths: Widths) -> Exchange:
    """Return what it takes to have the whole weights on every rank, once, for an engine with a copy of its own."""
    total = float(widths.weight * sizes.parameters)
    if candidate.kind in ("replicas", "zero2"):
        return Exchange(0.0, 0.0, hides=False)
    group = candidate.shards if candidate.kind == "hybrid" else candidate.everyone
    group = candidate.tensor if candidate.kind == "tensor" else group
    return _repeated(total, group, sizes.layers + 1, 1, hides=False)


def exposed_seconds(exchanges: Iterable[Exchange], compute_seconds: float) -> float:
    """Seconds that exchanges add: all of those that the computation waits for, of the others what is longer than it."""
    rows = list(exchanges)
    hidden = sum(row.seconds for row in rows if row.hides)
    return sum(row.seconds for row in rows if not row.hides) + max(0.0, hidden - compute_seconds)


def _gather(candidate: Candidate, sizes: DecoderSizes, width: int, times: int) -> Exchange:
    """An all-gather of weights, or a reduce-scatter of gradients, layer by layer; the rest of the model is one more."""
    total = width * sizes.parameters / candidate.tp_size
    return _repeated(total, candidate.shards, sizes.layers + 1, times, hides=True)


def _repeated(total: float, group: RankGroup, pieces: int, times: int, *, hides: bool) -> Exchange:
    seconds = times * gather_seconds(total, group, pieces)
    return Exchange(times * gathered_bytes(total, group.size), seconds, hides)


def _sum(total: float, group: RankGroup, pieces: int, times: int, *, hides: bool) -> Exchange:
    seconds = times * sum_seconds(total, group, pieces)
    return Exchange(2 * times * gathered_bytes(total, group.size), seconds, hides)


def _hidden_sums(
    candidate: Candidate, sizes: DecoderSizes, element_bytes: float, passes: int, *, layer_sums: int
) -> Exchange:
    """Sums of the hidden states over a tensor group: of each layer, and one of the embedding."""
    count = layer_sums * sizes.layers + 1
    return _sum(element_bytes * sizes.hidden * count, candidate.tensor, passes * count, 1, hides=False)
