"""Advantages of tokens from rewards for parts of a sequence: its reasoning steps or its turns."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.advantages.group_relative import group_norm
from rft_algos.advantages.group_statistics import group_numbers
from rft_algos.advantages.returns import discounted_returns
from rft_algos.input_checks import check_not_negative, check_unit, refuse
from rft_algos.packed.reverse_scan import loss_positions, scatter_loss_tokens
from rft_algos.packed.tensor_checks import check_mask


def process_group_norm(
    step_rewards_T: Tensor,
    reward_mask_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    group_ids_N: Tensor,
    *,
    epsilon: float = 1e-6,
) -> Tensor:
    """Process supervision of GRPO: credit for the steps of a sequence that are still to come.

    A_t = sum over the steps j of the sequence that end at t or later of (r_j - mean) / (std + epsilon),

    with mean and std (Bessel's correction) over the rewards of all steps of all sequences of the
    group. Steps of equal rewards throughout the group give exactly 0.

    Source: Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), section 4.1.3.

    Args:
        step_rewards_T: [T] the reward of a step at its last token; ignored, NaN included, where
            `reward_mask_T` is false.
        reward_mask_T: [T] bool, true at the last token of each step, which must be a loss token.
        loss_mask_T: [T] bool, true at tokens that the policy sampled.
        segment_ids_T: [T] int64 in 0..N-1, the sequence of each token; negative at padding.
        group_ids_N: [N] int64, the group of each sequence.
        epsilon: added to the standard deviation, in the unit of the rewards.

    Returns:
        [T] float64, no gradient; 0 where masked.
    """
    check_mask(reward_mask_T=reward_mask_T)
    if bool((reward_mask_T & ~loss_mask_T).any()):
        refuse("a step must end at a token that the policy sampled")
    ends_J = reward_mask_T.nonzero().squeeze(1)
    groups_J = group_ids_N[segment_ids_T[ends_J]]
    normalised_J = group_norm(step_rewards_T[ends_J], groups_J, epsilon=epsilon)
    normalised_T = torch.zeros_like(step_rewards_T, dtype=torch.float64).index_copy_(0, ends_J, normalised_J)
    # undiscounted, so that a step reaches all earlier tokens of its sequence alike
    return discounted_returns(normalised_T, loss_mask_T, segment_ids_T)


def turn_level(
    turn_rewards_NJ: Tensor,
    outcome_advantages_N: Tensor,
    turn_ids_T: Tensor,
    segment_ids_T: Tensor,
    group_ids_N: Tensor,
    *,
    gamma: float = 1.0,
    turn_coefficient: float = 1.0,
    epsilon: float = 1e-6,
) -> Tensor:
    """Credit for the turns of a conversation that are still to come, and for its outcome.

    A_t = turn_coefficient * sum over turns l >= j of gamma^(l - j) a_il  +  gamma^(J_i - 1 - j) A_i,
    a_il = (r_il - mean) / (std + epsilon),

    for a token t of turn j of sequence i, whose last turn is J_i - 1 and whose outcome has the
    advantage A_i. mean and std (Bessel's correction) are over turn number l of those sequences of
    the group that have such a turn: like is compared with like, and a turn that only one sequence
    reached gets 0. The outcome counts as earned at the end of the last turn.

    Sources: Zeng et al. 2025, "Reinforcing multi-turn reasoning in LLM agents via turn-level reward
    design" (MT-GRPO, arXiv 2505.11821), which for two turns, rewarded at the first, adds the turn's
    and the outcome's advantage in the first turn; discounting and the sum over more turns as the
    step returns of Feng et al. 2025, "GiGPO" (arXiv 2505.10978), which groups by state instead of by
    turn number.

    Args:
        turn_rewards_NJ: [N, J] reward of each turn; ignored, NaN included, where no token has that turn.
        outcome_advantages_N: [N] advantage of the whole sequence, such as `group_norm` gives.
        turn_ids_T: [T] int64, 0..J-1 at the tokens that the policy sampled in that turn, -1 at all others.
        segment_ids_T: [T] int64 in 0..N-1, the sequence of each token; ignored where the turn is -1.
        group_ids_N: [N] int64, the group of each sequence.
        gamma: discount from one turn to the next, in [0, 1].
        turn_coefficient: weight of the turns' rewards against the outcome.
        epsilon: added to the standard deviation, in the unit of the rewards.

    Returns:
        [T] float64, no gradient; 0 where the turn is -1.
    """
    check_unit(gamma=gamma)
    check_not_negative(epsilon=epsilon)
    num_sequences, num_turns = turn_rewards_NJ.shape
    if group_ids_N.shape != (num_sequences,):
        refuse(f"{group_ids_N.shape} group ids, {num_sequences} sequences")
    if turn_ids_T.shape != segment_ids_T.shape:
        refuse(f"{turn_ids_T.shape} turn ids, {segment_ids_T.shape} segment ids")
    if not bool((turn_ids_T < num_turns).all()):
        refuse(f"a turn id is outside of the {num_turns} turns that have rewards")
    positions_L = loss_positions(turn_ids_T >= 0)
    turns_L, sequences_L = turn_ids_T, segment_ids_T
    if positions_L is not None:
        turns_L, sequences_L = turn_ids_T.index_select(0, positions_L), segment_ids_T.index_select(0, positions_L)
    # a flat index into the table [N, J]: marking a cell and looking it up are one operation each
    cells_L = torch.add(turns_L, sequences_L, alpha=num_turns)
    has_turn_NJ = torch.zeros(turn_rewards_NJ.shape, dtype=torch.bool, device=turn_rewards_NJ.device)
    has_turn_NJ.view(-1).index_fill_(0, cells_L, True)

    credit_NJ = turn_coefficient * _turn_advantages(turn_rewards_NJ, has_turn_NJ, group_ids_N, epsilon)
    # counted from the right, a sequence's last turn is its first
    is_last_NJ = has_turn_NJ & (has_turn_NJ.flip(1).cumsum(1).flip(1) == 1)
    credit_NJ += torch.where(is_last_NJ, outcome_advantages_N.detach().to(torch.float64)[:, None], 0.0)
    # turns are few: one operation for each, over all sequences
    for turn in reversed(range(num_turns - 1)):
        credit_NJ[:, turn] += gamma * credit_NJ[:, turn + 1]
    return scatter_loss_tokens(credit_NJ.view(-1).index_select(0, cells_L), positions_L, turn_ids_T.shape[0])


def _turn_advantages(turn_rewards_NJ: Tensor, has_turn_NJ: Tensor, group_ids_N: Tensor, epsilon: float) -> Tensor:
    """Rewards normalised over the turns of one number in one group; 0 where there is no such turn."""
    num_turns = has_turn_NJ.shape[1]
    turns_J = torch.arange(num_turns, device=has_turn_NJ.device)
    # what is compared is one turn number in one group
    groups_NJ = torch.add(turns_J, group_numbers(group_ids_N)[:, None], alpha=num_turns)
    advantages_NJ = torch.zeros(has_turn_NJ.shape, dtype=torch.float64, device=has_turn_NJ.device)
    advantages_NJ[has_turn_NJ] = group_norm(turn_rewards_NJ[has_turn_NJ], groups_NJ[has_turn_NJ], epsilon=epsilon)
    return advantages_NJ
