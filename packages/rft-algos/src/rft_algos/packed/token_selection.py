"""Selection of the tokens of a batch to learn from.

A selection is made once, over the whole batch, before it is cut into micro-batches and spread over
ranks; what a micro-batch then gets is a mask. Selecting within micro-batches would make the result
depend on the cut. None of these functions has a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.input_checks import check_positive, refuse
from rft_algos.packed.segments import segment_counts, segment_index
from rft_algos.packed.tensor_checks import check_mask, check_vectors


def high_entropy_tokens(entropy_T: Tensor, loss_mask_T: Tensor, *, fraction: float) -> Tensor:
    """The tokens at which the policy was least certain, over the whole batch.

    Keeps the max(1, floor(fraction * n)) of the n loss tokens that have the highest entropy; of
    equals, the earlier. No loss tokens, none kept. TRL keeps the tokens at or above an interpolated quantile, which is
    at most one token more or less.

    Source: Wang et al. 2025, "Beyond the 80/20 Rule" (arXiv 2506.01939), which keeps a fraction of 0.2.

    Args:
        entropy_T: [T] entropy of the policy at each token of the batch, in nats, finite at loss tokens.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, is ignored.
        fraction: of the loss tokens to keep, in (0, 1].

    Returns:
        [T] bool, a part of `loss_mask_T`.
    """
    return largest(entropy_T, loss_mask_T, share(loss_mask_T, fraction))


def second_moment_tokens(log_ratio_T: Tensor, loss_mask_T: Tensor, *, limit: float = 0.04) -> Tensor:
    """The most tokens whose second moment of the log-ratio is within a limit, over the whole batch (M2PO).

    Leaves out the tokens of the largest (log_ratio_t)^2, one after another, until the mean of the squares over those
    that are kept is at most `limit`. Unlike a clip it lets single tokens go far as long as the batch does not.

    Source: Zheng et al. 2025, "Prosperity before collapse" (M2PO, arXiv 2510.01161), whose limit is 0.04. AReaL applies
    it to the ratio of the step's start over the policy that sampled.

    Args:
        log_ratio_T: [T] log pi - log pi of the policy that sampled, in nats.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, is ignored.
        limit: largest mean square, positive.

    Returns:
        [T] bool, a part of `loss_mask_T`.
    """
    check_positive(limit=limit)
    check_mask(loss_mask_T=loss_mask_T)
    check_vectors(log_ratio_T=log_ratio_T, loss_mask_T=loss_mask_T)
    squares_T = torch.where(loss_mask_T, log_ratio_T.detach().to(torch.float64).square(), torch.inf)
    rising_T, order_T = squares_T.sort(stable=True)
    numbers_T = torch.arange(1, squares_T.shape[0] + 1, device=squares_T.device)
    # the mean of the n smallest squares never falls with n, so those within the limit are a beginning
    kept_T = rising_T.cumsum(0) <= limit * numbers_T
    return torch.zeros_like(loss_mask_T).scatter(0, order_T, kept_T) & loss_mask_T


def high_entropy_tokens_per_sequence(
    entropy_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor, *, fraction: float
) -> Tensor:
    """The tokens at which the policy was least certain, in every sequence by itself.

    Keeps the max(1, floor(fraction * L)) of the L loss tokens of a sequence that have the highest
    entropy; of equals, the earlier. So a sequence keeps its share however certain it was throughout,
    where `high_entropy_tokens` may leave it none.

    Args:
        entropy_T: [T] entropy of the policy at each token, in nats, finite at loss tokens.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, is ignored.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.
        fraction: of the loss tokens to keep, in (0, 1].

    Returns:
        [T] bool, a part of `loss_mask_T`.
    """
    _check(entropy_T, loss_mask_T, fraction)
    places = segment_index(loss_mask_T, segment_ids_T)
    slots_T = places.index_T
    falling_T = entropy_T.argsort(descending=True, stable=True)
    order_T = falling_T[slots_T[falling_T].argsort(stable=True)]  # by slot, within a slot by falling entropy
    counts_S = segment_counts(places, dtype=torch.float64)
    quotas_S = (fraction * counts_S).floor().clamp(min=1.0)
    starts_S = counts_S.cumsum(0) - counts_S
    ordered_slots_T = slots_T[order_T]
    ranks_T = torch.arange(slots_T.shape[0], device=slots_T.device) - starts_S[ordered_slots_T]
    kept_T = (ranks_T < quotas_S[ordered_slots_T]) & (ordered_slots_T < places.spare)
    return torch.zeros_like(loss_mask_T).scatter(0, order_T, kept_T)


def share(loss_mask_T: Tensor, fraction: float) -> int:
    """Return the number of tokens that a fraction of the loss tokens is: max(1, floor(fraction * n)), 0 where n = 0.

    The product is that of floating-point numbers: floor(0.29 * 100) is 28.

    Args:
        loss_mask_T: [T] bool.
        fraction: in (0, 1].

    Returns:
        A number of tokens.
    """
    check_mask(loss_mask_T=loss_mask_T)
    if not 0.0 < fraction <= 1.0:
        refuse(f"fraction must lie in (0, 1], it is {fraction}")
    num_tokens = int(loss_mask_T.count_nonzero())
    return min(num_tokens, max(1, int(fraction * num_tokens)))


def largest(scores_T: Tensor, loss_mask_T: Tensor, num: int) -> Tensor:
    """The `num` loss tokens of the largest scores; of equals, the earlier.

    Args:
        scores_T: [T] scores, finite at loss tokens.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, is ignored.
        num: how many, at most the number of loss tokens.

    Returns:
        [T] bool.
    """
    if scores_T.shape != loss_mask_T.shape:
        refuse(f"{scores_T.shape} scores for {loss_mask_T.shape} mask")
    check_mask(loss_mask_T=loss_mask_T)
    check_vectors(scores_T=scores_T)
    if num == 0:
        return torch.zeros_like(loss_mask_T)
    scores_T = scores_T.masked_fill(~loss_mask_T, -torch.inf)
    threshold = scores_T.topk(num, sorted=False).values.amin()  # on a CPU a third to two thirds of `kthvalue`
    above_T, equal_T = scores_T > threshold, (scores_T == threshold) & loss_mask_T
    # `topk` leaves open which of equals it takes, so the threshold alone is used
    return above_T | (equal_T & (equal_T.cumsum(0) <= num - above_T.sum()))


def _check(scores_T: Tensor, loss_mask_T: Tensor, fraction: float) -> None:
    if scores_T.shape != loss_mask_T.shape:
        refuse(f"{scores_T.shape} scores for {loss_mask_T.shape} mask")
    if not 0.0 < fraction <= 1.0:
        refuse(f"fraction must lie in (0, 1], it is {fraction}")
