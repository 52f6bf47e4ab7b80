"""Where images lie in a row of segments, and what a decoder is given for such a row."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.errors import DataError
from rft_models.families.image_layout import Grid, ImageLayout, PlacedImage, SmallestImage
from rft_models.vision.media import ImageInputs, Media
from rft_models.vision.packed_rows import Features, RowInputs, check_counts, check_whole, place

IMAGE_ID = 99


class Layout(ImageLayout):
    """A feature a patch; every axis of a prompt with images has its own positions."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(vision_config=None))

    def smallest(self) -> SmallestImage:
        return SmallestImage((1,), None, 1)

    def arguments(self, pixels: Sequence[Tensor], grids: Sequence[Grid | None]) -> dict[str, Tensor]:
        raise NotImplementedError

    def num_features(self, grid: Grid | None) -> int | None:
        return None if grid is None else prod(grid)

    def positions(self, length: int, images: Sequence[PlacedImage]) -> Tensor:
        return torch.arange(length) + 100 * len(images) * torch.tensor([[1], [2], [3]])


class ThreeAxes(Layout):
    """The same with positions on three axes."""

    three_axes = True


def image(number: int, size: int, grid: Grid | None = None) -> ImageInputs:
    return ImageInputs.of(torch.full((2,), float(number)), grid, size)


A, B, C = image(1, 2, (1, 1, 2)), image(2, 3), image(3, 1)
FIRST = Media((A, B), ((1, 2), (4, 3)), IMAGE_ID)
SECOND = Media((image(2, 3), C), ((0, 3), (3, 1)), IMAGE_ID)
MEDIA, LENGTHS = (None, FIRST, None, SECOND), (2, 8, 1, 5)
SOURCE = [-1, -1, -1, 0, 1, -1, 2, 3, 4, -1, -1, 2, 3, 4, 5, -1]


def row(media: Sequence[Media | None] = MEDIA, lengths: Sequence[int] = LENGTHS) -> tuple[Tensor, Tensor]:
    """(token ids, positions) of these segments: ids count from 10, placeholders stand where images are."""
    ids = torch.arange(sum(lengths)) + 10
    begin = 0
    for one, length in zip(media, lengths, strict=True):
        for first, number in one.spans if one is not None else ():
            ids[begin + first : begin + first + number] = IMAGE_ID
        begin += length
    return ids, torch.cat([torch.arange(length) for length in lengths])


def test_an_image_that_several_segments_have_is_one_and_each_placeholder_has_its_feature() -> None:
    found = place(MEDIA, LENGTHS, *row(), Layout())
    assert found is not None
    assert found.images == (A, B, C)
    assert found.source_T.tolist() == SOURCE
    assert found.positions_3T is None


def test_prompts_with_images_have_the_positions_of_the_layout_and_others_their_own() -> None:
    ids, positions = row()
    found = place(MEDIA, LENGTHS, ids, positions, ThreeAxes())
    assert found is not None
    assert found.positions_3T is not None
    for axis in range(3):
        expected = positions.clone()
        for begin, end in ((2, 10), (11, 16)):
            expected[begin:end] = torch.arange(end - begin) + 200 * (axis + 1)
        assert torch.equal(found.positions_3T[axis], expected)


def test_a_row_without_images_is_not_placed() -> None:
    assert place((None, None), (3, 2), *row((None, None), (3, 2)), ThreeAxes()) is None


def refused(*arguments: Any, call: Any = place, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        call(*arguments, **options)
    return caught.value


def test_a_token_that_is_no_placeholder_is_refused_where_a_feature_would_stand() -> None:
    ids, positions = row()
    ids[8], ids[3] = 7, 6
    problem = refused(MEDIA, LENGTHS, ids, positions, Layout()).problem
    assert problem.code == "vision.placeholders"
    assert problem.what.startswith("2 of 9 features")
    assert "token 3 of the row is 6, not 99" in problem.what


def test_images_whose_grid_states_another_number_are_refused_before_the_tower_runs() -> None:
    wrong = Media((image(1, 2, (1, 2, 2)),), ((0, 2),), IMAGE_ID)
    problem = refused((wrong,), (2,), *row((wrong,), (2,)), Layout()).problem
    assert problem.code == "vision.other_features"
    assert problem.what == "image 1 of 1 has 2 placeholders and 4 features"
    check_counts([2, 3], [A, B])
    problem = refused([2, 4], [A, B], call=check_counts).problem
    assert problem.what == "image 2 of 2 has 3 placeholders and 4 features"


def test_a_prompt_is_not_cut_before_the_end_of_its_images() -> None:
    check_whole(FIRST, 7)
    problem = refused(FIRST, 6, call=check_whole, where="line 3").problem
    assert (problem.code, problem.where) == ("vision.cut_media", "line 3")
    assert refused((FIRST,), (6,), *row((FIRST,), (7,)), Layout()).problem.code == "vision.cut_media"


def test_entries_of_another_number_than_segments_are_an_error() -> None:
    with pytest.raises(AssertionError):
        place(MEDIA[:3], LENGTHS, *row(), Layout())


def embed(ids: Tensor) -> Tensor:
    return torch.stack([ids, -ids], -1).double()


def inputs(deep: int = 0, axes: bool = False) -> RowInputs:
    ids, positions = row()
    values = torch.arange(12.0).view(6, 2) / 2
    features = Features(values, tuple(values * (10 + number) for number in range(deep)))
    positions_3 = positions + torch.tensor([[0], [20], [40]]) if axes else None
    return RowInputs(ids, positions, torch.tensor(SOURCE), positions_3, features)


def test_features_stand_in_place_of_embeddings() -> None:
    made = inputs(deep=2)
    hidden, rows, here = made.embedded(embed)
    assert rows.tolist() == [at for at, number in enumerate(SOURCE) if number >= 0]
    assert made.features is not None
    for at, number in enumerate(SOURCE):
        expected = embed(made.token_ids_K[at]) if number < 0 else made.features.main_FD[number].double()
        assert torch.equal(hidden[at], expected)
    order = [number for number in SOURCE if number >= 0]
    assert torch.equal(here.main_FD, made.features.main_FD[order].double())
    assert [torch.equal(a, b[order].double()) for a, b in zip(here.deep, made.features.deep, strict=True)] == [True] * 2


def test_the_same_feature_is_the_same_token_and_no_word() -> None:
    ids = row()[0].tolist()
    expected = [token if number < 0 else -1 - number for token, number in zip(ids, SOURCE, strict=True)]
    assert inputs().identities_K.tolist() == expected
    text = RowInputs(torch.tensor([4, 5]), torch.arange(2))
    assert text.identities_K is text.token_ids_K


@pytest.mark.parametrize("axes", [False, True])
def test_selected_tokens_keep_all_that_belongs_to_them(axes: bool) -> None:
    made = inputs(axes=axes)
    for places in (torch.tensor([3, 0, 11]), slice(2, 7)):
        found = made.select(places)
        assert torch.equal(found.token_ids_K, made.token_ids_K[places])
        assert torch.equal(found.positions_K, made.positions_K[places])
        assert found.source_K is not None
        assert found.source_K.tolist() == torch.tensor(SOURCE)[places].tolist()
        assert found.features is made.features
        assert (found.positions_3K is None) != axes
        if found.positions_3K is not None and made.positions_3K is not None:
            assert torch.equal(found.positions_3K, made.positions_3K[:, places])
    assert RowInputs(torch.tensor([4, 5]), torch.arange(2)).select(slice(1, 2)).source_K is None


@pytest.mark.parametrize("axes", [False, True])
@pytest.mark.parametrize("deep", [0, 2])
def test_a_decoder_is_given_embeddings_positions_and_what_stands_behind_its_first_layers(deep: int, axes: bool) -> None:
    made = inputs(deep, axes)
    found = made.arguments((2, 8), embed)
    assert set(found) == {"position_ids", "inputs_embeds"} | (
        {"visual_pos_masks", "deepstack_visual_embeds"} if deep else set()
    )
    hidden, _, here = made.embedded(embed)
    assert torch.equal(found["inputs_embeds"], hidden.view(2, 8, 2))
    expected = made.positions_K if made.positions_3K is None else made.positions_3K
    assert torch.equal(found["position_ids"], expected.reshape(*expected.shape[:-1], 2, 8))
    if deep:
        assert found["visual_pos_masks"].dtype is torch.bool
        assert found["visual_pos_masks"].tolist() == (torch.tensor(SOURCE) >= 0).view(2, 8).tolist()
        assert len(found["deepstack_visual_embeds"]) == deep
        assert all(torch.equal(a, b) for a, b in zip(found["deepstack_visual_embeds"], here.deep, strict=True))


def test_a_decoder_is_given_the_ids_of_text() -> None:
    found = RowInputs(torch.arange(6), torch.arange(6) + 1).arguments((3, 2), embed)
    assert {name: value.tolist() for name, value in found.items()} == {
        "input_ids": [[0, 1], [2, 3], [4, 5]],
        "position_ids": [[1, 2], [3, 4], [5, 6]],
    }
