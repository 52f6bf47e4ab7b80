"""Newton-Schulz on matrices of which every rank holds a block: gathered whole, orthogonalised, and taken back.

    U = all blocks of u, in bfloat16       (in which Newton-Schulz takes it: half of the traffic, the same bits)
    O = `orthogonalised`(U) on every rank;  o = this rank's block of O

One matrix is whole at a time. A stack of matrices that is cut between its matrices is orthogonalised where it lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rft_dist.optim.muon import orthogonalised
from rft_dist.strategies.dtensor_shards import full_tensor, local, start_of


class ShardedMatrices:
    """The matrices that Muon steps on, as the ranks keep them (`BlockOrthogonaliser`)."""

    def __init__(self, matrices: Mapping[str, Tensor]) -> None:
        """`matrices`: distributed tensors by name, the same on every rank and in the same order."""
        self._matrices = dict(matrices)

    @property
    def names(self) -> Sequence[str]:
        """All of the matrices, in the order of the exchanges."""
        return list(self._matrices)

    def shape(self, name: str) -> Sequence[int]:
        """Return the shape of the whole matrix."""
        return self._matrices[name].shape

    def orthogonalised(self, name: str, block: Tensor | None) -> Tensor:
        """Return this rank's block of the orthogonalised whole; every rank calls it, also one without a block.

        Args:
            name: of the matrix.
            block: this rank's block of the direction, of the shape of its block of the matrix; None = it has none.
        """
        matrix = self._matrices[name]
        own = local(matrix.detach())
        block = torch.empty_like(own) if block is None else block
        if not isinstance(matrix, DTensor) or _is_cut_between_matrices(matrix):
            return orthogonalised(block) if block.numel() else block
        # to where the ranks exchange: with moments in host memory the block is there
        sent = block.bfloat16().to(matrix.device_mesh.device_type)
        sharded = DTensor.from_local(
            sent,
            matrix.device_mesh,
            matrix.placements,
            run_check=False,
            shape=matrix.shape,
            stride=torch.empty(matrix.shape, device="meta").stride(),
        )
        direction = orthogonalised(full_tensor(sharded))
        places = (slice(first, first + size) for first, size in zip(start_of(matrix), own.shape, strict=True))
        return direction[tuple(places)].to(block.device)


def _is_cut_between_matrices(matrix: DTensor) -> bool:
    """Return whether a rank's block is a number of whole matrices."""
    return local(matrix).shape[1:] == matrix.shape[1:] and matrix.ndim > 2
