"""Policy loss of a micro-batch: an algorithm of `rft_algos` applied to packed batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rft_algos import objectives
from rft_algos.algorithms.published import PolicyAlgorithm
from rft_algos.objectives import Coefficients
from rft_core.errors import OptionsError
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample


class PolicyObjective:
    """The policy loss of one algorithm on one micro-batch."""

    def __init__(self, record: PolicyAlgorithm, coefficients: Callable[[], Coefficients] | None = None) -> None:
        self._record = record
        self._coefficients = coefficients or (lambda: Coefficients.of(record))

    @property
    def needs_entropy(self) -> bool:
        """Return whether the loss has an entropy term, so that gradients flow through the entropy."""
        return self._record.needs_entropy

    @property
    def logs_entropy(self) -> bool:
        """Return True: a collapse of the policy shows in its entropy first."""
        return True

    @property
    def by_token(self) -> bool:
        """Return whether the loss of a token depends on that token alone, so that it can be computed token by token."""
        return objectives.is_by_token(self._record)

    def check(self, samples: Sequence[TrainingSample]) -> None:
        """Refuse samples of a loop by hand that lack log-probs of the loss, before a forward is made.

        Raises:
            OptionsError: those of the policy before the step, or of the reference policy, are missing.
        """
        trained = [sample for sample in samples if sample.num_tokens > sample.prompt_length]
        if any(not sample.old_logprobs for sample in trained):
            why = "its ratio is that of the policy to what it was before the step"
            raise _missing(self._record, "of the policy before the step", why, "old=policy.logprobs(batch)")
        needs_reference = self._record.kl_place == "loss" and self._record.needs_reference
        if needs_reference and any(not sample.reference_logprobs for sample in trained):
            why = "its loss has a KL term, kl_place = loss; open_loop(..., reference=True) loads the reference policy"
            raise _missing(self._record, "of a reference policy", why, "reference=policy.reference_logprobs(batch)")

    def token_losses(self, batch: TokenBatch, counts: Counts) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return a function (log-probs [N], entropies [N], token indices [N]) -> their losses [N].

        Over all loss tokens they add up to the loss of the micro-batch.
        """
        assert batch.old_logprobs_T is not None
        weights_T = objectives.token_weights(
            self._record,
            loss_mask_T=batch.loss_mask_T,
            segment_ids_T=batch.segment_ids_T,
            num_loss_tokens=counts.num_loss_tokens,
            num_sequences=counts.num_sequences,
            dtype=torch.float64,
        )
        # read at every call, since controllers change them between steps
        coefficients = self._coefficients()
        old_T, reference_T = batch.old_logprobs_T, batch.reference_logprobs_T

        def losses(logprobs_N: Tensor, entropy_N: Tensor, tokens_N: Tensor) -> Tensor:
            def at_tokens(values_T: Tensor | None) -> Tensor | None:
                return None if values_T is None else values_T[tokens_N]

            return objectives.token_losses(
                self._record,
                logprobs_T=logprobs_N,
                old_logprobs_T=old_T[tokens_N],
                reference_logprobs_T=at_tokens(reference_T),
                advantages_T=batch.advantages_T[tokens_N],
                weights_T=weights_T[tokens_N],
                entropy_T=entropy_N if self.needs_entropy else None,
                token_weights_T=at_tokens(batch.token_weights_T),
                selected_T=at_tokens(batch.selected_T),
                coefficients=coefficients,
            )

        return losses

    def __call__(
        self, batch: TokenBatch, logprobs_T: Tensor, entropy_T: Tensor | None, counts: Counts
    ) -> objectives.LossOutput:
        """Compute the policy loss with the denominators of the whole optimizer step."""
        old_logprobs_T, behaviour_T = batch.old_logprobs_T, batch.behaviour_logprobs_T
        reference_T, selected_T = batch.reference_logprobs_T, batch.selected_T
        # only prompts, or responses without a token, in this micro-batch: nothing is masked in, and what the loss needs
        # of a response is there for none of them
        if old_logprobs_T is None:
            old_logprobs_T = torch.zeros_like(logprobs_T)
            if reference_T is None and self._record.needs_reference and self._record.kl_place == "loss":
                reference_T = old_logprobs_T
            if behaviour_T is None and self._record.off_policy_delta is not None:
                behaviour_T = old_logprobs_T
            if selected_T is None and self._record.surrogate.is_selective:
                selected_T = torch.zeros_like(batch.loss_mask_T)
        return objectives.policy_loss(
            self._record,
            logprobs_T=logprobs_T,
            old_logprobs_T=old_logprobs_T,
            reference_logprobs_T=reference_T,
            advantages_T=batch.advantages_T,
            loss_mask_T=batch.loss_mask_T,
            segment_ids_T=batch.segment_ids_T,
            entropy_T=entropy_T,
            num_loss_tokens=counts.num_loss_tokens,
            num_sequences=counts.num_sequences,
            behaviour_logprobs_T=behaviour_T,
            token_weights_T=batch.token_weights_T,
            selected_T=selected_T,
            coefficients=self._coefficients(),
        )


def _missing(record: PolicyAlgorithm, whose: str, why: str, argument: str) -> OptionsError:
    return OptionsError(
        code="loss.no_logprobs",
        what=f"the loss of {record.name} on a batch without log-probs {whose}",
        where="trainer.forward_backward",
        why=why,
        state="no weight was changed",
        do=f"batch = batch.with_logprobs({argument})",
    )
