"""The critic: losses of its values, and how much of the returns they explain."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rft_algos.input_checks import check_positive, refuse
from rft_algos.packed.tensor_checks import check_mask


def squared_value_loss(values_T: Tensor, returns_T: Tensor) -> Tensor:
    """Half the squared error of the value: l_t = (V_t - G_t)^2 / 2.

    Args:
        values_T: [T] values of the critic, in the unit of the rewards; the gradient flows through them.
        returns_T: [T] returns that they should have been, no gradient.

    Returns:
        [T] loss per token, with gradient V_t - G_t.
    """
    return (values_T - returns_T.detach()).square() / 2


def huber_value_loss(values_T: Tensor, returns_T: Tensor, delta: float = 1.0) -> Tensor:
    """Squared error that grows linearly beyond a distance.

    l_t = e^2 / 2 where |e| <= delta, delta (|e| - delta / 2) beyond; e = V_t - G_t.

    The gradient is e, held to +-delta: one return that is far off does not decide the step of the critic.

    Source: Huber 1964, "Robust estimation of a location parameter".

    Args:
        values_T: [T] values of the critic, in the unit of the rewards; the gradient flows through them.
        returns_T: [T] returns that they should have been, no gradient.
        delta: distance at which the loss becomes linear, positive, in the unit of the rewards.

    Returns:
        [T] loss per token; `squared_value_loss` within `delta`.
    """
    check_positive(delta=delta)
    errors_T = values_T - returns_T.detach()
    held_T = errors_T.clamp(-delta, delta)
    # the tangent beyond delta: its slope is the bound, its value that of the parabola there
    return held_T.detach() * (errors_T - held_T) + held_T.square() / 2


def clipped_value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float | None) -> Tensor:
    """Value loss of PPO2: the worse of the value and of the value kept near the old one.

    l_t = max((V_t - G_t)^2, (clip(V_t, V_old_t - clip, V_old_t + clip) - G_t)^2) / 2.

    Where the clip decides (`value_clipped`) the loss is constant and gives no gradient: a value that
    has already moved by `clip` towards its return is pushed no further in this step.

    Sources: the PPO2 implementation of OpenAI Baselines; studied by Andrychowicz et al. 2020, "What
    matters in on-policy reinforcement learning?" (arXiv 2006.05990).

    Args:
        values_T: [T] values of the critic, in the unit of the rewards; the gradient flows through them.
        old_values_T: [T] values at the start of the step, no gradient.
        returns_T: [T] returns, no gradient.
        clip: how far a value may move, positive, in the unit of the rewards; None for no clip.

    Returns:
        [T] loss per token; `squared_value_loss` where the value moved by `clip` at most.
    """
    if clip is None:
        return squared_value_loss(values_T, returns_T)
    free_T = squared_value_loss(values_T, returns_T)
    # detached: where the clip decides, the loss is a constant
    clipped_T = squared_value_loss(_near_old(values_T.detach(), old_values_T, clip), returns_T)
    # the larger of the two; not `maximum`, whose gradient takes longer
    return torch.where(clipped_T > free_T.detach(), clipped_T, free_T)


def value_clipped(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float | None) -> Tensor:
    """Mask the tokens where the clip of `clipped_value_loss` decides the loss, so that the token gives no gradient.

    Args:
        values_T: [T] values of the critic.
        old_values_T: [T] values at the start of the step.
        returns_T: [T] returns.
        clip: as in `clipped_value_loss`.

    Returns:
        [T] bool, all False without a clip.
    """
    if clip is None:
        return torch.zeros_like(values_T, dtype=torch.bool)
    near_T = _near_old(values_T, old_values_T, clip)
    return squared_value_loss(near_T, returns_T) > squared_value_loss(values_T, returns_T)


def _near_old(values_T: Tensor, old_values_T: Tensor, clip: float) -> Tensor:
    if not clip > 0:
        refuse(f"clip must be positive, it is {clip}; None is for no clip")
    old_T = old_values_T.detach()
    # clamp leaves a value inside the range as it is; V_old + clamp(V - V_old) would round it
    return values_T.clamp(old_T - clip, old_T + clip)


@dataclass(frozen=True, slots=True, eq=False)
class ValueMoments:
    """Moments of returns G and residuals G - V over loss tokens, which add over micro-batches and ranks.

    Mean and sum of squared deviations rather than sums of squares: returns of 1000 +- 0.01 keep
    their digits. Every field is a float64 tensor [], so that nothing waits for the device.

    Example: returns 1 and 3 with values 1 and 2 have count 2, returns_mean 2, returns_m2 2,
    residuals 0 and 1, residuals_mean 0.5 and residuals_m2 0.5.
    """

    count: Tensor
    """Loss tokens."""
    returns_mean: Tensor
    """Mean return, 0 where there is no token."""
    returns_m2: Tensor
    """Sum of squared deviations of the returns from their mean; exactly 0 where all are equal."""
    residuals_mean: Tensor
    """Mean of G - V: positive for a critic that is too low."""
    residuals_m2: Tensor
    """Sum of squared deviations of the residuals from their mean."""

    def merge(self, other: ValueMoments) -> ValueMoments:
        """Moments of both sets of tokens together, by the update of Chan, Golub and LeVeque (1983).

        Args:
            other: moments of other tokens; may be of none.

        Returns:
            The moments of the union.
        """
        count = self.count + other.count
        share = other.count / count.clamp(min=1)
        returns_shift = other.returns_mean - self.returns_mean
        residuals_shift = other.residuals_mean - self.residuals_mean
        return ValueMoments(
            count=count,
            returns_mean=self.returns_mean + returns_shift * share,
            returns_m2=self.returns_m2 + other.returns_m2 + returns_shift.square() * self.count * share,
            residuals_mean=self.residuals_mean + residuals_shift * share,
            residuals_m2=self.residuals_m2 + other.residuals_m2 + residuals_shift.square() * self.count * share,
        )


@torch.no_grad()
def value_moments(values_T: Tensor, returns_T: Tensor, loss_mask_T: Tensor) -> ValueMoments:
    """Moments of the returns and of what the values leave of them, for `explained_variance`.

    Args:
        values_T: [T] values; whatever stands at masked tokens, NaN included, counts for nothing.
        returns_T: [T] returns, likewise.
        loss_mask_T: [T] bool.

    Returns:
        Moments over the loss tokens, no gradient.
    """
    check_mask(loss_mask_T=loss_mask_T)
    shapes = (values_T.shape, returns_T.shape, loss_mask_T.shape)
    if len(set(shapes)) != 1:
        refuse(f"values, returns and mask must have one shape [T]: {shapes}")
    returns = returns_T.to(torch.float64)
    count = loss_mask_T.sum(dtype=torch.float64)
    returns_mean, returns_m2 = _mean_and_m2(returns, loss_mask_T, count)
    residuals_mean, residuals_m2 = _mean_and_m2(returns - values_T.to(torch.float64), loss_mask_T, count)
    return ValueMoments(count, returns_mean, returns_m2, residuals_mean, residuals_m2)


def explained_variance(moments: ValueMoments) -> float | None:
    """Compute the share of the variance of the returns that the critic explains: 1 - Var(G - V) / Var(G).

    1 for a perfect critic, 0 for one that predicts a constant, negative for one that is worse. A
    constant offset of the values is not held against them.

    Args:
        moments: over all loss tokens of the step, merged over micro-batches and ranks.

    Returns:
        A number up to 1; None where all returns are equal or there are none, because then there is
        no variance to explain.
    """
    if moments.returns_m2 == 0:
        return None
    return float(1 - moments.residuals_m2 / moments.returns_m2)


def _mean_and_m2(values_T: Tensor, mask_T: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    # amax of nothing is an error
    if values_T.numel() == 0:
        return torch.zeros_like(count), torch.zeros_like(count)
    # deviations from one of the values itself: where all are equal they are exactly 0
    largest = values_T.masked_fill(~mask_T, -torch.inf).amax()
    deviations_T = torch.where(mask_T, values_T - largest, 0.0)
    shift = deviations_T.sum() / count
    m2 = torch.where(mask_T, deviations_T - shift, 0.0).square().sum()
    # without loss tokens -inf and 0 / 0 stand here
    return torch.where(mask_T.any(), largest + shift, 0.0), m2
