"""Changes to rewards that happen before advantages."""

from __future__ import annotations

import torch
from torch import Tensor


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
        kl_T: [T] estimate per token (`rft_algos.kl`), in nats; ignored, NaN included, where masked.
        loss_mask_T: [T] bool, true at tokens that the policy sampled.
        sequence_index_T: [T] int64 in 0..N-1, the sequence of each token; ignored where masked.
        coefficient: beta, in units of reward per nat.

    Returns:
        [N] float64.
    """
    assert loss_mask_T.dtype == torch.bool, f"loss_mask_T must be bool, it is {loss_mask_T.dtype}"
    spent_T = torch.where(loss_mask_T, kl_T.detach(), 0.0).to(torch.float64)
    index_T = torch.where(loss_mask_T, sequence_index_T, 0)
    spent_N = spent_T.new_zeros(rewards_N.shape[0]).index_add_(0, index_T, spent_T)
    return rewards_N.detach().to(torch.float64) - coefficient * spent_N
