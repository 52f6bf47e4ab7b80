"""The catalogue of a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_genrec.catalogue.chosen import chosen_dataset
from rft_genrec.settings.catalogue import CatalogueSettings


def test_files_that_are_named_take_the_place_of_the_catalogue_s_own(catalogue: Path, tmp_path: Path) -> None:
    index, items = tmp_path / "tools.faiss-rq.index.json", tmp_path / "named.item.json"
    index.write_text(json.dumps({n: [f"<z_{n}>"] for n in range(6)}))
    items.write_text(json.dumps({n: {"title": f"Other {n}"} for n in range(6)}))
    named = CatalogueSettings(catalogue=str(catalogue), sid_index_path=str(index), item_meta_path=str(items))
    dataset, ids = chosen_dataset(named)
    assert ids.text(5) == "<z_5>"
    assert dataset.catalogue.items[2].title == "Other 2"
    assert len(dataset.of("train")) == 32


def test_no_ids_and_other_items_are_refused(catalogue: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.item.json"
    few.write_text(json.dumps({0: {"title": "one"}}))
    with pytest.raises(DataError, match="has 1 items, the catalogue 6"):
        chosen_dataset(CatalogueSettings(catalogue=str(catalogue), item_meta_path=str(few)))
    (catalogue / "tools.index.json").unlink()
    with pytest.raises(DataError, match=r"no \.index\.json") as refused:
        chosen_dataset(CatalogueSettings(catalogue=str(catalogue)))
    assert refused.value.problem.code == "genrec.no_ids"
