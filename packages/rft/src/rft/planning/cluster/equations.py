"""Operations, bytes and seconds of the parts of a step: one equation a function, numbers in, a number out.

Symbols: P parameters, M those in matrices that a token is multiplied with (layers and head), L layers, q the width of
the queries, h that of the hidden states, n tokens of a sample. Bytes are bytes, seconds are seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rft.planning.cluster.hardware import NETWORK, NVLINK, PCIE, RING_NETWORK, RING_NVLINK, RING_START, TREE_STEP
from rft.planning.predicted_speed import active_matrices
from rft_dist.planning.memory_estimate import DecoderSizes, cache_bytes_of_token

ADAM_BYTES = 28
"""Read or written for a parameter in AdamW's step in float32: gradient once, weight and both moments twice."""


def matrix_weights(sizes: DecoderSizes) -> int:
    """M = weights of the layers' matrices that a token goes through, and V h of the output matrix."""
    return active_matrices(sizes) + sizes.vocab * sizes.hidden


def forward_flops(sizes: DecoderSizes, num_tokens: int) -> float:
    """F(n) / 3 = 2 M n + 2 L q n^2: operations of one forward of one sample.

    A third of `predicted_speed`'s F(n); the last term is attention under a causal mask (Chowdhery et al. 2022, "PaLM",
    appendix B, with the half that the mask leaves).
    """
    attention = 2.0 * sizes.layers * sizes.query_width * num_tokens**2
    return 2.0 * matrix_weights(sizes) * num_tokens + attention


def training_flops(sizes: DecoderSizes, num_tokens: int, *, recomputes: bool) -> float:
    """F(n), or 4/3 F(n) where layers are computed again: forward and backward of one sample, as the GPU computes them.

    The backward takes twice the operations of the forward.
    """
    return (4 if recomputes else 3) * forward_flops(sizes, num_tokens)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that exchange something, and how they lie on the machines."""

    size: int
    of_machine: int
    """Of them on one machine; the other GPUs of it are in groups that exchange at the same time."""

    @property
    def num_machines(self) -> int:
        """Return the machines that they are on."""
        return self.size // self.of_machine

    @property
    def bandwidth(self) -> float:
        """Bytes a second into each rank: NVLink, and between machines at most a port for each rank of a machine.

        A ring enters a machine once and passes all its ranks, so that their ports work side by side.
        """
        if self.num_machines == 1:
            return NVLINK.value
        return min(NVLINK.value, self.of_machine * NETWORK.value)


def gathered_bytes(total: float, size: int) -> float:
    """(S - 1) / S B: what each of S ranks receives to have B bytes of which each has a part (or sends, to sum B).

    The same of an all-gather and a reduce-scatter (NVIDIA/nccl-tests, doc/PERFORMANCE.md).
    """
    return total * (size - 1) / size


def gather_seconds(total: float, group: RankGroup, pieces: int = 1) -> float:
    """(S - 1) / S B / w + pieces (a + (S - K) b + (K - 1) c): an all-gather or a reduce-scatter on a ring.

    K machines, w the bandwidth, a its start, b and c a step within and between machines: S - 1 steps, K - 1 of them
    between machines (NVIDIA/nccl, ncclTuningLatRing).
    """
    if group.size == 1:
        return 0.0
    machines = group.num_machines
    steps = (group.size - machines) * RING_NVLINK.value + (machines - 1) * RING_NETWORK.value
    return gathered_bytes(total, group.size) / group.bandwidth + pieces * (RING_START.value + steps)


def sum_seconds(total: float, group: RankGroup, pieces: int = 1) -> float:
    """The faster one of a ring and a tree: an all-reduce of B bytes in pieces.

    Ring: 2 (S - 1) / S B / w and twice the steps of `gather_seconds`. Tree: 2 B / w and, a piece,
    2 (S / K - 1 + log2 K) steps (NVIDIA/nccl, ncclTuningLatTree).
    """
    if group.size == 1:
        return 0.0
    ring = 2 * gather_seconds(total, group, pieces) - pieces * RING_START.value
    hops = group.of_machine - 1 + math.log2(group.num_machines)
    return min(ring, 2 * total / group.bandwidth + pieces * (RING_START.value + 2 * hops * TREE_STEP.value))


def optimizer_seconds(parameters: float, bandwidth: float) -> float:
    """28 P / w of the P parameters that a rank steps on: AdamW reads and writes memory and computes next to nothing."""
    return ADAM_BYTES * parameters / bandwidth


def decode_step_bytes(sizes: DecoderSizes, rows: float, context: float, weight_bytes: int, gpus: int) -> float:
    """(M w + k c 2 L v w) / S: what each of an engine's S GPUs reads to draw one token for each of k rows.

    All matrices, and the keys and values (v wide) of c tokens a row.
    """
    cache = rows * context * cache_bytes_of_token(sizes, weight_bytes)
    return (matrix_weights(sizes) * weight_bytes + cache) / gpus


def decode_step_flops(sizes: DecoderSizes, rows: float, context: float, gpus: int) -> float:
    """k (2 M + 4 L q c) / S: operations of one token for each of k rows that see c tokens, on each of S GPUs."""
    return rows * (2.0 * matrix_weights(sizes) + 4.0 * sizes.layers * sizes.query_width * context) / gpus


def host_copy_seconds(num_bytes: float) -> float:
    """2 B / w: B bytes to the host and back over PCIe."""
    return 2 * num_bytes / PCIE.value
