"""Distillation: divergences between the distributions of a student and of its teacher, token by token.

p is the teacher's and q the student's distribution over the vocabulary, softmax(logits / temperature).
A temperature above 1 shows more of how the teacher ranks unlikely tokens. It divides the gradient
with respect to the logits by its square, so every divergence here is multiplied by temperature^2
(Hinton et al. 2015, arXiv 1503.02531, section 2), and its weight beside a likelihood stays what it
was. Some trainers leave the factor out of the Jensen-Shannon divergence.

There is no mask: pass the rows of the tokens to learn from. Logits of -inf forbid a token. A token of
probability 0 under the distribution that is averaged over adds 0, whatever the other says.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rft_algos.decoding.sampling import temperature_scaled_logprobs
from rft_algos.input_checks import refuse
from rft_algos.packed.tensor_checks import check_mask


def forward_kl(student_logits_TV: Tensor, teacher_logits_TV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """l_t = temperature^2 sum_v p_t(v) (log p_t(v) - log q_t(v)): KL(teacher || student).

    Covers all that the teacher may say. Its gradient is that of the cross-entropy against the
    teacher, -sum_v p_t(v) log q_t(v), which differs by the teacher's entropy, a constant.

    Source: Hinton et al. 2015 (arXiv 1503.02531), section 2.

    Args:
        student_logits_TV: [T, V] logits, any floating type; the gradient flows through them.
        teacher_logits_TV: [T, V] logits over the same vocabulary, no gradient.
        temperature: positive, divides the logits of both.

    Returns:
        [T] nats, 0 or more; infinite where the student forbids what the teacher may say.
    """
    log_p_TV, log_q_TV = _both(student_logits_TV, teacher_logits_TV, temperature)
    return temperature**2 * _kl(log_p_TV, log_q_TV)


def reverse_kl(student_logits_TV: Tensor, teacher_logits_TV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """l_t = temperature^2 sum_v q_t(v) (log q_t(v) - log p_t(v)): KL(student || teacher).

    Keeps the student to what the teacher finds likely. Exact over the vocabulary at the tokens given;
    `reverse_kl_reward` is its estimate from one sampled token.

    Source: Gu et al. 2023, "MiniLLM" (arXiv 2306.08543), section 2.1.

    Args:
        student_logits_TV: [T, V] logits, any floating type; the gradient flows through them.
        teacher_logits_TV: [T, V] logits over the same vocabulary, no gradient.
        temperature: positive, divides the logits of both.

    Returns:
        [T] nats, 0 or more; infinite where the teacher forbids what the student may say.
    """
    log_p_TV, log_q_TV = _both(student_logits_TV, teacher_logits_TV, temperature)
    return temperature**2 * _kl(log_q_TV, log_p_TV)


def jensen_shannon(
    student_logits_TV: Tensor, teacher_logits_TV: Tensor, *, beta: float = 0.5, temperature: float = 1.0
) -> Tensor:
    """Generalised Jensen-Shannon divergence, between forward and reverse KL and bounded.

    l_t = temperature^2 (beta KL(p_t || m_t) + (1 - beta) KL(q_t || m_t)), m_t = beta p_t + (1 - beta) q_t.

    Divided by beta it tends to the forward KL as beta goes to 0, and divided by 1 - beta to the
    reverse KL as beta goes to 1; at either end itself it is 0, so those have their own functions.

    Source: Agarwal et al. 2023, "On-policy distillation of language models" (GKD, arXiv 2306.13649),
    section 2.

    Args:
        student_logits_TV: [T, V] logits, any floating type; the gradient flows through them.
        teacher_logits_TV: [T, V] logits over the same vocabulary, no gradient.
        beta: share of the teacher in the mixture, in (0, 1).
        temperature: positive, divides the logits of both.

    Returns:
        [T] nats, from 0 to temperature^2 times the entropy of (beta, 1 - beta): log 2 for 0.5.
    """
    if not 0 < beta < 1:
        refuse(f"beta must be in (0, 1), it is {beta}; forward_kl and reverse_kl are the limits")
    log_p_TV, log_q_TV = _both(student_logits_TV, teacher_logits_TV, temperature)
    # where both forbid a token, the slope of the mixture would be NaN at -inf
    log_p_TV = log_p_TV.clamp(min=torch.finfo(log_p_TV.dtype).min)
    log_m_TV = torch.logaddexp(log_p_TV + math.log(beta), log_q_TV + math.log1p(-beta))
    return temperature**2 * (beta * _kl(log_p_TV, log_m_TV) + (1 - beta) * _kl(log_q_TV, log_m_TV))


def skew_forward_kl(
    student_logits_TV: Tensor, teacher_logits_TV: Tensor, *, alpha: float = 0.1, temperature: float = 1.0
) -> Tensor:
    """Forward KL to a mixture that holds some of the teacher.

    l_t = temperature^2 KL(p_t || alpha p_t + (1 - alpha) q_t).

    Bounded by temperature^2 log(1 / alpha), also where the student forbids what the teacher may say.

    Source: Ko et al. 2024, "DistiLLM" (arXiv 2402.03898), skew KL, whose alpha is 0.1.

    Args:
        student_logits_TV: [T, V] logits, any floating type; the gradient flows through them.
        teacher_logits_TV: [T, V] logits over the same vocabulary, no gradient.
        alpha: share of the teacher in the mixture, in (0, 1).
        temperature: positive, divides the logits of both.

    Returns:
        [T] nats, 0 or more.
    """
    log_p_TV, log_q_TV = _both(student_logits_TV, teacher_logits_TV, temperature)
    return temperature**2 * _kl(log_p_TV, _mixture(log_p_TV, log_q_TV, alpha))


def skew_reverse_kl(
    student_logits_TV: Tensor, teacher_logits_TV: Tensor, *, alpha: float = 0.1, temperature: float = 1.0
) -> Tensor:
    """Reverse KL to a mixture that holds some of the student.

    l_t = temperature^2 KL(q_t || (1 - alpha) p_t + alpha q_t).

    Source: Ko et al. 2024, "DistiLLM" (arXiv 2402.03898), skew reverse KL, whose alpha is 0.1.

    Args:
        student_logits_TV: [T, V] logits, any floating type; the gradient flows through them.
        teacher_logits_TV: [T, V] logits over the same vocabulary, no gradient.
        alpha: share of the student in the mixture, in (0, 1).
        temperature: positive, divides the logits of both.

    Returns:
        [T] nats, 0 or more.
    """
    log_p_TV, log_q_TV = _both(student_logits_TV, teacher_logits_TV, temperature)
    return temperature**2 * _kl(log_q_TV, _mixture(log_q_TV, log_p_TV, alpha))


def adaptive_kl(
    student_logits_TV: Tensor, teacher_logits_TV: Tensor, *, head: float = 0.5, temperature: float = 1.0
) -> Tensor:
    """Forward and reverse KL, blended by where the student differs from the teacher.

    l_t = g_head / (g_head + g_tail) forward KL + g_tail / (g_head + g_tail) reverse KL, each with its temperature^2,

    g the sum of |p_t(v) - q_t(v)| over the tokens of head or tail, without gradient. The head is the teacher's
    likeliest tokens whose probabilities add up to less than `head`, and the one that reaches it. Equal distributions
    give 0.

    Source: Wu et al. 2024, "Rethinking Kullback-Leibler divergence in knowledge distillation for large language models"
    (arXiv 2404.02657), with a head of 0.5.

    Args:
        student_logits_TV: [T, V] logits, any floating type; the gradient flows through them.
        teacher_logits_TV: [T, V] logits over the same vocabulary, no gradient.
        head: probability that the head holds, in (0, 1).
        temperature: positive, divides the logits of both.

    Returns:
        [T] nats, 0 or more.
    """
    if not 0 < head < 1:
        refuse(f"head must be in (0, 1), it is {head}")
    log_p_TV, log_q_TV = _both(student_logits_TV, teacher_logits_TV, temperature)
    p_TV = log_p_TV.exp()
    order_TV = torch.argsort(p_TV, dim=1, descending=True, stable=True)
    sorted_TV = p_TV.gather(1, order_TV)
    # what stands before a token does not reach the head's share yet
    is_early_TV = sorted_TV.cumsum(1) - sorted_TV < head
    is_head_TV = torch.zeros_like(is_early_TV).scatter(1, order_TV, is_early_TV)
    gaps_TV = (p_TV - log_q_TV.detach().exp()).abs()
    head_T, all_T = torch.where(is_head_TV, gaps_TV, 0.0).sum(1), gaps_TV.sum(1)
    share_T = torch.where(all_T > 0, head_T / all_T, 0.5)
    blended_T = share_T * _kl(log_p_TV, log_q_TV) + (1 - share_T) * _kl(log_q_TV, log_p_TV)
    return temperature**2 * blended_T


def top_k_forward_kl(
    student_logits_TV: Tensor, teacher_logprobs_TK: Tensor, teacher_ids_TK: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Forward KL over the teacher's K most likely tokens: what an engine that returns log-probs allows.

    l_t = temperature^2 sum over k of p_t(v_k) (log p_t(v_k) - log q_t(v_k)), v_k the tokens given.

    Both distributions are normalised over the whole vocabulary, so the rest of the sum is left out
    and the value may be slightly negative. With all V tokens it is `forward_kl`. The student that
    minimises it is the teacher renormalised over its K tokens.

    Args:
        student_logits_TV: [T, V] logits, any floating type; the gradient flows through them.
        teacher_logprobs_TK: [T, K] the teacher's log-probs of the K tokens at the same temperature,
            in nats, no gradient; -inf in places that are not used.
        teacher_ids_TK: [T, K] int64 in 0..V-1, different in a row where used.
        temperature: positive, divides the student's logits.

    Returns:
        [T] nats.
    """
    _check_rows(
        student_logits_TV=student_logits_TV, teacher_logprobs_TK=teacher_logprobs_TK, teacher_ids_TK=teacher_ids_TK
    )
    shapes = (teacher_logprobs_TK.shape, teacher_ids_TK.shape)
    if shapes[0] != shapes[1]:
        refuse(f"{shapes[0]} log-probs for {shapes[1]} token ids")
    log_q_TK = temperature_scaled_logprobs(student_logits_TV, temperature).gather(1, teacher_ids_TK)
    return temperature**2 * _kl(teacher_logprobs_TK.detach().to(log_q_TK.dtype), log_q_TK)


def reverse_kl_reward(student_logprobs_T: Tensor, teacher_logprobs_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    """Reward of on-policy distillation at each sampled token: r_t = log p_t(token_t) - log q_t(token_t).

    Minus the k1 estimate of KL(student || teacher) at that token, for tokens that the student sampled.
    Used as the token's own advantage, with no return of later tokens added (a discount of 0), its
    policy gradient is that of `reverse_kl` in expectation.

    Sources: Gu et al. 2023, "MiniLLM" (arXiv 2306.08543), section 2.2; Lu and Thinking Machines Lab
    2025, "On-policy distillation" (thinkingmachines.ai/blog/on-policy-distillation).

    Args:
        student_logprobs_T: [T] log-probs of the tokens under the student that sampled them, in nats.
        teacher_logprobs_T: [T] under the teacher.
        loss_mask_T: [T] bool, true at sampled tokens; whatever stands elsewhere, NaN included, is ignored.

    Returns:
        [T] float64 in nats, no gradient, 0 where masked; -inf at a token that the teacher forbids.
    """
    check_mask(loss_mask_T=loss_mask_T)
    difference_T = teacher_logprobs_T.detach().to(torch.float64) - student_logprobs_T.detach().to(torch.float64)
    return torch.where(loss_mask_T, difference_T, 0.0)


def _both(student_logits_TV: Tensor, teacher_logits_TV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of teacher and student, the teacher's without gradient."""
    _check_rows(student_logits_TV=student_logits_TV, teacher_logits_TV=teacher_logits_TV)
    shapes = (student_logits_TV.shape, teacher_logits_TV.shape)
    if shapes[0] != shapes[1]:
        refuse(f"student {shapes[0]} and teacher {shapes[1]} need one vocabulary and one length")
    log_p_TV = temperature_scaled_logprobs(teacher_logits_TV.detach(), temperature)
    return log_p_TV, temperature_scaled_logprobs(student_logits_TV, temperature)


def _mixture(log_first_TV: Tensor, log_second_TV: Tensor, alpha: float) -> Tensor:
    """log(alpha first + (1 - alpha) second)."""
    if not 0 < alpha < 1:
        refuse(f"alpha must be in (0, 1), it is {alpha}")
    # where both forbid a token, the slope would be NaN at -inf
    log_first_TV = log_first_TV.clamp(min=torch.finfo(log_first_TV.dtype).min)
    return torch.logaddexp(log_first_TV + math.log(alpha), log_second_TV + math.log1p(-alpha))


def _check_rows(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.ndim != 2:
            refuse(
                f"{name} must have one row a token, its shape is {tuple(tensor.shape)}",
                why="the sum is over the second axis, which would be time",
                do=f"{name}[loss_mask]",
            )


def _kl(log_p_TV: Tensor, log_q_TV: Tensor) -> Tensor:
    p_TV = log_p_TV.exp()
    # 0 log 0 is 0; the difference of two infinities would be NaN
    return (p_TV * torch.where(p_TV > 0, log_p_TV - log_q_TV, 0.0)).sum(1)
