"""What decoders are given for prompts with images, with a double of the vision tower."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rft_core.errors import DataError, PreflightError
from rft_models.vision.decode_inputs import generation_inputs, prepare_multimodal
from rft_models.vision.media import ImageInputs, Media
from rft_models.vision.packed_rows import Features, RowInputs
from rft_models.vision.tower import VisionTower

A, B = ImageInputs.of(torch.zeros(1), None, 2), ImageInputs.of(torch.ones(1), None, 1)
FIRST, SECOND = Media((A,), ((1, 2),), 9), Media((B, A), ((0, 1), (2, 2)), 9)
EMBEDDING = torch.arange(20.0).view(10, 2)
FEATURES = Features(torch.tensor([[50.0, 60.0], [70.0, 80.0]]), (torch.tensor([[1.0, 2.0], [3.0, 4.0]]),))


class Tower:
    """Notes what it is asked; the row that it gives has two features at the tokens 1 and 2."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.layout = SimpleNamespace(position_offset=lambda placed: -sum(image.num_tokens for image in placed))

    def row(self, *given: Any) -> RowInputs:
        self.rows.append(given)
        source, axes = torch.tensor([-1, 1, 0, -1]), torch.arange(12).view(3, 4)
        return RowInputs(given[2], given[3], source, axes, FEATURES)

    def own_arguments(self, *given: Any) -> dict[str, Any]:
        return {"given": given}


def tower() -> tuple[Tower, VisionTower]:
    made = Tower()
    return made, cast("VisionTower", made)


IDS, POSITIONS = torch.tensor([3, 9, 9, 4]), torch.arange(4)


@pytest.mark.parametrize("media", [None, (None, None)])
def test_prompts_without_images_are_their_embeddings(media: tuple[None, ...] | None) -> None:
    for given in (None, tower()[1]):
        found = prepare_multimodal(given, media, [3, 1], IDS, POSITIONS)
        assert found.axes_3T is None
        assert (found.offsets_P.tolist(), found.offsets_P.dtype) == ([0, 0], torch.int64)
        hidden = found.embedded(EMBEDDING)
        assert torch.equal(hidden, EMBEDDING[IDS])
        found.add_deep(0, hidden)
        assert torch.equal(hidden, EMBEDDING[IDS])


def test_prompts_with_images_have_features_and_later_positions_are_shifted() -> None:
    double, given = tower()
    media = (None, FIRST, SECOND)
    found = prepare_multimodal(given, media, [1, 2, 1], IDS, POSITIONS)
    [asked] = double.rows
    assert asked[0] is media
    assert asked[1] == [1, 2, 1]
    assert asked[2] is IDS
    assert asked[3] is POSITIONS
    assert found.offsets_P.tolist() == [0, -2, -3]
    assert torch.equal(cast("Tensor", found.axes_3T), torch.arange(12).view(3, 4))
    hidden = found.embedded(EMBEDDING)
    assert hidden.tolist() == [[6.0, 7.0], [70.0, 80.0], [50.0, 60.0], [8.0, 9.0]]
    for layer in (1, 2):
        found.add_deep(layer, hidden)
    assert hidden.tolist() == [[6.0, 7.0], [70.0, 80.0], [50.0, 60.0], [8.0, 9.0]]
    found.add_deep(0, hidden)
    assert hidden.tolist() == [[6.0, 7.0], [73.0, 84.0], [51.0, 62.0], [8.0, 9.0]]


def test_images_for_a_model_without_a_tower_are_refused() -> None:
    for call in (
        lambda: prepare_multimodal(None, (FIRST,), [4], IDS, POSITIONS),
        lambda: generation_inputs(None, (FIRST,), [4], 4),
    ):
        with pytest.raises(PreflightError) as caught:
            call()
        assert caught.value.problem.code == "vision.no_tower"


def test_generation_is_given_every_image_with_its_place_in_rows_that_are_padded_at_the_left() -> None:
    given = tower()[1]
    assert generation_inputs(given, None, [3], 3) == {}
    assert generation_inputs(given, (None,), [3], 3) == {}
    found = generation_inputs(given, (None, FIRST, SECOND), [6, 3, 5], 6)["given"]
    assert found == ([A, B, A], [(1, 4, 2), (2, 1, 1), (2, 3, 2)], (3, 6))
    with pytest.raises(DataError) as caught:
        generation_inputs(given, (FIRST,), [2], 6)
    assert caught.value.problem.code == "vision.cut_media"
