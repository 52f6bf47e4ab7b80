"""Baselines of tokens: what the sequences of a group earned from the same position on."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.advantages.group_statistics import group_numbers
from rft_algos.advantages.returns import discounted_returns
from rft_algos.packed.reverse_scan import gather_loss_tokens, loss_positions, same_sequence, scatter_loss_tokens
from rft_algos.packed.tensor_checks import check_group_ids, check_vectors


def optimal_token_baseline(
    token_rewards_T: Tensor,
    logprobs_T: Tensor,
    sum_squared_probs_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    group_ids_N: Tensor,
    *,
    gamma: float = 1.0,
) -> Tensor:
    """Returns minus the baseline of least variance at each position of a group.

    A_it = G_it - B_gt,  B_gt = sum_j W_jt G_jt / sum_j W_jt,  W_it = sum over s <= t of (1 - 2 p_is + sum_v p_is(v)^2),

    sums over the sequences j of the group that reach loss token number t. W is the squared norm of the gradient of the
    log-prob with respect to the logits, added up over the tokens so far: what the gradient of a prefix varies by. A
    position that one sequence alone reaches has advantage 0; so has a group of one. Where all W are 0 the plain mean is
    the baseline.

    Source: Li et al. 2026, "Optimal token baseline" (arXiv 2602.07078).

    Args:
        token_rewards_T: [T] rewards of tokens; ignored, NaN included, where masked.
        logprobs_T: [T] log p of the sampled tokens, in nats; ignored where masked.
        sum_squared_probs_T: [T] sum over the vocabulary of p^2 = exp(logsumexp(2 x) - 2 logsumexp(x)), x the logits.
        loss_mask_T: [T] bool, true at tokens that the policy sampled.
        segment_ids_T: [T] int64 in 0..N-1, the sequence of each token; the tokens of one are contiguous.
        group_ids_N: [N] int64, the group of each sequence.
        gamma: discount from one loss token to the next, in [0, 1].

    Returns:
        [T] float64, no gradient; 0 where masked.
    """
    check_group_ids(group_ids_N=group_ids_N)
    check_vectors(
        token_rewards_T=token_rewards_T,
        logprobs_T=logprobs_T,
        sum_squared_probs_T=sum_squared_probs_T,
        loss_mask_T=loss_mask_T,
        segment_ids_T=segment_ids_T,
    )
    returns_T = discounted_returns(token_rewards_T, loss_mask_T, segment_ids_T, gamma=gamma)
    positions_L = loss_positions(loss_mask_T)
    returns_L = gather_loss_tokens(returns_T, positions_L)
    energies_L = 1 - 2 * gather_loss_tokens(logprobs_T, positions_L).exp()
    energies_L += gather_loss_tokens(sum_squared_probs_T, positions_L)
    number_L = _since_start(torch.ones_like(energies_L), segment_ids_T, positions_L).to(torch.int64) - 1
    weights_L = _since_start(energies_L, segment_ids_T, positions_L).clamp(min=0)
    ids_L = segment_ids_T if positions_L is None else segment_ids_T.index_select(0, positions_L)
    # one cell for each position of each group
    cells_L = group_numbers(group_numbers(group_ids_N)[ids_L] * (energies_L.shape[0] + 1) + number_L)

    def over_cell(values_L: Tensor) -> Tensor:
        return torch.zeros_like(values_L).index_add_(0, cells_L, values_L).index_select(0, cells_L)

    total_L = over_cell(weights_L)
    weights_L = torch.where(total_L > 0, weights_L, torch.ones_like(weights_L))
    baseline_L = over_cell(weights_L * returns_L) / over_cell(weights_L)
    is_single_L = over_cell(torch.ones_like(returns_L)) == 1
    return scatter_loss_tokens(torch.where(is_single_L, 0.0, returns_L - baseline_L), positions_L, loss_mask_T.shape[0])


def _since_start(values_L: Tensor, segment_ids_T: Tensor, positions_L: Tensor | None) -> Tensor:
    """Sums over the loss tokens of a sequence up to and with each."""
    sums_L = values_L.cumsum(0)
    continues_L = same_sequence(segment_ids_T, positions_L)
    is_first_L = torch.ones_like(continues_L)
    is_first_L[1:] = ~continues_L[:-1]
    # what had been added before the sequence began, at its first token
    numbers_L = is_first_L.cumsum(0) - 1
    before_I = (sums_L - values_L)[is_first_L]
    return sums_L - before_I[numbers_L]
