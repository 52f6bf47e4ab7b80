"""Inputs of a decode forward for prompts with images: embeddings, positions and the shift of later positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rft_models.vision.packed_rows import Features, MediaInputs, RowInputs, check_whole, no_tower
from rft_models.vision.tower import VisionTower


@dataclass(slots=True)
class MultimodalPrompts:
    """Concatenated prompts; embedding them records the rows of the features."""

    row: RowInputs
    offsets_P: Tensor
    """[P] int64 on the CPU: see `ImageLayout.position_offset`."""
    places_F: Tensor | None = None
    features: Features | None = None

    @property
    def axes_3T(self) -> Tensor | None:
        """Positions on three axes; None where one number a token is enough."""
        return self.row.positions_3K

    def embedded(self, embedding_VD: Tensor) -> Tensor:
        """[T, D] with the features in their places."""
        if self.row.features is None:
            return F.embedding(self.row.token_ids_K, embedding_VD)
        hidden_TD, self.places_F, self.features = self.row.embedded(lambda ids: F.embedding(ids, embedding_VD))
        return hidden_TD

    def add_deep(self, layer: int, hidden_TD: Tensor) -> None:
        """Add what the tower has for the states behind this layer, in place."""
        if self.features is not None and layer < len(self.features.deep):
            assert self.places_F is not None
            hidden_TD.index_add_(0, self.places_F, self.features.deep[layer])


def prepare_multimodal(
    tower: VisionTower | None,
    media: MediaInputs | None,
    lengths: Sequence[int],
    token_ids_T: Tensor,
    positions_T: Tensor,
) -> MultimodalPrompts:
    """Prompts of these lengths with their images, which run through the tower once each.

    Raises:
        PreflightError: images for a model without a tower.
        DataError: see `packed_rows.place`.
    """
    nothing_P = torch.zeros(len(lengths), dtype=torch.int64)
    if media is None or not any(one is not None for one in media):
        return MultimodalPrompts(RowInputs(token_ids_T, positions_T), nothing_P)
    if tower is None:
        raise no_tower("this model")
    row = tower.row(media, lengths, token_ids_T, positions_T)
    offsets = [0 if one is None else tower.layout.position_offset(one.placed) for one in media]
    return MultimodalPrompts(row, torch.tensor(offsets))


def generation_inputs(
    tower: VisionTower | None, media: MediaInputs | None, lengths: Sequence[int], longest: int
) -> dict[str, Any]:
    """Return arguments of transformers' `generate` beside the tokens of left-padded rows; empty without images.

    Raises:
        PreflightError: images for a model without a tower.
        DataError: a row ends before the last of its placeholders.
    """
    if media is None or not any(one is not None for one in media):
        return {}
    if tower is None:
        raise no_tower("this model")
    spans: list[tuple[int, int, int]] = []
    for row, (one, length) in enumerate(zip(media, lengths, strict=True)):
        if one is not None:
            check_whole(one, length)
            spans += [(row, longest - length + first, number) for first, number in one.spans]
    images = [image for one in media if one is not None for image in one.images]
    return tower.own_arguments(images, spans, (len(lengths), longest))
