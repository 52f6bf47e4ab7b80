"""Soft Adaptive Policy Optimization: a smooth gate in place of a hard clip."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.algorithms import components
from rft_algos.algorithms.registry import register_equation
from rft_algos.input_checks import check_positive
from rft_algos.packed.importance_ratio import ratio
from rft_algos.packed.loss_tokens import Tokens
from rft_algos.packed.tensor_checks import check_alike


def sapo(log_ratio_T: Tensor, advantages_T: Tensor, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Tensor:
    """Soft-gated surrogate of SAPO, as a loss.

    l_t = -A_t (4 / tau) sigmoid(tau (r_t - 1)), tau = tau_positive where A_t > 0, else tau_negative.

    The factor 4 / tau gives the gate a slope of 1 at r_t = 1, so on-policy the gradient is that of
    the policy gradient; away from 1 it fades out. A larger tau fades faster: negative advantages
    get the larger one, because they spread probability over unsampled tokens.

    Source: Gao et al. 2025, "Soft Adaptive Policy Optimization" (arXiv 2511.20347).

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats; the gradient flows through it.
        advantages_T: [T] advantages, no gradient.
        tau_positive: temperature of the gate at positive advantages, above 0.
        tau_negative: temperature of the gate at negative advantages, above 0.

    Returns:
        [T] loss per token. At log_ratio 0 it is -2 A_t / tau, with gradient -A_t.
    """
    check_alike(log_ratio_T=log_ratio_T, advantages_T=advantages_T)
    check_positive(tau_positive=tau_positive, tau_negative=tau_negative)
    # numbers as tensors of the advantages' type: two plain floats would make a float32 tau
    positive, negative = advantages_T.new_full((), tau_positive), advantages_T.new_full((), tau_negative)
    tau_T = torch.where(advantages_T > 0, positive, negative)
    return advantages_T * (-4.0 / tau_T) * (tau_T * (ratio(log_ratio_T) - 1.0)).sigmoid()


@register_equation(components.Sapo)
def _sapo(choice: components.Sapo, tokens: Tokens) -> Tensor:
    return sapo(tokens.log_ratio, tokens.advantages, choice.tau_positive, choice.tau_negative)
