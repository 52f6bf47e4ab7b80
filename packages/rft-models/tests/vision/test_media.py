"""The images of a prompt: what makes two equal, how they are counted, and the prompt with one placeholder each."""

from __future__ import annotations

import pytest
import torch

from rft_models.vision.media import ImageInputs, Media

VALUES = torch.arange(6.0).view(2, 3)
A, B = ImageInputs.of(VALUES, (1, 2, 2), 4), ImageInputs.of(VALUES, None, 1)
MEDIA = Media((A, B, A), ((2, 4), (6, 1), (9, 4)), 7)


def test_images_are_equal_where_pixels_type_shape_grid_and_features_are() -> None:
    same = ImageInputs.of(VALUES.t().contiguous().t(), (1, 2, 2), 4)
    assert same == A
    assert hash(same) == hash(A)
    assert same.pixel_values.is_contiguous()
    others = (
        B,
        ImageInputs.of(VALUES + 1, (1, 2, 2), 4),
        ImageInputs.of(VALUES.view(3, 2), (1, 2, 2), 4),
        ImageInputs.of(VALUES.double(), (1, 2, 2), 4),
        ImageInputs.of(VALUES, (2, 1, 2), 4),
        ImageInputs.of(VALUES, (1, 2, 2), 5),
    )
    assert len({A, *others}) == 1 + len(others)
    assert A.digest != A


def test_the_images_of_a_prompt_are_counted() -> None:
    assert (MEDIA.num_images, MEDIA.num_tokens, MEDIA.end) == (3, 9, 13)
    assert Media((B, A), ((8, 1), (1, 4)), 7).end == 9
    assert [(one.first, one.num_tokens, one.grid) for one in MEDIA.placed] == [
        (2, 4, (1, 2, 2)),
        (6, 1, None),
        (9, 4, (1, 2, 2)),
    ]
    assert MEDIA.digest != Media((A, A, B), ((0, 4), (4, 4), (8, 1)), 7).digest
    assert MEDIA.digest == Media((A, B, A), ((0, 4), (4, 1), (5, 4)), 8).digest


def test_a_collapsed_prompt_has_one_placeholder_an_image() -> None:
    assert MEDIA.collapsed(list(range(15))) == [0, 1, 2, 6, 7, 8, 9, 13, 14]


@pytest.mark.parametrize(("images", "spans"), [((), ()), ((A,), ()), ((A,), ((0, 3),)), ((A, B), ((0, 1), (1, 4)))])
def test_images_without_as_many_placeholders_as_features_are_an_error(
    images: tuple[ImageInputs, ...], spans: tuple[tuple[int, int], ...]
) -> None:
    with pytest.raises(AssertionError):
        Media(images, spans, 7)
