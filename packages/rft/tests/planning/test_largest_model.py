"""The models of a family on a card: known by their published numbers of parameters, and gone through in order."""

from __future__ import annotations

import pytest

from rft.decoder_sizes import model_sizes
from rft.planning.known_models import FAMILIES
from rft.planning.largest_model import config_directory

PUBLISHED = {
    ("qwen2.5", "0.5B"): 494_032_768,
    ("qwen2.5", "1.5B"): 1_543_714_304,
    ("qwen2.5", "3B"): 3_085_938_688,
    ("qwen2.5", "7B"): 7_615_616_512,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "8B"): 8_190_735_360,
    ("llama3", "1B"): 1_235_814_400,
    ("llama3", "3B"): 3_212_749_824,
    ("llama3", "8B"): 8_030_261_248,
}


@pytest.mark.parametrize(("family", "name"), PUBLISHED)
def test_a_known_model_has_its_published_number_of_parameters(family: str, name: str) -> None:
    with config_directory(FAMILIES[family][name]) as directory:
        sizes, notes = model_sizes(directory)
    assert sizes.parameters == PUBLISHED[family, name]
    assert notes == []
    assert not directory.exists()


def test_every_family_goes_from_the_smallest_to_the_largest() -> None:
    for models in FAMILIES.values():
        counts: list[int] = []
        for config in models.values():
            with config_directory(config) as directory:
                counts.append(model_sizes(directory)[0].parameters)
        assert counts == sorted(counts)
