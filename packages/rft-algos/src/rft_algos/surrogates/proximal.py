"""Surrogates with a quadratic pull towards the old policy, and PPO with a proximal policy of its own."""

from __future__ import annotations

from torch import Tensor

from rft_algos.algorithms import components
from rft_algos.algorithms.registry import register_equation
from rft_algos.input_checks import check_not_negative
from rft_algos.packed.loss_tokens import Tokens
from rft_algos.packed.segments import broadcast_to_tokens, segment_counts, segment_index, segment_sums
from rft_algos.packed.tensor_checks import check_alike
from rft_algos.surrogates.ppo import ppo_clip


def squared_log_ratio(log_ratio_T: Tensor) -> Tensor:
    """Half the squared log-ratio, a penalty that pulls towards the old policy.

    q_t = (log pi_t - log pi_old,t)^2 / 2.

    Not clamped: far away is where its pull is needed.

    Source: Kimi Team 2025, "Kimi k1.5" (arXiv 2501.12599).

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats; the gradient flows through it.

    Returns:
        [T] penalty per token, with gradient log_ratio_t.
    """
    return log_ratio_T.square() / 2


def dro(logprobs_T: Tensor, log_ratio_T: Tensor, advantages_T: Tensor, tau: float) -> Tensor:
    """Policy gradient with a quadratic penalty, as a loss: DRO, and the update of Kimi k1.5.

    l_t = -A_t log pi_t + tau (log pi_t - log pi_old,t)^2 / 2.

    Both papers minimise the square of A - tau log(pi / pi_old) of whole responses, which has the gradient of
    `dro_sequence` times tau. This one squares the log-ratio of every token, as trainers do that reduce over tokens:
    its pull does not grow with the length of a response, and differs from the papers' by the products of tokens.

    Sources: Richemond et al. 2024, "Offline Regularised Reinforcement Learning for Large Language
    Models Alignment" (arXiv 2405.19107); Kimi Team 2025, "Kimi k1.5" (arXiv 2501.12599).

    Args:
        logprobs_T: [T] log pi of the sampled tokens, in nats; the gradient flows through it.
        log_ratio_T: [T] log pi - log pi_old, in nats; the gradient flows through it.
        advantages_T: [T] advantages, no gradient.
        tau: strength of the penalty, in advantage per nat.

    Returns:
        [T] loss per token. At the old policy its gradient is -A_t.
    """
    check_alike(logprobs_T=logprobs_T, log_ratio_T=log_ratio_T, advantages_T=advantages_T)
    check_not_negative(tau=tau)
    return (tau / 2) * log_ratio_T.square() - advantages_T * logprobs_T


def dro_sequence(
    logprobs_T: Tensor,
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    tau: float,
) -> Tensor:
    """Policy gradient with the squared log-ratio of whole responses, as a loss: DRO and Kimi k1.5 as published.

    l_t = -A_t log pi_t + tau / (2 L_i) (sum over the loss tokens s of sequence i of log_ratio_s)^2.

    The sum over the L_i loss tokens of a sequence is the published loss of the response, so that
    `aggregation.sequence_mean_token_sum` gives the objective; the mean over tokens divides it by the length.

    Sources: Richemond et al. 2024 (arXiv 2405.19107); Kimi Team 2025, "Kimi k1.5" (arXiv 2501.12599), section 2.3.

    Args:
        logprobs_T: [T] log pi of the sampled tokens, in nats; the gradient flows through it.
        log_ratio_T: [T] log pi - log pi_old, in nats; the gradient flows through it.
        advantages_T: [T] advantages, no gradient.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, reaches no other token.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.
        tau: strength of the penalty, in advantage per nat.

    Returns:
        [T] loss per token. At the old policy its gradient is -A_t.
    """
    check_not_negative(tau=tau)
    places = segment_index(loss_mask_T, segment_ids_T)
    sums_S = segment_sums(log_ratio_T, places)
    lengths_S = segment_counts(places, dtype=sums_S.dtype).clamp(min=1)
    penalty_T = broadcast_to_tokens((tau / 2) * sums_S.square() / lengths_S, places)
    return penalty_T - advantages_T * logprobs_T


def decoupled_ppo(
    log_ratio_prox_T: Tensor, advantages_T: Tensor, behaviour_weights_T: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """PPO whose trust region stands around a proximal policy, not around the one that sampled, as a loss.

    l_t = sg[w_t] ppo_clip(log pi_t - log pi_prox,t, A_t), w_t = pi_prox,t / pi_behaviour,t.

    The weight corrects for who sampled, the clip limits how far this step goes. With stale samples
    the two differ, and PPO that clips against the behaviour policy would stand still.

    Source: Hilton, Cobbe, Schulman 2021, "Batch size-invariance for policy optimization"
    (arXiv 2110.00641); for asynchronous language-model training, AReaL (arXiv 2505.24298).

    Args:
        log_ratio_prox_T: [T] log pi - log pi_prox, in nats; the gradient flows through it.
        advantages_T: [T] advantages, no gradient.
        behaviour_weights_T: [T] pi_prox / pi_behaviour, bounded by a function of `rft_algos.losses.off_policy`.
        clip_low: as in `ppo_clip`.
        clip_high: as in `ppo_clip`.

    Returns:
        [T] loss per token.
    """
    return behaviour_weights_T.detach() * ppo_clip(log_ratio_prox_T, advantages_T, clip_low, clip_high)


@register_equation(components.DroSequence)
def _dro_sequence(choice: components.DroSequence, tokens: Tokens) -> Tensor:
    return dro_sequence(
        tokens.logprobs, tokens.log_ratio, tokens.advantages, tokens.mask, tokens.segment_ids, choice.tau
    )


@register_equation(components.Dro)
def _dro(choice: components.Dro, tokens: Tokens) -> Tensor:
    return dro(tokens.logprobs, tokens.log_ratio, tokens.advantages, choice.tau)
