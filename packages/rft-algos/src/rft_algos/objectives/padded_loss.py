"""The loss of an algorithm record from padded rows [batch, time]: advantages, loss and denominators in one call.

Denominators are those of the whole batch, also where `rows` names a part of it: the losses of the parts add up to that
of the batch. Over several ranks give the sums over ranks as `num_loss_tokens` and `num_sequences`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from rft_algos.algorithms.published import PolicyAlgorithm
from rft_algos.input_checks import check_positive, refuse
from rft_algos.losses.aggregation import Count
from rft_algos.objectives.advantages import AdvantageOutput, RolloutBatch, compute_advantages
from rft_algos.objectives.policy_loss import LossOutput, policy_loss
from rft_algos.packed.padded_rows import PaddedRows
from rft_algos.packed.tensor_checks import check_group_ids, check_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBatch:
    """All rollouts of a step as padded rows: B sequences in rows of L positions, prompts and padding masked.

    What stands at masked positions, NaN included, reaches nothing. Optional fields are None where the algorithm does
    not ask for them.
    """

    rewards_B: Tensor
    """[B] rewards."""
    group_ids_B: Tensor
    """[B] int64, equal for the rollouts of one prompt."""
    loss_mask_BL: Tensor
    """[B, L] bool, true at tokens that the policy sampled."""
    old_logprobs_BL: Tensor
    """[B, L] log-probs of the policy at the start of the step, in nats."""
    behaviour_logprobs_BL: Tensor | None = None
    """[B, L] log-probs of the engine that sampled; for corrections."""
    reference_logprobs_BL: Tensor | None = None
    """[B, L] log-probs of the reference policy; for a KL term."""
    entropy_BL: Tensor | None = None
    """[B, L] entropy at the start of the step; where tokens are selected by it."""
    values_BL: Tensor | None = None
    """[B, L] a critic's estimate before each token; for GAE."""
    greedy_rewards_B: Tensor | None = None
    """[B] reward of the greedy response to each prompt; for ReMax."""
    components_BK: Tensor | None = None
    """[B, K] the parts of the reward; for GDPO."""

    def flat(self) -> RolloutBatch:
        """Return the batch in the flat form, such as `compute_advantages` takes (shapes [T], T = B L)."""
        rows = PaddedRows.of(self.loss_mask_BL)
        check_group_ids(group_ids_B=self.group_ids_B)
        for name, values in (("rewards_B", self.rewards_B), ("group_ids_B", self.group_ids_B)):
            check_tensors(**{name: values})
            if values.shape != (rows.num_rows,):
                refuse(f"{name} must be one a row, its shape is {tuple(values.shape)} for {rows.num_rows} rows")
        return RolloutBatch(
            rewards_N=self.rewards_B,
            group_ids_N=self.group_ids_B,
            loss_mask_T=rows.loss_mask_T,
            segment_ids_T=rows.segment_ids_T,
            old_logprobs_T=rows.pack(self.old_logprobs_BL, "old_logprobs_BL"),
            behaviour_logprobs_T=_packed(rows, self.behaviour_logprobs_BL, "behaviour_logprobs_BL"),
            reference_logprobs_T=_packed(rows, self.reference_logprobs_BL, "reference_logprobs_BL"),
            entropy_T=_packed(rows, self.entropy_BL, "entropy_BL"),
            values_T=_packed(rows, self.values_BL, "values_BL"),
            greedy_rewards_N=self.greedy_rewards_B,
            components_NK=self.components_BK,
        )


def padded_loss(
    record: PolicyAlgorithm,
    batch: PaddedBatch,
    logprobs_BL: Tensor,
    *,
    entropy_BL: Tensor | None = None,
    advantages: AdvantageOutput | Tensor | None = None,
    rows: slice = slice(None),
    num_loss_tokens: Count | None = None,
    num_sequences: Count | None = None,
) -> LossOutput:
    """The loss of a record on padded rows: `compute_advantages`, then `policy_loss`.

    loss = sum_t w_t l_t over the loss tokens of `rows`, with w_t, l_t and the metrics of `policy_loss`.

    Args:
        record: the algorithm.
        batch: all rollouts of the step.
        logprobs_BL: [B, L] log-probs of the current policy at `rows`, in nats; the gradient flows through them.
        entropy_BL: [B, L] entropy of the current policy at `rows`, where the record has an entropy bonus.
        advantages: from `compute_advantages(record, batch.flat())`, once a step where the batch is cut; or advantages
            of your own, [B] or [B, L] of the whole batch; None to compute them here.
        rows: the rows of this micro-batch, such as slice(0, 8); all rows by default.
        num_loss_tokens: loss tokens of the whole step; None for those of the batch.
        num_sequences: sequences of the whole step; None for the rows of the batch that have a loss token.

    Returns:
        The loss and the metrics.
    """
    if isinstance(batch, dict):
        refuse("batch must be a PaddedBatch, it is a dict", do="PaddedBatch(**batch)")
    _check(record, logprobs_BL, batch.old_logprobs_BL, advantages)
    counts = {"num_loss_tokens": num_loss_tokens, "num_sequences": num_sequences}
    check_positive(**{name: count for name, count in counts.items() if not isinstance(count, Tensor)})
    layout, part = PaddedRows.of(batch.loss_mask_BL), PaddedRows.of(batch.loss_mask_BL[rows])
    if advantages is None:
        advantages = compute_advantages(record, batch.flat())
    if isinstance(advantages, Tensor):
        advantages = AdvantageOutput(layout.pack(advantages, "advantages"), None, None, None, None, {})

    def of_rows(values_T: Tensor | None) -> Tensor | None:
        return None if values_T is None else part.pack(values_T.reshape(layout.num_rows, layout.num_columns)[rows])

    return policy_loss(
        record,
        logprobs_T=part.pack(logprobs_BL, "logprobs_BL"),
        old_logprobs_T=part.pack(batch.old_logprobs_BL[rows], "old_logprobs_BL"),
        reference_logprobs_T=_packed(part, batch.reference_logprobs_BL, "reference_logprobs_BL", rows),
        behaviour_logprobs_T=_packed(part, batch.behaviour_logprobs_BL, "behaviour_logprobs_BL", rows),
        entropy_T=_packed(part, entropy_BL, "entropy_BL"),
        advantages_T=part.pack(layout.unpack(advantages.advantages_T)[rows]),
        token_weights_T=of_rows(advantages.weights_T),
        selected_T=of_rows(advantages.selected_T),
        loss_mask_T=part.loss_mask_T,
        segment_ids_T=part.segment_ids_T,
        num_loss_tokens=layout.num_loss_tokens.clamp(min=1) if num_loss_tokens is None else num_loss_tokens,
        num_sequences=layout.num_sequences.clamp(min=1) if num_sequences is None else num_sequences,
    )


def _packed(layout: PaddedRows, values_BL: Tensor | None, name: str, rows: slice = slice(None)) -> Tensor | None:
    return None if values_BL is None else layout.pack(values_BL[rows], name)


def _check(record: object, logprobs_BL: object, old_logprobs_BL: object, advantages: object) -> None:
    if isinstance(record, type | str):
        name = record.__name__ if isinstance(record, type) else repr(record)
        made = f"{name}()" if isinstance(record, type) else f"by_name({name})()"
        refuse(f"record must be a record of an algorithm, it is {name}", do=made)
    check_tensors(logprobs_BL=logprobs_BL, old_logprobs_BL=old_logprobs_BL)
    if isinstance(advantages, list | tuple):
        check_tensors(advantages=cast(object, advantages))
    if isinstance(logprobs_BL, Tensor) and not logprobs_BL.is_floating_point():
        refuse(f"logprobs_BL must be floating, they are {logprobs_BL.dtype}", why="a gradient flows through them")
