"""Log-probabilities besides the engine's that the algorithm needs: one forward pass without gradient.

Used for the reference policy, and for the policy at the start of the step where the engine's own
log-probs may not stand in for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rft_trainer.batches.packing import pack
from rft_trainer.protocols import Collectives, Policy
from rft_trainer.records.rollouts import RolloutGroup, TrainingSample
from rft_trainer.scoring.sharded_forward import Forward, ShardedTokenForward


class LogprobScorer:
    """Scorer of responses under a policy; every rank gets the log-probs of all responses, in order."""

    def __init__(
        self,
        policy: Policy,
        collectives: Collectives,
        *,
        max_sequences: int,
        max_tokens: int,
        temperature: float,
        device: str = "cpu",
        collective_forward: bool = False,
    ) -> None:
        """Store the policy and the micro-batch limits; `collective_forward` as in `ShardedTokenForward`."""
        self._policy = policy
        self._temperature = temperature
        self._device = device

        def sharded(forward: Forward, num_columns: int = 1) -> ShardedTokenForward:
            return ShardedTokenForward(
                forward,
                collectives,
                max_sequences=max_sequences,
                max_tokens=max_tokens,
                collective_forward=collective_forward,
                num_columns=num_columns,
            )

        self._all_ranks, self._all_entropies = sharded(self._logprobs), sharded(self._entropies)
        self._all_of_both = sharded(self._logprobs_and_entropies, 2)

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[tuple[float, ...]]:
        """Return one tuple of log-probs a rollout, in `flat_rollouts` order, one number a response token."""
        return self._all_ranks(groups)

    def of_samples(self, samples: Sequence[TrainingSample]) -> list[tuple[float, ...]]:
        """Return one tuple of log-probs a sample, one number a response token."""
        return self._all_ranks.of_samples(samples)

    def entropies_of_samples(self, samples: Sequence[TrainingSample]) -> list[tuple[float, ...]]:
        """Return the policy's entropy at each response token, in nats, one tuple a sample."""
        return self._all_entropies.of_samples(samples)

    def entropies(self, groups: Sequence[RolloutGroup]) -> list[tuple[float, ...]]:
        """Return the policy's entropy at each response token, in nats, one tuple a rollout, as `__call__`."""
        return self._all_entropies(groups)

    def with_entropies(self, groups: Sequence[RolloutGroup]) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        """Return log-probs and entropies of one forward pass, each as `__call__` and `entropies` return them."""
        logprobs, entropies = self._all_of_both.columns(groups)
        return logprobs, entropies

    def _entropies(self, samples: Sequence[TrainingSample]) -> Tensor:
        return self._forward(samples, with_entropy=True)[1]

    def _logprobs_and_entropies(self, samples: Sequence[TrainingSample]) -> Tensor:
        return torch.stack(self._forward(samples, with_entropy=True), dim=-1)

    def _logprobs(self, samples: Sequence[TrainingSample]) -> Tensor:
        return self._forward(samples, with_entropy=False)[0]

    def _forward(self, samples: Sequence[TrainingSample], *, with_entropy: bool) -> tuple[Tensor, Tensor]:
        """Log-probs [T] and, where they are asked for, entropies [T]; otherwise the second is empty."""
        batch = pack(samples, self._device)
        # at the sampling temperature: ratios compare probabilities of one distribution
        logprobs_T, entropy_T = self._policy.token_logprobs(
            batch.tokens,
            temperature=self._temperature,
            with_entropy=with_entropy,
        )
        assert not with_entropy or entropy_T is not None
        return logprobs_T, logprobs_T.new_empty(0) if entropy_T is None else entropy_T
