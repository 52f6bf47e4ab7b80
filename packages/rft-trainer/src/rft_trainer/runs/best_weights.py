"""The weights of the best evaluation so far, so that a run can end with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rft_core.errors import CheckpointError


class BestWeights:
    """A copy of a policy's parameters on the host; one more set of weights in memory and in each checkpoint.

    Example::

        best = BestWeights(policy.named_parameters())
        best.keep()          # the evaluation was the best so far
        ...
        best.put_back()      # the policy has these weights again
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._parameters = dict(named_parameters)
        self._kept: dict[str, Tensor] = {}

    def keep(self) -> None:
        """Copy the parameters as they are now to the host."""
        # a copy also where the weights are on the CPU already: the optimizer updates them in place
        self._kept = {name: value.detach().to("cpu", copy=True) for name, value in self._parameters.items()}

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the kept values to the parameters; they stay as they are where none were kept."""
        for name, value in self._kept.items():
            # in place, since the optimizer and the engine hold these tensors
            self._parameters[name].copy_(value)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the kept values by parameter name; the present values before anything was kept."""
        # never empty: a checkpoint has the same tensors before and after the first evaluation
        return dict(self._kept) or {name: value.detach() for name, value in self._parameters.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the tensors that `checkpoint_tensors()` returned.

        Raises:
            CheckpointError: other parameters, or parameters of other sizes.
        """
        expected = {name: tuple(value.shape) for name, value in self._parameters.items()}
        stored = {name: tuple(value.shape) for name, value in tensors.items()}
        if stored != expected:
            differing = sorted(n for n in {*expected, *stored} if expected.get(n) != stored.get(n))
            raise CheckpointError(
                code="checkpoint.best_weights",
                what=f"the best weights of the checkpoint differ from the model in {len(differing)} of "
                f"{len(expected)} parameters, the first is {differing[0]}",
                where="state/best_weights.safetensors",
                why="they belong to the model that is trained",
                do="resume with the model that the run was started with",
            )
        self._kept = {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
