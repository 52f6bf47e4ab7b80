"""Samples are read before their columns of IDs are written anew."""

from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_genrec.semantic_ids.catalogue_files import check_samples


def test_a_malformed_row_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    file = tmp_path / "train.csv"
    file.write_text("user_id,history_item_id,item_id\nA1,[0],1\n")
    check_samples(tmp_path, 2)
    file.write_text("user_id,history_item_id,item_id\nA1,[0],1\nA2,nonsense,1\n")
    with pytest.raises(DataError, match=r"train.csv:3"):
        check_samples(tmp_path, 2)
