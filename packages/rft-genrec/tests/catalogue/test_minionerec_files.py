"""Files in MiniOneRec's formats."""

import json
from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_genrec.catalogue.minionerec_files import read_dataset


def catalogue(folder: Path, history: str = "[0, 1]", target: str = "1") -> Path:
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
