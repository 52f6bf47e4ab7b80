"""Directories in MiniOneRec's formats."""

import json
import os
import shutil
from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_genrec.catalogue.index_files import level_use
from rft_genrec.catalogue.minionerec_files import read_dataset, write_ids, write_items
from rft_genrec.catalogue.records import Catalogue, Item, SemanticIds

REAL = Path(os.environ.get("RFT_DATA_DIR", "")) / "amazon18-industrial"
needs_real_data = pytest.mark.skipif(not REAL.is_dir(), reason="RFT_DATA_DIR has no amazon18-industrial")


def catalogue(folder: Path, history: str = "[0, 1]", target: str = "1") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tools.item.json").write_text(
        json.dumps({"0": {"title": "Hammer", "description": "['hard', 'red']"}, "1": {"title": "Saw"}})
    )
    (folder / "tools.index.json").write_text(json.dumps({"0": ["<a_0>", "<b_1>"], "1": ["<a_1>", "<b_0>"]}))
    (folder / "valid.csv").write_text(f'user_id,history_item_id,item_id\nA1,"{history}",{target}\n')
    return folder


def test_a_directory_is_read(tmp_path: Path) -> None:
    dataset = read_dataset(catalogue(tmp_path))
    assert [item.text for item in dataset.catalogue.items] == ["Hammer hard red", "Saw"]
    assert dataset.ids is not None
    assert dataset.ids.text(0) == "<a_0><b_1>"
    (sample,) = dataset.of("valid")
    assert (sample.sample_id, sample.user, sample.history, sample.target) == ("valid:0", "A1", (0, 1), 1)
    assert dataset.of("test") == ()


@pytest.mark.parametrize("history", ["[0, '1']", "__import__('os').getpid()", "(0,)", "[0, 7]", "["])
def test_a_history_that_is_no_list_of_items_is_refused_with_its_row(tmp_path: Path, history: str) -> None:
    with pytest.raises(DataError, match="row 2"):
        read_dataset(catalogue(tmp_path, history))


def test_the_layout_of_the_original_is_read(tmp_path: Path) -> None:
    given = catalogue(tmp_path / "given")
    amazon = tmp_path / "Amazon"
    for folder in ("index", "train", "valid", "test", "info"):
        (amazon / folder).mkdir(parents=True)
    for name in ("tools", "toys"):
        shutil.copy(given / "tools.item.json", amazon / f"index/{name}.item.json")
        shutil.copy(given / "tools.index.json", amazon / f"index/{name}.index.json")
        shutil.copy(given / "valid.csv", amazon / f"test/{name}_5_2016-10-2018-11.csv")
        (amazon / f"info/{name}_5_2016-10-2018-11.txt").write_text("<a_0><b_1>\tHammer\t0\n<a_1><b_0>\tSaw\t1\n")
    with pytest.raises(DataError, match=r"2 catalogues in one directory: .*tools\.item\.json, .*toys\.item\.json"):
        read_dataset(amazon)
    dataset = read_dataset(amazon, "toys")
    assert (dataset.catalogue.name, len(dataset.of("test"))) == ("toys", 1)
    (amazon / "test/toys_5_2017.csv").write_text("")
    with pytest.raises(DataError, match="2 files test/toys"):
        read_dataset(amazon, "toys")


def test_samples_of_the_first_stage_are_read(tmp_path: Path) -> None:
    folder = catalogue(tmp_path)
    heading = "user_id:token\titem_id_list:token_seq\titem_id:token\n"
    (folder / "tools.train.inter").write_text(f"{heading}4\t0 1\t0\n")
    (sample,) = read_dataset(folder).of("train")
    assert (sample.sample_id, sample.user, sample.history, sample.target) == ("train:0", "A4", (0, 1), 0)


def test_an_info_file_of_other_items_is_refused(tmp_path: Path) -> None:
    folder = catalogue(tmp_path)
    (folder / "info.txt").write_text("<a_0><b_1>\tHammer\t0\n<a_1><b_0>\tAxe\t1\n")
    with pytest.raises(DataError, match="row 2, column title"):
        read_dataset(folder)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"description": "no title"}, "item 1 is"),
        ({"title": 7}, "item 1 is"),
        ({"title": "Saw", "description": {}}, "item 1, description"),
        ({"title": "Saw", "brand": None}, "item 1, brand"),
        ({"title": "Saw", "categories": [["a"]]}, "item 1, categories"),
        (["Saw"], "item 1 is"),
    ],
)
def test_an_item_without_texts_is_refused(tmp_path: Path, item: object, said: str) -> None:
    (tmp_path / "a.item.json").write_text(json.dumps({"0": {"title": "Hammer"}, "1": item}))
    with pytest.raises(DataError, match=said):
        read_dataset(tmp_path)


def test_a_directory_without_items_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file \*\.item\.json"):
        read_dataset(tmp_path)


def test_items_are_read_as_they_were_written(tmp_path: Path) -> None:
    items = (Item("Saw", 'it\'s "red"\n', "B", ("tools", "saws")), Item("Axe"))
    write_items(tmp_path / "t.item.json", Catalogue("t", items))
    assert read_dataset(tmp_path).catalogue == Catalogue("t", items)


@pytest.mark.parametrize(
    ("literal", "text"),
    [
        ("['it's red', 'x']", "it's red', 'x"),  # what the original leaves when it replaces entities in a literal
        ("[\"a\", 'b']", "a b"),
        ("['a', ['b']]", "a', ['b']"),
        ("plain", "plain"),
    ],
)
def test_descriptions_that_are_literals_are_read_as_texts(tmp_path: Path, literal: str, text: str) -> None:
    (tmp_path / "a.item.json").write_text(json.dumps({"0": {"title": "Saw", "description": literal}}))
    assert read_dataset(tmp_path).catalogue.items[0].description == text


def test_new_ids_are_written_into_all_files_that_hold_them(tmp_path: Path) -> None:
    folder = catalogue(tmp_path)
    ids = SemanticIds((("<a_7>", "<b_7>"), ("<a_7>", "<b_8>")))
    write_ids(folder, read_dataset(folder), ids)
    assert read_dataset(folder).ids == ids
    assert "<a_7><b_8>" in (folder / "valid.csv").read_text()
    assert (folder / "info.txt").read_text().startswith("<a_7><b_7>\tHammer\t0\n")


@needs_real_data
def test_the_published_files_are_read_and_written_as_they_are(tmp_path: Path) -> None:
    dataset = read_dataset(REAL)
    assert dataset.ids is not None
    assert (len(dataset.catalogue), len(dataset.ids.items_by_id), len(dataset.ids.vocabulary)) == (3686, 3670, 560)
    assert [use.codes for use in level_use(dataset.ids)] == [48, 256, 256]
    assert [round(use.perplexity, 1) for use in level_use(dataset.ids)] == [40.7, 241.7, 225.6]
    assert (len(dataset.of("train")), len(dataset.of("valid")), len(dataset.of("test"))) == (0, 4532, 4533)
    assert not any(item.description.startswith("[") for item in dataset.catalogue.items)
    write_ids(tmp_path, dataset, dataset.ids)
    for name in ("test.csv", "valid.csv", "info.txt"):
        assert (tmp_path / name).read_bytes() == (REAL / name).read_bytes()
