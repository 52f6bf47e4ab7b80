"""Log-probabilities that the algorithm asks for besides the engine's: one forward without gradient.

Used for the reference policy, and for the policy at the start of the step where the engine's own
log-probs may not stand in for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rft_trainer.packing import assign_to_ranks, cut_in_order, pack
from rft_trainer.protocols import Collectives, Policy
from rft_trainer.records import RolloutGroup, TrainingSample
from rft_trainer.samples import build_samples, flat_rollouts


class LogprobAnnotator:
    """Scores responses under a policy; every rank gets the log-probs of all, in order."""

    def __init__(
        self,
        policy: Policy,
        collectives: Collectives,
        *,
        max_sequences: int,
        max_tokens: int,
        temperature: float,
        device: str = "cpu",
    ) -> None:
        self._policy = policy
        self._collectives = collectives
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._device = device

    @torch.no_grad()
    def __call__(self, groups: Sequence[RolloutGroup]) -> list[tuple[float, ...]]:
        """One tuple a rollout in `flat_rollouts` order, one number a response token."""
        blank: list[tuple[float, ...]] = [()] * len(flat_rollouts(groups))
        samples = build_samples(groups, [0.0] * len(blank), blank, [])
        mine = assign_to_ranks([s.num_tokens for s in samples], self._collectives.world_size)
        share = mine[self._collectives.rank]
        scored = dict(zip(share, self._score([samples[i] for i in share]), strict=True))
        if self._collectives.world_size > 1:
            scored = self._exchange(samples, mine, scored)
        return [scored[i] for i in range(len(samples))]

    def _score(self, samples: Sequence[TrainingSample]) -> list[tuple[float, ...]]:
        result: list[tuple[float, ...]] = []
        for cut in cut_in_order([s.num_tokens for s in samples], self._max_sequences, self._max_tokens):
            chosen = [samples[i] for i in cut]
            batch = pack(chosen, self._device)
            logprobs_T, _ = self._policy.token_logprobs(
                batch.token_ids_T,
                batch.positions_T,
                batch.segment_ids_T,
                batch.loss_mask_T,
                temperature=self._temperature,
            )
            rows = logprobs_T.cpu().split([s.num_tokens for s in chosen])
            result += [tuple(row[s.prompt_length :].tolist()) for row, s in zip(rows, chosen, strict=True)]
        return result

    def _exchange(
        self, samples: Sequence[TrainingSample], mine: list[list[int]], scored: dict[int, tuple[float, ...]]
    ) -> dict[int, tuple[float, ...]]:
        """Float32 bits travel as they are, so 2 ranks read what 1 rank would have computed."""
        own = torch.tensor([x for i in mine[self._collectives.rank] for x in scored[i]], dtype=torch.float32)
        parts = self._collectives.gather_bytes(own.numpy().tobytes())
        merged: dict[int, tuple[float, ...]] = {}
        for indices, part in zip(mine, parts, strict=True):
            values = torch.frombuffer(bytearray(part), dtype=torch.float32) if part else torch.empty(0)
            lengths = [samples[i].num_tokens - samples[i].prompt_length for i in indices]
            merged |= {i: tuple(row.tolist()) for i, row in zip(indices, values.split(lengths), strict=True)}
        return merged
