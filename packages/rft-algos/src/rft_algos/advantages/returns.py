"""Returns: what a sampled token led to, as the sum over what its sequence earned from there on.

Tokens that the policy did not sample (prompt, observations between turns) are not steps of the
decision process: they neither discount nor end the recurrence, and get 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.input_checks import check_unit, refuse
from rft_algos.packed.reverse_scan import (
    gather_loss_tokens,
    loss_positions,
    reverse_scan_,
    same_sequence,
    scatter_loss_tokens,
)


def discounted_returns(
    token_rewards_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor, *, gamma: float = 1.0
) -> Tensor:
    """Discounted sum of the rewards from a token on.

    G_t = sum over the loss tokens s >= t of the sequence of gamma^n(t, s) r_s, where n(t, s) counts
    the loss tokens in t..s-1.

    The sum runs on through observations, so that an early turn is credited with what a later one
    earned.

    Source: Sutton and Barto 2018, "Reinforcement learning", equation 3.8, with r_s written at the
    token that earns it. It is the advantage of REINFORCE and of Hu 2025, "REINFORCE++" (arXiv
    2501.03262), there followed by whitening over the tokens of the batch.

    Args:
        token_rewards_T: [T] rewards (`rewards.kl_penalty.token_rewards`); ignored, NaN included, where masked.
        loss_mask_T: [T] bool, true at tokens that the policy sampled.
        segment_ids_T: [T] int64, the sequence of each token; the tokens of one are contiguous.
        gamma: discount from one loss token to the next, in [0, 1].

    Returns:
        [T] float64, no gradient; 0 where masked. Example: rewards 1, 2 around an observation, with
        gamma 0.5, give 1 + 0.5 * 2 = 2, 0, 2.
    """
    check_unit(gamma=gamma)
    if token_rewards_T.shape != loss_mask_T.shape:
        refuse(f"{token_rewards_T.shape} rewards, {loss_mask_T.shape} mask")
    if loss_mask_T.shape != segment_ids_T.shape:
        refuse(f"{loss_mask_T.shape} mask for {segment_ids_T.shape} segment ids")
    positions_L = loss_positions(loss_mask_T)
    discounts_L = same_sequence(segment_ids_T, positions_L).to(torch.float64).mul_(gamma)
    # the gathered rewards are a copy, so the scan may overwrite them
    returns_L = reverse_scan_(gather_loss_tokens(token_rewards_T, positions_L), discounts_L)
    return scatter_loss_tokens(returns_L, positions_L, loss_mask_T.shape[0])


reinforce = discounted_returns
"""The advantage of REINFORCE, which has no baseline, is the return."""
