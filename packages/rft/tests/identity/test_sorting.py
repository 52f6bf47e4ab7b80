"""How each setting counts: every one of a command that trains is in one list, knowingly."""

from __future__ import annotations

from dataclasses import fields
from itertools import combinations
from typing import get_type_hints

import pytest

from rft.identity import sorting
from rft.settings import DpoSettings, PretrainSettings, RlSettings, RmSettings, SftSettings
from rft_models.settings import DecoderSettings

LISTS = {name: getattr(sorting, name) for name in ("DECIDES", "CONTENT", "FREE", "OF_ONE_START")}


def names_of(owner: type) -> set[str]:
    """The flat names of a command's settings."""
    return {item.name for group in get_type_hints(owner).values() for item in fields(group)}


def test_every_setting_of_a_training_is_sorted_and_no_other_name_is() -> None:
    owners = (RlSettings, SftSettings, PretrainSettings, DpoSettings, RmSettings)
    settings = {name for owner in owners for name in names_of(owner)}
    listed = frozenset[str]().union(*LISTS.values())
    assert sorted(settings - listed) == [], "a new setting decides the result, or says why not: rft.identity.sorting"
    assert sorted(listed - settings) == []


@pytest.mark.parametrize("pair", list(combinations(LISTS, 2)), ids="-".join)
def test_no_setting_is_in_two_lists(pair: tuple[str, str]) -> None:
    first, second = pair
    assert sorted(LISTS[first] & LISTS[second]) == []


def test_a_setting_of_another_package_decides_and_is_recorded() -> None:
    assert sorting.decides("of_a_package")
    assert sorting.is_recorded("of_a_package")
    assert not sorting.is_recorded("accept_changes")
    assert [sorting.decides(name) for name in ("temperature", "log_interval", "reward", "save_path")] == [
        True,
        False,
        False,
        False,
    ]


def test_what_no_resume_can_change_decides_the_result() -> None:
    assert set(sorting.FIXED) <= sorting.DECIDES
    staleness = sorting.FIXED["max_staleness"]
    assert [staleness.differs(*pair) for pair in ((0, 2), (2, 0), (1, 2), (0, 0))] == [True, True, False, False]
    assert sorting.FIXED["seed"].differs(1, 2)


def test_no_resume_of_pretraining_changes_its_decoder_whose_names_are_other_settings_elsewhere() -> None:
    decoder = {item.name for item in fields(DecoderSettings)} | {"tokenizer", "tokenizer_size"}
    assert set(sorting.FIXED_OF["pretrain"]) == decoder
    assert decoder <= sorting.DECIDES
    assert sorting.fixed_setting("rl", "top_k") is None
    found = sorting.fixed_setting("pretrain", "top_k")
    assert found is not None
    assert found.differs(2, 4)
    assert not found.from_weights
