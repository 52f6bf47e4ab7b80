"""Log-probabilities within a few allowed tokens a row, from the rows of the output matrix that they need.

    z_v = softcap(h . W_v + b_v) / temperature        log p(y | A) = z_y - log sum_{v in A} exp z_v
    H = log sum_{v in A} exp z_v - sum_{v in A} p_v z_v

The matrix rows of all tokens that occur in some row's set are gathered once, U of them, and one product [R, D] x
[D, U] takes the place of [R, D] x [D, V]; the gradient goes back to those rows. The sets themselves are ragged, one
after another, so that a row with a single token costs one entry whatever the widest set has.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from rft_core.packed_tokens import AllowedTokens
from rft_models.layers.fast_linear import linear


def allowed_logprobs(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    targets_R: Tensor,
    allowed: AllowedTokens,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute log p(target | allowed), equal to a softmax over the vocabulary with -inf for all other tokens.

    Args:
        hidden_RD: final hidden states, one row a predicted token.
        weight_VD: output matrix.
        targets_R: [R] int64, each among its row's allowed tokens.
        allowed: the tokens of each row.
        bias: [V] or None.
        temperature: positive divisor of the logits.
        softcap: bound of the logits, c tanh(z / c); None = none.
        with_entropy: also the entropy of the distribution over the allowed tokens, in nats.
        entropy_gradient: let gradients flow through it.

    Returns:
        [R] log-probs and [R] entropies or None; float32, or float64 for float64 inputs.
    """
    used_U, places_E = _distinct(allowed.ids_E)
    logits_RU = linear(
        hidden_RD, weight_VD.index_select(0, used_U), None if bias is None else bias.index_select(0, used_U)
    )
    logits_RU = logits_RU if logits_RU.dtype is torch.float64 else logits_RU.float()
    if softcap is not None:
        logits_RU = softcap * torch.tanh(logits_RU / softcap)
    logits_RU = logits_RU / temperature
    num_rows, width = logits_RU.shape
    rows_E = torch.repeat_interleave(torch.arange(num_rows, device=hidden_RD.device), allowed.counts_R)
    logits_E = logits_RU.flatten().index_select(0, rows_E * width + places_E)
    # without a gradient: the largest logit cancels in the logarithm of the sum
    largest_R = logits_E.new_full((num_rows,), -torch.inf).scatter_reduce(0, rows_E, logits_E.detach(), "amax")
    shares_E = (logits_E - largest_R[rows_E]).exp()
    sums_R = logits_E.new_zeros(num_rows).index_add(0, rows_E, shares_E)
    log_sums_R = sums_R.log() + largest_R
    target_R = logits_RU.gather(1, torch.searchsorted(used_U, targets_R)[:, None])[:, 0]
    if not with_entropy:
        return target_R - log_sums_R, None
    means_E = shares_E / sums_R[rows_E] * logits_E
    entropy_R = log_sums_R - logits_E.new_zeros(num_rows).index_add(0, rows_E, means_E)
    return target_R - log_sums_R, entropy_R if entropy_gradient else entropy_R.detach()


def _distinct(ids_E: Tensor) -> tuple[Tensor, Tensor]:
    distinct = ids_E.unique(return_inverse=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return cast(tuple[Tensor, Tensor], distinct)
