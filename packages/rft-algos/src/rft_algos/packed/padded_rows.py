"""Padded rows [batch, time] in the flat form of the equations, and back.

The rows are laid end to end: nothing is copied where the memory allows it, gradients flow back to the rows, no device
is asked for a number, and the shapes do not depend on the mask. Prompt and padding stay where they are and are masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rft_algos.input_checks import refuse
from rft_algos.packed.tensor_checks import check_mask, check_tensors


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """The layout of B rows of L positions as T = B L tokens.

    Example: the mask [[True, False], [True, True]] has the tokens True, False, True, True of the sequences 0, 0, 1, 1.
    """

    loss_mask_T: Tensor
    """[T] bool, true at tokens that the policy sampled."""
    segment_ids_T: Tensor
    """[T] int64, the row of each token."""
    num_rows: int
    """B, the number of sequences."""
    num_columns: int
    """L, the number of positions of a row."""

    @classmethod
    def of(cls, loss_mask_BL: Tensor) -> PaddedRows:
        """Return the layout of the rows of this mask.

        Args:
            loss_mask_BL: [B, L] bool, true at tokens that the policy sampled; false at prompt, observations, padding.

        Returns:
            The layout.
        """
        check_mask(loss_mask_BL=loss_mask_BL)
        if loss_mask_BL.ndim != 2:
            refuse(f"loss_mask_BL must be [batch, time], its shape is {tuple(loss_mask_BL.shape)}")
        num_rows, num_columns = loss_mask_BL.shape
        rows_B1 = torch.arange(num_rows, device=loss_mask_BL.device)[:, None]
        return cls(loss_mask_BL.reshape(-1), rows_B1.expand(num_rows, num_columns).reshape(-1), num_rows, num_columns)

    def pack(self, values_BL: Tensor, name: str = "values_BL") -> Tensor:
        """Lay the rows end to end.

        Args:
            values_BL: [B, L] values, or [B] one a sequence, which stands at each of its tokens.
            name: of the values, for an error.

        Returns:
            [T] values; the gradient flows back.
        """
        check_tensors(**{name: values_BL})
        if values_BL.shape == (self.num_rows,):
            values_BL = values_BL[:, None].expand(self.num_rows, self.num_columns)
        if values_BL.shape != (self.num_rows, self.num_columns):
            refuse(
                f"{name} of shape {tuple(values_BL.shape)} for {self.num_rows} rows of {self.num_columns} positions",
                why="values stand at the positions of the mask, or are one a row; of logits take those of the tokens "
                "(logprobs_from_logits)"
                if values_BL.ndim == 3
                else "values stand at the positions of the mask, or are one a row",
            )
        return values_BL.reshape(-1)

    def unpack(self, values_T: Tensor) -> Tensor:
        """Cut the tokens into rows again.

        Args:
            values_T: [T] values, such as losses or advantages.

        Returns:
            [B, L] values, 0 where masked; the gradient flows back.
        """
        kept_T = torch.where(self.loss_mask_T, values_T, torch.zeros((), dtype=values_T.dtype, device=values_T.device))
        return kept_T.reshape(self.num_rows, self.num_columns)

    @property
    def num_loss_tokens(self) -> Tensor:
        """[] int64 number of loss tokens."""
        return self.loss_mask_T.sum()

    @property
    def num_sequences(self) -> Tensor:
        """[] int64 number of rows that have a loss token; the others carry no loss and count for nothing."""
        return self.loss_mask_T.reshape(self.num_rows, self.num_columns).any(1).sum()
