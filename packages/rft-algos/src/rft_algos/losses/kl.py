"""Estimators of KL(pi || pi_ref) from the log-probs of sampled tokens.

x_t = log pi(token) - log pi_ref(token), tokens sampled from pi. Each function gives one value per
token, unreduced. What their average estimates, as a value and, taken as a loss, by its gradient:

    function            expected value             expected gradient as a loss
    k1                  KL(pi || pi_ref)           0
    absolute            not that divergence        gradient of the sum over the vocabulary of |pi - pi_ref|
    k2                  biased                     gradient of KL(pi || pi_ref)
    k3                  KL(pi || pi_ref)           gradient of KL(pi_ref || pi)
    straight_through    that of its value          that of its second argument: with k2, of KL(pi || pi_ref)
    unbiased_k3         KL(pi || pi_ref)           gradient of KL(pi || pi_ref), tokens sampled from pi_old
    importance_weighted_k1    the same             the same

So in the reward k1 or k3 belong, and in the loss k2, `straight_through(k1 or k3, k2)`, `unbiased_k3` or
`importance_weighted_k1`. All but the last two take tokens of the current policy; after the first
optimizer step on a batch they are off by the policy's own change.

See Schulman 2020, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import threshold

from rft_algos.packed.importance_ratio import LOG_RATIO_LIMIT, ratio


def k1(log_ratio_T: Tensor) -> Tensor:
    """k1_t = x_t: unbiased, high variance, may be negative.

    Right as a penalty in the reward. As a loss its expected gradient is zero, so there it only
    adds noise.

    Args:
        log_ratio_T: [T] log pi - log pi_ref, in nats.

    Returns:
        [T] estimates, in nats.
    """
    return log_ratio_T


def k2(log_ratio_T: Tensor) -> Tensor:
    """k2_t = x_t^2 / 2: biased, low variance, never negative; right gradient as a loss.

    Args:
        log_ratio_T: [T] log pi - log pi_ref, in nats.

    Returns:
        [T] estimates, in nats.
    """
    return log_ratio_T.square() / 2


def k3(log_ratio_T: Tensor) -> Tensor:
    """k3_t = exp(-x_t) - 1 + x_t: unbiased, low variance, never negative.

    Its gradient as a loss is that of the reverse divergence KL(pi_ref || pi); this is the term of
    GRPO (arXiv 2402.03300, equation 4).

    x is clamped from below at -20 before anything else, because exp(-x) overflows there; such a
    token has the constant value exp(20) - 21 and zero gradient (`is_clamped` counts them). Above,
    nothing overflows and nothing is clamped. Clamping the exponential alone would leave the
    gradient of the linear term, which pushes x further down.

    Args:
        log_ratio_T: [T] log pi - log pi_ref, in nats.

    Returns:
        [T] estimates, in nats.
    """
    bounded_T = threshold(log_ratio_T, -LOG_RATIO_LIMIT, -LOG_RATIO_LIMIT)  # a clamp with a quicker gradient
    # expm1 keeps the digits that exp(-x) - 1 loses near x = 0, where nearly all tokens are
    return torch.expm1(-bounded_T) + bounded_T


def absolute(log_ratio_T: Tensor) -> Tensor:
    """|x_t|: never negative, the same pull however near or far.

    Its average is not KL(pi || pi_ref) but larger. As a loss its expected gradient is that of the sum over the
    vocabulary of |pi(v) - pi_ref(v)|, twice the total variation distance.

    Args:
        log_ratio_T: [T] log pi - log pi_ref, in nats.

    Returns:
        [T] distances, in nats; the gradient at 0 is 0.
    """
    return log_ratio_T.abs()


def straight_through(value_T: Tensor, gradient_T: Tensor) -> Tensor:
    """The value of one estimator with the gradient of another.

    v_t + g_t - sg[g_t], where sg stops the gradient.

    With k1 or k3 as the value and k2 for the gradient, both are right: an unbiased number to watch
    and to steer by, and the gradient of KL(pi || pi_ref).

    Args:
        value_T: [T] estimates that give the value, finite.
        gradient_T: [T] estimates that give the gradient, finite.

    Returns:
        [T] estimates.
    """
    return value_T.detach() + (gradient_T - gradient_T.detach())


def unbiased_k3(log_ratio_reference_T: Tensor, log_ratio_old_T: Tensor) -> Tensor:
    """k3 for tokens of the old policy, with the right value and the right gradient.

    The value is r_t k3_t, r_t = exp(clamp(log pi_t - log pi_old,t, -20, 20)); the gradient with
    respect to log pi_t is r_t x_t.

    The importance ratio moves the average from pi_old to pi, and its own gradient supplies what is
    missing from that of k3: r (exp(-x) - 1 + x) + r (1 - exp(-x)) = r x. That sum is not left to
    arithmetic, which would lose at x = -18 every digit of float32 to exp(18): r x is the gradient
    as it is, also where the value is held (`k3`), and r stands in it as a constant.

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2" (arXiv 2512.02556), section 3.1.

    Args:
        log_ratio_reference_T: [T] log pi - log pi_ref, in nats; the gradient flows through it.
        log_ratio_old_T: [T] log pi - log pi_old, in nats; no gradient flows through it.

    Returns:
        [T] estimates, in nats.
    """
    ratio_T = ratio(log_ratio_old_T.detach())
    return straight_through(ratio_T * k3(log_ratio_reference_T), ratio_T * k2(log_ratio_reference_T))


def importance_weighted_k1(log_ratio_reference_T: Tensor, log_ratio_old_T: Tensor) -> Tensor:
    """k1 for tokens of the old policy: r_t x_t, unbiased in value and gradient.

    r_t = exp(clamp(log pi_t - log pi_old,t, -20, 20)). Its gradient with respect to log pi_t is r_t (x_t + 1), of which
    the part r_t is 0 on average: noise that `unbiased_k3` does not have.

    Source: Tang and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL" (arXiv 2506.09477).

    Args:
        log_ratio_reference_T: [T] log pi - log pi_ref, in nats; the gradient flows through it.
        log_ratio_old_T: [T] log pi - log pi_old, in nats; the gradient flows through it.

    Returns:
        [T] estimates, in nats.
    """
    return ratio(log_ratio_old_T) * log_ratio_reference_T


def is_clamped(log_ratio_T: Tensor) -> Tensor:
    """Mask the tokens where `k3` had to clamp: x_t < -20.

    Args:
        log_ratio_T: [T] log pi - log pi_ref, in nats.

    Returns:
        [T] bool.
    """
    return log_ratio_T < -LOG_RATIO_LIMIT


def _k1_gradient_of_k2(log_ratio_T: Tensor) -> Tensor:
    return straight_through(k1(log_ratio_T), k2(log_ratio_T))


def _k3_gradient_of_k2(log_ratio_T: Tensor) -> Tensor:
    return straight_through(k3(log_ratio_T), k2(log_ratio_T))


ON_POLICY: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k1+": _k1_gradient_of_k2,
    "k3+": _k3_gradient_of_k2,
}
"""Estimators of the log-ratio to the reference alone, by the word of an algorithm's `kl_estimator`."""

OFF_POLICY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "unbiased_k3": unbiased_k3,
    "importance_weighted_k1": importance_weighted_k1,
}
"""Estimators that weigh tokens of the old policy, by the word of an algorithm's `kl_estimator`."""


def estimates(estimator: str, log_ratio_reference_T: Tensor, log_ratio_old_T: Tensor) -> Tensor:
    """The estimates by the word of an algorithm's `kl_estimator`.

    k1, k2, k3 and abs are the functions of this module; k1+ and k3+ have the value of k1 and of k3 with the gradient
    of k2 (`straight_through`); unbiased_k3 and importance_weighted_k1 weigh by the ratio to the old policy.

    Args:
        estimator: one of `ON_POLICY` or `OFF_POLICY`.
        log_ratio_reference_T: [T] log pi - log pi_ref, in nats; the gradient flows through it.
        log_ratio_old_T: [T] log pi - log pi_old, in nats; looked at by the estimators of `OFF_POLICY` alone.

    Returns:
        [T] estimates, in nats.
    """
    if estimator in OFF_POLICY:
        return OFF_POLICY[estimator](log_ratio_reference_T, log_ratio_old_T)
    return ON_POLICY[estimator](log_ratio_reference_T)
