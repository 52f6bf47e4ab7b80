"""Sharded forward pass: one number a response token, computed over the ranks' shares and gathered on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rft_trainer.batches.memory_use import memory_use
from rft_trainer.batches.out_of_memory import (
    is_out_of_memory,
    longest_sample,
    no_room_in_collective,
    no_split_left,
)
from rft_trainer.batches.packing import assign_to_ranks, num_filler_batches
from rft_trainer.batches.units import MicroBatching, split_in_order
from rft_trainer.protocols import Collectives
from rft_trainer.records.rollouts import RolloutGroup, TrainingSample
from rft_trainer.scoring.samples import build_samples, flat_rollouts

_LOG = logging.getLogger(__name__)

Forward = Callable[[Sequence[TrainingSample]], Tensor]
"""A micro-batch of samples to one number for each of their tokens, laid end to end: [T], or [T, K] for K numbers."""


class ShardedTokenForward:
    """Forward pass over this rank's share of the rollouts, with an exchange of the results."""

    def __init__(
        self,
        forward: Forward,
        collectives: Collectives,
        *,
        max_sequences: int,
        max_tokens: int,
        collective_forward: bool = False,
        num_columns: int = 1,
    ) -> None:
        """Store the forward and its limits.

        `collective_forward`: every forward is a collective operation, so all ranks must run equally many.
        `num_columns` is K.
        """
        self._num_columns = num_columns
        self._collective_forward = collective_forward
        self._forward = forward
        self._collectives = collectives
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[tuple[float, ...]]:
        """Return one tuple a rollout in `flat_rollouts` order, K numbers a response token; the same on every rank."""
        # samples without advantages or log-probs: only their tokens are needed
        blank: list[tuple[float, ...]] = [()] * len(flat_rollouts(groups))
        return self.of_samples(build_samples(groups, [0.0] * len(blank), blank, []))

    @torch.no_grad()
    def of_samples(self, samples: Sequence[TrainingSample]) -> list[tuple[float, ...]]:
        """Return one tuple a sample, K numbers a response token; the same on every rank."""
        mine = assign_to_ranks([s.num_tokens for s in samples], self._collectives.world_size)
        share = mine[self._collectives.rank]
        values = dict(zip(share, self._of_share([samples[i] for i in share]), strict=True))
        # after the own share: ranks with fewer forwards make up the difference at the end
        if self._collective_forward and samples:
            self._match_collective_forwards(samples)
        if self._collectives.world_size > 1:
            values = self._exchange(samples, mine, values)
        return [values[i] for i in range(len(samples))]

    def columns(self, groups: Sequence[RolloutGroup]) -> list[list[tuple[float, ...]]]:
        """Return K lists, each with one tuple a rollout and one number a response token, of one forward pass."""
        rows = self(groups)
        return [[row[column :: self._num_columns] for row in rows] for column in range(self._num_columns)]

    def _of_share(self, samples: Sequence[TrainingSample]) -> list[tuple[float, ...]]:
        result: list[tuple[float, ...]] = []
        for cut in self._cut([s.num_tokens for s in samples]):
            result += self._of_batch([samples[i] for i in cut])
        return result

    def _of_batch(self, chosen: Sequence[TrainingSample]) -> list[tuple[float, ...]]:
        """Compute one micro-batch; in two halves where memory runs out, which changes no number of it."""
        try:
            rows = self._forward(chosen).cpu().split([s.num_tokens for s in chosen])
            return [tuple(row[s.prompt_length :].flatten().tolist()) for row, s in zip(rows, chosen, strict=True)]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            limits = MicroBatching(self._max_sequences, self._max_tokens, by_tokens=False)
            device = "cuda" if torch.cuda.is_available() and isinstance(error, torch.OutOfMemoryError) else "cpu"
            longest, use = longest_sample(chosen), memory_use(error, None, device)
            if len(chosen) == 1:
                raise no_split_left(limits, longest, self._collectives, use) from error
            if self._collective_forward:
                # the other ranks wait in this forward, and then for as many as they have
                flag = f"--micro_rollout_batch_size {len(chosen) // 2}"
                raise no_room_in_collective(limits, longest, self._collectives, use, flag) from error
        # outside the handler: the error holds the tensors of the forward until it is left
        half = len(chosen) // 2
        _LOG.warning("out of memory: a forward of %d samples is computed in two halves", len(chosen))
        # for the next ones too, since they are as large
        self._max_sequences = min(self._max_sequences, len(chosen) - half)
        return self._of_batch(chosen[:half]) + self._of_batch(chosen[half:])

    def _cut(self, num_tokens: Sequence[int]) -> list[list[int]]:
        return split_in_order(num_tokens, self._max_sequences, self._max_tokens)

    def _match_collective_forwards(self, samples: Sequence[TrainingSample]) -> None:
        ranks, lengths = self._collectives, [s.num_tokens for s in samples]
        for _ in range(num_filler_batches(lengths, ranks.rank, ranks.world_size, self._cut)):
            # the shortest sample, whose result is discarded: only the number of collectives must match
            self._forward([min(samples, key=lambda s: s.num_tokens)])

    def _exchange(
        self, samples: Sequence[TrainingSample], mine: list[list[int]], values: dict[int, tuple[float, ...]]
    ) -> dict[int, tuple[float, ...]]:
        """Gather the values of all ranks as float32 bits, so that 2 ranks hold what 1 rank would have computed."""
        own = torch.tensor([x for i in mine[self._collectives.rank] for x in values[i]], dtype=torch.float32)
        parts = self._collectives.gather_bytes(own.numpy().tobytes())
        merged: dict[int, tuple[float, ...]] = {}
        for indices, part in zip(mine, parts, strict=True):
            # a copy that may be written to: torch warns about read-only memory, and refuses an empty one
            part_values = torch.frombuffer(bytearray(part), dtype=torch.float32) if part else torch.empty(0)
            # every rank knows the assignment, so lengths need not be sent
            lengths = [(samples[i].num_tokens - samples[i].prompt_length) * self._num_columns for i in indices]
            merged |= {i: tuple(row.tolist()) for i, row in zip(indices, part_values.split(lengths), strict=True)}
        return merged
