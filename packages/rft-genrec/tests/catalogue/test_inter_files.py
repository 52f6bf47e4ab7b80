"""Files of MiniOneRec's first stage."""

import json
from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_genrec.catalogue.inter_files import read_inter, write_inter, write_numbers, write_reviews, write_sequences
from rft_genrec.catalogue.records import Sample

HEADING = "user_id:token\titem_id_list:token_seq\titem_id:token\n"


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    samples = [Sample("test:0", "A1", (0, 1), 1), Sample("test:1", "A20", (), 0)]
    write_inter(tmp_path / "t.test.inter", samples)
    assert (tmp_path / "t.test.inter").read_text() == f"{HEADING}1\t0 1\t1\n20\t\t0\n"
    assert [*read_inter(tmp_path / "t.test.inter", "test", 2)] == samples


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("user\titems\titem\n", "row 1: expected the heading"),
        (f"{HEADING}1\t0\n", "row 2: expected 3 cells"),
        (f"{HEADING}1\t0 x\t1\n", "row 2, column item_id_list:token_seq"),
        (f"{HEADING}1\t0 7\t1\n", "items from 0 to 1"),
        (f"{HEADING}1\t0\t1 0\n", "column item_id:token: expected one number"),
        (f"{HEADING}\t0\t1\n", "column user_id:token: expected one number"),
    ],
)
def test_a_malformed_file_is_refused_with_its_row(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.inter").write_text(text)
    with pytest.raises(DataError, match=said):
        list(read_inter(tmp_path / "a.inter", "test", 2))


def test_sequences_numbers_and_reviews_are_written(tmp_path: Path) -> None:
    write_sequences(tmp_path / "a.inter.json", [(0, 1), (1,)])
    assert json.loads((tmp_path / "a.inter.json").read_text()) == {"0": [0, 1], "1": [1]}
    write_numbers(tmp_path / "a.user2id", ["x", "y"])
    assert (tmp_path / "a.user2id").read_text() == "x\t0\ny\t1\n"
    write_reviews(tmp_path / "a.review.json", {(0, 1, 99): ("good", "yes")})
    assert json.loads((tmp_path / "a.review.json").read_text()) == {"(0, 1, 99)": {"review": "good", "summary": "yes"}}
