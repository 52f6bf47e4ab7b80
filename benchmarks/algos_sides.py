"""What both sides of `algos.py` are given: the same tokens, packed in one row for ours, padded for the peers.

Each side of a case gives a tuple of results, which `algos.py` compares before it times: numbers, [T] packed
against [N, W] padded (read at the mask), or None for what the peer does not compute alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rft_algos.algorithms.components import Advantage
from rft_algos.algorithms.published import PolicyAlgorithm
from rft_algos.objectives import RolloutBatch, compute_advantages
from rft_algos.packed.packed_ids import packed_segment_ids
from rft_core import keyed_random

GROUP_SIZE = 8
WEIGHTS = (1.0, 1.0)
"""Of the two components of the rewards, once normalised: those of `choices.Gdpo`."""
Results = tuple[Tensor | None, ...]
Run = Callable[[], Results]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One function of ours, in all that the peer's does, beside the peer's."""

    name: str
    peer_name: str
    ours: Run
    peer: Run
    bytes_per_token: int
    """What must be read and written once, whoever computes it: inputs, results and gradients in float32."""
    bare: Run | None = None
    """Ours without what only goes with it (the record's dispatch, metrics); timed, not compared."""
    gate: tuple[Run, Run] | None = None
    """Compared in the place of `ours` and `peer`, where those draw at random."""
    departure: str = ""
    """What the peer computes differently; the gate leaves that out."""


class Batch:
    """N ragged sequences in groups of 8, lengths keyed and uniform between half of the width W and W."""

    def __init__(self, num_sequences: int, width: int, *, observations: bool = False) -> None:
        self.num_sequences, self.width = num_sequences, width
        self.suffix = ", observations" if observations else ""
        """Of the names of cases."""
        key = keyed_random.derive_key(7, "lengths")
        self.lengths_N = keyed_random.integers(key, num_sequences, width // 2, width + 1)
        self.bool_mask_BT = torch.arange(width) < self.lengths_N[:, None]
        self.num_tokens = int(self.lengths_N.sum())
        generator = torch.Generator().manual_seed(7)

        def normal(scale: float) -> Tensor:
            return scale * torch.randn(self.num_tokens, generator=generator)

        # mostly certain tokens, some with a fraction of a percent
        self.logprobs_T = -normal(1.0).abs() * normal(1.0).abs() - 1e-3
        self.old_logprobs_T = (self.logprobs_T + normal(0.15)).clamp(max=-1e-3)
        self.reference_logprobs_T = (self.logprobs_T + normal(0.3)).clamp(max=-1e-3)
        self.behaviour_logprobs_T = (self.old_logprobs_T + normal(0.02)).clamp(max=-1e-3)
        self.entropy_T = normal(1.0).abs()
        self.old_values_T, self.values_T, self.returns_T = normal(0.5), normal(0.5), normal(0.7)
        self.components_NK = torch.rand(num_sequences, 2, generator=generator)
        self.rewards_N = self.components_NK @ torch.tensor(WEIGHTS)
        self.greedy_rewards_N = torch.rand(num_sequences, generator=generator)
        self.group_ids_N = torch.arange(num_sequences) // GROUP_SIZE
        scores_N = self.rewards_N - self.rewards_N.mean()
        # not around 0: the loss would be a difference of equal sums, and its relative error that of nothing
        self.advantages_T = (scores_N / scores_N.std() + 0.5)[self.segment_ids_T]
        self.num_loss_tokens = int(self.mask_T.sum())

    @cached_property
    def segment_ids_T(self) -> Tensor:
        """[T] int64."""
        return packed_segment_ids(self.lengths_N)

    @cached_property
    def mask_T(self) -> Tensor:
        """[T] bool, all true, because padding is not there; with observations every fourth stretch of 32 is false."""
        mask_T = torch.ones(self.num_tokens, dtype=torch.bool)
        if self.suffix:
            mask_T = torch.arange(self.num_tokens) // 32 % 4 != 1
            mask_T[self.lengths_N.cumsum(0) - 1] = True  # the reward is there
        return mask_T

    @cached_property
    def mask_BT(self) -> Tensor:
        """[N, W] float32, the type with which the peers are fastest."""
        return self.padded(self.mask_T.float())

    @cached_property
    def rewards_BT(self) -> Tensor:
        """[N, W] the reward at the last token of each sequence."""
        rewards_BT = torch.zeros(self.num_sequences, self.width)
        rewards_BT[torch.arange(self.num_sequences), self.lengths_N - 1] = self.rewards_N
        return rewards_BT

    @cached_property
    def index_N(self) -> np.ndarray:
        """[N] the groups, as verl takes them."""
        return self.group_ids_N.numpy()

    def padded(self, values_T: Tensor) -> Tensor:
        """[N, W], 0 at padding."""
        padded_BT = torch.zeros(self.num_sequences, self.width, dtype=values_T.dtype)
        padded_BT[self.bool_mask_BT] = values_T
        return padded_BT

    def packed(self, values_BT: Tensor) -> Tensor:
        """[T] of [N, W]."""
        return values_BT[self.bool_mask_BT]

    def loss_tokens(self, values: Tensor) -> Tensor:
        """What is compared: of [T] and [N, W] the loss tokens, other results as they are."""
        values_T = self.packed(values) if values.ndim == 2 else values
        return values_T[self.mask_T] if values_T.shape == self.mask_T.shape else values_T

    @cached_property
    def rollouts(self) -> RolloutBatch:
        """The batch as `objectives.compute_advantages` takes it."""
        return RolloutBatch(
            rewards_N=self.rewards_N,
            group_ids_N=self.group_ids_N,
            loss_mask_T=self.mask_T,
            segment_ids_T=self.segment_ids_T,
            old_logprobs_T=self.old_logprobs_T,
            behaviour_logprobs_T=self.behaviour_logprobs_T,
            reference_logprobs_T=self.reference_logprobs_T,
            entropy_T=self.entropy_T,
            values_T=self.old_values_T,
            greedy_rewards_N=self.greedy_rewards_N,
            components_NK=self.components_NK,
        )

    def credited(self, advantage: Advantage, *, normalise: bool = False) -> Run:
        """The whole way of a record from rewards to the advantages of tokens."""
        record = PolicyAlgorithm(advantage=advantage, normalise_advantages=normalise)

        def run() -> Results:
            made = compute_advantages(record, self.rollouts)
            return made.advantages_T, made.returns_T

        return run


def with_gradient(loss_of: Callable[[Tensor], Tensor], values: Tensor) -> Results:
    """A loss and its gradient with respect to the values."""
    leaf = values.detach().requires_grad_()
    loss = loss_of(leaf)
    loss.backward()
    return loss.detach(), leaf.grad
