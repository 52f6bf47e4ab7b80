"""Learning rates as a function of the step. Torch-free.

`step` counts optimizer steps from 0, and the value is the rate that step uses. No step is wasted:
the first step of a warm-up of W steps uses peak / (W + 1), step W uses the peak, and the floor is
reached at `num_steps`, one after the last step.
"""

from __future__ import annotations

import math


def warmup_cosine(step: int, *, num_steps: int, warmup_steps: int, peak: float, floor_ratio: float) -> float:
    """Linear warm-up, then half a cosine down to floor_ratio * peak.

    After the warm-up: floor + (peak - floor) * (1 + cos(pi * progress)) / 2, where progress is
    (step - warmup_steps) / (num_steps - warmup_steps).

    Source: Loshchilov and Hutter 2017, "SGDR" (arXiv 1608.03983), without restarts.

    Args:
        step: optimizer step, from 0; at or after `num_steps` the rate is the floor.
        num_steps: steps of the run.
        warmup_steps: steps before the peak, 0 for none.
        peak: largest rate.
        floor_ratio: last rate over the peak, in [0, 1].

    Returns:
        The rate of this step, a float (no tensors).
    """
    if step < warmup_steps:
        return _warmup(step, warmup_steps, peak)
    share = (1.0 + math.cos(math.pi * _progress(step, num_steps, warmup_steps))) / 2.0
    return peak * (floor_ratio + (1.0 - floor_ratio) * share)


def warmup_linear(step: int, *, num_steps: int, warmup_steps: int, peak: float, floor_ratio: float) -> float:
    """Linear warm-up, then a straight line down to floor_ratio * peak.

    After the warm-up: floor + (peak - floor) * (1 - progress), progress as in `warmup_cosine`.

    Args:
        step: optimizer step, from 0; at or after `num_steps` the rate is the floor.
        num_steps: steps of the run.
        warmup_steps: steps before the peak, 0 for none.
        peak: largest rate.
        floor_ratio: last rate over the peak, in [0, 1].

    Returns:
        The rate of this step, a float (no tensors).
    """
    if step < warmup_steps:
        return _warmup(step, warmup_steps, peak)
    share = 1.0 - _progress(step, num_steps, warmup_steps)
    return peak * (floor_ratio + (1.0 - floor_ratio) * share)


def constant(step: int, *, peak: float, warmup_steps: int = 0) -> float:
    """The peak at every step, after a linear warm-up if one is asked for.

    Args:
        step: optimizer step, from 0.
        peak: the rate.
        warmup_steps: steps before the peak, 0 for none.

    Returns:
        The rate of this step, a float (no tensors).
    """
    return _warmup(step, warmup_steps, peak) if step < warmup_steps else peak


def warmup_stable_decay(
    step: int, *, num_steps: int, warmup_steps: int, decay_steps: int, peak: float, floor_ratio: float
) -> float:
    """Linear warm-up, then the peak, then in the last `decay_steps` a straight line down to floor_ratio * peak (WSD).

    Before the decay the rate does not depend on `num_steps`: a run that is made longer goes on at the peak.

    Source: Hu et al. 2024, "MiniCPM" (arXiv 2404.06395), section 4.2, with the linear decay of Hägele et al. 2024,
    "Scaling laws and compute-optimal training beyond fixed training durations" (arXiv 2405.18392), section 3.

    Args:
        step: optimizer step, from 0; at or after `num_steps` the rate is the floor.
        num_steps: steps of the run.
        warmup_steps: steps before the peak, 0 for none.
        decay_steps: last steps, in which the rate falls; the warm-up comes before them in any case.
        peak: largest rate.
        floor_ratio: last rate over the peak, in [0, 1].

    Returns:
        The rate of this step, a float (no tensors).
    """
    decay_start = max(warmup_steps, num_steps - decay_steps)
    if step < decay_start:
        return constant(step, peak=peak, warmup_steps=warmup_steps)
    return warmup_linear(step, num_steps=num_steps, warmup_steps=decay_start, peak=peak, floor_ratio=floor_ratio)


def _warmup(step: int, warmup_steps: int, peak: float) -> float:
    return peak * (step + 1) / (warmup_steps + 1)


def _progress(step: int, num_steps: int, warmup_steps: int) -> float:
    # a run no longer than its warm-up has no decay; it is then over, hence 1
    return min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps)) if step < num_steps else 1.0
