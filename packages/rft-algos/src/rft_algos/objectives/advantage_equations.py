"""The advantages of sequences and the corrections of tokens, by choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rft_algos import advantages
from rft_algos.algorithms import components
from rft_algos.algorithms.registry import equation_of, register_equation
from rft_algos.input_checks import refuse
from rft_algos.losses import off_policy, sequence_corrections
from rft_algos.packed import token_selection
from rft_core.errors import OptionsError

if TYPE_CHECKING:
    from rft_algos.objectives.advantages import RolloutBatch


@register_equation(components.GroupNorm)
def _group_norm(choice: components.GroupNorm, batch: RolloutBatch) -> Tensor:
    return advantages.group_norm(batch.rewards_N, batch.group_ids_N, epsilon=choice.epsilon)


@register_equation(components.GroupCentred)
def _group_centred(choice: components.GroupCentred, batch: RolloutBatch) -> Tensor:
    return advantages.group_centred(batch.rewards_N, batch.group_ids_N)


@register_equation(components.BatchStd)
def _batch_std(choice: components.BatchStd, batch: RolloutBatch) -> Tensor:
    return advantages.batch_std(batch.rewards_N, batch.group_ids_N, epsilon=choice.epsilon)


@register_equation(components.LeaveOneOut)
def _leave_one_out(choice: components.LeaveOneOut, batch: RolloutBatch) -> Tensor:
    return advantages.leave_one_out(batch.rewards_N, batch.group_ids_N)


@register_equation(components.MaxRl)
def _max_rl(choice: components.MaxRl, batch: RolloutBatch) -> Tensor:
    return advantages.max_rl(batch.rewards_N, batch.group_ids_N)


@register_equation(components.Opo)
def _opo(choice: components.Opo, batch: RolloutBatch) -> Tensor:
    return advantages.opo(batch.rewards_N, batch.group_ids_N, batch.lengths_N)


@register_equation(components.PassAtK)
def _pass_at_k(choice: components.PassAtK, batch: RolloutBatch) -> Tensor:
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


@register_equation(components.BestOfGroup)
def _best_of_group(choice: components.BestOfGroup, batch: RolloutBatch) -> Tensor:
    return advantages.best_of_group(batch.rewards_N, batch.group_ids_N, epsilon=choice.epsilon)


@register_equation(components.Gdpo)
def _gdpo(choice: components.Gdpo, batch: RolloutBatch) -> Tensor:
    if batch.components_NK is None:
        refuse("GDPO needs the parts of the reward")
    weights_K = batch.component_weights_K
    if weights_K is None:
        weights_K = torch.ones(batch.components_NK.shape[1], dtype=torch.float64)
    advantages_N = advantages.gdpo(batch.components_NK, batch.group_ids_N, weights_K, epsilon=choice.epsilon)
    if not choice.over_batch:
        return advantages_N
    # the last normalisation is over sequences, each counted once
    everyone_N = torch.ones_like(advantages_N, dtype=torch.bool)
    moments = advantages.moments(advantages_N, everyone_N)
    return advantages.whiten(advantages_N, everyone_N, moments, epsilon=choice.epsilon)


@register_equation(components.Gpg)
def _gpg(choice: components.Gpg, batch: RolloutBatch) -> Tensor:
    return advantages.gpg(batch.rewards_N, batch.group_ids_N)


@register_equation(components.CpgdWeighted)
def _cpgd(choice: components.CpgdWeighted, batch: RolloutBatch) -> Tensor:
    return advantages.cpgd(
        batch.rewards_N,
        batch.group_ids_N,
        weighting=choice.weighting,
        epsilon=choice.epsilon,
        max_weight=choice.max_weight,
    )


@register_equation(components.ReMax)
def _remax(choice: components.ReMax, batch: RolloutBatch) -> Tensor:
    if batch.greedy_rewards_N is None:
        refuse("ReMax needs the rewards of greedy responses")
    return advantages.remax(batch.rewards_N, batch.greedy_rewards_N)


@register_equation(components.TokenTis)
def _truncate_tokens(
    choice: components.TokenTis, log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor
) -> Tensor:
    return off_policy.truncate_tokens(log_rho_T, choice.cap, choice.floor)


@register_equation(components.SequenceTis)
def _truncate_sequences(
    choice: components.SequenceTis, log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor
) -> Tensor:
    return off_policy.truncate_sequences(log_rho_T, loss_mask_T, segment_ids_T, choice.cap, choice.floor)


@register_equation(components.TokenMis)
def _mask_tokens(choice: components.TokenMis, log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor) -> Tensor:
    return off_policy.mask_tokens(log_rho_T, choice.low, choice.high)


@register_equation(components.SequenceMis)
def _mask_sequences(
    choice: components.SequenceMis, log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor
) -> Tensor:
    return off_policy.mask_sequences(log_rho_T, loss_mask_T, segment_ids_T, choice.low, choice.high)


@register_equation(components.GeometricMis)
def _mask_geometric(
    choice: components.GeometricMis, log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor
) -> Tensor:
    return off_policy.mask_sequences_geometric(log_rho_T, loss_mask_T, segment_ids_T, choice.low, choice.high)


@register_equation(components.GeometricTis)
def _truncate_geometric(
    choice: components.GeometricTis, log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor
) -> Tensor:
    return sequence_corrections.truncate_geometric(log_rho_T, loss_mask_T, segment_ids_T, choice.cap, choice.floor)


@register_equation(components.Veto)
def _veto(choice: components.Veto, log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor) -> Tensor:
    return off_policy.veto_outliers(log_rho_T, loss_mask_T, segment_ids_T, choice.low, choice.high)


@register_equation(components.SecondMoment)
def _second_moment(
    choice: components.SecondMoment, log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor
) -> Tensor:
    return token_selection.second_moment_tokens(log_rho_T, loss_mask_T, limit=choice.limit).to(log_rho_T.dtype)


@register_equation(components.SelfNormalised)
def _self_normalised(
    choice: components.SelfNormalised, log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor
) -> Tensor:
    # the tokens are those of the whole step, so the sum over them is the step's
    weights_T = equation_of(choice.part)(choice.part, log_rho_T, loss_mask_T, segment_ids_T)
    return sequence_corrections.self_normalised(weights_T, loss_mask_T)


@register_equation(components.Product)
def _product(choice: components.Product, log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor) -> Tensor:
    weights_T = torch.ones_like(log_rho_T)
    for part in choice.parts:
        weights_T = weights_T * equation_of(part)(part, log_rho_T, loss_mask_T, segment_ids_T)
    return weights_T
