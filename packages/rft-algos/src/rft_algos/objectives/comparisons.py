"""The advantages of sequences and the corrections of tokens, by choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rft_algos import advantages, choices, corrections
from rft_algos.objectives.registry import implements
from rft_core.errors import OptionsError

if TYPE_CHECKING:
    from rft_algos.objectives.credit import RolloutBatch


@implements(choices.GroupNorm)
def _group_norm(choice: choices.GroupNorm, batch: RolloutBatch) -> Tensor:
    return advantages.group_norm(batch.rewards_N, batch.group_ids_N, epsilon=choice.epsilon)


@implements(choices.GroupCentred)
def _group_centred(choice: choices.GroupCentred, batch: RolloutBatch) -> Tensor:
    return advantages.group_centred(batch.rewards_N, batch.group_ids_N)


@implements(choices.BatchStd)
def _batch_std(choice: choices.BatchStd, batch: RolloutBatch) -> Tensor:
    return advantages.batch_std(batch.rewards_N, batch.group_ids_N, epsilon=choice.epsilon)


@implements(choices.LeaveOneOut)
def _leave_one_out(choice: choices.LeaveOneOut, batch: RolloutBatch) -> Tensor:
    return advantages.leave_one_out(batch.rewards_N, batch.group_ids_N)


@implements(choices.MaxRl)
def _max_rl(choice: choices.MaxRl, batch: RolloutBatch) -> Tensor:
    return advantages.max_rl(batch.rewards_N, batch.group_ids_N)


@implements(choices.Opo)
def _opo(choice: choices.Opo, batch: RolloutBatch) -> Tensor:
    return advantages.opo(batch.rewards_N, batch.group_ids_N, batch.lengths_N)


@implements(choices.PassAtK)
def _pass_at_k(choice: choices.PassAtK, batch: RolloutBatch) -> Tensor:
    other_N = batch.rewards_N[(batch.rewards_N != 0) & (batch.rewards_N != 1)]
    if other_N.numel():
        raise OptionsError(
            code="algorithm.rewards_not_binary",
            what=f"a reward of {float(other_N[0]):g} with pass@k",
            where="rewards of the step",
            why="whether one of k draws is right is defined for rewards of 0 and 1",
            do="--advantage_estimator best_of_group",
        )
    return advantages.pass_at_k(batch.rewards_N, batch.group_ids_N, k=choice.k)


@implements(choices.BestOfGroup)
def _best_of_group(choice: choices.BestOfGroup, batch: RolloutBatch) -> Tensor:
    return advantages.best_of_group(batch.rewards_N, batch.group_ids_N, epsilon=choice.epsilon)


@implements(choices.Gdpo)
def _gdpo(choice: choices.Gdpo, batch: RolloutBatch) -> Tensor:
    assert batch.components_NK is not None, "GDPO needs the parts of the reward"
    weights_K = batch.component_weights_K
    if weights_K is None:
        weights_K = torch.ones(batch.components_NK.shape[1], dtype=torch.float64)
    advantages_N = advantages.gdpo(batch.components_NK, batch.group_ids_N, weights_K, epsilon=choice.epsilon)
    if not choice.over_batch:
        return advantages_N
    everyone_N = torch.ones_like(advantages_N, dtype=torch.bool)
    moments = advantages.moments(advantages_N, everyone_N)
    return advantages.whiten(advantages_N, everyone_N, moments, epsilon=choice.epsilon)


@implements(choices.Gpg)
def _gpg(choice: choices.Gpg, batch: RolloutBatch) -> Tensor:
    return advantages.gpg(batch.rewards_N, batch.group_ids_N)


@implements(choices.CpgdWeighted)
def _cpgd(choice: choices.CpgdWeighted, batch: RolloutBatch) -> Tensor:
    return advantages.cpgd(
        batch.rewards_N,
        batch.group_ids_N,
        weighting=choice.weighting,
        epsilon=choice.epsilon,
        max_weight=choice.max_weight,
    )


@implements(choices.ReMax)
def _remax(choice: choices.ReMax, batch: RolloutBatch) -> Tensor:
    assert batch.greedy_rewards_N is not None, "ReMax needs the rewards of greedy responses"
    return advantages.remax(batch.rewards_N, batch.greedy_rewards_N)


@implements(choices.TruncateTokens)
def _truncate_tokens(
    choice: choices.TruncateTokens, log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor
) -> Tensor:
    return corrections.truncate_tokens(log_rho_T, choice.cap)


@implements(choices.TruncateSequences)
def _truncate_sequences(
    choice: choices.TruncateSequences, log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor
) -> Tensor:
    return corrections.truncate_sequences(log_rho_T, loss_mask_T, segment_ids_T, choice.cap)


@implements(choices.MaskTokens)
def _mask_tokens(choice: choices.MaskTokens, log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor) -> Tensor:
    return corrections.mask_tokens(log_rho_T, choice.low, choice.high)


@implements(choices.MaskSequences)
def _mask_sequences(
    choice: choices.MaskSequences, log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor
) -> Tensor:
    return corrections.mask_sequences(log_rho_T, loss_mask_T, segment_ids_T, choice.low, choice.high)


@implements(choices.MaskGeometric)
def _mask_geometric(
    choice: choices.MaskGeometric, log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor
) -> Tensor:
    return corrections.mask_sequences_geometric(log_rho_T, loss_mask_T, segment_ids_T, choice.low, choice.high)
