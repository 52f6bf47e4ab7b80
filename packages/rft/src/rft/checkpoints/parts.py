"""The model's part of a checkpoint: what each rank writes of its weights, and the rest of the model directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

Copy = Callable[[str, Tensor], Tensor]
"""Name and tensor to a copy of the tensor."""
DirectoryWriter = Callable[[Path], None]
"""Fills the model directory of a checkpoint; called on rank 0."""


class CheckpointParts(Protocol):
    """A model as a checkpoint takes it, whichever rank keeps which of its weights."""

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the tensors that this rank keeps, which must be finite to be saved."""
        ...

    def local_weights(self) -> Mapping[str, Tensor] | None:
        """Return the full weights that this rank writes, by their names in the model directory; all ranks call it.

        None = rank 0 has all weights, and `directory_writer` writes them.
        """
        ...

    def directory_writer(self) -> DirectoryWriter:
        """Return the function that writes what `local_weights` leaves, as it is when that has been called."""
        ...

    def snapshot(self, copy: Copy) -> DirectoryWriter:
        """Return `directory_writer` over copies, made by `copy`, of all that training goes on to change."""
        ...


class SavableModel(Protocol):
    """A model that one process can write as a complete directory."""

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]: ...
    def save_pretrained(self, directory: Path) -> None: ...
    def snapshot(self, copy: Copy) -> DirectoryWriter: ...


@dataclass(frozen=True, slots=True)
class FullWeights:
    """A model of which every rank keeps all weights: rank 0 writes the directory (`CheckpointParts`)."""

    model: SavableModel

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Yield all parameters of the model."""
        return self.model.named_parameters()

    def local_weights(self) -> None:
        """Return None: no rank writes weights apart from the directory."""

    def directory_writer(self) -> DirectoryWriter:
        """Return the function that writes the complete model directory."""
        return self.model.save_pretrained

    def snapshot(self, copy: Copy) -> DirectoryWriter:
        """Return the function that writes the weights as they are now."""
        return self.model.snapshot(copy)
