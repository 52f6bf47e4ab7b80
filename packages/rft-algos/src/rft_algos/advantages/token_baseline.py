"""Baselines of tokens: what the sequences of a group earned from the same position on."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.advantages.group_statistics import group_numbers
from rft_algos.advantages.returns import discounted_returns
from rft_algos.input_checks import refuse
from rft_algos.packed.reverse_scan import gather_loss_tokens, loss_positions, scatter_loss_tokens
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
    turn_ids_T: Tensor | None = None,
) -> Tensor:
    """Returns minus the baseline of least variance at each position of a group.

    A_it = G_it - B_gt,  B_gt = sum_j W_jt G_jt / sum_j W_jt,  W_it = sum over s <= t of (1 - 2 p_is + sum_v p_is(v)^2),

    sums over the sequences j of the group that reach loss token number t. W is the squared norm of the gradient of the
    log-prob with respect to the logits, added up over the tokens so far: what the gradient of a prefix varies by. A
    position that one sequence alone reaches has advantage 0; so has a group of one. Where all W are 0 the plain mean is
    the baseline.

    Over turns: the tokens of an observation are masked, so that returns and W run through them. Tokens are numbered
    from the start of the sequence; with `turn_ids_T` from the start of their turn, and compared within the turn's
    number, so that the first token after an observation stands beside those of the other sequences however long the
    turns before it were. W is that of the whole prefix either way: the gradient of all that was sampled before is what
    the baseline is to quieten.

    Source: Li et al. 2026, "Optimal token baseline" (arXiv 2602.07078).

    Args:
        token_rewards_T: [T] rewards of tokens; ignored, NaN included, where masked.
        logprobs_T: [T] log p of the sampled tokens, in nats; ignored where masked.
        sum_squared_probs_T: [T] sum over the vocabulary of p^2 = exp(logsumexp(2 x) - 2 logsumexp(x)), x the logits.
        loss_mask_T: [T] bool, true at tokens that the policy sampled.
        segment_ids_T: [T] int64 in 0..N-1, the sequence of each token; the tokens of one are contiguous.
        group_ids_N: [N] int64, the group of each sequence.
        gamma: discount from one loss token to the next, in [0, 1].
        turn_ids_T: [T] int64, the number of each token's turn, from 0 on and never falling within a sequence; ignored
            where masked. None to number tokens from the start of the sequence.

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
        turn_ids_T=turn_ids_T,
    )
    returns_T = discounted_returns(token_rewards_T, loss_mask_T, segment_ids_T, gamma=gamma)
    positions_L = loss_positions(loss_mask_T)
    returns_L = gather_loss_tokens(returns_T, positions_L)
    energies_L = 1 - 2 * gather_loss_tokens(logprobs_T, positions_L).exp()
    energies_L += gather_loss_tokens(sum_squared_probs_T, positions_L)
    ids_L = _at(segment_ids_T, positions_L)
    is_first_L = _changes(ids_L)
    weights_L = _since_first(energies_L, is_first_L).clamp(min=0)
    cells: list[Tensor] = [group_numbers(group_ids_N)[ids_L]]
    if turn_ids_T is not None:
        turns_L = _at(turn_ids_T, positions_L)
        _check_turns(turns_L, ids_L)
        # what is compared is a turn's number within a group, and what is counted the tokens of one turn
        cells.append(turns_L)
        is_first_L = is_first_L | _changes(turns_L)
    cells.append(_since_first(torch.ones_like(ids_L), is_first_L))
    cells_L = group_numbers(*cells)

    def over_cell(values_L: Tensor) -> Tensor:
        return torch.zeros_like(values_L).index_add_(0, cells_L, values_L).index_select(0, cells_L)

    total_L = over_cell(weights_L)
    weights_L = torch.where(total_L > 0, weights_L, torch.ones_like(weights_L))
    baseline_L = over_cell(weights_L * returns_L) / over_cell(weights_L)
    is_single_L = over_cell(torch.ones_like(returns_L)) == 1
    return scatter_loss_tokens(torch.where(is_single_L, 0.0, returns_L - baseline_L), positions_L, loss_mask_T.shape[0])


def _check_turns(turns_L: Tensor, ids_L: Tensor) -> None:
    falls_L = (turns_L.diff() < 0) & (ids_L.diff() == 0)
    if bool((turns_L < 0).any() | falls_L.any()):
        refuse("turn_ids_T must be 0 or more at loss tokens and never fall within a sequence")


def _at(values_T: Tensor, positions_L: Tensor | None) -> Tensor:
    return values_T if positions_L is None else values_T.index_select(0, positions_L)


def _changes(ids_L: Tensor) -> Tensor:
    """Whether a number differs from the one before; the first does."""
    changes_L = torch.ones_like(ids_L, dtype=torch.bool)
    changes_L[1:] = ids_L[1:] != ids_L[:-1]
    return changes_L


def _since_first(values_L: Tensor, is_first_L: Tensor) -> Tensor:
    """Sums up to and with each value, that begin again at the first of a sequence or turn."""
    sums_L = values_L.cumsum(0)
    numbers_L = is_first_L.cumsum(0) - 1
    before_I = (sums_L - values_L)[is_first_L]
    return sums_L - before_I[numbers_L]
