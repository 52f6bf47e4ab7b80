"""Whitening: centring and scaling the advantages of tokens by moments over the whole batch.

Moments are counted first, on every rank and micro-batch for itself, then merged, then used: whiten
with the moments of a part and the result depends on how the batch was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rft_algos.input_checks import check_not_negative, refuse
from rft_algos.packed.reverse_scan import gather_loss_tokens, loss_positions
from rft_algos.packed.tensor_checks import check_mask


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations from the mean, as scalars []; no gradient.

    Unlike sums of squares these keep their digits far from 0: equal values have an m2 of
    exactly 0. `merge` adds the moments of another part of the batch.
    """

    count: Tensor
    """[] float64, how many values."""
    mean: Tensor
    """[] float64, 0 of no values."""
    m2: Tensor
    """[] float64, sum of (v - mean)^2."""

    def merge(self, other: Moments) -> Moments:
        """The moments of both parts together, in any order to rounding.

        mean = mean_a + d n_b / n,   m2 = m2_a + m2_b + d^2 n_a n_b / n,   d = mean_b - mean_a.

        Source: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for
        computing sample variances".
        """
        count = self.count + other.count
        # of no values at all this is 0 / 1, not 0 / 0
        share = other.count / count.clamp(min=1)
        difference = other.mean - self.mean
        m2 = self.m2 + other.m2 + difference.square() * self.count * share
        return Moments(count, self.mean + difference * share, m2)

    def std(self, *, ddof: int = 1) -> Tensor:
        """[] sqrt(m2 / (count - ddof)); 0 where that divides by nothing, as of one value.

        Args:
            ddof: 1 for Bessel's correction, 0 for the standard deviation of the values themselves.
        """
        return (self.m2 / (self.count - ddof).clamp(min=1)).sqrt()


def moments(values_T: Tensor, mask_T: Tensor) -> Moments:
    """Moments of the values at the tokens of a mask.

    Args:
        values_T: [T] values; ignored, NaN included, where masked.
        mask_T: [T] bool.

    Returns:
        Their number, mean and sum of squared deviations, which is exactly 0 for equal values.
    """
    if values_T.shape != mask_T.shape:
        refuse(f"{values_T.shape} values, {mask_T.shape} mask")
    check_mask(mask_T=mask_T)
    # a copy, which is shifted in place below
    values_L = gather_loss_tokens(values_T, loss_positions(mask_T))
    count = values_L.new_tensor(values_L.shape[0])
    # relative to one of the values: of equal values the mean is then that value, to the last digit
    origin = values_L[:1].sum()  # 0 where there is no value
    values_L -= origin
    offset = values_L.sum() / count.clamp(min=1)
    values_L -= offset
    return Moments(count, origin + offset, values_L.dot(values_L))


def whiten(
    values_T: Tensor,
    mask_T: Tensor,
    moments: Moments,
    *,
    epsilon: float = 1e-8,
    center: bool = True,
    ddof: int = 1,
) -> Tensor:
    """Values in standard deviations from the mean: (v_t - mean) / (std + epsilon).

    Exactly 0 everywhere where the standard deviation is 0, which is also that of a single token. A NaN or an
    infinity at a token of the mask makes every value NaN. Long sequences weigh more in moments over tokens than
    short ones.

    Source: Hu 2025, "REINFORCE++" (arXiv 2501.03262), normalisation of the advantages over the batch.

    Args:
        values_T: [T] values; ignored, NaN included, where masked.
        mask_T: [T] bool.
        moments: of the whole batch, on all ranks (`moments`, `Moments.merge`).
        epsilon: added to the standard deviation, in the unit of the values.
        center: subtract the mean; without it v_t / (std + epsilon).
        ddof: 1 for Bessel's correction, 0 for none.

    Returns:
        [T] float64, no gradient; 0 where masked.
    """
    if values_T.shape != mask_T.shape:
        refuse(f"{values_T.shape} values, {mask_T.shape} mask")
    check_mask(mask_T=mask_T)
    check_not_negative(epsilon=epsilon)
    std = moments.std(ddof=ddof)
    whitened_T = values_T.detach().to(torch.float64, copy=True)
    if center:
        whitened_T -= moments.mean
    whitened_T /= std + epsilon
    # without a spread all values are equal, and a rounding error over epsilon must not become an advantage;
    # a spread of NaN is no such case: it makes every value NaN, which the step refuses
    return whitened_T.masked_fill_(~mask_T | (std == 0), 0.0)


def clip(values_T: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Values limited to [-limit, limit], and which of them that changed.

    Args:
        values_T: [T] values.
        limit: positive, in the unit of the values.

    Returns:
        [T] clipped values, and [T] bool, true where |v| > limit before clipping; its mean over
        the loss tokens is the clipped fraction.
    """
    if not limit > 0:
        refuse(f"the limit must be positive: {limit}")
    return values_T.clamp(-limit, limit), values_T.abs() > limit
