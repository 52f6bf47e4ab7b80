"""Log-probabilities besides the engine's that the algorithm needs: one forward pass without gradient.

Used for the reference policy, and for the policy at the start of the step where the engine's own
log-probs may not stand in for it.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        in_step: bool = False,
    ) -> None:
        """Store the policy and the micro-batch limits; `in_step` as in `ShardedTokenForward`."""
        self._policy = policy
        self._temperature = temperature
        self._device = device

        def numbers(forward: Forward) -> ShardedTokenForward:
            return ShardedTokenForward(
                forward, collectives, max_sequences=max_sequences, max_tokens=max_tokens, in_step=in_step
            )

        self._all_ranks, self._all_entropies = numbers(self._logprobs), numbers(self._entropies)

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[tuple[float, ...]]:
        """Return one tuple of log-probs a rollout, in `flat_rollouts` order, one number a response token."""
        return self._all_ranks(groups)

    def entropies(self, groups: Sequence[RolloutGroup]) -> list[tuple[float, ...]]:
        """Return the policy's entropy at each response token, in nats, one tuple a rollout, as `__call__`."""
        return self._all_entropies(groups)

    def _entropies(self, samples: Sequence[TrainingSample]) -> Tensor:
        batch = pack(samples, self._device)
        _, entropy_T = self._policy.token_logprobs(
            batch.token_ids_T,
            batch.positions_T,
            batch.segment_ids_T,
            batch.loss_mask_T,
            temperature=self._temperature,
            with_entropy=True,
            **batch.media_arguments,
        )
        assert entropy_T is not None
        return entropy_T

    def _logprobs(self, samples: Sequence[TrainingSample]) -> Tensor:
        batch = pack(samples, self._device)
        logprobs_T, _ = self._policy.token_logprobs(
            batch.token_ids_T,
            batch.positions_T,
            batch.segment_ids_T,
            batch.loss_mask_T,
            temperature=self._temperature,
            **batch.media_arguments,
        )
        return logprobs_T
