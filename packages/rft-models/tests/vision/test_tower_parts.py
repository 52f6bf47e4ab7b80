"""The vision tower by itself: features of images in their order, and the rows that run it without an image."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_core.errors import DataError
from rft_models.families.vision import VISION_FAMILIES
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.vision.media import ImageInputs, Media
from rft_models.vision.tower import VisionTower, vision_tower_of

FAMILIES = sorted(VISION_FAMILIES)
Directory = Callable[[str], Path]


@pytest.fixture(scope="module")
def policies(vision_directory: Directory) -> dict[str, CausalPolicy]:
    """A model of each family."""
    found = {name: load_policy(vision_directory(name)) for name in FAMILIES}
    for policy in found.values():
        policy.model.requires_grad_(False)
    return found


@pytest.mark.parametrize("model_type", FAMILIES)
def test_features_come_image_after_image_with_those_for_deeper_layers(
    model_type: str, policies: dict[str, CausalPolicy]
) -> None:
    tower = VisionTower(policies[model_type].model)
    first, second = tower.smallest(1), tower.smallest(2)
    both, alone, other = tower.features([first, second]), tower.features([first]), tower.features([second])
    assert both.main_FD.shape == (first.num_tokens + second.num_tokens, 32)
    torch.testing.assert_close(both.main_FD, torch.cat([alone.main_FD, other.main_FD]), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(alone.main_FD, other.main_FD, atol=1e-3)
    assert bool(both.deep) == (model_type == "qwen3_vl")
    for layer, here, there in zip(both.deep, alone.deep, other.deep, strict=True):
        torch.testing.assert_close(layer, torch.cat([here, there]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_without_its_output_matrix_has_the_same_tower(
    model_type: str, policies: dict[str, CausalPolicy]
) -> None:
    whole, decoder = VisionTower(policies[model_type].model), VisionTower(policies[model_type].model.model)
    image = whole.smallest()
    assert torch.equal(decoder.features([image]).main_FD, whole.features([image]).main_FD)
    assert decoder.image_token_id == whole.image_token_id == policies[model_type].model.config.image_token_id


def test_a_tower_of_half_precision_is_given_pixels_of_its_type(policies: dict[str, CausalPolicy]) -> None:
    narrow = VisionTower(copy.deepcopy(policies["qwen2_vl"].model).bfloat16())
    image = narrow.smallest()
    features = narrow.features([image])
    assert features.main_FD.dtype is torch.bfloat16
    assert image.pixel_values.dtype is torch.float32
    assert narrow.own_arguments([image], [(0, 1, 2)], (1, 5))["pixel_values"].dtype is torch.bfloat16


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_smallest_image_is_a_function_of_its_seed(model_type: str, policies: dict[str, CausalPolicy]) -> None:
    tower = VisionTower(policies[model_type].model)
    before = torch.get_rng_state()
    assert tower.smallest() == tower.smallest(0)
    assert tower.smallest(1) != tower.smallest(0)
    assert tower.probe(3).images == (tower.smallest(3),)
    assert torch.equal(torch.get_rng_state(), before)
    smallest = tower.layout.smallest()
    image = tower.smallest()
    assert (tuple(image.pixel_values.shape), image.grid, image.num_tokens) == smallest
    media = tower.probe(0)
    assert media.spans == ((1, image.num_tokens),)
    assert media.image_token_id == tower.image_token_id
    assert media.end == 1 + image.num_tokens


def row_of(tower: VisionTower, *, always: bool, media: Media | str | None = "text") -> Any:
    tower.runs_always = always
    tokens_T, positions_T = torch.arange(10, 17), torch.arange(7)
    if isinstance(media, Media):
        tokens_T[1 : media.end] = tower.image_token_id
    return tower.row(None if media == "text" else [media], [7], tokens_T, positions_T)  # type: ignore[list-item]


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("media", ["text", None])
def test_a_row_of_text_runs_the_tower_only_where_ranks_wait_for_each_other(
    media: str | None, model_type: str, policies: dict[str, CausalPolicy]
) -> None:
    tower = VisionTower(policies[model_type].model)
    assert not tower.runs_always
    alone = row_of(tower, always=False, media=media)
    assert (alone.features, alone.source_K, alone.positions_3K) == (None, None, None)
    always = row_of(tower, always=True, media=media)
    assert always.source_K.tolist() == [-1] * 7
    assert always.positions_3K is None
    assert torch.equal(always.features.main_FD, tower.features([tower.smallest()]).main_FD)
    for row in (alone, always):
        assert row.token_ids_K.tolist() == list(range(10, 17))
        assert row.positions_K.tolist() == list(range(7))


@pytest.mark.parametrize("always", [False, True])
def test_a_row_with_an_image_has_its_features_and_no_others(always: bool, policies: dict[str, CausalPolicy]) -> None:
    tower = VisionTower(policies["qwen2_5_vl"].model)
    media = tower.probe(4)
    row = row_of(tower, always=always, media=media)
    assert row.source_K.tolist() == [-1, 0, 1, -1, -1, -1, -1]
    assert torch.equal(row.features.main_FD, tower.features(media.images).main_FD)
    assert row.positions_3K.shape == (3, 7)
    assert torch.equal(row.positions_3K, tower.layout.positions(7, media.placed))


def test_a_tower_that_gives_another_number_of_features_is_found_out(policies: dict[str, CausalPolicy]) -> None:
    tower = VisionTower(policies["llava"].model)
    image = tower.smallest()
    longer = ImageInputs.of(image.pixel_values, image.grid, image.num_tokens + 1)
    with pytest.raises(DataError) as caught:
        tower.features([longer])
    assert caught.value.problem.code == "vision.other_features"


def test_arguments_of_the_model_s_own_forward_say_where_each_image_stands(policies: dict[str, CausalPolicy]) -> None:
    tower = VisionTower(policies["qwen2_vl"].model)
    first, second = tower.smallest(1), tower.smallest(2)
    given = tower.own_arguments([first, second], [(0, 1, 2), (1, 3, 2)], (2, 6))
    assert given["mm_token_type_ids"].tolist() == [[0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0]]
    assert torch.equal(given["pixel_values"], torch.cat([first.pixel_values, second.pixel_values]))
    assert given["image_grid_thw"].tolist() == [list(first.grid or ()), list(second.grid or ())]
    own = tower.own_inputs(torch.arange(6), Media((first,), ((2, 2),), tower.image_token_id))
    assert own["mm_token_type_ids"].tolist() == [[0, 0, 1, 1, 0, 0]]
    assert torch.equal(own["pixel_values"], first.pixel_values)


def test_a_model_of_text_has_no_tower(character_directory: Path, policies: dict[str, CausalPolicy]) -> None:
    assert vision_tower_of(load_policy(character_directory).model) is None
    found = vision_tower_of(policies["llava"].model)
    assert isinstance(found, VisionTower)
