"""The vision tower of a transformers model: images in, features in place of embeddings out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rft_models.families.vision import VISION_FAMILIES
from rft_models.vision.media import ImageInputs, Media
from rft_models.vision.packed_rows import Features, MediaInputs, RowInputs, check_counts, place


class VisionTower:
    """Vision tower of one of `VISION_FAMILIES`; shares the model's weights.

    A row's distinct images run once, in one call, however many samples of a prompt the row has.
    """

    def __init__(self, model: Any) -> None:
        """`model` is the whole one, ...ForConditionalGeneration, or that without its output matrix, ...Model."""
        self._model = model
        self._inner = model if model.get_output_embeddings() is None else model.model
        self.image_token_id = int(model.config.image_token_id)
        self.layout = VISION_FAMILIES[model.config.model_type].layout(model.config)
        self.runs_always = False
        """True where also rows without images run the tower: ranks that gather weights together must all use them."""

    def features(self, images: Sequence[ImageInputs]) -> Features:
        """Compute the features of all images, one after another.

        Raises:
            DataError: the tower gives another number of features of an image than it has placeholders.
        """
        output = self._inner.get_image_features(**self._arguments(images), return_dict=True)
        # what the tower gives is counted too: `place` knows only what the grids state
        check_counts([len(part) for part in output.pooler_output], images)
        deep = getattr(output, "deepstack_features", None) or ()
        return Features(torch.cat(list(output.pooler_output)), tuple(torch.cat(list(layer)) for layer in deep))

    def row(
        self, mm_inputs: MediaInputs | None, lengths: Sequence[int], token_ids_T: Tensor, positions_T: Tensor
    ) -> RowInputs:
        """Return the row of these segments, with the features of their images.

        Raises:
            DataError: see `packed_rows.place`.
        """
        placed = None
        if mm_inputs is not None:
            placed = place(mm_inputs, lengths, token_ids_T, positions_T, self.layout)
        if placed is not None:
            features = self.features(placed.images)
            return RowInputs(token_ids_T, positions_T, placed.source_T, placed.positions_3T, features)
        if not self.runs_always:
            return RowInputs(token_ids_T, positions_T)
        nowhere_T = torch.full_like(token_ids_T, -1)
        # the smallest image runs and its features stand at no token, so that no rank waits for the others
        return RowInputs(token_ids_T, positions_T, nowhere_T, None, self.features([self.smallest()]))

    def smallest(self, seed: int = 0) -> ImageInputs:
        """Noise of the smallest size that the tower takes, to try it on."""
        generator = torch.Generator().manual_seed(seed)
        image = self.layout.smallest()
        return ImageInputs.of(torch.randn(image.shape, generator=generator), image.grid, image.num_tokens)

    def probe(self, seed: int) -> Media:
        """One such image behind the first token of a segment."""
        image = self.smallest(seed)
        return Media((image,), ((1, image.num_tokens),), self.image_token_id)

    def own_inputs(self, token_ids_L: Tensor, media: Media) -> dict[str, Any]:
        """Return arguments of the model's own forward beside the tokens of one sequence [1, L]."""
        spans = [(0, first, number) for first, number in media.spans]
        return self.own_arguments(media.images, spans, (1, token_ids_L.shape[0]))

    def own_arguments(
        self, images: Sequence[ImageInputs], spans: Sequence[tuple[int, int, int]], shape: tuple[int, int]
    ) -> dict[str, Any]:
        """Return the model's arguments for rows of `shape` with these images.

        `spans` are (row, first column, number of placeholders) of each image.
        """
        device, _ = self._device_and_dtype()
        return self._arguments(images) | self.layout.row_arguments(spans, shape, device)

    def _arguments(self, images: Sequence[ImageInputs]) -> dict[str, Any]:
        device, dtype = self._device_and_dtype()
        pixels = [image.pixel_values.to(device=device, dtype=dtype) for image in images]
        return self.layout.arguments(pixels, [image.grid for image in images])

    def _device_and_dtype(self) -> tuple[torch.device, torch.dtype]:
        matrix = self._model.get_output_embeddings() or self._model.get_input_embeddings()
        parameter = matrix.weight
        return parameter.device, parameter.dtype


def vision_tower_of(model: Any) -> VisionTower | None:
    """Return the tower of a model that takes images, else None."""
    return VisionTower(model) if model.config.model_type in VISION_FAMILIES else None
