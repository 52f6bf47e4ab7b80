"""Semantic IDs in files."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import DataError
from rft_genrec.catalogue.index_files import check_info, level_use, read_ids, write_index, write_info
from rft_genrec.catalogue.records import Catalogue, Item, SemanticIds

ROWS: dict[str, Any] = {
    "0": ["<a_0>", "<b_1>"],
    "1": ["<a_1>", "<b_0>", "<c_0>"],
    "2": ["<a_1>", "<b_0>", "<c_1>"],
    "3": ["<a_0>", "<b_2>"],
}


def test_ids_are_read_as_they_were_written(tmp_path: Path) -> None:
    ids = SemanticIds(tuple(map(tuple, ROWS.values())))
    write_index(tmp_path / "a.index.json", ids)
    assert read_ids(tmp_path / "a.index.json", 4) == ids


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"3": None}, "1 of 4 items have no semantic ID: item 3"),
        ({"4": ["<a_0>", "<b_9>"]}, "5 IDs for 4 items: '4'"),
        ({"x": ["<a_0>", "<b_9>"]}, "'x'"),
        ({"0": []}, "item 0 has"),
        ({"0": "<a_0><b_1>"}, "item 0 has"),
        ({"0": ["<a_0>", 7]}, "item 0 has"),
        ({"0": ["<a_0>", "b_1"]}, "token 'b_1'"),
        ({"0": ["<a_0>", "<b_1> "]}, "token '<b_1> '"),
        ({"0": ["<a_0>", "<a_1>"]}, "where others have <b_...>|another letter"),
        ({"2": ["<a_1>", "<c_0>", "<b_1>"]}, "item 2 has <c_0> as token 2"),
        ({"0": ["<a_0>"]}, "lengths differ"),
        ({"3": ["<a_0>", "<b_2>", "<c_4>"]}, "lengths differ .* as of item 3"),
    ],
)
def test_ids_that_are_not_those_of_the_items_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    rows = {key: value for key, value in (ROWS | change).items() if value is not None}
    (tmp_path / "a.index.json").write_text(json.dumps(rows))
    with pytest.raises(DataError, match=said) as caught:
        read_ids(tmp_path / "a.index.json", 4)
    assert caught.value.problem.code == "genrec.index"


def test_the_use_of_a_level_is_counted() -> None:
    ids = SemanticIds((("<a_0>", "<b_0>"), ("<a_0>", "<b_1>"), ("<a_5>", "<b_2>"), ("<a_5>", "<b_3>")))
    first, second = level_use(ids)
    assert (first.letter, first.codes, second.letter, second.codes) == ("a", 2, "b", 4)
    assert math.isclose(first.perplexity, 2)
    assert math.isclose(second.perplexity, 4)


def test_an_info_file_is_compared_with_items_and_ids(tmp_path: Path) -> None:
    catalogue = Catalogue("t", (Item("Hammer\tred"), Item("Saw")))
    ids = SemanticIds((("<a_0>",), ("<a_1>",)))
    path = tmp_path / "info.txt"
    write_info(path, catalogue, ids)
    assert path.read_text() == "<a_0>\tHammer red\t0\n<a_1>\tSaw\t1\n"
    check_info(path, catalogue, ids)
    swapped = Catalogue("t", (Item("Saw"), Item("Hammer red")))
    with pytest.raises(DataError, match="row 1, column title"):
        check_info(path, swapped, ids)
    with pytest.raises(DataError, match="different indexes"):
        check_info(path, catalogue, SemanticIds((("<a_1>",), ("<a_0>",))))
    with pytest.raises(DataError, match="2 lines for 3 items"):
        check_info(path, Catalogue("t", (*catalogue.items, Item("Axe"))), None)
    path.write_text("<a_0>\tHammer red\t1\n")
    with pytest.raises(DataError, match="row 1, column item_id: expected item 0"):
        check_info(path, catalogue, ids)
    write_info(path, catalogue, None)
    check_info(path, catalogue, ids)  # it was written before there were IDs, and says nothing of them
