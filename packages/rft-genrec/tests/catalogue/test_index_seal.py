"""An index that is damaged, cut, changed by one code or of other items is refused; others may have no seal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_genrec.catalogue.chosen import chosen_dataset
from rft_genrec.catalogue.index_files import write_index
from rft_genrec.catalogue.index_seal import check_seal, seal_file
from rft_genrec.catalogue.minionerec_files import write_items
from rft_genrec.catalogue.records import Catalogue, Item, SemanticIds
from rft_genrec.settings.catalogue import CatalogueSettings

IDS = SemanticIds((("<a_0>", "<b_1>"), ("<a_1>", "<b_0>"), ("<a_1>", "<b_1>")))
ITEMS = Catalogue("t", (Item("Hammer"), Item("Saw"), Item("Axe")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_items(tmp_path / "t.item.json", ITEMS)
    write_index(tmp_path / "t.index.json", IDS, ITEMS)
    return tmp_path


def index_of(folder: Path) -> Path:
    return folder / "t.index.json"


def missing(folder: Path) -> None:
    index_of(folder).unlink()


def truncated(folder: Path) -> None:
    index_of(folder).write_text(index_of(folder).read_text()[:-9])


def other_number_of_levels(folder: Path) -> None:
    rows = json.loads(index_of(folder).read_text())
    index_of(folder).write_text(json.dumps({key: tokens[:1] if key == "0" else tokens for key, tokens in rows.items()}))


def an_id_twice(folder: Path) -> None:
    rows = json.loads(index_of(folder).read_text())
    index_of(folder).write_text(json.dumps(rows | {"2": rows["1"]}))


def of_other_items(folder: Path) -> None:
    write_items(folder / "t.item.json", Catalogue("t", (*ITEMS.items[:2], Item("Lamp"))))


def one_flipped_bit(folder: Path) -> None:
    # of the digit of a code: 0 becomes 1, and the ID of item 0 is another well-formed one
    content = bytearray(index_of(folder).read_bytes())
    content[content.index(b"<a_0>") + 3] ^= 1
    index_of(folder).write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (missing, "genrec.no_ids"),
        (truncated, "genrec.file"),
        (other_number_of_levels, "genrec.item_index"),
        (an_id_twice, "genrec.item_index"),
        (of_other_items, "genrec.item_index"),
        (one_flipped_bit, "genrec.item_index"),
    ],
)
def test_a_damaged_index_is_refused(folder: Path, damage: Callable[[Path], None], code: str) -> None:
    settings = CatalogueSettings(catalogue=str(folder))
    assert chosen_dataset(settings)[1] == IDS
    damage(folder)
    with pytest.raises(DataError) as refused:
        chosen_dataset(settings)
    assert refused.value.problem.code == code


def test_both_hashes_and_the_command_that_makes_the_index_are_told(folder: Path) -> None:
    one_flipped_bit(folder)
    with pytest.raises(DataError, match=r"its SHA-256 is \w{12}, t\.index\.seal\.json has \w{12}") as refused:
        chosen_dataset(CatalogueSettings(catalogue=str(folder)))
    assert refused.value.problem.do.startswith("rft-train genrec sid --overwrite")
    # a file that is named is sealed as well
    (folder / "own").mkdir()
    write_items(folder / "own" / "t.item.json", ITEMS)
    named = CatalogueSettings(catalogue=str(folder / "own"), sid_index_path=str(index_of(folder)))
    with pytest.raises(DataError, match="does not match"):
        chosen_dataset(named)


def test_an_index_of_other_codebooks_is_told_with_the_codes_of_each_level(folder: Path) -> None:
    assert json.loads(seal_file(index_of(folder)).read_text())["codes"] == [2, 2]
    index_of(folder).write_text(json.dumps({"0": ["<a_0>"], "1": ["<a_1>"], "2": ["<a_2>"]}))
    with pytest.raises(DataError, match=r"codes in use by level are \[3\], and were \[2, 2\]"):
        check_seal(index_of(folder), ITEMS)


def test_a_seal_without_codes_is_one_of_an_earlier_version(folder: Path) -> None:
    sealed = json.loads(seal_file(index_of(folder)).read_text())
    del sealed["codes"]
    seal_file(index_of(folder)).write_text(json.dumps(sealed))
    check_seal(index_of(folder), ITEMS)
    one_flipped_bit(folder)
    with pytest.raises(DataError, match="SHA-256") as refused:
        check_seal(index_of(folder), ITEMS)
    assert "codes in use" not in refused.value.problem.what


def test_an_index_of_another_program_is_read_without_a_seal(folder: Path) -> None:
    seal_file(index_of(folder)).unlink()
    one_flipped_bit(folder)
    assert chosen_dataset(CatalogueSettings(catalogue=str(folder)))[1].text(0) == "<a_1><b_1>"


def test_ids_that_are_written_without_items_take_an_earlier_seal_away(folder: Path) -> None:
    write_index(index_of(folder), IDS)
    assert not seal_file(index_of(folder)).exists()
