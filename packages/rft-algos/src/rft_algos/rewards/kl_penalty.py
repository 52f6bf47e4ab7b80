"""Changes to rewards that happen before advantages: components combined, limits, the price of divergence."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.advantages.group_relative import gdpo
from rft_algos.input_checks import refuse
from rft_algos.packed.reverse_scan import gather_loss_tokens, last_positions, loss_positions, scatter_loss_tokens
from rft_algos.packed.tensor_checks import check_mask


def kl_penalised(
    rewards_N: Tensor, kl_T: Tensor, loss_mask_T: Tensor, sequence_index_T: Tensor, *, coefficient: float
) -> Tensor:
    """Sequence rewards minus the divergence that each sequence spent.

    R'_i = R_i - coefficient * sum of kl_t over the loss tokens t of sequence i.

    The sum over tokens of k1 is an unbiased estimate of the divergence between the two
    distributions over whole sequences. No gradient flows: the penalty acts through the advantage.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), equation 2.

    Args:
        rewards_N: [N] rewards.
        kl_T: [T] estimate per token (`rft_algos.losses.kl`), in nats; ignored, NaN included, where masked.
        loss_mask_T: [T] bool, true at tokens that the policy sampled.
        sequence_index_T: [T] int64 in 0..N-1, the sequence of each token; ignored where masked.
        coefficient: beta, in units of reward per nat.

    Returns:
        [N] float64.
    """
    check_mask(loss_mask_T=loss_mask_T)
    spent_T = torch.where(loss_mask_T, kl_T.detach(), 0.0).to(torch.float64)
    # masked tokens add their 0 to sequence 0, because their own index may be none
    index_T = torch.where(loss_mask_T, sequence_index_T, 0)
    spent_N = spent_T.new_zeros(rewards_N.shape[0]).index_add_(0, index_T, spent_T)
    return rewards_N.detach().to(torch.float64) - coefficient * spent_N


def token_rewards(
    rewards_N: Tensor, kl_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor, *, coefficient: float
) -> Tensor:
    """Rewards of tokens: each pays for its divergence, the last one of a sequence earns its reward.

    r_t = -coefficient * kl_t + (R_i if t is the last loss token of sequence i, else 0).

    With no discount the sum over a sequence is `kl_penalised`; for returns and values of tokens
    this form says when it was spent. The reward of a sequence without loss tokens is lost.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), equation 2, per token as in Hu 2025, "REINFORCE++"
    (arXiv 2501.03262).

    Args:
        rewards_N: [N] rewards.
        kl_T: [T] estimate per token (`rft_algos.losses.kl`), in nats; ignored, NaN included, where masked.
        loss_mask_T: [T] bool, true at tokens that the policy sampled.
        segment_ids_T: [T] int64 in 0..N-1, the sequence of each token; the tokens of one are
            contiguous; negative at padding.
        coefficient: beta, in units of reward per nat.

    Returns:
        [T] float64, no gradient; 0 where masked.
    """
    if kl_T.shape != loss_mask_T.shape:
        refuse(f"{kl_T.shape} estimates, {loss_mask_T.shape} mask")
    if segment_ids_T.shape != loss_mask_T.shape:
        refuse(f"{segment_ids_T.shape} segment ids, {loss_mask_T.shape} mask")
    positions_L = loss_positions(loss_mask_T)
    costs_L = gather_loss_tokens(kl_T, positions_L).mul_(-coefficient)
    token_rewards_T = scatter_loss_tokens(costs_L, positions_L, loss_mask_T.shape[0])
    ends_I = last_positions(segment_ids_T, positions_L)
    # in place, because the costs are a copy either way
    return token_rewards_T.index_add_(0, ends_I, rewards_N.detach().to(torch.float64)[segment_ids_T[ends_I]])


def combine(components_NK: Tensor, weights_K: Tensor) -> Tensor:
    """Weighted sum of reward components: R_i = sum_k w_k R_ik.

    Args:
        components_NK: [N, K] finite reward components of each sequence.
        weights_K: [K] weights of the components.

    Returns:
        [N] float64, no gradient.
    """
    return components_NK.detach().to(torch.float64) @ weights_K.detach().to(torch.float64)


def combine_normalised(
    components_NK: Tensor, weights_K: Tensor, group_ids_N: Tensor, *, epsilon: float = 1e-6
) -> Tensor:
    """Weighted sum of reward components, each normalised within its group first.

    R_i = sum_k w_k (R_ik - mean_g R_k) / (std_g R_k + epsilon).

    The weights then say how much each component matters, whatever its unit and its spread. It is
    `rft_algos.advantages.gdpo` used as a reward.

    Source: Liu et al. 2026, "GDPO" (arXiv 2601.05242).

    Args:
        components_NK: [N, K] finite reward components of each sequence.
        weights_K: [K] weights of the components.
        group_ids_N: [N] int64, the group of each sequence.
        epsilon: added to each standard deviation, in the unit of the component.

    Returns:
        [N] float64, no gradient; a component adds exactly 0 where it is equal throughout the group.
    """
    return gdpo(components_NK, group_ids_N, weights_K, epsilon=epsilon)


def clip_rewards(rewards_N: Tensor, limit: float) -> Tensor:
    """Rewards limited to [-limit, limit].

    Args:
        rewards_N: [N] rewards.
        limit: positive, in the unit of the rewards.

    Returns:
        [N] float64, no gradient.
    """
    if not limit > 0:
        refuse(f"the limit must be positive: {limit}")
    return rewards_N.detach().to(torch.float64).clamp(-limit, limit)
