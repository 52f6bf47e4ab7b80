"""The exponential moving average of the weights that are trained, in float32, in the layout of the optimizer.

    a_0 = w_0,   a_t = d a_(t-1) + (1 - d) w_t      after every step that is applied

(Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992, with exponential weights.)
Where weights lie in blocks, each rank averages its blocks: nothing is exchanged. Where the optimizer steps on
float32 copies, those are averaged, and not what they are rounded to.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

KIND = "ema"
"""The average of a weight is "ema/<name>" among the tensors of an optimizer's state."""


class MovingAverage:
    """Averages of named tensors.

    Example::

        average = MovingAverage({"w": w}, decay=0.99)
        average.update({"w": w})          # after a step has changed w
    """

    def __init__(self, tensors: Mapping[str, Tensor], decay: float) -> None:
        """The averages begin as the tensors are now; `decay` is in [0, 1)."""
        assert 0 <= decay < 1, f"decay {decay}"
        self._decay = decay
        self._averages = {name: init(tensor) for name, tensor in tensors.items()}

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Move every average towards its tensor."""
        for name, average in self._averages.items():
            update(average, tensors[name], self._decay)

    def restart(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin anew from the tensors as they are now."""
        for name, average in self._averages.items():
            average.copy_(tensors[name].detach())

    def tensors(self) -> dict[str, Tensor]:
        """The averages by name, live."""
        return dict(self._averages)


def init(tensor: Tensor) -> Tensor:
    """The average of one tensor before any step: float32, or float64 for a tensor of that type."""
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.detach().to(dtype, copy=True)


def update(average: Tensor, tensor: Tensor, decay: float) -> None:
    """a <- d a + (1 - d) w, in place."""
    # lerp adds a share of the difference: where both are equal, the average does not change by a bit
    average.lerp_(tensor.detach().to(average.dtype), 1.0 - decay)
