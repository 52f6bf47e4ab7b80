"""Placement of image features in a packed row, and the decoder's inputs for such a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_core.errors import DataError, PreflightError
from rft_models.families.image_layout import ImageLayout
from rft_models.layers.embedding_noise import NoiseRows
from rft_models.vision.media import ImageInputs, Media

MediaInputs = Sequence[Media | None]
"""Of each segment of a row in order, what images its prompt has."""


class Features(NamedTuple):
    """Features that the vision tower computes for several images, one after another."""

    main_FD: Tensor
    """In place of embeddings."""
    deep: tuple[Tensor, ...] = ()
    """[F, D] each, added behind the first decoder layers (Qwen3-VL's DeepStack, arXiv 2406.04334)."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Assignment of features to the tokens of a row."""

    images: tuple[ImageInputs, ...]
    """The distinct images of the row; their features are numbered through."""
    source_T: Tensor
    """[T] int64: number of the feature, -1 at text."""
    positions_3T: Tensor | None
    """[3, T]; None where the decoder has one axis, or no segment has images."""


@dataclass(frozen=True, slots=True)
class RowInputs:
    """Inputs of a decoder for the tokens of a row."""

    token_ids_K: Tensor
    positions_K: Tensor
    source_K: Tensor | None = None
    """As of `Placement`; None: no images."""
    positions_3K: Tensor | None = None
    features: Features | None = None
    noise: NoiseRows | None = None
    """Of the embeddings; None: without."""

    @property
    def identities_K(self) -> Tensor:
        """[K] int64, equal where tokens are: the id, and at a feature a number of its own below 0."""
        if self.source_K is None:
            return self.token_ids_K
        return torch.where(self.source_K >= 0, -1 - self.source_K, self.token_ids_K)

    def select(self, places: Tensor | slice) -> RowInputs:
        """Select the tokens at these indices, in their order."""
        axes = self.positions_3K
        return replace(
            self,
            token_ids_K=self.token_ids_K[places],
            positions_K=self.positions_K[places],
            source_K=None if self.source_K is None else self.source_K[places],
            positions_3K=None if axes is None else axes[:, places],
            noise=None if self.noise is None else self.noise.select(places),
        )

    def arguments(self, shape: tuple[int, int], embed: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return the decoder's arguments for these tokens in rows of `shape`; `embed` is its embedding."""
        axes = self.positions_3K
        inputs: dict[str, Any] = {
            "position_ids": self.positions_K.view(shape) if axes is None else axes.view(3, *shape),
        }
        if self.features is None and self.noise is not None:
            return inputs | {"inputs_embeds": self._noisy(embed).view(*shape, -1)}
        if self.features is None:
            return inputs | {"input_ids": self.token_ids_K.view(shape)}
        embedded_KD, rows_F, features = self.embedded(embed)
        inputs["inputs_embeds"] = embedded_KD.view(*shape, -1)
        if features.deep:
            is_feature_K = torch.zeros_like(self.token_ids_K, dtype=torch.bool)
            is_feature_K[rows_F] = True
            inputs |= {"visual_pos_masks": is_feature_K.view(shape), "deepstack_visual_embeds": list(features.deep)}
        return inputs

    def embedded(self, embed: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Features]:
        """([K, D] embeddings with features in their places, [F] these places ascending, the features there)."""
        assert self.source_K is not None
        assert self.features is not None
        embedded_KD = self._noisy(embed)
        rows_F = (self.source_K >= 0).nonzero()[:, 0]
        source_F = self.source_K[rows_F]
        placed = [part.index_select(0, source_F).to(embedded_KD.dtype) for part in _parts(self.features)]
        here = Features(placed[0], tuple(placed[1:]))
        return embedded_KD.index_copy(0, rows_F, here.main_FD), rows_F, here

    def _noisy(self, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """[K, D] embeddings, with the noise where there is any; features of images have none."""
        embedded_KD = embed(self.token_ids_K)
        return embedded_KD if self.noise is None else self.noise.added_to(embedded_KD)


def _parts(features: Features) -> list[Tensor]:
    return [features.main_FD, *features.deep]


def place(
    mm_inputs: MediaInputs, lengths: Sequence[int], token_ids_T: Tensor, positions_T: Tensor, layout: ImageLayout
) -> Placement | None:
    """Lay the images of segments of these lengths into their row; None where no segment has any.

    Args:
        mm_inputs: one a segment.
        lengths: tokens of each.
        token_ids_T, positions_T: the row.
        layout: of the model.

    Raises:
        DataError: a segment ends before the last of its placeholders, something else stands at one, or an image
            has another number of features.
    """
    assert len(mm_inputs) == len(lengths), f"{len(mm_inputs)} entries of mm_inputs for {len(lengths)} segments"
    if not any(mm_inputs):
        return None
    # equal images are one key: samples of a prompt, and prompts about one image, share its features
    numbers = dict.fromkeys(image for media in mm_inputs if media is not None for image in media.images)
    # by the grids, so that a wrong number is found before the tower runs
    check_counts([_features_of(image, layout) for image in numbers], tuple(numbers))
    behind = 0
    first_feature: dict[ImageInputs, int] = {}
    for image in numbers:
        first_feature[image] = behind
        behind += image.num_tokens
    source_T = torch.full((sum(lengths),), -1, dtype=torch.int64)
    # filled on the host, segment after segment, and sent to the device once
    axes = positions_T.to("cpu").expand(3, -1).clone() if layout.three_axes else None
    begin = 0
    for media, length in zip(mm_inputs, lengths, strict=True):
        if media is not None:
            check_whole(media, length)
            for image, (first, number) in zip(media.images, media.spans, strict=True):
                start = begin + first
                source_T[start : start + number] = torch.arange(number) + first_feature[image]
            if axes is not None:
                axes[:, begin : begin + length] = layout.positions(length, media.placed)
        begin += length
    device = token_ids_T.device
    source_T = source_T.to(device)
    _check_placeholders(token_ids_T, source_T, next(media for media in mm_inputs if media is not None))
    return Placement(tuple(numbers), source_T, None if axes is None else axes.to(device))


def check_counts(counts: Sequence[int], images: Sequence[ImageInputs]) -> None:
    """Raise `DataError` where an image has another number of features than of placeholders."""
    for at, (count, image) in enumerate(zip(counts, images, strict=True)):
        if count != image.num_tokens:
            raise DataError(
                code="vision.other_features",
                what=f"image {at + 1} of {len(images)} has {image.num_tokens} placeholders and {count} features",
                where="mm_inputs",
                why="the image processor and the vision tower must agree on patches and on what becomes of them",
                do="copy the processor files and config.json of one and the same model",
            )


def _features_of(image: ImageInputs, layout: ImageLayout) -> int:
    """Return the features that the grid of an image states; where it states none, those that the processor counted."""
    stated = layout.num_features(image.grid)
    return image.num_tokens if stated is None else stated


def check_whole(media: Media, length: int, *, where: str = "prompt") -> None:
    """Raise `DataError` where `length` tokens of a prompt end inside or before its images."""
    if length < media.end:
        raise DataError(
            code="vision.cut_media",
            what=f"{length} tokens are kept, but the {media.num_images} images end at token {media.end} "
            f"(they have {media.num_tokens} placeholders)",
            where=where,
            why="every placeholder has its feature: a prompt is never cut inside or before an image",
            do=f"--prompt_max_len {media.end}, or smaller images (--max_pixels)",
        )


def _check_placeholders(token_ids_T: Tensor, source_T: Tensor, media: Media) -> None:
    wrong_T = (source_T >= 0) & (token_ids_T != media.image_token_id)
    num_wrong = int(wrong_T.sum())
    if num_wrong:
        at = int(wrong_T.nonzero()[0, 0])
        raise DataError(
            code="vision.placeholders",
            what=f"{num_wrong} of {int((source_T >= 0).sum())} features stand at tokens that are no placeholders; "
            f"token {at} of the row is {int(token_ids_T[at])}, not {media.image_token_id}",
            where="mm_inputs",
            why="every placeholder needs one feature, and every feature one placeholder",
            do="give every prompt the media that were encoded with it",
        )


def no_tower(name: str) -> PreflightError:
    """Return the error for images given to a model that takes none."""
    return PreflightError(
        code="vision.no_tower",
        what=f"images were given to {name}, which has no vision tower",
        where="media of the prompts",
        why="features of images come from the vision tower of a vision-language model",
        do="--pretrain DIR of a vision-language model, or data without images",
    )
