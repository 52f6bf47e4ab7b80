"""Mixtures of terms, invalid responses, and settings that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rft_core.errors import DataError, OptionsError
from rft_genrec.catalogue.records import SemanticIds
from rft_genrec.rewards.mixture import GroupReward

IDS = SemanticIds((("<a_0>", "<b_0>", "<c_0>"), ("<a_0>", "<b_0>", "<c_1>"), ("<a_1>", "<b_0>", "<c_0>")))
TARGET = "<a_0><b_0><c_1>"


class Places:
    """Scores every item by its number, less the number of items before it."""

    def scores(self, histories: Sequence[Sequence[int]]) -> Any:
        return np.array([[0.0, 1.0, 2.0 - 3 * len(history)] for history in histories], dtype=np.float32)


def test_terms_are_added_by_their_weights_and_shown_without_them() -> None:
    found = GroupReward(IDS, {"rule": 1.0, "prefix": 0.1})(["<a_0> <b_0> <c_0>", TARGET], TARGET)
    assert [one.value for one in found] == pytest.approx([0.05, 1.1])
    assert found[0].parts == {"rule": 0.0, "prefix": 0.5}


def test_an_invalid_response_has_a_status_and_keeps_its_place() -> None:
    found = GroupReward(IDS, {"ranking": 1.0})(["Hammer", "<a_1><b_0><c_0>", TARGET], TARGET)
    assert [(one.status, one.value is None) for one in found] == [("invalid", True), ("ok", False), ("ok", False)]
    # the miss is at place 1 of 3, though the first is no item
    assert found[1].value == pytest.approx(-0.63093 / 2.13093, abs=1e-5)


def test_the_history_reaches_the_scorer() -> None:
    reward = GroupReward(IDS, {"collaborative": 2.0}, scorer=Places())
    assert [one.value for one in reward([TARGET, "<a_1><b_0><c_0>"], TARGET)] == [1.0, 2.0]
    assert [one.value for one in reward([TARGET, "<a_1><b_0><c_0>"], TARGET, [0])] == [2.0, 0.0]


def test_embeddings_are_those_of_the_items() -> None:
    embeddings = np.array([[1, 0], [1, 1], [0, 1]], dtype=np.float32)
    found = GroupReward(IDS, {"semantic": 1.0}, embeddings_ND=embeddings)(["<a_0><b_0><c_0>", TARGET], TARGET)
    assert [one.value for one in found] == pytest.approx([2**-0.5, 1.0])
    with pytest.raises(DataError, match="2 embeddings for 3 items"):
        GroupReward(IDS, {"semantic": 1.0}, embeddings_ND=embeddings[:2])


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ({"exact": 1.0}, "reward term exact"),
        ({}, "no reward term"),
        ({"semantic": 1.0}, "without embeddings"),
        ({"collaborative": 1.0}, "without a scorer"),
    ],
)
def test_terms_without_what_they_need_are_refused(weights: dict[str, float], what: str) -> None:
    with pytest.raises(OptionsError, match=what):
        GroupReward(IDS, weights)


def test_a_target_that_is_no_item_is_refused() -> None:
    with pytest.raises(DataError, match="is the ID of no item"):
        GroupReward(IDS, {"rule": 1.0})([TARGET], "<a_7>")
