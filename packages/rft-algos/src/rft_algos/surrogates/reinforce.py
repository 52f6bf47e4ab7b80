"""The policy gradient without a trust region: plain, and weighted by the importance ratio."""

from __future__ import annotations

from torch import Tensor

from rft_algos.algorithms import components
from rft_algos.algorithms.registry import register_equation
from rft_algos.packed.importance_ratio import ratio
from rft_algos.packed.loss_tokens import Tokens
from rft_algos.packed.tensor_checks import check_alike


def reinforce(logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
    """REINFORCE, as a loss.

    l_t = -A_t log pi_t.

    On tokens of the current policy the gradient is that of the expected return; it is the loss of
    RLOO, of REINFORCE++ and of GPG when every batch is used once.

    Source: Williams 1992, "Simple statistical gradient-following algorithms".

    Args:
        logprobs_T: [T] log pi of the sampled tokens, in nats; the gradient flows through it.
        advantages_T: [T] advantages, no gradient.

    Returns:
        [T] loss per token. Its value means nothing; its gradient is -A_t.
    """
    check_alike(logprobs_T=logprobs_T, advantages_T=advantages_T)
    return -advantages_T * logprobs_T


def importance_weighted(log_ratio_T: Tensor, advantages_T: Tensor) -> Tensor:
    """Importance-weighted policy gradient, as a loss.

    l_t = -A_t r_t, r_t = exp(clamp(log_ratio_t, -20, 20)).

    Unbiased for one-step decisions whatever policy sampled, with a variance that grows with the
    distance between the two. `ppo_clip` is this with a limit.

    Args:
        log_ratio_T: [T] log pi - log pi of the policy that sampled, in nats; the gradient flows through it.
        advantages_T: [T] advantages, no gradient.

    Returns:
        [T] loss per token.
    """
    check_alike(log_ratio_T=log_ratio_T, advantages_T=advantages_T)
    return -advantages_T * ratio(log_ratio_T)


@register_equation(components.Reinforce)
def _reinforce(choice: components.Reinforce, tokens: Tokens) -> Tensor:
    return reinforce(tokens.logprobs, tokens.advantages)


@register_equation(components.ImportanceWeighted)
def _importance_weighted(choice: components.ImportanceWeighted, tokens: Tokens) -> Tensor:
    return importance_weighted(tokens.log_ratio, tokens.advantages)
