"""The moving averages of a checkpoint (`--enable_ema`) in the place of its weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rft_algos.errors import OptionsError
from rft_dist import ema
from rft_dist.checkpoints.blocks import BlockReader
from rft_dist.checkpoints.reader import Checkpoint
from rft_models.policy import CausalPolicy


class WeightsOrAverages:
    """Tensors of a model directory, those that are averaged as their averages; one in memory at a time."""

    def __init__(self, stored: BlockReader, averages: BlockReader, names: Mapping[str, str]) -> None:
        self.table = stored.table
        self._stored, self._averages, self._names = stored, averages, names

    def whole(self, name: str) -> Tensor:
        """A tensor in full."""
        return self._averages.whole(self._names[name]) if name in self._names else self._stored.whole(name)


def take_averages(policy: CausalPolicy, checkpoint: Checkpoint, stored: BlockReader) -> WeightsOrAverages:
    """Put every average that the checkpoint has into the policy; what stands for its weights from now on.

    Raises:
        OptionsError: it has none, or some of tensors that the model does not have.
    """
    reader = checkpoint.blocks("optimizer")
    names = {key.removeprefix(f"{ema.KIND}/"): key for key in reader.table if key.startswith(f"{ema.KIND}/")}
    parameters = dict(policy.named_parameters())
    unknown = sorted(name for name in names if name not in parameters or name not in stored.table)
    if unknown or not names:
        raise _no_averages(checkpoint, unknown)
    with torch.no_grad():
        for name, key in names.items():
            parameters[name].copy_(reader.whole(key))
    return WeightsOrAverages(stored, reader, names)


def _no_averages(checkpoint: Checkpoint, unknown: list[str]) -> OptionsError:
    found = (
        f"averages of {len(unknown)} tensors that its model does not have, the first {unknown[0]}" if unknown else ""
    )
    return OptionsError(
        code="export.no_averages",
        what=f"step {checkpoint.step} holds {found or 'no moving average of its weights'}",
        where=f"--ema, {checkpoint.path}",
        why="averages of whole weights are kept while a run trains with --enable_ema",
        do=f"rft-train export {checkpoint.path} DIR (the weights themselves), or train with --enable_ema",
    )
